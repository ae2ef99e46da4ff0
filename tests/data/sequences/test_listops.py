import json
import logging
import os
import pickle
import re
from collections.abc import Callable
from math import comb, sqrt
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from softline.data.sequences import listops_cache
from softline.data.sequences.interface import SequenceError, SequenceSamples, SequenceSource
from softline.data.sequences.listops import (
    IDS,
    ListOpsSamples,
    ListOpsSettings,
    decode,
    encode,
    generate_listops,
    read_listops_tsv,
)
from softline.data.sequences.listops_cache import open_listops

TINY = ListOpsSettings(samples=(30, 6, 5), min_length=10, max_length=80, seed=3)

# of the grammar with the benchmark's bounds, by `exact_law`: a simulation can only come near
ACCEPTANCE, MEAN_LENGTH, LENGTH_DEVIATION = 0.082755, 1035.02, 393.8
LABEL_SHARES = (0.16958, 0.09040, 0.07728, 0.08287, 0.08961, 0.08638, 0.07662, 0.07173, 0.08734, 0.16819)


def exact_law(max_length: int, max_depth: int = 10, max_args: int = 10) -> NDArray[np.float64]:
    """Probabilities [value, length] of a tree of fewer than max_length tokens.

    Lengths of nodes add up, so that their polynomials multiply: powers of transforms that are long enough not to wrap.
    """
    size = 1 << (max_args * max_length).bit_length()
    leaf = np.zeros((10, max_length))
    leaf[:, 1] = 0.1
    tree = leaf
    for _ in range(max_depth - 1):
        upto = np.cumsum(np.fft.rfft(tree, size), 0)
        less = np.concatenate([np.zeros_like(upto[:1]), upto])  # [11, frequencies]: values below 0 to 10
        operations = np.zeros((10, max_length))
        for arity in range(2, max_args + 1):
            ordered = np.fft.irfft(law_of_order(less, less[-1] - less, arity), size)[:, :max_length]
            operations += (ordered + law_of_sum(tree, arity, size)) / 4 / (max_args - 1)
        tree = 0.75 * leaf
        tree[:, 2:] += 0.25 * operations[:, :-2]
    return tree


def law_of_order(less: NDArray, rest: NDArray, arity: int) -> NDArray:
    """MIN, MAX and MED together, [10, frequencies]. less, rest: of values below 0 to 10, and of the others."""
    half = arity // 2
    rank = (arity + 1) // 2
    lower = np.diff(sum(comb(arity, j) * less**j * rest ** (arity - j) for j in range(rank, arity + 1)), axis=0)
    middle = lower.copy()
    if arity % 2 == 0:
        smaller, larger = np.diff(less**half, axis=0), -np.diff(rest**half, axis=0)
        for low in range(10):
            for high in range(low + 1, 10):
                both = comb(arity, half) * smaller[low] * larger[high]
                middle[low] -= both
                middle[(low + high) // 2] += both
    return -np.diff(rest**arity, axis=0) + np.diff(less**arity, axis=0) + middle


def law_of_sum(tree: NDArray, arity: int, size: int) -> NDArray:
    """SM, [10, length]: a sum modulo 10 is a product of Fourier series over the values."""
    waves = np.exp(2j * np.pi * np.outer(np.arange(10), np.arange(10)) / 10)
    powers = np.fft.ifft(np.fft.fft(waves @ tree, size) ** arity)[:, : tree.shape[1]]
    return (waves.conj() @ powers).real / 10


class Parsed:
    """Value, greatest depth of an operation and numbers of arguments of a written expression."""

    def __init__(self, text: str) -> None:
        self.depth, self.arities = 0, set()
        lists: list[list] = [[]]
        for word in text.split():
            if word.startswith("["):
                lists.append([word[1:]])
                self.depth = max(self.depth, len(lists) - 1)
            elif word == "]":
                name, *values = lists.pop()
                self.arities.add(len(values))
                lists[-1].append(self.evaluate(name, values))
            else:
                lists[-1].append(int(word))
        ((self.value,),) = lists

    @staticmethod
    def evaluate(name: str, values: list[int]) -> int:
        if name == "SM":
            return int(str(sum(values))[-1])
        return int({"MIN": min, "MAX": max, "MED": median}[name](values))


def texts(samples: ListOpsSamples) -> list[str]:
    return [decode(samples.tokens[start:end]) for start, end in zip(samples.starts, samples.starts[1:], strict=False)]


def check_statistics(samples: ListOpsSamples, acceptance: float, mean: float, deviation: float, shares) -> None:
    """Each is within four standard errors of what the grammar says."""
    count, lengths = len(samples.labels), np.diff(samples.starts)
    error = sqrt(acceptance * (1 - acceptance) / samples.candidates)
    assert abs(samples.accepted / samples.candidates - acceptance) < 4 * error
    assert abs(lengths.mean() - mean) < 4 * deviation / sqrt(count)
    found = np.bincount(samples.labels, minlength=10) / count
    assert (np.abs(found - shares) < 4 * np.sqrt(np.multiply(shares, np.subtract(1, shares)) / count)).all()


@pytest.fixture(scope="module")
def thousand() -> ListOpsSamples:
    return generate_listops(ListOpsSettings(samples=(900, 50, 50)))


def test_every_label_is_the_value_of_its_expression(thousand):
    parsed = [Parsed(text) for text in texts(thousand)]
    assert [tree.value for tree in parsed] == thousand.labels.tolist()


def test_trees_keep_to_the_grammar(thousand):
    parsed = [Parsed(text) for text in texts(thousand)]
    assert {tree.depth for tree in parsed} == {9}
    assert set().union(*(tree.arities for tree in parsed)) == set(range(2, 11))
    assert set(np.unique(thousand.tokens)) == set(range(1, 16))
    lengths = np.diff(thousand.starts)
    assert lengths.min() > 500
    assert lengths.max() < 2000


def test_digits_and_operations_are_uniform(thousand):
    counts = np.bincount(thousand.tokens, minlength=16)
    for ids in (slice(1, 11), slice(11, 15)):
        expected = counts[ids].mean()
        # trees are accepted by length, which does not depend on either
        assert (np.abs(counts[ids] - expected) < 5 * sqrt(expected)).all()
    assert counts[11:15].sum() == counts[15]


def test_statistics_are_those_of_the_grammar(thousand):
    check_statistics(thousand, ACCEPTANCE, MEAN_LENGTH, LENGTH_DEVIATION, LABEL_SHARES)


def check_against_law(samples: ListOpsSamples, settings: ListOpsSettings) -> tuple[float, float, NDArray]:
    lengths = np.arange(settings.min_length + 1, settings.max_length)
    law = exact_law(settings.max_length)[:, settings.min_length + 1 :]
    acceptance = law.sum()
    mean = (law.sum(0) @ lengths) / acceptance
    deviation = sqrt((law.sum(0) @ (lengths - mean) ** 2) / acceptance)
    shares = law.sum(1) / acceptance
    check_statistics(samples, acceptance, mean, deviation, shares)
    return acceptance, mean, shares


def test_statistics_of_short_trees_are_those_of_the_grammar():
    settings = ListOpsSettings(samples=(1000, 1, 1), min_length=100, max_length=512)
    samples = generate_listops(settings)
    check_against_law(samples, settings)
    assert [Parsed(text).value for text in texts(samples)] == samples.labels.tolist()


@pytest.mark.slow
def test_statistics_of_20000_samples_are_those_of_the_benchmark():
    settings = ListOpsSettings(samples=(19998, 1, 1), seed=1)
    samples = generate_listops(settings)
    acceptance, mean, shares = check_against_law(samples, settings)
    np.testing.assert_allclose(acceptance, ACCEPTANCE, atol=1e-6)
    np.testing.assert_allclose(mean, MEAN_LENGTH, atol=0.01)
    np.testing.assert_allclose(shares, LABEL_SHARES, atol=1e-5)
    assert abs(samples.accepted / samples.candidates - 0.082) < 0.003
    assert abs(np.diff(samples.starts).mean() - MEAN_LENGTH) < 15
    assert [Parsed(text).value for text in texts(samples)] == samples.labels.tolist()


def test_samples_do_not_depend_on_the_number_of_workers():
    settings = ListOpsSettings(samples=(800, 9, 9), min_length=50, max_length=100)
    alone = generate_listops(settings)
    together = generate_listops(settings, workers=2)
    # enough for one worker to overtake the other
    assert alone.candidates > 10_000
    assert all(np.array_equal(getattr(alone, name), getattr(together, name)) for name in ("tokens", "starts", "labels"))
    assert (alone.accepted, alone.candidates) == (together.accepted, together.candidates)


def test_the_seed_decides():
    first, again, other = (
        generate_listops(ListOpsSettings(samples=(5, 5, 5), min_length=10, max_length=80, seed=seed))
        for seed in (0, 0, 1)
    )
    assert texts(first) == texts(again)
    assert not set(texts(first)) & set(texts(other))


def test_samples_occur_once():
    # an operation on two digits: there are 4 * 10 * 10, and all are found
    settings = ListOpsSettings(samples=(300, 50, 50), min_length=3, max_length=5, max_depth=2)
    calls = []
    samples = generate_listops(settings, progress=lambda *numbers: calls.append(numbers))
    assert len(set(texts(samples))) == 400
    assert samples.accepted > 400
    assert calls[-1] == (400, 400)
    assert calls == sorted(calls)
    assert len(calls) == samples.candidates / 1000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"samples": (301, 50, 50), "min_length": 3, "max_length": 5, "max_depth": 2},
            "401 different ListOps samples of more than 3 and fewer than 5 tokens cannot be found with max_depth 2 "
            r"and max_args 10: \d+ candidates gave 400, the last 100000 of them 0; ask for fewer",
        ),
        ({"samples": (1, 1, 1), "max_depth": 1}, "100000 candidates gave 0, the last 100000 of them 0; ask for fewer"),
    ],
)
def test_samples_that_are_not_to_be_found_end_in_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        generate_listops(ListOpsSettings(**settings))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": (1, 2)}, r"samples must be three numbers, for train, val and test; got \(1, 2\)"),
        ({"samples": (1, 0, 1)}, "samples must be at least 1, got 0"),
        ({"min_length": -1}, "min_length must be at least 0, got -1"),
        ({"min_length": 1999}, r"strictly between min_length \(1999\) and max_length \(2000\)"),
        ({"max_length": 2.5}, "max_length must be a whole number, got 2.5"),
        ({"max_depth": 0}, "max_depth must be at least 1, got 0"),
        ({"max_depth": 101}, "max_depth must be at most 100, got 101"),
        ({"max_args": 1}, "max_args must be at least 2, got 1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_settings_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        ListOpsSettings(**options)


def test_the_number_of_workers_is_checked(tmp_path):
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        generate_listops(TINY, workers=0)
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        open_listops(tmp_path / "cache", "train", settings=TINY, workers=0)


def test_written_forms_have_one_encoding():
    expected = [12, 3, 10, 11, 5, 8, 15, 1, 15]
    for text in (
        "[MAX 2 9 [MIN 4 7 ] 0 ]",
        "[MAX 2 9 [MIN 4 7 X 0 X",
        "( ( ( ( ( [MAX 2 ) 9 ) ( ( ( [MIN 4 ) 7 ) ] ) ) 0 ) ] )",
    ):
        tokens = encode(text)
        assert tokens.dtype == np.uint16
        assert tokens.tolist() == expected
    assert decode(tokens) == "[MAX 2 9 [MIN 4 7 ] 0 ]"
    assert encode("[MED [SM ] 7").tolist() == [13, 14, 15, 8]


def test_what_is_no_expression_is_refused():
    with pytest.raises(ValueError, match=r"a word .* must be 0, 1, .*, \[SM, \] or X; got '\[FIRST'"):
        encode("[FIRST 1 2 ]")
    with pytest.raises(ValueError, match="at least one word, got none"):
        encode("( )")
    for token in (0, 16):
        with pytest.raises(ValueError, match=f"a ListOps token must lie between 1 and 15, got {token}"):
            decode([1, token])


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


def content(source: SequenceSource) -> list[tuple[str, int]]:
    samples = [source.load(index) for index in range(len(source))]
    return [(decode(tokens), label) for (tokens,), label in samples]


def test_splits_are_those_generated(tiny_cache):
    sources = [open_listops(tiny_cache, split, settings=TINY) for split in ("train", "val", "test")]
    assert [len(source) for source in sources] == [30, 6, 5]
    samples = generate_listops(TINY)
    expected = list(zip(texts(samples), samples.labels.tolist(), strict=True))
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
        ('{"format": 1', r"listops\.json is damaged \(Expecting .*\); delete"),
        ("[]", r"listops\.json is damaged \(it has no format\); delete"),
        ('{"format": 1, "settings": {}}', r"listops\.json is damaged \(it has no sha256\); delete"),
        ('{"format": 2}', r"listops\.json must have format 1, got 2; choose another directory, or delete"),
    ],
)
def test_a_damaged_description_is_named(cache, text, message):
    (cache / "listops.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        open_listops(cache, "val", settings=TINY)


def test_the_split_is_checked(tmp_path):
    with pytest.raises(ValueError, match="split must be one of test, train, val; got 'dev'"):
        open_listops(tmp_path / "cache", "dev", settings=TINY)
    assert list(tmp_path.iterdir()) == []


LINES = ("( ( ( [MAX 2 ) 9 ) ] )\t9", "( ( ( [MED 0 ) 5 ) ] )\t2", "7\t7")


@pytest.fixture
def write_tsv(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: str, header: str = "Source\tTarget", end: str = "\r\n") -> Path:
        path = tmp_path / "basic_train.tsv"
        path.write_bytes("".join(line + end for line in (header, *lines)).encode())
        return path

    return write


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_files_of_the_benchmark_are_read(write_tsv, end, last):
    path = write_tsv(*LINES, end=end)
    if not last:
        path.write_bytes(path.read_bytes()[: -len(end)])
    source = read_listops_tsv(path)
    assert isinstance(source, SequenceSource)
    assert content(source) == [("[MAX 2 9 ]", 9), ("[MED 0 5 ]", 2), ("7", 7)]
    assert (source.vocabulary, source.max_length, source.parts, len(source.classes)) == (32, 2000, 1, 10)
    assert source.name(0) == f"{path}, line 2"
    assert source.load(0)[0][0].dtype == np.uint16
    assert content(pickle.loads(pickle.dumps(source))) == content(source)
    with pytest.raises(IndexError, match="index must lie between 0 and 2, got 3"):
        source.load(3)


def test_generated_trees_survive_the_format_of_the_benchmark(write_tsv, tiny_cache):
    expected = content(open_listops(tiny_cache, "train", settings=TINY))
    assert content(read_listops_tsv(write_tsv(*(f"{text}\t{label}" for text, label in expected)))) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("( [MAX 2", "a line must be an expression, a tab and its value; got 0 tabs in '( [MAX 2'"),
        ("", "a line must be an expression, a tab and its value; got 0 tabs in ''"),
        ("1\t2\t3", "a line must be an expression, a tab and its value; got 2 tabs in '1\\t2\\t3'"),
        ("1 " * 50, f"a line must be an expression, a tab and its value; got 0 tabs in '{'1 ' * 30}'..."),
        ("( [MAX 2 ) 10 ) ] )\t9", f"a word in a ListOps expression must be {', '.join(IDS)}; got '10'"),
        ("()\t9", "a ListOps expression must have at least one word, got none"),
        ("[MAX 2 9 ]\t10", "the value must be 0 to 9, got '10'"),
        ("[MAX 2 9 ]\t", "the value must be 0 to 9, got ''"),
        ("[MAX 2 9 8 ]\t9", "an expression must have at most 4 tokens (max_length), got 5"),
    ],
)
def test_lines_that_are_no_samples_are_named(write_tsv, line, message):
    path = write_tsv(LINES[0], line, LINES[1])
    source = read_listops_tsv(path, max_length=4)
    assert len(source) == 3
    assert source.load(2)[1] == 2
    with pytest.raises(SequenceError) as error:
        source.load(1)
    assert str(error.value) == f"{path}, line 3: {message}".replace("], X", "] or X")


def test_a_file_that_breaks_off_is_refused_when_it_is_opened(write_tsv):
    path = write_tsv(*LINES[:2])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(SequenceError, match=rf"{path}, line 3: a line must be .*; got 0 tabs in"):
        read_listops_tsv(path)


def test_files_without_header_or_samples_are_refused(write_tsv, tmp_path):
    with pytest.raises(ValueError, match=r"basic_train\.tsv, line 1: it must be 'Source\\tTarget', got '7\\t7'"):
        read_listops_tsv(write_tsv(*LINES, header="7\t7"))
    with pytest.raises(ValueError, match="it ends after its first line"):
        read_listops_tsv(write_tsv())
    (tmp_path / "empty.tsv").write_text("")
    with pytest.raises(ValueError, match=r"empty\.tsv, line 1: it must be 'Source\\tTarget', got ''"):
        read_listops_tsv(tmp_path / "empty.tsv")
    with pytest.raises(ValueError, match=r"basic_val\.tsv must be a file .*listops-1000 of https://.*lra_release\.gz"):
        read_listops_tsv(tmp_path / "basic_val.tsv")
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        read_listops_tsv(write_tsv(*LINES), max_length=0)
