"""Build a detection task from its recipe: backbone, head, data."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from softline.data.coco.datasets import DetectionImages, detection_eval_transform, detection_train_transform
from softline.data.coco.source import CocoSource
from softline.engine import distributed
from softline.engine.machine import check_batch_memory
from softline.engine.task import Notify, Setup, log
from softline.heads.detectors import cascade_mask_rcnn, mask_rcnn, retinanet, retinanet_lite
from softline.tasks.detection.recipe import DetectionRecipe
from softline.tasks.detection.task import Detection
from softline.tasks.images import check_split_classes, corrupt_indices
from softline.tasks.networks import build_body, channel_statistics, with_head

DETECTORS: Mapping[str, Callable[..., nn.Module]] = {
    "retinanet": retinanet,
    "retinanet_lite": retinanet_lite,
    "mask_rcnn": mask_rcnn,
    "cascade_mask_rcnn": cascade_mask_rcnn,
}


def build_detection(recipe: DetectionRecipe, setup: Setup) -> Detection:
    data, notify = recipe.data, setup.notify
    side = min(data.train_short_sides)
    check_batch_memory(recipe, (3, side, side), processes=distributed.place()[1])
    train_source = _open_coco(recipe, data.train_split, data.train_annotations, notify, training=True)
    val_set = detection_val_set(recipe, notify=notify)
    check_split_classes(train_source.classes, val_set.source.classes, data)
    transform = detection_train_transform(
        short_sides=data.train_short_sides, long_side=data.long_side, hflip=data.hflip
    )
    train_set = DetectionImages(train_source, transform, seed=recipe.seed, masks=_masks(recipe), training=True)
    groups = train_set.aspect_groups() if data.group_aspects else None
    for group, name in enumerate(("wide", "tall")):
        count = 0 if groups is None else groups.count(group)
        if 0 < count < recipe.batch_size:
            notify(
                f"{count} {name} images are fewer than batch_size {recipe.batch_size} and are never trained on: "
                "data.group_aspects=false mixes them with the others"
            )
    return Detection(
        build_detector(recipe, len(train_source.classes), notify=notify),
        train_source.classes,
        train_set=train_set,
        val_set=val_set,
        masks=train_set.masks,
        groups=groups,
    )


def build_detector(recipe: DetectionRecipe, num_classes: int, *, notify: Notify = log.info) -> nn.Module:
    body = build_body(recipe.model, notify=notify)
    mean, std = channel_statistics(body, recipe.data)
    sides = {"short_side": recipe.data.short_side, "long_side": recipe.data.long_side}
    return with_head(DETECTORS, recipe.head, body, num_classes, image_mean=mean, image_std=std, **sides)


def detection_val_set(recipe: DetectionRecipe, *, notify: Notify = log.info) -> DetectionImages:
    source = _open_coco(recipe, recipe.data.val_split, recipe.data.val_annotations, notify, training=False)
    return DetectionImages(source, detection_eval_transform(), masks=_masks(recipe), training=False)


def _open_coco(
    recipe: DetectionRecipe, split: str, annotations: str | None, notify: Notify, *, training: bool
) -> CocoSource:
    data = recipe.data
    root = Path(data.source)
    file = root / "annotations" / f"instances_{split}.json" if annotations is None else Path(annotations)
    source = CocoSource(
        root / split,
        file,
        skip_corrupt=data.skip_corrupt,
        skip_empty_boxes=data.skip_empty_boxes and training,
        masks=_masks(recipe),
        notify=notify,
    )
    return source.without(corrupt_indices(source, split, notify)) if data.skip_corrupt else source


def _masks(recipe: DetectionRecipe) -> bool:
    return recipe.head.name in ("mask_rcnn", "cascade_mask_rcnn")
