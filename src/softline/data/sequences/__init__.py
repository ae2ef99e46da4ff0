"""Labelled sequences of tokens: the tasks of the Long Range Arena."""
