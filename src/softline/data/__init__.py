"""Labelled images: where they come from, how they are read, in which order."""

from softline.data.corrupt import CorruptImage, find_corrupt, without
from softline.data.images import LabelledImages, StreamImages
from softline.data.interface import CorruptImageError, ImageSource, ImageStream
from softline.data.sampler import EvalShard, TrainBatches
from softline.data.sources import check_same_classes, in_order, open_source
from softline.data.transforms import IMAGENET_MEAN, IMAGENET_STD, eval_transform, train_transform

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "CorruptImage",
    "CorruptImageError",
    "EvalShard",
    "ImageSource",
    "ImageStream",
    "LabelledImages",
    "StreamImages",
    "TrainBatches",
    "check_same_classes",
    "eval_transform",
    "find_corrupt",
    "in_order",
    "open_source",
    "train_transform",
    "without",
]
