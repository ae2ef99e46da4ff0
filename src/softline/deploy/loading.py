"""Open whatever softline has trained or exported, or knows by its name."""

from pathlib import Path
from typing import TYPE_CHECKING

from softline.errors import UserError

if TYPE_CHECKING:
    from softline.engine.trained import Trained


def load(source: str | Path) -> "Trained":
    """Open a trained model, whose `predict` can be used on new samples.

    source: a checkpoint that `softline train` wrote, an ONNX file that `softline export` wrote, which ONNX Runtime
        runs, a directory that timm saved, or the name of a model with published weights.
    """
    path = Path(source)
    if path.suffix == ".onnx":
        return _load_onnx(path)
    if path.suffix == ".pt2":
        raise UserError(f"{path}: torch.export.load opens .pt2 files; softline opens checkpoints and .onnx files")
    # the extra ``train`` is needed from here on
    from softline.tasks.loading import load_trained

    return load_trained(str(source))


def _load_onnx(path: Path) -> "Trained":
    from softline.checks import check_option
    from softline.deploy.onnx_files import open_onnx
    from softline.engine.task import TASKS

    network, about = open_onnx(path)
    if about.get("features"):
        raise UserError(f"{path} has the features of {about['task']}, which is no prediction: run it by onnxruntime")
    if about.get("preprocess"):
        raise UserError(
            f"{path} normalises images itself, which softline does as well: run it by onnxruntime, or export it "
            "without the preprocessing"
        )
    try:
        check_option("task", about["task"], TASKS)
        return TASKS[about["task"]].reopen(network, about["description"])
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
