"""Build a segmentation task from its recipe: backbone, head, data."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from softline.data.semantic.sources import SemanticImages, SemanticSource, open_semantic
from softline.data.semantic.transforms import normalization, semantic_eval_transform, semantic_train_transform
from softline.engine import distributed
from softline.engine.machine import check_batch_memory
from softline.engine.task import Notify, Setup, log
from softline.heads.segmenters import segformer, semantic_fpn, upernet
from softline.tasks.images import check_split_classes, corrupt_indices
from softline.tasks.networks import build_body, channel_statistics, with_head
from softline.tasks.segmentation.recipe import SegmentationRecipe, SemanticData
from softline.tasks.segmentation.task import Segmentation
from softline.tasks.segmentation.windows import SlidingWindows

SEGMENTERS: Mapping[str, Callable[..., nn.Module]] = {
    "upernet": upernet,
    "semantic_fpn": semantic_fpn,
    "segformer": segformer,
}


def build_segmentation(recipe: SegmentationRecipe, setup: Setup) -> Segmentation:
    data, notify = recipe.data, setup.notify
    check_batch_memory(recipe, (3, *data.crop), processes=distributed.place()[1])
    train_source = _open_semantic(data, data.train_split, notify)
    model = build_segmenter(recipe, len(train_source.classes), notify=notify)
    val_set = segmentation_val_set(data, notify=notify)
    check_split_classes(train_source.classes, val_set.source.classes, data)
    mean, std = channel_statistics(model, data)
    transform = semantic_train_transform(
        data.crop,
        base_size=data.base_size,
        scale=data.scale,
        largest_share=data.largest_share,
        hflip=data.hflip,
        distort=data.distort,
        mean=mean,
        std=std,
    )
    return Segmentation(
        model,
        train_source.classes,
        train_set=SemanticImages(train_source, transform, seed=recipe.seed),
        val_set=val_set,
        normalize=normalization(mean, std),
        windows=windows_of(data),
        channels_last=recipe.model.channels_last,
    )


def build_segmenter(recipe: SegmentationRecipe, num_classes: int, *, notify: Notify = log.info) -> nn.Module:
    model = with_head(SEGMENTERS, recipe.head, build_body(recipe.model, notify=notify), num_classes)
    return model.to(memory_format=torch.channels_last) if recipe.model.channels_last else model


def segmentation_val_set(data: SemanticData, *, notify: Notify = log.info) -> SemanticImages:
    """Images whose pixels are not normalised yet."""
    source = _open_semantic(data, data.val_split, notify)
    return SemanticImages(source, semantic_eval_transform(short_side=data.short_side, long_side=data.long_side))


def normalization_of(model: nn.Module, data: SemanticData) -> Callable[[Tensor], Tensor]:
    """Return what makes pixels, uint8, the images that the model was trained with."""
    return normalization(*channel_statistics(model, data))


def windows_of(data: SemanticData) -> SlidingWindows | None:
    """SlidingWindows of the crop's size that overlap by a third, if images are evaluated in windows."""
    if data.inference == "whole":
        return None
    height, width = data.crop
    return SlidingWindows(crop=data.crop, stride=(max(height * 2 // 3, 1), max(width * 2 // 3, 1)))


def _open_semantic(data: SemanticData, split: str, notify: Notify) -> SemanticSource:
    source = open_semantic(
        data.layout,
        Path(data.source),
        split,
        classes=data.classes,
        ignore_index=data.ignore_index,
        skip_corrupt=data.skip_corrupt,
        notify=notify,
    )
    return source.without(corrupt_indices(source, split, notify)) if data.skip_corrupt else source
