"""The SOFT paper's detectors and segmenters with SOFT++ backbones: their size, and what the paper says of it."""

from typing import NamedTuple

import torch

from softline.engine.reading import load_recipe

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
CLASSES = {"detection": 80, "segmentation": 150}
DIFFERENCE = (
    "Counted here: torchvision's and segmentation-models-pytorch's heads, no classifier or final norm of the backbone "
    "(0.5 to 1 M), which dense models do not use. The paper rounds to millions; its heads are those of mmdetection and "
    "mmsegmentation, and what else differs (up to 1.4 M for Large) it does not say."
)


class DenseCard(NamedTuple):
    recipe: str
    backbone: int
    """Parameters; those of the stages that the head reads."""
    head: int
    reported_millions: int

    @property
    def parameters(self) -> int:
        return self.backbone + self.head


def describe_dense(recipe_name: str) -> DenseCard:
    """Size of a recipe's model, counted without allocating it."""
    # its packages are an extra
    from softline.tasks.dense import dense_model

    recipe = load_recipe(recipe_name)
    with torch.device("meta"):
        model = dense_model(recipe, CLASSES[recipe.task])
    (body,) = (module for name, module in model.named_modules() if name.endswith("maps.body"))
    total, own = (sum(parameter.numel() for parameter in part.parameters()) for part in (model, body))
    return DenseCard(recipe_name, own, total - own, REPORTED_MILLIONS[recipe_name])
