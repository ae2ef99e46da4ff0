"""Backbones, registered with timm when imported: one file for each family."""
