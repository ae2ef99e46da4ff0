"""What an exported file tells about its task, and the way back."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from softline.checks import check_range
from softline.engine.graph import Description
from softline.engine.reading import read_recipe, to_dict
from softline.engine.recipe import Recipe
from softline.errors import UserError
from softline.plain import check_entries, short

R = TypeVar("R", bound=Recipe)

# keys of a recipe's data that name files beside its source
PLACES = ("root", "train_annotations", "val_annotations")
# pixels of a side to which images are resized on a file's word
MOST_PIXELS = 2**13


class End(NamedTuple):
    """The input or an output of an exported network: ONNX's name of its type, and the length of each axis.

    An axis without a fixed length has a name, or None.
    """

    type: str
    shape: tuple[int | str | None, ...]


def floats(*shape: int | str | None) -> End:
    return End("tensor(float)", shape)


def describe_recipe(recipe: Recipe, facts: Mapping[str, Any]) -> Description:
    """Describe a trained model by its recipe, without the directories of the machine that trained it, and its facts."""
    kept: Any = recipe.without_weights()
    elsewhere = {field.name: None for field in dataclasses.fields(kept.data) if field.name in PLACES}
    # a relative place such as ".." has the name of its directory too
    name = Path(os.path.abspath(kept.data.source)).name
    data = dataclasses.replace(kept.data, source=name, **elsewhere)
    return {"recipe": to_dict(kept.replace(output=Path(kept.output).name, data=data)), "facts": dict(facts)}


def read_description(described: Mapping[str, Any], kind: type[R]) -> tuple[R, dict[str, Any]]:
    """Return the recipe and the facts that `describe_recipe` wrote."""
    check_entries(described, {"recipe": dict, "facts": dict}, "the description")
    recipe = read_recipe(described["recipe"], where="the description")
    if not isinstance(recipe, kind):
        raise UserError(f"the description has a recipe for {recipe.task}, which is not that of its task")
    kept: Any = recipe
    data = kept.data
    named = [getattr(data, place, None) for place in PLACES]
    if any(named) or data.source != Path(data.source).name or data.source == "..":
        places = ", ".join(short(place) for place in (data.source, *named) if place is not None)
        raise UserError(f"the recipe in an exported file has a name for its data and no place, got {places}")
    return recipe, described["facts"]


def check_ends(network: Any, takes: End, outputs: Mapping[str, End]) -> None:
    """Check that an exported network takes and returns what its task needs.

    network: has ``takes``, ``outputs`` and ``ranges``, as `softline.deploy.onnx_files.OnnxNetwork` does.
    takes: the input, with the names of its axes.
    outputs: by name, in their order. A name is that of the input's axis with the same length; None may be any length.
    """
    if network.takes != takes:
        raise UserError(f"the input must be {_text(takes)}, got {_text(network.takes)}")
    if list(network.outputs) != list(outputs):
        raise UserError(f"the outputs must be {', '.join(outputs)}; got {short(list(network.outputs))}")
    for name, wanted in outputs.items():
        found = network.outputs[name]
        alike = len(found.shape) == len(wanted.shape) and all(
            # an axis of the input may have one length only
            length in (None, given) or network.ranges.get(length) == [given, given]
            for length, given in zip(wanted.shape, found.shape, strict=True)
        )
        if found.type != wanted.type or not alike:
            raise UserError(f"{name} must be {_text(wanted)}, got {_text(found)}")


def _text(end: End) -> str:
    return f"{end.type} {short(list(end.shape))}"


def check_sides(**sides: float | None) -> None:
    """Check lengths in pixels to which a description has images resized."""
    for name, side in sides.items():
        if side is not None:
            check_range(name, side, 1, MOST_PIXELS)
