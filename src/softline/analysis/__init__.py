"""The figures of both papers for any model and any images, one module for each figure."""
