"""A recipe of tiny expressions."""

from pathlib import Path

from softline.engine.reading import load_recipe
from softline.engine.recipe import Recipe

EXPRESSIONS = ["--data.generate.samples=[48,16,10]", "--data.generate.min_length=5", "--data.generate.max_length=40"]


def small_overrides(root: Path, *given: str) -> list[str]:
    return [
        f"--data.source={root}/listops",
        *EXPRESSIONS,
        "--batch_size=8",
        "--schedule.epochs=2",
        "--eval_steps=5",
        "--log_every=1",
        "--device=cpu",
        *given,
    ]


def small_recipe(root: Path, *given: str) -> Recipe:
    return load_recipe("lra_listops_small", small_overrides(root, f"--output={root}/run", *given))
