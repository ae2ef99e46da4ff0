"""What the command line says about an error."""

import errno
import os

from softline.engine.machine import is_out_of_memory
from softline.errors import UserError

EXTRAS = {
    **dict.fromkeys(("accelerate", "jsonargparse", "matplotlib", "tensorboard", "torchmetrics"), "train"),
    **dict.fromkeys(("datasets", "webdataset"), "data"),
    **dict.fromkeys(("faster_coco_eval", "segmentation_models_pytorch"), "dense"),
    "gradio": "explore",
    **dict.fromkeys(("onnx", "onnx_ir", "onnxruntime", "onnxscript"), "export"),
}
"""Optional packages by the name that is imported, and the extra of softline that installs each."""

OUT_OF_MEMORY = "out of memory: choose a smaller batch, smaller images or a smaller model"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def message_of(error: Exception) -> str | None:
    """Return what the user can do something about; None for a fault of softline, which needs its traceback."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        return f"this needs {package}: pip install 'softline[{EXTRAS[package]}]'" if package in EXTRAS else None
    if isinstance(error, OSError):
        return _about_a_file(error)
    return OUT_OF_MEMORY if is_out_of_memory(error) else None


def _about_a_file(error: OSError) -> str | None:
    """Return the message of the operating system about a named file or a full disk."""
    # softline.files puts a better text around the error of the system
    origin = error.__cause__ or error.__context__
    named = error.filename is not None or (isinstance(origin, OSError) and origin.filename is not None)
    if not named and error.errno not in DISK_FULL:
        return None
    text = error.strerror or str(error)
    files = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    return ": ".join([text, *([" -> ".join(files)] if files else [])])
