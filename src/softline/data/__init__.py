"""Datasets, their transforms, sampling order and random numbers; nothing here depends on a model."""
