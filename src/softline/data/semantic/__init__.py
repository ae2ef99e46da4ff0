"""Semantic segmentation datasets: ADE20K, Cityscapes, and folders of images and masks."""
