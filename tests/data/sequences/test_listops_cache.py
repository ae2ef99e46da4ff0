import hashlib
import json
import logging
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from softline.data.sequences import listops_cache
from softline.data.sequences.interface import SequenceSamples, SequenceSource
from softline.data.sequences.listops import ListOpsSamples, ListOpsSettings, decode, generate_listops
from softline.data.sequences.listops_cache import open_listops
from softline.errors import UserError

TINY = ListOpsSettings(samples=(30, 6, 5), min_length=10, max_length=80, seed=3)


def content(source: SequenceSource) -> list[tuple[str, int]]:
    samples = [source.load(index) for index in range(len(source))]
    return [(decode(tokens), label) for (tokens,), label in samples]


@pytest.fixture(scope="module")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    directory = tmp_path_factory.mktemp("listops") / "cache"
    open_listops(directory, "train", settings=TINY)
    return directory


@pytest.fixture
def cache(tmp_path: Path, tiny_cache: Path) -> Path:
    directory = tmp_path / "cache"
    directory.mkdir()
    for path in tiny_cache.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return directory


def test_splits_are_those_generated(tiny_cache):
    sources = [open_listops(tiny_cache, split, settings=TINY) for split in ("train", "val", "test")]
    assert [len(source) for source in sources] == [30, 6, 5]
    samples = generate_listops(TINY)
    parts = np.split(samples.tokens, samples.starts[1:-1])
    expected = [(decode(tokens), label) for tokens, label in zip(parts, samples.labels.tolist(), strict=True)]
    assert [sample for source in sources for sample in content(source)] == expected
    assert len({text for text, _ in expected}) == 41


def test_a_cache_is_a_sequence_source(tiny_cache):
    source = open_listops(tiny_cache, "val", settings=TINY)
    assert isinstance(source, SequenceSource)
    assert source.classes == tuple("0123456789")
    assert (source.vocabulary, source.max_length, source.parts) == (32, 80, 1)
    assert source.name(4) == f"{tiny_cache}/val_tokens.npy, sample 4"
    (tokens,), label = source.load(4)
    assert (type(tokens), tokens.dtype, type(label)) == (np.ndarray, np.uint16, int)
    for index in (-1, 6):
        with pytest.raises(IndexError, match=f"index must lie between 0 and 5, got {index}"):
            source.load(index)


def test_an_opened_cache_is_small_to_send_and_read_by_workers(tiny_cache):
    source = open_listops(tiny_cache, "train", settings=TINY)
    sent = pickle.dumps(source)
    assert len(sent) < 500
    assert content(pickle.loads(sent)) == content(source)
    loader = DataLoader(SequenceSamples(source), batch_size=None, num_workers=1)
    for ((tokens,), label), (expected, expected_label) in zip(loader, content(source), strict=True):
        assert tokens.dtype == torch.int64
        assert (decode(tokens.numpy()), label) == (expected, expected_label)


def test_a_cache_is_made_once_and_described(tmp_path):
    heard, calls = [], []
    directory = tmp_path / "new" / "cache"

    def open_it(split: str) -> SequenceSource:
        return open_listops(
            directory, split, settings=TINY, notify=heard.append, progress=lambda *numbers: calls.append(numbers)
        )

    open_it("train")
    assert heard[0] == f"generating 41 ListOps samples for {directory}"
    assert re.fullmatch(rf"accepted \d+ of \d+000 candidates; {directory} is complete", heard[1])
    assert calls[-1] == (41, 41)
    heard.clear()
    open_it("test")
    assert heard == []
    assert [path.name for path in directory.parent.iterdir()] == ["cache"]
    described = json.loads((directory / "listops.json").read_text())
    assert described["format"] == 1
    assert described["settings"]["samples"] == [30, 6, 5]
    assert described["counts"] == {"train": 30, "val": 6, "test": 5}
    assert {"listops.json", *described["sha256"]} == {path.name for path in directory.iterdir()}


def test_progress_goes_to_the_log_by_default(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        open_listops(tmp_path / "cache", "val", settings=TINY)
    assert caplog.records[0].getMessage().startswith("generating 41 ListOps samples for ")


def test_an_empty_directory_is_filled(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    assert len(open_listops(tmp_path / "link", "val", settings=TINY)) == 6
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "cache" / "listops.json").is_file()


def test_a_directory_of_other_things_is_refused(tmp_path):
    for name in "abcd":
        (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=r"must be empty or hold ListOps .* it holds a, b, c and 1 more; choose"):
        open_listops(tmp_path, "train", settings=TINY)
    with pytest.raises(ValueError, match="a must be a directory for ListOps samples, it is a file"):
        open_listops(tmp_path / "a", "train", settings=TINY)
    assert sorted(path.name for path in tmp_path.iterdir()) == list("abcd")


@pytest.mark.parametrize("step", ["rename", "fsync"])
def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch, step):
    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(KeyboardInterrupt):
            open_listops(tmp_path / "cache", "train", settings=TINY)
    assert list(tmp_path.iterdir()) == []
    assert len(open_listops(tmp_path / "cache", "train", settings=TINY)) == 30


def test_a_kill_before_the_rename_leaves_no_cache(tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        # nothing is tidied up by a killed process
        patch.setattr(listops_cache.shutil, "rmtree", lambda *arguments, **options: None)
        with pytest.raises(KeyboardInterrupt):
            open_listops(tmp_path / "cache", "train", settings=TINY)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".cache.")
    assert len(open_listops(tmp_path / "cache", "train", settings=TINY)) == 30


def test_a_failing_disk_is_named(tmp_path, monkeypatch):
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"could not write .*/cache: No space left on device"):
        open_listops(tmp_path / "cache", "train", settings=TINY)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_to_is_named_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    calls = []
    with pytest.raises(OSError, match=r"could not write .*/file/cache: "):
        open_listops(
            tmp_path / "file" / "cache", "train", settings=TINY, progress=lambda *numbers: calls.append(numbers)
        )
    assert calls == []


def opened_meanwhile(directory: Path, theirs: ListOpsSettings, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Open TINY while another process makes its own cache; what it told."""
    heard = []

    def generate(settings: ListOpsSettings, **options: object) -> ListOpsSamples:
        monkeypatch.setattr(listops_cache, "generate_listops", generate_listops)
        open_listops(directory, "train", settings=theirs)
        return generate_listops(settings)

    monkeypatch.setattr(listops_cache, "generate_listops", generate)
    source = open_listops(directory, "val", settings=TINY, notify=heard.append)
    assert len(source) == 6
    return heard


def test_the_second_of_two_processes_uses_the_cache_of_the_first(tmp_path, monkeypatch, tiny_cache):
    heard = opened_meanwhile(tmp_path / "cache", TINY, monkeypatch)
    assert heard[-1] == f"{tmp_path}/cache was meanwhile created by another process"
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    for path in tiny_cache.iterdir():
        assert (tmp_path / "cache" / path.name).read_bytes() == path.read_bytes()


def test_the_cache_of_another_process_must_have_the_same_settings(tmp_path, monkeypatch):
    theirs = ListOpsSettings(samples=(30, 6, 5), min_length=10, max_length=80, seed=4)
    with pytest.raises(ValueError, match="holds ListOps samples of other settings: seed is 4, asked for 3; choose"):
        opened_meanwhile(tmp_path / "cache", theirs, monkeypatch)


def test_every_setting_that_differs_is_named(tiny_cache):
    settings = ListOpsSettings(samples=(30, 6, 6), min_length=10, max_length=81, seed=3)
    with pytest.raises(ValueError, match="of other settings") as error:
        open_listops(tiny_cache, "train", settings=settings)
    assert str(error.value) == (
        f"{tiny_cache} holds ListOps samples of other settings: samples is [30, 6, 5], asked for [30, 6, 6]; "
        "max_length is 80, asked for 81; choose another directory, or delete this one to have it generated again"
    )


@pytest.mark.parametrize("name", ["val_tokens.npy", "val_starts.npy", "val_labels.npy"])
def test_a_damaged_file_is_named(cache, name):
    data = bytearray((cache / name).read_bytes())
    data[-2] ^= 1
    (cache / name).write_bytes(data)
    with pytest.raises(ValueError, match=rf"{name} is damaged: listops\.json has sha256 \w+ .*; delete {cache}, so"):
        open_listops(cache, "val", settings=TINY)
    (cache / name).unlink()
    with pytest.raises(ValueError, match=rf"{name} is missing; delete {cache}, so that it is generated again"):
        open_listops(cache, "val", settings=TINY)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 1', r"listops\.json is not JSON: Expecting .*; delete"),
        ("[" * 100_000, r"listops\.json is nested too deeply; delete"),
        ("1" * 10_000, r"listops\.json is not JSON: .*; delete"),
        ("[]", r"listops\.json is damaged \(it has no format\); delete"),
        ('{"format": 1, "settings": {}}', r"listops\.json is damaged \(it has no sha256\); delete"),
        ('{"format": 2}', r"listops\.json must have format 1, got 2; choose another directory, or delete"),
    ],
)
def test_a_damaged_description_is_named(cache, text, message):
    (cache / "listops.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        open_listops(cache, "val", settings=TINY)


def test_split_and_workers_are_checked(tmp_path):
    with pytest.raises(ValueError, match="split must be one of test, train, val; got 'dev'"):
        open_listops(tmp_path / "cache", "dev", settings=TINY)
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        open_listops(tmp_path / "cache", "train", settings=TINY, workers=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("array", "content", "message"),
    [
        ("tokens", np.zeros((2, 2), np.uint16), r"val_tokens\.npy must be a list of whole numbers, .* uint16 \[2, 2\]"),
        ("labels", np.zeros(6), r"val_labels\.npy must be a list of whole numbers, it has type float64 \[6\]"),
        ("labels", np.zeros(5, np.uint8), "the arrays of the split 'val' must belong together"),
        ("starts", np.zeros(7, np.int64), "the arrays of the split 'val' must belong together"),
        ("starts", np.zeros(0, np.int64), "the arrays of the split 'val' must belong together"),
        ("tokens", np.array([{}]), r"val_tokens\.npy must be an array in numpy's format"),
    ],
)
def test_arrays_of_another_kind_are_refused_even_with_the_right_hash(cache, array, content, message):
    path = cache / f"val_{array}.npy"
    np.save(path, content)
    description = json.loads((cache / "listops.json").read_text())
    description["sha256"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    (cache / "listops.json").write_text(json.dumps(description))
    with pytest.raises(UserError, match=message):
        open_listops(cache, "val", settings=TINY)
