"""What an exported file tells about its task, and the way back."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from softline.engine.graph import Description
from softline.engine.reading import read_recipe, to_dict
from softline.engine.recipe import Recipe
from softline.errors import UserError
from softline.plain import check_entries

R = TypeVar("R", bound=Recipe)


def describe_recipe(recipe: Recipe, facts: Mapping[str, Any]) -> Description:
    """Describe a trained model by its recipe, without the directories of the machine that trained it, and its facts."""
    kept: Any = recipe.without_weights()
    data = dataclasses.replace(kept.data, source=Path(kept.data.source).name)
    return {"recipe": to_dict(kept.replace(output=Path(kept.output).name, data=data)), "facts": dict(facts)}


def read_description(described: Mapping[str, Any], kind: type[R]) -> tuple[R, dict[str, Any]]:
    """Return the recipe and the facts that `describe_recipe` wrote."""
    check_entries(described, {"recipe": dict, "facts": dict}, "the description")
    recipe = read_recipe(described["recipe"], where="the description")
    if not isinstance(recipe, kind):
        raise UserError(f"the description has a recipe for {recipe.task}, which is not that of its task")
    return recipe, described["facts"]
