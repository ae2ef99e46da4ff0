"""How much a trained model owes to its attention: its accuracy with all attention switched off."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from softline.attention.multihead import MultiHeadAttention
from softline.data.images import ImageSource
from softline.data.images.datasets import LabelledImages
from softline.tasks.images import eval_image_transform
from softline.tasks.loading import Trained


def top1(trained: Trained, source: ImageSource, *, batch_size: int = 250) -> float:
    """Accuracy of 0 to 1 on all images of the source."""
    images = LabelledImages(source, eval_image_transform(trained.settings), mode=trained.settings["mode"])
    trained.model.eval()
    right = 0
    for start in range(0, len(images), batch_size):
        batch, labels = zip(*(images[i] for i in range(start, min(start + batch_size, len(images)))), strict=True)
        with torch.no_grad():
            predicted = trained.model(torch.stack(batch)).argmax(-1)
        right += int((predicted == torch.tensor(labels)).sum())
    return right / len(images)


@contextmanager
def attention_off(model: nn.Module) -> Iterator[None]:
    """Every operator gives zeros; projections, local convolutions and all other layers stay."""
    modules = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    operators = [module.operator for module in modules]
    for module in modules:
        module.operator = module.operator._replace(attention=_nothing)
    try:
        yield
    finally:
        for module, operator in zip(modules, operators, strict=True):
            module.operator = operator


def _nothing(*, v: Tensor, **_: Any) -> Tensor:
    return torch.zeros_like(v)
