"""Open whatever softline has trained, or knows by its name."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from softline.engine.trained import Trained


def load(source: str | Path) -> "Trained":
    """Open a trained model, whose `predict` can be used on new samples.

    source: a checkpoint that `softline train` wrote, a directory that timm saved, or the name of a model with published
        weights.
    """
    # the extra ``train`` is needed from here on
    from softline.tasks.loading import load_trained

    return load_trained(str(source))
