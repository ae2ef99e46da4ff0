"""Heads for dense tasks; their only input is a list of feature maps."""
