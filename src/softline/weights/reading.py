"""Reading weight files without executing code in them.

Every file of weights that softline opens goes through here: checkpoints of softline, timm and the papers' authors, as
zip archives of torch or as safetensors. A file is checked before it is read: that it is complete, that its entries are
not compressed, and that its pickle asks for nothing but tensors and plain values. torch's restricted unpickler alone
would also create bytearrays and tensors of any size for a file of a few bytes.
"""

import argparse
import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from softline.errors import UserError
from softline.files import check_name, check_regular, open_regular

# entries of a checkpoint that may hold its weights; averaged weights come first, as the papers evaluate those
WEIGHT_ENTRIES = ("state_dict_ema", "model_ema", "state_dict", "model")
_STORAGES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
# what a pickle of tensors and plain values asks for
TENSORS = {
    "collections.OrderedDict",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_tensor_v2",
    *(f"torch.{kind}Storage" for kind in _STORAGES),
}
MAX_TUPLES = 64
"""Tuples inside each other; the hash of a deeper one as a key would exhaust the stack of the process."""


def _number(kind: "np.dtype[Any]", content: bytes = b"") -> Any:
    """Read a number of numpy, of which the file must hold every byte: numpy itself would allocate the others."""
    if kind.kind not in "biuf" or len(content) != kind.itemsize:
        raise ValueError("a number of numpy without its bytes")
    return np.frombuffer(content, kind)[0].item()


# the function by which numpy unpickles a scalar; its module differs between versions of numpy
_SCALARS = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
# the settings that the releases save beside the weights, read as plain data
SETTINGS: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "yacs.config.CfgNode": OrderedDict,
    "numpy.dtype": np.dtype,
    "numpy.dtypes.Float64DType": type(np.dtype(np.float64)),
    **dict.fromkeys(_SCALARS, _number),
}
# the numbers of numpy's scalars are bytes, which old pickles encode
_SETTINGS_ONLY = {*SETTINGS, "_codecs.encode"}


def load_official(path: str | Path) -> dict[str, Tensor]:
    """Read the state dict of a release's .pth (or .safetensors) file without executing any code in it.

    Averaged (EMA) weights are preferred if the file has them.
    """
    path = Path(path)
    content: Any = _read_safetensors(path) if path.suffix == ".safetensors" else read_archive(path, settings=True)
    if isinstance(content, Mapping):
        for entry in WEIGHT_ENTRIES:
            if isinstance(content.get(entry), Mapping):
                content = content[entry]
                break
    named = isinstance(content, Mapping) and all(isinstance(key, str) for key in content)
    if not named or not content or not all(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path} holds no state dict (a mapping of names to tensors, or one under {WEIGHT_ENTRIES})")
    check_tensors(content, str(path))
    return {key.removeprefix("module."): value for key, value in content.items()}


def read_archive(path: Path, *, settings: bool = False) -> Any:
    """Read a zip archive that torch wrote: tensors, numbers, texts, lists and dictionaries.

    settings: also accept what the papers' releases save beside the weights, as plain data.
    """
    _check_archive(path, TENSORS | _SETTINGS_ONLY if settings else TENSORS)
    try:
        with torch.serialization.safe_globals([(kind, name) for name, kind in SETTINGS.items()] if settings else []):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # a pickle that was not written by torch may fail anywhere in torch's unpickler
        raise UserError(f"{path} is not a checkpoint: {_first_line(error)}") from error


def check_tensors(tensors: Mapping[str, Tensor], where: str) -> None:
    """Check that each tensor is an ordinary one, whose numbers are all in the file, and that they are finite."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
            raise UserError(f"{name} in {where} must be an ordinary tensor, got {tensor.layout} on {tensor.device}")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UserError(f"{name} in {where} is out of proportion: {tuple(tensor.shape)} from fewer numbers")
    if (bad := first_nonfinite_weight(tensors)) is not None:
        raise UserError(f"{bad} in {where} is not finite: the weights cannot be used")


def first_nonfinite_weight(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that has a number which is infinite or not a number."""
    floating = ((name, tensor) for name, tensor in tensors.items() if tensor.is_floating_point() or tensor.is_complex())
    return next((name for name, tensor in floating if not tensor.isfinite().all()), None)


def _check_file(path: Path) -> None:
    check_name(path)
    if not path.exists():
        raise UserError(f"no such file: {path}")
    check_regular(path)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    _check_file(path)
    try:
        return load_file(path)
    except (SafetensorError, RuntimeError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is truncated or not a checkpoint: {_first_line(error)}") from error


def _check_archive(path: Path, allowed: set[str]) -> None:
    """Check the entries of a zip archive, their checksums, which torch ignores, and what its pickle asks for."""
    _check_file(path)
    try:
        if not zipfile.is_zipfile(path):
            raise UserError(f"{path} is truncated or not a checkpoint: torch has written zip archives since 1.6")
        _check_directory(path)
        with zipfile.ZipFile(path) as archive:
            _check_sizes(archive, path)
            damaged = archive.testzip()
            if damaged is not None:
                raise UserError(f"{path} is corrupt: the checksum of {damaged} is wrong")
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise UserError(f"{path} is not a checkpoint: torch writes one data.pkl, found {len(pickles)}")
            _check_pickle(archive.read(pickles[0]), path, allowed)
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
        EOFError,
        ValueError,
        OverflowError,
        OSError,
    ) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is corrupt: {_first_line(error)}") from error


def _check_directory(path: Path) -> None:
    """Check that the list of entries lies where the end of the file says: readers differ in where they look for it.

    zipfile takes what lies before the end, torch what the end points to.
    """
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(max(size - 98, 0))
        tail = file.read()
    place = size - 22
    # the end record without a comment, and before it that of zip64, which torch writes, and its locator
    sound = tail[-22:-18] == b"PK\5\6" and tail[-2:] == b"\0\0"
    length, start = struct.unpack("<II", tail[-10:-2])
    if len(tail) == 98 and tail[56:60] == b"PK\6\7":
        place = size - 98
        sound = sound and tail[:4] == b"PK\6\6" and struct.unpack("<Q", tail[64:72])[0] == place
        length, start = struct.unpack("<QQ", tail[40:56])
    if not sound or start + length != place:
        raise UserError(f"{path} is refused: its list of entries is not at its end, where torch writes it")


def _check_sizes(archive: zipfile.ZipFile, path: Path) -> None:
    entries = archive.infolist()
    for entry in entries:
        if entry.flag_bits & 1:
            raise UserError(f"{path} is refused: {entry.filename} is encrypted")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise UserError(f"{path} is refused: {entry.filename} is compressed, and torch compresses nothing")
    if len({entry.filename for entry in entries}) != len(entries):
        raise UserError(f"{path} is refused: it has several entries of one name")
    total, size = sum(entry.file_size for entry in entries), path.stat().st_size
    if total > size:
        raise UserError(f"{path} is refused: its entries claim {total:,} bytes, and the file has {size:,}")


def _check_pickle(content: bytes, path: Path, allowed: set[str]) -> None:
    """Refuse a pickle that asks for anything but ``allowed``; nothing in it is executed."""
    tuples = _Tuples()
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if tuples.depth(opcode, argument) > MAX_TUPLES:
                raise UserError(f"{path} is refused: tuples are nested more than {MAX_TUPLES} deep")
            if opcode.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
                raise UserError(f"{path} is refused: its pickle uses {opcode.name}, which torch never writes")
            if opcode.name == "GLOBAL" and (asked := str(argument).replace(" ", ".")) not in allowed:
                raise UserError(
                    f"{path} is refused: it asks to run {asked}, and weights consist of tensors, numbers and text"
                )
    except UserError:
        raise
    except (ValueError, pickle.UnpicklingError, LookupError, MemoryError) as error:
        raise UserError(f"{path} is corrupt: its pickle cannot be read ({_first_line(error)})") from error


class _Tuples:
    """Follows a pickle's stack to know how deep its tuples are nested; of other values it keeps a 0."""

    def __init__(self) -> None:
        self.stack: list[int | None] = []
        """Depths; None is a mark."""
        self.memo: dict[int, int | None] = {}

    def depth(self, opcode: pickletools.OpcodeInfo, argument: Any) -> int:
        """Take the next step; return the depth of the tuple that it makes."""
        name = opcode.name
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if argument is None else int(argument)] = self.stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[int(argument)])
        elif name == "MARK":
            self.stack.append(None)
        elif name == "DUP":
            self.stack.append(self.stack[-1])
        else:
            taken = self._take(opcode.stack_before)
            depth = 1 + max(taken, default=0) if "TUPLE" in name else 0
            self.stack += [depth] * len(opcode.stack_after)
            return depth
        return 0

    def _take(self, before: list[Any]) -> list[int]:
        """Remove what a step takes from the stack."""
        count, taken = len(before), []
        if pickletools.markobject in before:
            count = before.index(pickletools.markobject)
            while (top := self.stack.pop()) is not None:
                taken.append(top)
        taken += [self.stack.pop() or 0 for _ in range(count)]
        return taken


def _first_line(error: Exception) -> str:
    # torch's own messages advise to execute the file
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text if isinstance(error, RuntimeError | OSError | ValueError | zipfile.BadZipFile) else type(error).__name__
