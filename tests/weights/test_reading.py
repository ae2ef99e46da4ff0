import argparse

import numpy as np
import pytest
import torch

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
