"""The SOFT paper's detectors and segmenters with SOFT++ backbones: their size, and the size that the paper reports.

Needs the extra ``dense``.
"""

from typing import NamedTuple

import torch

from softline.engine.reading import load_recipe
from softline.engine.task import definition_of

# millions of parameters: Tables 4, 5 and 7 of SOFT (https://arxiv.org/abs/2207.03341)
REPORTED_MILLIONS = {
    "retinanet_softpp_tiny": 23,
    "retinanet_softpp_small": 38,
    "retinanet_softpp_medium": 59,
    "retinanet_softpp_large": 98,
    "mask_rcnn_softpp_tiny": 32,
    "mask_rcnn_softpp_small": 48,
    "mask_rcnn_softpp_medium": 69,
    "mask_rcnn_softpp_large": 106,
    "ade20k_upernet_softpp_small": 60,
    "ade20k_upernet_softpp_medium": 81,
    "ade20k_upernet_softpp_large": 121,
}
COCO_CLASSES, ADE20K_CLASSES = 80, 150
DIFFERENCE = (
    "softline counts the heads of torchvision and segmentation-models-pytorch, without the backbone's classifier "
    "and final norm (0.5 to 1 M), which dense models do not use. The paper rounds to millions and uses the heads of "
    "mmdetection and mmsegmentation; it does not explain the remaining difference (up to 1.4 M for Large)."
)


class DenseCard(NamedTuple):
    recipe: str
    backbone: int
    """Parameters of the backbone's stages that the head reads."""
    head: int
    """All other parameters."""
    reported_millions: int

    @property
    def parameters(self) -> int:
        return self.backbone + self.head


def describe_dense(recipe_name: str) -> DenseCard:
    """Count the parameters of a recipe's model without allocating it."""
    recipe = load_recipe(recipe_name)
    count = ADE20K_CLASSES if recipe_name.startswith("ade20k") else COCO_CLASSES
    with torch.device("meta"):
        model = definition_of(recipe).network(recipe, {"classes": [str(label) for label in range(count)]})
    (body,) = (module for name, module in model.named_modules() if name.endswith("maps.body"))
    total, own = (sum(parameter.numel() for parameter in part.parameters()) for part in (model, body))
    return DenseCard(recipe_name, own, total - own, REPORTED_MILLIONS[recipe_name])
