"""Texts as bytes: Text (IMDb reviews) and Retrieval (AAN papers) of the Long Range Arena.

The layouts below ``ROOT``:

- IMDb: ``[aclImdb/]{train,test}/{neg,pos}/*.txt``
- AAN: ``[tsv_data/ | lra_release/tsv_data/]new_aan_pairs.{train,eval,test}.tsv`` with the tab-separated columns label,
  id1, id2, text1, text2, without a header and without quotes

A token is a byte + 1, because 0 is padding; texts are cut to ``max_length`` bytes, as in the benchmark.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from softline.checks import check_integer, check_option
from softline.data.reading import walk
from softline.data.sequences.interface import SequenceError, SequenceSource, Split, Tokens
from softline.errors import UserError
from softline.files import open_regular

# the benchmark selects its checkpoint on the test reviews
IMDB_SPLITS = {"train": "train", "val": "test", "test": "test"}
AAN_SPLITS = {"train": "train", "val": "eval", "test": "test"}
IMDB_ORIGIN = "aclImdb_v1.tar.gz of ai.stanford.edu/~amaas/data/sentiment"
LRA_ORIGIN = "lra_release.gz of github.com/google-research/long-range-arena"
VOCABULARY = 512
# bytes that the benchmark cuts texts to
MAX_LENGTH = 4000
SENTIMENTS = ("neg", "pos")
COLUMNS = ("label", "id1", "id2", "text1", "text2")
PAIR_CLASSES = ("different", "same")
PAIR_LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}
BLOCK = 1 << 24

logger = logging.getLogger(__name__)


class Reviews:
    """Text files, one per sample; every load opens its file again, so that threads and processes share no open files.

    folder: folder that contains neg and pos.
    files: label and file name of each sample.
    """

    classes = SENTIMENTS
    vocabulary = VOCABULARY
    parts = 1

    def __init__(self, folder: str, files: Sequence[tuple[int, str]], *, max_length: int) -> None:
        self.max_length = max_length
        self._folder = folder
        # arrays, because reference counting would gradually copy the objects of a list into every worker
        self._labels = np.array([label for label, _ in files], np.uint8)
        self._names = np.array([os.fsencode(name) for _, name in files])

    def __len__(self) -> int:
        return len(self._names)

    def lengths(self) -> NDArray[np.int64]:
        sizes = [os.path.getsize(self.name(index)) for index in range(len(self))]
        return np.minimum(np.array(sizes, np.int64), self.max_length)

    def name(self, index: int) -> str:
        return f"{self._folder}/{SENTIMENTS[self._labels[index]]}/{os.fsdecode(self._names[index])}"

    def load(self, index: int) -> tuple[tuple[Tokens, ...], int]:
        with open_regular(self.name(index)) as file:
            text = file.read(self.max_length)
        if not text:
            raise SequenceError(f"{self.name(index)}: a review must have at least one byte, the file is empty")
        return (text_tokens(text, max_length=self.max_length),), int(self._labels[index])


class Pairs:
    """Lines of a tab-separated file, each a sample of two texts; every load opens the file again.

    bounds: start and end of each line, without its line feed [lines, 2].
    """

    classes = PAIR_CLASSES
    vocabulary = VOCABULARY
    parts = 2

    def __init__(self, path: str, bounds: NDArray[np.int64], *, max_length: int) -> None:
        self.max_length = max_length
        self._path, self._bounds = path, bounds

    def __len__(self) -> int:
        return len(self._bounds)

    def lengths(self) -> None:
        return None

    def name(self, index: int) -> str:
        return f"{self._path}:{range(len(self))[index] + 1}"

    def load(self, index: int) -> tuple[tuple[Tokens, ...], int]:
        start, end = self._bounds[index].tolist()
        with open_regular(self._path) as file:
            file.seek(start)
            line = file.read(end - start)
        fields = line.removesuffix(b"\r").split(b"\t")
        if len(fields) != len(COLUMNS):
            rule = f"a line must have {len(COLUMNS)} columns ({', '.join(COLUMNS)}) between tabs"
            raise SequenceError(f"{self.name(index)}: {rule}, it has {len(fields)}")
        label, texts = PAIR_LABELS.get(fields[0]), fields[3:]
        if label is None:
            known = ", ".join(value.decode() for value in PAIR_LABELS)
            raise SequenceError(f"{self.name(index)}: the label must be one of {known}; got {_excerpt(fields[0])}")
        for column, text in zip(COLUMNS[3:], texts, strict=True):
            if not text:
                raise SequenceError(f"{self.name(index)}: {column} must have at least one byte, it is empty")
        return tuple(text_tokens(text, max_length=self.max_length) for text in texts), label


def open_imdb(root: Path, split: Split, *, max_length: int = MAX_LENGTH) -> SequenceSource:
    """Open the reviews of a split, sorted by file name across labels; "val" is the test set, as in the benchmark.

    root: folder aclImdb or its parent.
    """
    check_option("split", split, IMDB_SPLITS)
    check_integer("max_length", max_length, 1)
    folders = [base / IMDB_SPLITS[split] for base in (Path(root), Path(root) / "aclImdb")]
    needed = [[folder / sentiment for sentiment in SENTIMENTS] for folder in folders]
    for folder, pair in zip(folders, needed, strict=True):
        if all(path.is_dir() for path in pair):
            files = [(name, label) for label, path in enumerate(pair) for name in _text_names(path, Path(root))]
            return Reviews(str(folder), [(label, name) for name, label in sorted(files)], max_length=max_length)
    raise missing_download("IMDb's reviews", split, [path for pair in needed for path in pair], IMDB_ORIGIN)


def open_aan(root: Path, split: Split, *, max_length: int = MAX_LENGTH) -> SequenceSource:
    """Open the pairs of papers of a split, in the order of the file; "val" is the file eval.

    The file is read once to find its lines and to check their columns.

    root: lra_release, its parent, or the folder of the files.
    """
    check_option("split", split, AAN_SPLITS)
    check_integer("max_length", max_length, 1)
    name = f"new_aan_pairs.{AAN_SPLITS[split]}.tsv"
    paths = [Path(root, folder, name) for folder in ("", "tsv_data", "lra_release/tsv_data")]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise missing_download("AAN's pairs of papers", split, paths, LRA_ORIGIN)
    bounds, tabs = _find_lines(path)
    if not len(bounds):
        raise UserError(f"{path} must hold lines of the columns {', '.join(COLUMNS)}; it is empty")
    source = Pairs(str(path), bounds, max_length=max_length)
    for index in np.flatnonzero(_doubtful(path, bounds, tabs))[:1]:
        # raises here and not during training
        source.load(int(index))
    return source


def missing_download(what: str, split: str, paths: Sequence[Path], origin: str) -> UserError:
    """The error for data that is not found at ``paths``."""
    places = ", ".join(str(path) for path in paths)
    return UserError(f"{what} for the split {split!r} were not found; looked for {places}; they come from {origin}")


def _text_names(folder: Path, root: Path) -> list[str]:
    # macOS creates ._name.txt files, which are not texts
    found = next(walk(folder, wanted=lambda name: name.endswith(".txt") and not name.startswith("."), root=root))
    if not found.files:
        raise UserError(f"{folder} holds no reviews: expected *.txt")
    if others := found.others + len(found.subfolders):
        logger.warning("%d files in %s are not reviews (*.txt) and are ignored", others, folder)
    return found.files


def find_bytes(path: Path, *characters: str) -> tuple[list[NDArray[np.int64]], int]:
    """Positions of each character in a file, which is read in blocks, and the size of the file."""
    found, size = [[np.zeros(0, np.int64)] for _ in characters], 0
    with open_regular(path) as file:
        while block := file.read(BLOCK):
            values = np.frombuffer(block, np.uint8)
            for places, character in zip(found, characters, strict=True):
                places.append(np.flatnonzero(values == ord(character)) + size)
            size += len(block)
    return [np.concatenate(places) for places in found], size


def _find_lines(path: Path) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and end of each line [lines, 2], and positions of the tabs."""
    (ends, tabs), size = find_bytes(path, "\n", "\t")
    # the last line need not end in a line feed
    if size and (not len(ends) or ends[-1] != size - 1):
        ends = np.append(ends, size)
    starts = np.append(0, ends + 1)[: len(ends)]
    return np.stack([starts, ends], axis=1), tabs


def _doubtful(path: Path, bounds: NDArray[np.int64], tabs: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which lines [lines] have a wrong number of columns, an empty text or an unknown label."""
    content = np.memmap(path, np.uint8, "r")
    starts, ends = bounds.T
    first = np.searchsorted(tabs, starts)
    wrong = np.searchsorted(tabs, ends) - first != len(COLUMNS) - 1
    whole = np.flatnonzero(~wrong)
    # position before each column of the complete lines, and end of the line [lines, columns + 1]
    inner = tabs[first[whole, None] + np.arange(len(COLUMNS) - 1)]
    edges = np.concatenate([starts[whole, None] - 1, inner, ends[whole, None]], axis=1)
    widths = np.diff(edges, axis=1) - 1
    # Windows line endings
    widths[:, -1] -= content[ends[whole] - 1] == ord("\r")
    wrong[whole] = (widths[:, 3:] == 0).any(1)
    known = np.zeros(len(whole), np.bool_)
    for label in PAIR_LABELS:
        alike = np.flatnonzero(widths[:, 0] == len(label))
        places = starts[whole[alike], None] + np.arange(len(label))
        known[alike] |= (content[places] == np.frombuffer(label, np.uint8)).all(1)
    wrong[whole] |= ~known
    return wrong


def text_tokens(text: bytes, *, max_length: int = MAX_LENGTH) -> Tokens:
    """Token ids [length] of a text, which is cut to ``max_length`` bytes."""
    return np.frombuffer(text[:max_length], np.uint8).astype(np.uint16) + np.uint16(1)


def _excerpt(field: bytes) -> str:
    text = field.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
