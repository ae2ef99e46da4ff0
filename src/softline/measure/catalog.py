"""Every softline model with its size, its cost and the accuracy that its paper reports."""

from fnmatch import fnmatch
from typing import NamedTuple

import timm
import torch

from softline.backbones import MODEL_NAMES
from softline.errors import UserError
from softline.measure.counting import count_operations

# of Table 1 of the SOFT paper and of the table of its release
SOFT_GMACS = {
    "tiny": 1.9,
    "small": 4.5,
    "medium": 8.7,
    "large": 15.4,
    "release_tiny": 1.9,
    "release_small": 3.3,
    "release_medium": 7.2,
    "release_large": 11.0,
    "release_huge": 16.3,
}
# ImageNet-1K top-1 accuracy as reported: in the papers' tables, and in the releases' own for the released models
REPORTED_TOP1 = {
    "soft_tiny": 80.9,
    "soft_small": 82.5,
    "soft_medium": 83.2,
    "soft_large": 83.6,
    "softpp_tiny": 80.9,
    "softpp_small": 82.6,
    "softpp_medium": 83.7,
    "softpp_large": 84.1,
    "soft_release_tiny": 79.3,
    "soft_release_small": 82.2,
    "soft_release_medium": 82.9,
    "soft_release_large": 83.1,
    "soft_release_huge": 83.3,
    "softpp_release_tiny": 79.4,
    "softpp_release_small": 82.4,
    "softpp_release_medium": 83.1,
    "softpp_release_large": 83.3,
    "softpp_release_huge": 83.4,
    "inline_deit_tiny": 74.5,
    "inline_deit_small": 80.2,
    "inline_deit_base": 82.3,
    "inline_pvt_tiny": 78.2,
    "inline_pvt_small": 82.0,
    "inline_pvt_medium": 83.2,
    "inline_pvt_large": 83.6,
    "inline_swin_tiny": 82.4,
    "inline_swin_small": 83.6,
    "inline_swin_base": 84.1,
    "inline_cswin_tiny": 83.2,
    "inline_cswin_small": 83.8,
    "inline_cswin_base": 84.5,
    "inline_cswin_base_384": 85.7,
}

# billions of multiply-adds from the same sources; those of SOFT leave Newton's steps out
REPORTED_GMACS = {
    **{f"{family}_{size}": gmacs for family in ("soft", "softpp") for size, gmacs in SOFT_GMACS.items()},
    "inline_deit_tiny": 1.1,
    "inline_deit_small": 5.0,
    "inline_deit_base": 17.2,
    "inline_pvt_tiny": 2.0,
    "inline_pvt_small": 3.9,
    "inline_pvt_medium": 6.9,
    "inline_pvt_large": 10.2,
    "inline_swin_tiny": 4.5,
    "inline_swin_small": 8.7,
    "inline_swin_base": 15.4,
    "inline_cswin_tiny": 4.3,
    "inline_cswin_small": 6.8,
    "inline_cswin_base": 14.9,
    "inline_cswin_base_384": 46.3,
}
DIFFERENCE = (
    "The SOFT paper leaves Newton's iteration out. softline computes P^T (A^+ (P V)) from the right; in the paper's "
    "order, (P^T A^+) (P V), its models have 0.04 to 0.2 G more: its own numbers of Small and Large, 2.0 G for Tiny as "
    "in its Table 10, but 8.9 G for Medium. The release's 3.3 G belong to 7 blocks in stage 3 of soft_release_small, "
    "where its code has 20."
)


class ModelCard(NamedTuple):
    name: str
    image_size: int
    parameters: int
    macs: int
    """Multiply-adds for one image of that size, Newton iterations included."""
    newton_macs: int
    """Those of Newton's iterations."""
    reported_gmacs: float | None
    """What the paper or the release reports, in billions; without Newton's iterations."""
    reported_top1: float | None


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of softline's models that match a shell pattern."""
    names = [name for name in MODEL_NAMES if fnmatch(name, pattern)]
    if not names:
        raise UserError(f"no model matches {pattern!r}; the models are {', '.join(MODEL_NAMES)}")
    return names


def describe(name: str) -> ModelCard:
    """Count a model's parameters and multiply-adds without allocating or computing anything."""
    model = timm.create_model(name, device="meta")
    cfg = timm.get_pretrained_cfg(name)
    assert cfg is not None, "every registered model has a configuration"
    size = cfg.input_size
    macs, newton = count_operations(model, torch.empty(1, *size, device="meta"))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return ModelCard(name, size[-1], parameters, macs, newton, REPORTED_GMACS.get(name), REPORTED_TOP1.get(name))
