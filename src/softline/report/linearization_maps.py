"""Attention of a model before and after it was linearised, on the same images."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from softline.analysis.heatmap import HeatMap, cell_at, query_map
from softline.analysis.subjects import Picture, Subject, source_pictures
from softline.backbones.inspection import Layer, LayerInput
from softline.data.images import ImageStream
from softline.data.images.datasets import to_mode
from softline.engine.reading import read_recipe
from softline.errors import UserError
from softline.linearizing.work import Linearized
from softline.replacing.replace import replace_attention, replaced_attention
from softline.tasks.classification.trained import Classifier
from softline.tasks.images import eval_image_transform
from softline.tasks.linearization.build import open_split
from softline.tasks.linearization.recipe import LinearizationRecipe
from softline.tasks.probabilities import names_by_label

# most photographs have their object there
MIDDLE = (0.5, 0.5)


@dataclass(frozen=True)
class MapExample:
    """One image under the attention of a model before and after it was linearised."""

    name: str
    image: Tensor
    """As both models see it, with values from 0 to 1: [C, H, W]."""
    label: str | None
    """None if the image has no label."""
    maps: dict[str, tuple[HeatMap, HeatMap]]
    """By attention module, what the token in the middle of the image takes from every patch in the original and in the
    linearised model: the weights of one query, averaged over the heads."""
    predictions: tuple[tuple[str, float], tuple[str, float]]
    """The most probable class and its probability, of the original and of the linearised model."""


def compare_maps(original: Classifier, linearized: Classifier, pictures: Sequence[Picture]) -> list[MapExample]:
    """Compare the attention of both models in the first, middle and last layer whose attention was replaced.

    Layers that attend inside windows are passed over, since their weights do not cover the image. The list is empty if
    none remains, and if softmax attention cannot be put back, as in PVTv2, whose keys are fewer than its tokens.
    """
    after = linearized.model.eval()
    names = list(replaced_attention(after))
    resized = copy.deepcopy(original)
    resized.resize(linearized.settings["image_size"])
    before = resized.model.eval()
    try:
        # it computes the same, and can show its weights
        replace_attention(before, "softmax", layers=names)
    except UserError:
        return []
    subjects = tuple(
        Subject(called, model, linearized.classes, linearized.settings, trained=True)
        for called, model in (("original", before), ("linearised", after))
    )
    examples = [_example(subjects, names, picture) for picture in pictures]
    return [example for example in examples if example.maps]


def _example(subjects: Sequence[Subject], names: Sequence[str], picture: Picture) -> MapExample:
    before, after = subjects
    settings = before.settings
    image: Tensor = eval_image_transform(settings)(to_mode(picture.image, settings["mode"], lambda: picture.name))
    (old, old_logits), (new, new_logits) = (_look(subject, names, image) for subject in subjects)
    chosen = first_middle_last([name for name in names if name in old and name in new])
    maps = {name: (_map(before, picture, old[name]), _map(after, picture, new[name])) for name in chosen}
    classes = names_by_label(before.classes, len(old_logits))
    label = None if picture.label is None else classes[picture.label]
    predictions = (_prediction(classes, old_logits), _prediction(classes, new_logits))
    return MapExample(picture.name, before.shown(image), label, maps, predictions)


def _look(subject: Subject, names: Sequence[str], image: Tensor) -> tuple[dict[str, LayerInput], Tensor]:
    """Return what the attentions that see the whole image are given, by name, and the logits [classes]."""
    hosts: list[Any] = [subject.model.get_submodule(name) for name in names]
    layers = [Layer(0, index, host.attention, names[index]) for index, host in enumerate(hosts)]
    seen, logits = subject.look(image[None].to(_device(subject.model)), layers)
    # each window is a sample of its own
    return {given.layer.name: given for given in seen if len(given.x) == 1}, logits[0]


def _map(subject: Subject, picture: Picture, given: LayerInput) -> HeatMap:
    query = cell_at(MIDDLE, given.grid_size)
    values = query_map(given, given.token(*query))
    column = f"{given.layer.name}, mean of heads"
    return HeatMap(subject.name, picture.name, column, query, given.grid_size, values)


def _prediction(classes: Sequence[str], logits: Tensor) -> tuple[str, float]:
    probability, label = logits.float().softmax(-1).max(-1)
    return classes[int(label)], float(probability)


def _device(model: nn.Module) -> Any:
    return next(model.parameters()).device


def first_middle_last(names: Sequence[str]) -> list[str]:
    """Return at most three names, spread over all."""
    return list(dict.fromkeys(names[place] for place in (0, len(names) // 2, -1))) if names else []


def some_pictures(result: Linearized, original: Classifier, count: int = 4) -> list[Picture]:
    """Return validation images of a linearisation, spread over all of them; none if they can only be read in order."""
    (recipe, *_) = (read_recipe(content) for content in result.recipes.values())
    assert isinstance(recipe, LinearizationRecipe), "all stages have one"
    source, _ = original.with_own_labels(open_split(recipe, recipe.data.val_split), recipe.data.source)
    if isinstance(source, ImageStream):
        return []
    pictures = source_pictures(source, count)
    return pictures if recipe.labelled else [replace(picture, label=None) for picture in pictures]
