"""The SOFT paper's detectors and segmenters with SOFT++ backbones: size and cost, and what the paper reports of them.

Needs the extra ``dense``.
"""

from typing import NamedTuple

import torch
from torch import nn

from softline.engine.reading import load_recipe
from softline.engine.task import definition_of
from softline.measure.counting import Operations, count_operations


class Reported(NamedTuple):
    """Numbers of Tables 4, 5 and 7 of SOFT (https://arxiv.org/abs/2207.03341)."""

    millions: int
    """Millions of parameters."""
    gmacs: int | None = None
    """Billions of multiply-adds, which the paper reports for segmentation only."""


REPORTED = {
    "retinanet_softpp_tiny": Reported(23),
    "retinanet_softpp_small": Reported(38),
    "retinanet_softpp_medium": Reported(59),
    "retinanet_softpp_large": Reported(98),
    "mask_rcnn_softpp_tiny": Reported(32),
    "mask_rcnn_softpp_small": Reported(48),
    "mask_rcnn_softpp_medium": Reported(69),
    "mask_rcnn_softpp_large": Reported(106),
    "ade20k_upernet_softpp_small": Reported(60, 237),
    "ade20k_upernet_softpp_medium": Reported(81, 260),
    "ade20k_upernet_softpp_large": Reported(121, 301),
    "cityscapes_upernet_softpp_small": Reported(60, 545),
    "cityscapes_upernet_softpp_medium": Reported(81, 607),
    "cityscapes_upernet_softpp_large": Reported(121, 899),
}
CLASSES = {"retinanet": 80, "mask": 80, "ade20k": 150, "cityscapes": 19}
# the training crops; the paper does not say at which size it counts, see docs/tasks/segmentation.md
IMAGE_SIZES = {"ade20k": 512, "cityscapes": 768}
DIFFERENCE = (
    "softline counts the heads of torchvision and segmentation-models-pytorch, without the backbone's classifier "
    "and final norm (0.5 to 1 M), which dense models do not use. The paper rounds to millions and uses the heads of "
    "mmdetection and mmsegmentation; it does not explain the remaining difference (up to 1.4 M for Large). Operations "
    "are those of 49 landmarks in each stage, Newton's iteration included (0.6 to 1.8 G), for images of 512 x 512 "
    "(ADE20K) and 768 x 768 (Cityscapes, assumed). At 512 x 512 the same head on Swin and ConvNeXt has the paper's "
    "numbers of these to 1 %. Cityscapes with Large is not explained: 3.0 times ADE20K's number for 2.25 times the "
    "pixels."
)


class DenseCard(NamedTuple):
    recipe: str
    backbone: int
    """Parameters of the backbone's stages that the head reads."""
    head: int
    """All other parameters."""
    reported_millions: int
    image_size: int | None
    """Side of the images for which operations are counted; None for detectors, whose operations depend on the image."""
    operations: Operations | None
    reported_gmacs: int | None

    @property
    def parameters(self) -> int:
        return self.backbone + self.head


def describe_dense(recipe_name: str) -> DenseCard:
    """Count the parameters of a recipe's model, and the operations of a segmenter, without allocating it."""
    recipe = load_recipe(recipe_name)
    kind = recipe_name.partition("_")[0]
    with torch.device("meta"):
        model = definition_of(recipe).network(recipe, {"classes": [str(label) for label in range(CLASSES[kind])]})
    (body,) = (module for name, module in model.named_modules() if name.endswith("maps.body"))
    total, own = (sum(parameter.numel() for parameter in part.parameters()) for part in (model, body))
    side, reported = IMAGE_SIZES.get(kind), REPORTED[recipe_name]
    operations = None if side is None else _operations(model, side)
    return DenseCard(recipe_name, own, total - own, reported.millions, side, operations, reported.gmacs)


def _operations(model: nn.Module, side: int) -> Operations:
    return count_operations(model, torch.empty(1, 3, side, side, device="meta"))
