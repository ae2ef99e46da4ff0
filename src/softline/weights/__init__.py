"""The papers' released checkpoints: reading them, renaming their parameters, building their models."""
