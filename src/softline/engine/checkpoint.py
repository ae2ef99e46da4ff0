"""Checkpoints: one file with everything that is needed to resume a run, or to use its model.

The weights have timm's keys, so ``timm.create_model(..., checkpoint_path=...)`` reads them as well. The file has no
code in it and is read by torch's restricted unpickler. It needs no random states: step n of a run draws from generators
that are seeded by (seed, n, process), and sample i of epoch e from generators seeded by (seed, e, i).
"""

import pickle
from pathlib import Path
from typing import Any

import torch

import softline
from softline.errors import UserError
from softline.files import write_whole
from softline.weights.reading import check_archive

FORMAT = 1
LAST, BEST = "last.pt", "best.pt"


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
    """Read what `save_checkpoint` wrote, onto the CPU."""
    if not path.is_file():
        raise UserError(f"no such checkpoint: {path}")
    check_archive(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        # torch's own message advises to execute the file
        raise UserError(
            f"{path} is not a checkpoint of softline: it contains more than tensors, numbers and text, and is refused "
            "because reading it could run code"
        ) from None
    except (RuntimeError, EOFError) as error:
        raise UserError(f"{path} is not a checkpoint of softline: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict) or "format" not in content or "recipe" not in content:
        raise UserError(f"{path} is not a checkpoint of softline: it has no recipe (`softline convert` reads releases)")
    if content["format"] != FORMAT:
        raise UserError(f"{path} has format {content['format']}; this softline reads format {FORMAT}")
    return content


def check_finite(content: dict[str, Any]) -> None:
    """Raise FloatingPointError for weights that are not finite, before they replace good ones."""
    for key in ("state_dict", "state_dict_ema"):
        for name, tensor in (content.get(key) or {}).items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise FloatingPointError(f"{name} is not finite")


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
