import pickle
from collections.abc import Callable
from math import comb, sqrt
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from numpy.typing import NDArray

from softline.data.sequences.interface import SequenceError, SequenceSource
from softline.data.sequences.listops import (
    IDS,
    ListOpsSamples,
    ListOpsSettings,
    decode,
    encode,
    generate_listops,
    read_listops_tsv,
)

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


@pytest.fixture(scope="module")
def parsed(thousand: ListOpsSamples) -> list[Parsed]:
    return [Parsed(text) for text in texts(thousand)]


def test_every_label_is_the_value_of_its_expression(thousand, parsed):
    assert [tree.value for tree in parsed] == thousand.labels.tolist()


def test_trees_keep_to_the_grammar(thousand, parsed):
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


def test_the_number_of_workers_is_checked():
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        generate_listops(TINY, workers=0)


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


def content(source: SequenceSource) -> list[tuple[str, int]]:
    samples = [source.load(index) for index in range(len(source))]
    return [(decode(tokens), label) for (tokens,), label in samples]


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


def test_generated_trees_survive_the_format_of_the_benchmark(write_tsv):
    samples = generate_listops(TINY)
    expected = list(zip(texts(samples), samples.labels.tolist(), strict=True))
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
