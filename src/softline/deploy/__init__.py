"""Trained models in use: loading them, exporting them, running exported files."""
