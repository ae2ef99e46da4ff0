"""From what a program holds, such as a text or an image, to the token ids that a model of sequences was trained on."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softline.data.images.single import check_file, list_images, to_image
from softline.data.sequences.interface import Tokens
from softline.data.sequences.listops import encode
from softline.data.sequences.pixels import grey_tokens
from softline.data.sequences.text import text_tokens
from softline.errors import UserError
from softline.files import read_bytes
from softline.plain import short
from softline.tasks.sequence.recipe import SequenceData


class TokenSample(NamedTuple):
    """A sample to use a model on."""

    parts: tuple[Tensor, ...]
    """Token ids [length] of each sequence, int64."""
    name: str | None
    """Path of its file; None if it comes from memory."""


def list_samples(inputs: Any, data: SequenceData, parts: int) -> list[Any] | None:
    """Return the samples of a list, or of a batch of images; None for one sample."""
    if parts > 1:
        return inputs if isinstance(inputs, list) else None
    if isinstance(inputs, list | tuple):
        # whole numbers are the ids of one sequence
        return None if inputs and all(_is_integer(entry) for entry in inputs) else list(inputs)
    return list_images(inputs) if _of_pixels(data) else None


def token_sample(given: Any, data: SequenceData, parts: int, what: str) -> TokenSample:
    """Return the token ids of a sample.

    given: see `TrainedSequenceModel.predict`.
    parts: number of sequences in a sample.
    what: what an error calls it.
    """
    is_file = isinstance(given, Path) or (isinstance(given, str) and _of_pixels(data))
    if parts == 1:
        sequences = [given]
    elif isinstance(given, Path):
        sequences = _read_parts(given, parts)
    elif isinstance(given, tuple) and len(given) == parts:
        sequences = list(given)
    else:
        raise UserError(f"{what} must be a tuple of {parts} sequences, or the Path of a file, got {short(given)}")
    return TokenSample(tuple(_tokens(part, data, what) for part in sequences), str(given) if is_file else None)


def _tokens(given: Any, data: SequenceData, what: str) -> Tensor:
    if isinstance(given, list | tuple) or (isinstance(given, np.ndarray | Tensor) and given.ndim == 1):
        return _ids(given, what)
    if _of_pixels(data):
        # grey values are computed from the colours, as in training
        return _as_tensor(grey_tokens(to_image(given, "RGB", name=what), lambda: what))
    if isinstance(given, Path):
        return _text_tokens(_read_text(given), data, str(given))
    if isinstance(given, str | bytes):
        return _text_tokens(given.encode() if isinstance(given, str) else given, data, what)
    held = f"{type(given).__name__} {list(given.shape)}" if hasattr(given, "shape") else short(given)
    raise UserError(f"{what} must be a text, the Path of a file, or token ids in one dimension, got {held}")


def _text_tokens(text: bytes, data: SequenceData, what: str) -> Tensor:
    if data.name != "listops":
        length = {} if data.max_length is None else {"max_length": data.max_length}
        return _as_tensor(text_tokens(text, **length))
    try:
        return _as_tensor(encode(text.decode(errors="replace")))
    except UserError as error:
        raise UserError(f"{what}: {error}") from None


def _ids(given: Any, what: str) -> Tensor:
    if isinstance(given, list | tuple):
        wrong = [entry for entry in given if not _is_integer(entry)]
        if wrong:
            raise UserError(f"token ids of {what} must be whole numbers, got {short(wrong[0])}")
        return torch.tensor(given, dtype=torch.int64)
    fractional = given.is_floating_point() if isinstance(given, Tensor) else False
    ids = given if fractional or not isinstance(given, Tensor) else given.cpu().numpy()
    if fractional or not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"token ids of {what} must be whole numbers, they are {ids.dtype}")
    return torch.from_numpy(ids.astype(np.int64))


def _as_tensor(tokens: Tokens) -> Tensor:
    return torch.from_numpy(tokens.astype(np.int64))


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _of_pixels(data: SequenceData) -> bool:
    return data.name in ("image", "pathfinder")


def _read_parts(path: Path, count: int) -> list[bytes]:
    parts = _read_text(path).rstrip(b"\r\n").split(b"\t")
    if len(parts) != count:
        raise UserError(f"{path} must hold {count} texts with a tab between them, it has {len(parts)}")
    return parts


def _read_text(path: Path) -> bytes:
    check_file(path, "file")
    text = read_bytes(path)
    if b"\0" in text:
        raise UserError(f"{path} must be a text, it has null characters")
    return text
