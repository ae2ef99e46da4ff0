"""From recipes of detection and segmentation to their tasks: backbone, head, data."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from softline.backbones.backbone import fit_positions
from softline.backbones.official import check_keys
from softline.checkpoints import read_weights
from softline.data.coco import CocoSource
from softline.data.detection import DetectionImages, detection_eval_transform, detection_train_transform
from softline.data.semantic import SemanticImages, SemanticSource, open_semantic
from softline.data.semantic_transforms import SemanticTransform, semantic_eval_transform, semantic_train_transform
from softline.engine.build import Notify, check_model_name, corrupt_indices, create_for_size, log, prepare_network
from softline.engine.recipe import DetectionData, DetectionRecipe, ModelRecipe, SegmentationRecipe, SemanticData
from softline.heads.detectors import mask_rcnn, retinanet
from softline.heads.segmenters import semantic_fpn, upernet
from softline.tasks.detection import Detection
from softline.tasks.segmentation import Segmentation, Windows

DETECTORS: Mapping[str, Callable[..., nn.Module]] = {"retinanet": retinanet, "mask_rcnn": mask_rcnn}
SEGMENTERS: Mapping[str, Callable[..., nn.Module]] = {"upernet": upernet, "semantic_fpn": semantic_fpn}


# detection


def build_detection(recipe: DetectionRecipe, *, notify: Notify = log.info) -> Detection:
    data = recipe.data
    train_source = _open_coco(recipe, data.train_split, data.train_annotations, notify, training=True)
    val_set = detection_val_set(recipe, notify=notify)
    _check_classes(train_source.classes, val_set.source.classes, data)
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
    mean, std = colours(body, recipe.data)
    sides = {"short_side": recipe.data.short_side, "long_side": recipe.data.long_side}
    return _with_head(DETECTORS, recipe.head, body, num_classes, image_mean=mean, image_std=std, **sides)


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
    return recipe.head.name == "mask_rcnn"


# segmentation


def build_segmentation(recipe: SegmentationRecipe, *, notify: Notify = log.info) -> Segmentation:
    data = recipe.data
    train_source = _open_semantic(data, data.train_split, notify)
    model = build_segmenter(recipe, len(train_source.classes), notify=notify)
    val_set = segmentation_val_set(recipe, model, notify=notify)
    _check_classes(train_source.classes, val_set.source.classes, data)
    mean, std = colours(model, data)
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
        windows=windows_of(data),
        channels_last=recipe.model.channels_last,
    )


def build_segmenter(recipe: SegmentationRecipe, num_classes: int, *, notify: Notify = log.info) -> nn.Module:
    model = _with_head(SEGMENTERS, recipe.head, build_body(recipe.model, notify=notify), num_classes)
    return model.to(memory_format=torch.channels_last) if recipe.model.channels_last else model


def segmentation_val_set(recipe: SegmentationRecipe, model: nn.Module, *, notify: Notify = log.info) -> SemanticImages:
    source = _open_semantic(recipe.data, recipe.data.val_split, notify)
    return SemanticImages(source, segmentation_eval_transform(model, recipe.data))


def segmentation_eval_transform(model: nn.Module, data: SemanticData) -> SemanticTransform:
    mean, std = colours(model, data)
    return semantic_eval_transform(short_side=data.short_side, long_side=data.long_side, mean=mean, std=std)


def windows_of(data: SemanticData) -> Windows | None:
    """Windows of the crop's size that overlap by a third, if images are evaluated in windows."""
    if data.inference == "whole":
        return None
    height, width = data.crop
    return Windows(crop=data.crop, stride=(max(height * 2 // 3, 1), max(width * 2 // 3, 1)))


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


# backbones


def build_body(recipe: ModelRecipe, *, notify: Notify = log.info) -> nn.Module:
    """The backbone as timm's features_only model, whose stages a head reads."""
    check_model_name(recipe.name)
    body: nn.Module = create_for_size(
        recipe.name, None, pretrained=recipe.pretrained, features_only=True, **recipe.options
    )
    # that of a network of convolutions is the model itself
    network: Any = getattr(body, "model", body)
    if recipe.checkpoint is not None:
        load_body(network, recipe.checkpoint, name=recipe.name, notify=notify)
    prepare_network(network, recipe)
    return body


def load_body(network: nn.Module, path: str, *, name: str, notify: Notify) -> None:
    """Start from a classifier's weights: all of the backbone must be there; what else there is, is not needed."""
    own = network.state_dict()
    weights = fit_positions(_flattened(read_weights(path, name), own), network)
    needed = {key: value for key, value in weights.items() if key in own}
    check_keys(network, needed, f"{name} (model.checkpoint {path})")
    network.load_state_dict(needed)
    left = [key for key in weights if key not in own]
    unused = f"; not needed: {', '.join(left[:6])}{', ...' if len(left) > 6 else ''}" if left else ""
    notify(f"{name}: all {len(needed)} tensors of the backbone loaded from {path}{unused}; the head starts afresh")


def _flattened(weights: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """stages.0.weight as stages_0.weight, where timm's features_only model has it so."""
    flat = {key: re.sub(r"^(\w+)\.(\d+)\.", r"\1_\2.", key) for key in weights}
    return {flat[key] if flat[key] in own else key: value for key, value in weights.items()}


def colours(model: nn.Module, data: DetectionData | SemanticData) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the channels: the recipe's, else the backbone's."""
    known = [module for module in model.modules() if getattr(module, "pretrained_cfg", None)]
    own = resolve_model_data_config(known[0] if known else model)
    return data.mean or own["mean"], data.std or own["std"]


def _check_classes(train: tuple[str, ...], val: tuple[str, ...], data: DetectionData | SemanticData) -> None:
    if train != val:
        differ = sorted(set(train) ^ set(val))
        names = f": {', '.join(differ[:10])}" if differ else " in another order"
        raise ValueError(f"{data.train_split} and {data.val_split} of {data.source} have different classes{names}")


def _with_head(
    heads: Mapping[str, Callable[..., nn.Module]], recipe: Any, body: nn.Module, num_classes: int, **given: Any
) -> nn.Module:
    try:
        return heads[recipe.name](body, num_classes, **{**given, **recipe.options})
    except TypeError as error:
        raise ValueError(f"head.options of {recipe.name}: {error}") from None
