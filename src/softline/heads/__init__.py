"""Heads of dense tasks: they see lists of feature maps only."""
