"""Colours, labels and axes that all figures share."""
