"""Every number of every recipe has a range, and NaN and infinity are in none."""

import dataclasses
import functools
import math
import typing

import pytest

from softline.engine.machine import check_batch_memory, is_out_of_memory, naming_memory
from softline.engine.optimizer import check_optimizer
from softline.engine.reading import load_recipe, recipe_keys
from softline.engine.recipe import EmaRecipe, OptimizerRecipe
from softline.engine.task import TASKS
from softline.errors import UserError
from tests.engine.small import small_recipe

RECIPES = {
    "classification": "quickstart",
    "detection": "coco128_retinanet",
    "segmentation": "camvid_small",
    "sequence": "lra_listops_small",
}
# too small for each of them; all other numbers must not be negative
TOO_SMALL = {
    **dict.fromkeys(("batch_size", "accumulate", "eval_batch_size", "eval_every", "eval_steps", "save_every"), 0),
    **dict.fromkeys(("log_every", "optimizer.lr", "optimizer.lr_batch", "optimizer.layer_decay"), 0),
    **dict.fromkeys(("optimizer.clip_norm", "schedule.epochs", "schedule.power", "schedule.decay_epochs"), 0),
}


def numeric_keys(kind):
    """Return the keys of a recipe whose value is a number or several, with their type and how many there are."""
    found = {}
    for key in recipe_keys(kind):
        owner = kind
        *sections, name = key.split(".")
        for section in sections:
            annotation = {field.name: field.type for field in dataclasses.fields(owner)}[section]
            owner = next(part for part in (annotation, *typing.get_args(annotation)) if dataclasses.is_dataclass(part))
        annotation = {field.name: field.type for field in dataclasses.fields(owner)}[name]
        several = typing.get_origin(annotation) is not tuple
        for part in typing.get_args(annotation) if several and typing.get_args(annotation) else [annotation]:
            inner = [one for one in typing.get_args(part) if one is not ...]
            if part in (int, float):
                found[key] = part, 0
            elif typing.get_origin(part) is tuple and set(inner) <= {int, float}:
                found[key] = inner[0], len(inner)
    return found


def cases():
    for task, name in RECIPES.items():
        for key, (type_, count) in numeric_keys(TASKS[task].recipe_type).items():
            # what is no whole number does not get as far as this where one is expected
            for value in (TOO_SMALL.get(key, -1), *((math.nan, math.inf) if type_ is float else ())):
                yield name, key, (value,) * count if count else value


@functools.cache
def loaded(name):
    return load_recipe(name)


def changed(part, path, value):
    """Return the recipe, or a part of it, with another value at the path; sections that are null are filled in."""
    name, *rest = path
    if rest:
        section = getattr(part, name)
        value = changed(EmaRecipe(decay=0.5) if section is None else section, rest, value)
    return dataclasses.replace(part, **{name: value})


@pytest.mark.parametrize(("name", "key", "value"), list(cases()))
def test_numbers_out_of_range_are_refused_by_their_key(name, key, value):
    with pytest.raises(UserError, match=key.replace(".", r"\.")):
        changed(loaded(name), key.split("."), value)


@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["drop_rate", "drop_path_rate", "attn_drop_rate", "proj_drop", "dropout"])
def test_drop_rates_are_probabilities(name, value):
    with pytest.raises(UserError, match=rf"model\.options\.{name} must be"):
        changed(loaded("quickstart"), ["model", "options"], {name: value})


def test_a_large_batch_is_refused_with_the_keys_that_make_it(tmp_path, monkeypatch):
    monkeypatch.setattr("softline.engine.machine.available_memory", lambda: 2**30)
    recipe = small_recipe(tmp_path, "--data.image_size", "5000", "--accumulate", "2")
    with pytest.raises(UserError) as caught:
        check_batch_memory(recipe, (3, 5000, 5000))
    assert str(caught.value) == (
        "batch_size 8 and data.image_size 5000: a batch of 4 inputs takes 1,144 MiB, "
        "and 1,024 MiB of memory are available"
    )
    check_batch_memory(recipe, (3, 5000, 5000), processes=2)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: x")])
def test_allocators_that_fail_are_explained(tmp_path, error):
    assert is_out_of_memory(error)
    message = r"out of memory with batch_size 8 and data\.image_size 16: lower one of them"
    with pytest.raises(UserError, match=message), naming_memory(small_recipe(tmp_path)):
        raise error
    with pytest.raises(RuntimeError, match="a fault"), naming_memory(small_recipe(tmp_path)):
        raise RuntimeError("a fault")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adahessian", {}),
        ("adamw", {"betas": [0.9]}),
        ("adamw", {"betas": [2, 3]}),
        ("adamw", {"eps": "small"}),
        ("adamw", {"lr": 1.0}),
        ("sgd", {"colour": "red"}),
    ],
)
def test_optimizers_that_cannot_be_built_are_named(name, options):
    with pytest.raises(UserError, match=rf"^optimizer\.name {name} with optimizer\.options "):
        check_optimizer(OptimizerRecipe(name=name, lr=1e-3, options=options))
    check_optimizer(OptimizerRecipe(name="adamw", lr=1e-3, options={"betas": [0.9, 0.95], "eps": 1e-6}))
