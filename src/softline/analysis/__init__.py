"""The figures of both papers, on any model and any images: one file for each."""
