"""Backbones, one file per family; importing this package registers them with timm."""

from softline.backbones import cswin, deit, pvt, soft, swin

MODEL_NAMES = tuple(sorted(name for family in (cswin, deit, pvt, soft, swin) for name in family.default_cfgs))

__all__ = ["MODEL_NAMES"]
