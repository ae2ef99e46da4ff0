import argparse
import os
import random
import warnings
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from softline.errors import UserError
from softline.weights.reading import load_official


class RunsCode:
    def __reduce__(self):
        return (exec, ("raise SystemError('code of a checkpoint ran')",))


def test_a_file_that_wants_to_run_code_is_refused(tmp_path):
    torch.save({"model": RunsCode()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=r"evil\.pth is refused: it asks to run .*exec"):
        load_official(tmp_path / "evil.pth")


def test_damaged_files_are_named(tmp_path):
    torch.save({"model": {"w": torch.ones(1000)}}, tmp_path / "whole.pth")
    whole = (tmp_path / "whole.pth").read_bytes()
    for name, content in {"half.pth": whole[: len(whole) // 2], "empty.pth": b"", "text.pth": b"hello" * 99}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="truncated or not a checkpoint"):
            load_official(tmp_path / name)
    (tmp_path / "junk.safetensors").write_bytes(b"junk" * 50)
    with pytest.raises(ValueError, match="truncated or not a checkpoint"):
        load_official(tmp_path / "junk.safetensors")
    with pytest.raises(ValueError, match="no such file"):
        load_official(tmp_path / "absent.pth")
    torch.save(torch.ones(3), tmp_path / "tensor.pth")
    with pytest.raises(ValueError, match="holds no state dict"):
        load_official(tmp_path / "tensor.pth")


def test_a_corrupt_byte_is_noticed(tmp_path):
    torch.save({"model": {"w": torch.ones(1000)}}, tmp_path / "good.pth")
    content = bytearray((tmp_path / "good.pth").read_bytes())
    content[content.index(torch.ones(4).numpy().tobytes())] ^= 0xFF
    (tmp_path / "bad.pth").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.pth is corrupt: the checksum of .* is wrong"):
        load_official(tmp_path / "bad.pth")


def test_weights_are_found_among_what_training_scripts_store(tmp_path):
    settings = argparse.Namespace(lr=0.1)
    weights = {"module.w": torch.ones(2)}
    average = {"module.w": torch.zeros(2)}
    torch.save({"state_dict": weights, "args": settings, "metric": np.float64(79.3)}, tmp_path / "plain.pth")
    torch.save({"state_dict": weights, "state_dict_ema": average}, tmp_path / "average.pth")
    assert torch.equal(load_official(tmp_path / "plain.pth")["w"], torch.ones(2))
    assert torch.equal(load_official(tmp_path / "average.pth")["w"], torch.zeros(2))


class Calls:
    """Pickled as a call of ``function``."""

    def __init__(self, function, *arguments):
        self.reduced = (function, arguments)

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    "call",
    [
        Calls(bytearray, 10**12),
        Calls(torch.FloatTensor, 10**12),
        Calls(torch.Size, [1]),
        Calls(torch.device, "cuda"),
        Calls(getattr, "text", "upper"),
    ],
    ids=lambda call: call.reduced[0].__name__,
)
def test_only_tensors_are_created(tmp_path, call):
    """torch's restricted unpickler would create the first two, of a terabyte each."""
    torch.save({"model": {"w": torch.ones(2)}, "more": call}, tmp_path / "x.pth")
    with pytest.raises(UserError, match="is refused: it asks to run"):
        load_official(tmp_path / "x.pth")


def rewrite(source, target, change):
    """Write a zip archive again, with ``change(name, content)`` in place of each entry."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            change(new, name, old.read(name))


def test_compressed_entries_are_refused_before_they_are_read(tmp_path):
    """A megabyte of zeros takes a kilobyte: a file of 3 MB would take 3 GB."""
    torch.save({"w": torch.zeros(2**18)}, tmp_path / "good.pth")

    def deflate(archive, name, content):
        archive.writestr(name, content, compress_type=zipfile.ZIP_DEFLATED)

    rewrite(tmp_path / "good.pth", tmp_path / "bomb.pth", deflate)
    assert (tmp_path / "bomb.pth").stat().st_size < 10_000
    with pytest.raises(UserError, match=r"bomb\.pth is refused: .* is compressed"):
        load_official(tmp_path / "bomb.pth")


def test_entries_of_one_name_are_refused(tmp_path):
    torch.save({"w": torch.zeros(4)}, tmp_path / "good.pth")

    def twice(archive, name, content):
        archive.writestr(name, content)
        if name.endswith("data/0"):
            archive.writestr(name, content)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        rewrite(tmp_path / "good.pth", tmp_path / "twice.pth", twice)
    with pytest.raises(UserError, match="several entries of one name"):
        load_official(tmp_path / "twice.pth")


def test_a_tensor_of_more_numbers_than_the_file_has_is_refused(tmp_path):
    torch.save({"w": torch.zeros(1).expand(10**12)}, tmp_path / "wide.pth")
    with pytest.raises(UserError, match=r"w in .* is out of proportion: \(1000000000000,\) from fewer numbers"):
        load_official(tmp_path / "wide.pth")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path, value):
    weights = {"a": torch.ones(2), "b": torch.tensor([1.0, value])}
    torch.save(weights, tmp_path / "x.pth")
    save_file(weights, tmp_path / "x.safetensors")
    for name in ("x.pth", "x.safetensors"):
        with pytest.raises(UserError, match=rf"b in .*{name} is not finite"):
            load_official(tmp_path / name)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.pth")
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name in ("pipe.pth", "pipe.safetensors"):
        with pytest.raises(UserError, match=f"{name} must be a regular file, it is a named pipe"):
            load_official(tmp_path / name)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_every_damage_ends_in_a_message_or_in_the_same_weights(tmp_path, suffix):
    weights = {"first.weight": torch.arange(30.0).reshape(5, 6), "second": torch.arange(4)}
    torch.save(weights, tmp_path / "x.pth")
    save_file(weights, tmp_path / "x.safetensors")
    whole = (tmp_path / f"x.{suffix}").read_bytes()
    # safetensors has no checksum of the numbers, which follow its header
    header = len(whole) if suffix == "pth" else whole.index(b"}}") + 2
    numbers, path, refused = random.Random(0), tmp_path / f"damaged.{suffix}", 0
    for _ in range(400):
        damaged = bytearray(whole)
        if numbers.random() < 0.3:
            del damaged[numbers.randrange(len(whole)) :]
        else:
            damaged[numbers.randrange(header)] ^= 1 << numbers.randrange(8)
        path.write_bytes(damaged)
        try:
            read = load_official(path)
        except UserError:
            refused += 1
            continue
        if suffix == "pth":
            assert read.keys() == weights.keys()
            assert all(torch.equal(read[name], weights[name]) for name in weights)
    assert refused > 200


def test_tuples_that_are_nested_without_end_are_refused(tmp_path):
    """The hash of such a key would exhaust the stack of the process."""
    torch.save({"w": torch.ones(2)}, tmp_path / "good.pth")
    # {((((...),),),): None}, by which Python would be asked for a hash
    deep = b"\x80\x02}" + b")" + b"\x85" * 1000 + b"Ns."

    def deepen(archive, name, content):
        archive.writestr(name, deep if name.endswith("data.pkl") else content)

    rewrite(tmp_path / "good.pth", tmp_path / "x.pth", deepen)
    with pytest.raises(UserError, match="tuples are nested more than 64 deep"):
        load_official(tmp_path / "x.pth")


def test_numbers_of_numpy_without_their_bytes_are_refused(tmp_path):
    """numpy would allocate a gigabyte for a name of a few characters."""
    scalar = np.float64(0).__reduce__()[0]
    torch.save({"w": torch.ones(2), "more": Calls(scalar, Calls(np.dtype, "V1000000000"))}, tmp_path / "x.pth")
    with pytest.raises(UserError, match="without its bytes"):
        load_official(tmp_path / "x.pth")


def test_a_list_of_entries_in_another_place_is_refused(tmp_path):
    """zipfile reads the list before the end of the file, and torch the one that the end points to."""
    torch.save({"w": torch.zeros(4)}, tmp_path / "good.pth")
    content = bytearray((tmp_path / "good.pth").read_bytes())
    place = content.rindex(b"PK\5\6") + 16
    content[place : place + 4] = (int.from_bytes(content[place : place + 4], "little") - 64).to_bytes(4, "little")
    locator = content.rfind(b"PK\6\6")
    if locator >= 0:
        at = slice(locator + 48, locator + 56)
        content[at] = (int.from_bytes(content[at], "little") - 64).to_bytes(8, "little")
    (tmp_path / "other.pth").write_bytes(content)
    with pytest.raises(UserError, match="its list of entries is not at its end"):
        load_official(tmp_path / "other.pth")


def test_complex_weights_are_no_weights(tmp_path):
    torch.save({"w": torch.tensor([complex("nan")])}, tmp_path / "x.pth")
    with pytest.raises(UserError, match=r"asks to run torch\.Complex"):
        load_official(tmp_path / "x.pth")
