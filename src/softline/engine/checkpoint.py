"""Checkpoints: one file with everything that is needed to resume a run, or to use its model.

The weights have timm's keys, so ``timm.create_model(..., checkpoint_path=...)`` reads them as well. The file has no
code in it and is read by `softline.weights.reading`. It needs no random states: step n of a run draws from generators
that are seeded by (seed, n, process), and sample i of epoch e from generators seeded by (seed, e, i).
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import softline
from softline.errors import UserError
from softline.files import write_whole
from softline.plain import check_entries, check_plain
from softline.weights.reading import check_tensors, first_nonfinite_weight, read_archive

FORMAT = 1
LAST, BEST = "last.pt", "best.pt"
WEIGHTS = ("state_dict", "state_dict_ema")
PLAIN = ("recipe", "facts", "metrics", "best", "step", "epoch", "evaluated_step")
ENTRIES = {
    "arch": str,
    "state_dict": dict[str, Tensor],
    "state_dict_ema": dict[str, Tensor] | None,
    "optimizer": dict,
    "scaler": dict | None,
    "step": int,
    "epoch": int,
    "metrics": dict[str, float],
    "evaluated_step": int | None,
    "best": dict[str, float],
    "recipe": dict,
    "facts": dict,
}
"""What a checkpoint consists of, beside the format and the versions that wrote it."""


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Replace the file at ``path`` atomically; if that fails, the previous file stays."""
    check_finite(content)
    stamped = {"format": FORMAT, "softline": softline.__version__, "torch": str(torch.__version__), **content}

    def write(file: Any) -> None:
        guarded: Any = _Remembering(file)
        try:
            torch.save(stamped, guarded)
        except RuntimeError:
            # torch hides the error of the operating system
            if guarded.error is not None:
                raise guarded.error from None
            raise

    write_whole(path, write)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, onto the CPU; every entry of `ENTRIES` is there and of its kind."""
    content = read_archive(path)
    if not isinstance(content, dict) or "format" not in content or "recipe" not in content:
        raise UserError(f"{path} is not a checkpoint of softline: it has no recipe (`softline convert` reads releases)")
    if content["format"] != FORMAT:
        raise UserError(f"{path} has format {content['format']!r}; this softline reads format {FORMAT}")
    check_entries(content, ENTRIES, str(path))
    for name in PLAIN:
        check_plain(content[name], f"{name} in {path}")
    for name in WEIGHTS:
        check_tensors(content[name] or {}, f"{name} in {path}")
    tensors = check_plain(content["optimizer"], f"optimizer in {path}", beside=(Tensor,))
    check_tensors({f"tensor {index}": tensor for index, tensor in enumerate(tensors)}, f"optimizer in {path}")
    return content


def check_finite(content: dict[str, Any]) -> None:
    """Raise FloatingPointError for weights that are not finite, before they replace good ones."""
    for name in WEIGHTS:
        if (bad := first_nonfinite_weight(content[name] or {})) is not None:
            raise FloatingPointError(f"{bad} is not finite")


class _Remembering:
    """A file that keeps the error of a failed write."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written: int = self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        return written

    def flush(self) -> None:
        self.file.flush()
