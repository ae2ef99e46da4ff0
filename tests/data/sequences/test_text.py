import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader

from softline.data.sequences import text as lra_text
from softline.data.sequences.interface import SequenceError, SequenceSamples, SequenceSource
from softline.data.sequences.text import open_aan, open_imdb
from softline.errors import UserError


def ids(text: bytes) -> list[int]:
    return [byte + 1 for byte in text]


@pytest.fixture
def imdb(tmp_path: Path) -> Path:
    """Two reviews of each sentiment in train, one in test."""
    reviews = {
        "train/neg/0_3.txt": b"bad",
        "train/neg/10_1.txt": b"worse",
        "train/pos/0_9.txt": b"good",
        "train/pos/1_10.txt": b"great",
        "test/neg/5_2.txt": b"no\n",
        "test/pos/5_7.txt": b"yes",
    }
    for name, text in reviews.items():
        path = tmp_path / "aclImdb" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return tmp_path


def names(source: SequenceSource) -> list[str]:
    return ["/".join(Path(source.name(index)).parts[-2:]) for index in range(len(source))]


def test_reviews_are_read_by_name_with_both_sentiments_mixed(imdb):
    source = open_imdb(imdb, "train")
    assert isinstance(source, SequenceSource)
    assert (source.classes, source.vocabulary, source.max_length, source.parts) == (("neg", "pos"), 512, 4000, 1)
    assert names(source) == ["neg/0_3.txt", "pos/0_9.txt", "neg/10_1.txt", "pos/1_10.txt"]
    assert source.name(0) == f"{imdb}/aclImdb/train/neg/0_3.txt"
    (tokens,), label = source.load(0)
    assert (tokens.dtype, tokens.tolist(), label) == (np.uint16, [99, 98, 101], 0)
    assert [source.load(index)[1] for index in range(4)] == [0, 1, 0, 1]


def test_the_root_may_be_aclimdb_itself(imdb):
    source = open_imdb(imdb / "aclImdb", "test")
    assert source.load(0)[0][0].tolist() == ids(b"no\n")


def test_reviews_are_validated_on_the_test_set(imdb):
    assert names(open_imdb(imdb, "val")) == names(open_imdb(imdb, "test")) == ["neg/5_2.txt", "pos/5_7.txt"]


def test_every_byte_has_its_own_token_above_padding(imdb):
    (imdb / "aclImdb/test/neg/5_2.txt").write_bytes(bytes(range(256)))
    assert open_imdb(imdb, "test").load(0)[0][0].tolist() == list(range(1, 257))


@pytest.mark.parametrize(("max_length", "length"), [(4000, 4000), (7, 7), (5000, 4100)])
def test_reviews_end_after_the_length_of_the_benchmark(imdb, max_length, length):
    (imdb / "aclImdb/test/neg/5_2.txt").write_bytes(b"ab" * 2050)
    source = open_imdb(imdb, "test", max_length=max_length)
    assert source.load(0)[0][0].tolist() == (ids(b"ab") * 2050)[:length]
    assert source.max_length == max_length


def test_an_empty_review_is_named(imdb):
    (imdb / "aclImdb/train/pos/0_9.txt").write_bytes(b"")
    source = open_imdb(imdb, "train")
    with pytest.raises(SequenceError) as error:
        source.load(1)
    assert str(error.value) == (
        f"{imdb}/aclImdb/train/pos/0_9.txt: a review must have at least one byte, the file is empty"
    )


def test_missing_reviews_say_where_they_were_looked_for(imdb):
    (imdb / "aclImdb/test/pos/5_7.txt").unlink()
    (imdb / "aclImdb/test/pos").rmdir()
    with pytest.raises(ValueError, match="split 'val'") as error:
        open_imdb(imdb, "val")
    assert str(error.value) == (
        f"IMDb's reviews for the split 'val' were not found; looked for {imdb}/test/neg, {imdb}/test/pos, "
        f"{imdb}/aclImdb/test/neg, {imdb}/aclImdb/test/pos; "
        "they come from aclImdb_v1.tar.gz of ai.stanford.edu/~amaas/data/sentiment"
    )


def test_a_folder_without_reviews_is_refused(imdb):
    (imdb / "aclImdb/test/pos/5_7.txt").rename(imdb / "aclImdb/test/pos/5_7.html")
    with pytest.raises(ValueError, match=r"aclImdb/test/pos holds no reviews: expected \*\.txt$"):
        open_imdb(imdb, "test")


def test_other_files_among_reviews_are_counted_in_the_log(imdb, caplog):
    (imdb / "aclImdb/train/neg/notes.md").write_bytes(b"x")
    (imdb / "aclImdb/train/neg/._0_3.txt").write_bytes(b"x")
    with caplog.at_level(logging.WARNING):
        assert len(open_imdb(imdb, "train")) == 4
    assert [record.getMessage() for record in caplog.records] == [
        f"1 files in {imdb}/aclImdb/train/neg are not reviews (*.txt) and are ignored"
    ]


LINES = [b"0.0\ta\tb\tfirst\tsecond", b'1.0\tc\td\t\'q"uoted"\tx y', b"1\te\tf\t\xff\x00\tz", b"0\tg\th\tl\tm"]


def test_only_regular_files_are_reviews(imdb):
    neg = imdb / "aclImdb" / "train" / "neg"
    (neg / "1_1.txt").symlink_to("0_3.txt")
    with pytest.raises(UserError, match=r"neg/1_1\.txt is a symbolic link to 0_3\.txt: links inside a dataset"):
        open_imdb(imdb, "train")
    (neg / "1_1.txt").unlink()
    source = open_imdb(imdb, "train")
    (neg / "0_3.txt").unlink()
    os.mkfifo(neg / "0_3.txt")
    with pytest.raises(UserError, match=r"neg/0_3\.txt must be a regular file, it is a named pipe"):
        open_imdb(imdb, "train")
    with pytest.raises(UserError, match="it is a named pipe"):
        source.load(0)


def write_pairs(root: Path, content: bytes, split: str = "train", folder: str = "tsv_data") -> Path:
    path = root / folder / f"new_aan_pairs.{split}.tsv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def joined(source: SequenceSource) -> list[tuple[list[int], list[int], int]]:
    samples = [source.load(index) for index in range(len(source))]
    return [(first.tolist(), second.tolist(), label) for (first, second), label in samples]


def test_pairs_are_read_line_by_line_without_quoting(tmp_path):
    path = write_pairs(tmp_path, b"\n".join(LINES) + b"\n")
    source = open_aan(tmp_path, "train")
    assert isinstance(source, SequenceSource)
    assert (source.classes, source.vocabulary, source.parts) == (("different", "same"), 512, 2)
    assert (len(source), source.max_length, source.name(2)) == (4, 4000, f"{path}:3")
    assert source.load(0)[0][0].dtype == np.uint16
    assert joined(source) == [
        (ids(b"first"), ids(b"second"), 0),
        (ids(b'\'q"uoted"'), ids(b"x y"), 1),
        ([256, 1], ids(b"z"), 1),
        (ids(b"l"), ids(b"m"), 0),
    ]


@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize("feed", [b"\n", b"\r\n"])
@pytest.mark.parametrize("end", [True, False])
def test_lines_are_the_same_whatever_block_and_line_end_they_have(tmp_path, monkeypatch, block, feed, end):
    write_pairs(tmp_path, b"\n".join(LINES) + b"\n")
    expected = joined(open_aan(tmp_path, "train"))
    write_pairs(tmp_path, feed.join(LINES) + feed * end)
    monkeypatch.setattr(lra_text, "BLOCK", block)
    assert joined(open_aan(tmp_path, "train")) == expected


@pytest.mark.parametrize("folder", ["", "tsv_data", "lra_release/tsv_data"])
def test_pairs_may_lie_in_the_release_or_alone(tmp_path, folder):
    write_pairs(tmp_path, LINES[0], folder=folder)
    assert len(open_aan(tmp_path, "train")) == 1


def test_pairs_are_validated_on_the_eval_file(tmp_path):
    for split, lines in (("train", 1), ("eval", 2), ("test", 3)):
        write_pairs(tmp_path, b"\n".join(LINES[:lines]), split)
    assert [len(open_aan(tmp_path, split)) for split in ("train", "val", "test")] == [1, 2, 3]


def test_each_text_of_a_pair_ends_after_the_length_of_the_benchmark(tmp_path):
    write_pairs(tmp_path, b"1\ta\tb\t" + b"x" * 4001 + b"\t" + b"y" * 3)
    first, second = open_aan(tmp_path, "train").load(0)[0]
    assert (len(first), len(second)) == (4000, 3)
    assert [len(text) for text in open_aan(tmp_path, "train", max_length=2).load(0)[0]] == [2, 2]


@pytest.mark.parametrize(
    ("line", "columns"), [(b"0.0\ta\tb\tfirst", 4), (b"", 1), (b"0.0\ta\tb\tfirst\tsecond\tthird", 6)]
)
def test_a_line_without_all_columns_is_refused_when_the_file_is_opened(tmp_path, line, columns):
    path = write_pairs(tmp_path, LINES[0] + b"\n" + line + b"\n" + LINES[1] + b"\n")
    with pytest.raises(SequenceError) as error:
        open_aan(tmp_path, "train")
    assert str(error.value) == (
        f"{path}:2: a line must have 5 columns (label, id1, id2, text1, text2) between tabs, it has {columns}"
    )


def test_a_download_that_ends_amid_a_line_is_refused(tmp_path):
    path = write_pairs(tmp_path, b"\n".join(LINES)[:-4])
    with pytest.raises(SequenceError, match=rf"{path}:4: a line must have 5 columns .* it has 3$"):
        open_aan(tmp_path, "train")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"2.0\ta\tb\tx\ty", "the label must be one of 0, 0.0, 1, 1.0; got '2.0'"),
        (b"label\ta\tb\tx\ty", "the label must be one of 0, 0.0, 1, 1.0; got 'label'"),
        (b"\xff" + b"l" * 50 + b"\ta\tb\tx\ty", f"the label must be one of 0, 0.0, 1, 1.0; got '\\\\xff{'l' * 36}...'"),
        (b"0.0\ta\tb\t\ty", "text1 must have at least one byte, it is empty"),
        (b"0.0\ta\tb\tx\t", "text2 must have at least one byte, it is empty"),
        (b"0.0\ta\tb\tx\t\r", "text2 must have at least one byte, it is empty"),
    ],
)
def test_a_line_of_another_kind_is_named_when_the_file_is_opened(tmp_path, line, problem):
    path = write_pairs(tmp_path, LINES[0] + b"\n" + line + b"\n")
    with pytest.raises(SequenceError) as error:
        open_aan(tmp_path, "train")
    assert str(error.value) == f"{path}:2: {problem}"


def test_an_empty_file_of_pairs_is_refused(tmp_path):
    path = write_pairs(tmp_path, b"")
    with pytest.raises(ValueError, match=rf"{path} must hold lines of the columns label, .*; it is empty"):
        open_aan(tmp_path, "train")


def test_missing_pairs_say_where_they_were_looked_for(tmp_path):
    write_pairs(tmp_path, LINES[0])
    with pytest.raises(ValueError, match="split 'val'") as error:
        open_aan(tmp_path, "val")
    name = "new_aan_pairs.eval.tsv"
    assert str(error.value) == (
        f"AAN's pairs of papers for the split 'val' were not found; looked for {tmp_path}/{name}, "
        f"{tmp_path}/tsv_data/{name}, {tmp_path}/lra_release/tsv_data/{name}; "
        "they come from lra_release.gz of github.com/google-research/long-range-arena"
    )


@pytest.mark.parametrize("open_it", [open_imdb, open_aan])
def test_splits_and_lengths_are_checked(tmp_path, open_it: Callable[..., SequenceSource]):
    with pytest.raises(ValueError, match="split must be one of test, train, val; got 'eval'"):
        open_it(tmp_path, "eval")
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        open_it(tmp_path, "train", max_length=0)


@pytest.mark.parametrize("open_it", [open_imdb, open_aan])
def test_texts_are_the_same_in_another_process(imdb, open_it: Callable[..., SequenceSource]):
    write_pairs(imdb, b"\n".join(LINES))
    source = open_it(imdb, "train")
    content = pickle.dumps(source)
    assert len(content) < 2000
    again = pickle.loads(content)
    loader = DataLoader(SequenceSamples(source), batch_size=None, num_workers=1)
    for index, (parts, label) in enumerate(loader):
        expected, expected_label = source.load(index)
        assert [part.tolist() for part in parts] == [part.tolist() for part in expected]
        assert [part.tolist() for part in again.load(index)[0]] == [part.tolist() for part in expected]
        assert label == again.load(index)[1] == expected_label
