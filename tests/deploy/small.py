"""Small trained models to export, made in seconds."""

from pathlib import Path
from typing import Any

import timm
import torch

import softline
from softline.engine.trained import Trained
from softline.tasks.classification.trained import Classifier
from softline.tasks.images import image_settings

# few steps of Newton's method, each of which would be a part of the graph
SMALL = {
    "embed_dims": [8, 8, 16, 16],
    "num_heads": [1, 1, 2, 2],
    "depths": [1, 1, 1, 1],
    "attention_options": {"iterations": 4},
}


def small_classifier(name: str = "softpp_micro", **options: Any) -> Classifier:
    """A classifier of five classes whose weights are spread as those of a trained network."""
    model = timm.create_model(name, num_classes=5, **{**SMALL, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    classes = ("cat", "cup", "shoe", "bag", "tree")
    return Classifier(name, model, classes, {**image_settings(model), "image_size": 48})


def saved_classifier(directory: Path) -> tuple[Path, Trained]:
    """The small classifier as a directory of timm's, and opened again."""
    trained = small_classifier()
    timm.models.save_for_hf(trained.model, directory, model_args=SMALL)
    return directory, softline.load(directory)
