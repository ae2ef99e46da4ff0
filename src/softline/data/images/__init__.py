"""Labelled images: sources, datasets and transforms for classification."""

from softline.data.images.corrupt import CorruptImage, find_corrupt, without
from softline.data.images.datasets import LabelledImages, StreamImages
from softline.data.images.interface import CorruptImageError, ImageSource, ImageStream
from softline.data.images.sources import check_same_classes, in_order, is_fetched, open_source
from softline.data.images.transforms import IMAGENET_MEAN, IMAGENET_STD, eval_transform, train_transform

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "CorruptImage",
    "CorruptImageError",
    "ImageSource",
    "ImageStream",
    "LabelledImages",
    "StreamImages",
    "check_same_classes",
    "eval_transform",
    "find_corrupt",
    "in_order",
    "is_fetched",
    "open_source",
    "train_transform",
    "without",
]
