"""Experiments: comparisons of variants, the papers' tables at a small scale, the quick start, the Long Range Arena."""
