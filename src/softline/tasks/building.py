"""From a recipe to its network, without its data."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from softline.checks import check_integer
from softline.engine.reading import load_recipe
from softline.engine.recipe import Recipe
from softline.engine.task import definition_of, numbered
from softline.errors import UserError


def build(recipe: str | Path | Recipe, *, classes: int | Sequence[str] | None = None) -> nn.Module:
    """Create the network of a recipe with random weights; its data is not opened.

    recipe: the name of a recipe of the package, the path of a YAML file, or a recipe.
    classes: names of the classes, or their number. Recipes for Fashion-MNIST, ImageNet, COCO, ADE20K, Cityscapes and
        the Long Range Arena tell it, and so do recipes with model.options.num_classes or data.classes; others need it.
    """
    read = recipe if isinstance(recipe, Recipe) else load_recipe(str(recipe))
    definition = definition_of(read)
    facts = definition.known_facts(read, _names(classes))
    definition.check_facts(facts)
    return definition.network(read, facts)


def _names(classes: int | Sequence[str] | None) -> tuple[str, ...] | None:
    if classes is None:
        return None
    if isinstance(classes, int):
        check_integer("classes", classes, 1)
        return numbered(classes)
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes) or not classes:
        raise UserError(f"classes must be names or their number, got {classes!r}")
    return tuple(classes)
