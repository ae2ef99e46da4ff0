"""Reading the checkpoint files of the papers' official releases without executing pickled code."""

import argparse
import pickle
import re
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

# entries of a checkpoint that may hold its weights; averaged weights come first, as the papers evaluate those
WEIGHT_ENTRIES = ("state_dict_ema", "model_ema", "state_dict", "model")


def load_official(path: str | Path) -> dict[str, Tensor]:
    """Read the state dict of a release's .pth (or .safetensors) file without executing any code in it.

    Averaged (EMA) weights are preferred if the file has them.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    try:
        content = load_file(path) if path.suffix == ".safetensors" else _load_pickle(path)
    except pickle.UnpicklingError as error:
        asked = re.search(r"(?:Unsupported global: GLOBAL|Trying to load unsupported GLOBAL) (\S+)", str(error))
        what = f"it asks to run {asked[1]}" if asked else "it cannot be read without running code in it"
        raise UserError(f"{path} is refused: {what}") from error
    except (SafetensorError, RuntimeError) as error:
        raise UserError(f"{path} is truncated or not a checkpoint: {str(error).splitlines()[0]}") from error
    return _weights(content, path)


def check_archive(path: Path) -> None:
    """Check that a file is a zip archive, as torch writes them, and its checksums, which torch does not verify."""
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path} is truncated or not a checkpoint: torch has written zip archives since 1.6")
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise UserError(f"{path} is corrupt: the checksum of {damaged} is wrong")


def _load_pickle(path: Path) -> Any:
    """Read with torch's restricted unpickler, which also accepts the types of the releases' settings as plain data."""
    check_archive(path)
    # the function by which numpy unpickles a scalar; its module differs between versions of numpy
    type_of_scalar = np.float64(0).__reduce__()[0]
    harmless: list[Any] = [
        argparse.Namespace,
        (OrderedDict, "yacs.config.CfgNode"),
        np.dtype,
        type(np.dtype(np.float64)),
    ]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        harmless.append((type_of_scalar, f"{module}.scalar"))
    with torch.serialization.safe_globals(harmless):
        return torch.load(path, map_location="cpu", weights_only=True)


def _weights(content: Any, path: Path) -> dict[str, Tensor]:
    if isinstance(content, Mapping):
        for entry in WEIGHT_ENTRIES:
            if isinstance(content.get(entry), Mapping):
                content = content[entry]
                break
    named = isinstance(content, Mapping) and all(isinstance(k, str) for k in content)
    if not named or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise UserError(f"{path} holds no state dict (a mapping of names to tensors, or one under {WEIGHT_ENTRIES})")
    return {key.removeprefix("module."): value for key, value in content.items()}
