"""Train variants of one recipe on the same data and budget, with several seeds, and set them side by side."""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple, TypeAlias

import torch

from softline.checks import check_at_least
from softline.data.images import open_source
from softline.engine.events import Event, read_log
from softline.engine.nonfinite import NonFiniteError
from softline.engine.reading import to_dict
from softline.engine.recipe import Recipe
from softline.errors import UserError
from softline.experiments.model_cost import ModelCost, measure_costs
from softline.experiments.presets import Variant, check_variants, variant_recipe
from softline.experiments.runs import Finished, TellRun, check_seeds, run_once, train_or_diverge
from softline.experiments.workers import Tell, run_in_processes
from softline.measure.environment import environment
from softline.tasks.classification.build import class_names
from softline.tasks.classification.recipe import ClassificationRecipe
from softline.tasks.images import image_settings
from softline.tasks.networks import build_model


class CurvePoint(NamedTuple):
    """At one evaluation."""

    epoch: float
    train_loss: float
    """Mean since the evaluation before."""
    top1: float


@dataclass(frozen=True)
class Run:
    """One training of one variant."""

    seed: int
    step: int
    """The last one."""
    top1: float | None
    """Accuracy of 0 to 1 at the end; None if the run diverged."""
    diverged: str | None
    """What was not finite and where, if the run ended so."""
    curve: tuple[CurvePoint, ...]

    @property
    def text(self) -> str:
        if self.top1 is None:
            return f"diverged at step {self.step}: {self.diverged}"
        return f"top-1 {100 * self.top1:.2f} %"


@dataclass(frozen=True)
class Row:
    """One variant."""

    name: str
    changes: dict[str, Any]
    cost: ModelCost
    runs: tuple[Run, ...]

    @property
    def top1(self) -> list[float | None]:
        """Of each seed."""
        return [run.top1 for run in self.runs]

    @property
    def diverged(self) -> list[Run]:
        return [run for run in self.runs if run.diverged is not None]

    @property
    def mean(self) -> float | None:
        """Over the seeds that did not diverge."""
        finished = self._finished()
        return mean(finished) if finished else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over the seeds that did not diverge; None for fewer than two."""
        finished = self._finished()
        return stdev(finished) if len(finished) > 1 else None

    def _finished(self) -> list[float]:
        return [run.top1 for run in self.runs if run.top1 is not None]


@dataclass(frozen=True)
class Comparison:
    title: str
    reference: str
    """What it is a miniature of, if anything."""
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    recipe: dict[str, Any]
    """What all variants share."""
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dictionaries."""
        content = dataclasses.asdict(self)
        for plain, row in zip(content["rows"], self.rows, strict=True):
            plain |= {"top1": row.top1, "mean": row.mean, "spread": row.spread, "diverged": len(row.diverged)}
        plain_content: dict[str, Any] = json.loads(json.dumps(content))
        return plain_content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Comparison":
        return cls(
            title=content["title"],
            reference=content["reference"],
            seeds=tuple(content["seeds"]),
            rows=tuple(_read_row(row) for row in content["rows"]),
            recipe=content["recipe"],
            environment=content["environment"],
        )


Progress: TypeAlias = Callable[[str, int, Event | Finished], None]
"""Called with a variant's name, a seed and what happened there."""


def compare(
    recipe: Recipe,
    variants: Sequence[Variant],
    *,
    seeds: Sequence[int],
    output: Path,
    jobs: int = 1,
    progress: Progress = lambda *_: None,
    title: str = "Comparison",
    reference: str = "",
) -> Comparison:
    """Train every variant with every seed, in ``output/<variant>/seed<k>``, and measure what the models cost.

    A run that is finished there is not repeated and one that was interrupted goes on. A run whose loss or gradient is
    not finite is a result as well. If SIGTERM stops a run, KeyboardInterrupt is raised.

    jobs: trainings at a time, each in a process with its share of torch's threads; 1 stays in this process. A script
        that asks for more needs ``if __name__ == "__main__":`` around what it does.
    progress: hears how the runs go on.
    """
    assert isinstance(recipe, ClassificationRecipe), "the only type of recipe"
    _check(variants, seeds, jobs)
    classes = class_names(open_source(recipe.data.source, recipe.data.train_split, root=recipe.data.root), recipe.model)
    base = _with_own_images(recipe, len(classes))
    recipes = {variant.name: _variant_recipe(base, variant) for variant in variants}
    # before the trainings: what cannot be built is found out at once
    costs = measure_costs(recipes, len(classes))
    tasks = [
        _Task(name, dataclasses.replace(changed, seed=seed, output=str(output / name / f"seed{seed}")))
        for name, changed in recipes.items()
        for seed in seeds
    ]
    runs = _run_here(tasks, progress) if jobs == 1 else _run_in_processes(tasks, jobs, progress)
    rows = tuple(
        Row(
            variant.name,
            variant.changes,
            costs[variant.name],
            tuple(run for task, run in zip(tasks, runs, strict=True) if task.name == variant.name),
        )
        for variant in variants
    )
    return Comparison(title, reference, tuple(seeds), rows, to_dict(base), dict(environment()))


def _check(variants: Sequence[Variant], seeds: Sequence[int], jobs: int) -> None:
    check_variants(variants)
    check_at_least("jobs", jobs, 1)
    check_seeds(seeds)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a comparison starts its own processes: use jobs rather than torchrun")


def _with_own_images(recipe: ClassificationRecipe, num_classes: int) -> ClassificationRecipe:
    """The recipe with the size, colours and crop of its model's images spelt out, so that other models share them."""
    blank = dataclasses.replace(recipe.model, pretrained=False, checkpoint=None)
    settings = image_settings(build_model(blank, num_classes, recipe.data.image_size), recipe.data)
    own = {key: value for key, value in settings.items() if key != "mode"}
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **own))


def _variant_recipe(base: ClassificationRecipe, variant: Variant) -> ClassificationRecipe:
    recipe = variant_recipe(base, variant)
    assert isinstance(recipe, ClassificationRecipe), "variants do not change the task"
    return recipe


# the runs


class _Task(NamedTuple):
    name: str
    recipe: Recipe


def _run_here(tasks: Sequence[_Task], progress: Progress) -> list[Run]:
    return [
        _run_once(task, lambda event, task=task: progress(task.name, task.recipe.seed, event))  # type: ignore[misc]
        for task in tasks
    ]


def _run_in_processes(tasks: Sequence[_Task], jobs: int, progress: Progress) -> list[Run]:
    threads = max(torch.get_num_threads() // jobs, 1)
    return run_in_processes(
        _run_and_tell, tasks, processes=jobs, threads=threads, hear=lambda message: progress(*message)
    )


def _run_and_tell(task: _Task, tell: Tell) -> Run:
    return _run_once(task, lambda event: tell((task.name, task.recipe.seed, event)))


def _run_once(task: _Task, tell: TellRun) -> Run:
    return run_once(task.recipe, lambda: _train(task.recipe, tell), _read_run, tell)


def _train(recipe: Recipe, tell: TellRun) -> Run:
    result, directory = train_or_diverge(recipe, tell), Path(recipe.output)
    if isinstance(result, NonFiniteError):
        return Run(recipe.seed, result.step, None, result.reason, _read_curve(directory))
    return Run(recipe.seed, result.step, result.metrics["top1"], None, _read_curve(directory))


def _read_curve(directory: Path) -> tuple[CurvePoint, ...]:
    points: list[CurvePoint] = []
    losses: list[float] = []
    path = directory / "log.jsonl"
    for line in read_log(path) if path.exists() else []:
        if line["event"] == "stepped":
            losses.append(line["loss"])
        elif line["event"] == "evaluated" and losses:
            points.append(CurvePoint(line["epoch"], mean(losses), line["metrics"]["top1"]))
            losses = []
    return tuple(points)


def _read_run(content: Mapping[str, Any]) -> Run:
    curve = tuple(CurvePoint(*point) for point in content["curve"])
    return Run(content["seed"], content["step"], content["top1"], content["diverged"], curve)


def _read_row(content: Mapping[str, Any]) -> Row:
    runs = tuple(_read_run(run) for run in content["runs"])
    return Row(content["name"], content["changes"], ModelCost(**content["cost"]), runs)
