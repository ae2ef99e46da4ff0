"""Backbones, registered with timm when imported: one file for each family."""

from softline.backbones import deit, pvt, soft

MODEL_NAMES = tuple(sorted(name for family in (deit, pvt, soft) for name in family.default_cfgs))

__all__ = ["MODEL_NAMES"]
