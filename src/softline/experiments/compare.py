"""Train variants of one recipe on the same data and budget, with several seeds, and compare them."""

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
from softline.engine.events import Event, read_log
from softline.engine.nonfinite import NonFiniteError
from softline.engine.reading import to_dict
from softline.engine.recipe import Recipe
from softline.engine.task import build_task, definition_of
from softline.engine.train import check_before_training
from softline.errors import UserError
from softline.experiments.model_cost import CountedCost, ModelCost, count_cost, measure_costs
from softline.experiments.presets import Variant, check_variants, variant_recipe
from softline.experiments.runs import Finished, NotifyRun, check_seeds, run_once, train_or_diverge
from softline.experiments.workers import Send, run_in_processes
from softline.locks import hold_directory
from softline.measure.environment import environment


class CurvePoint(NamedTuple):
    """One evaluation during a training."""

    epoch: float
    train_loss: float
    """Mean since the previous evaluation."""
    score: float


@dataclass(frozen=True)
class Run:
    """One training of one variant."""

    seed: int
    step: int
    """The last step."""
    score: float | None
    """The comparison's metric at the end, from 0 to 1; None if the run diverged."""
    diverged: str | None
    """What was not finite and where, if the run diverged."""
    curve: tuple[CurvePoint, ...]
    metric: str

    @property
    def text(self) -> str:
        if self.score is None:
            return f"diverged at step {self.step}: {self.diverged}"
        return f"{metric_label(self.metric)} {100 * self.score:.2f} %"


@dataclass(frozen=True)
class VariantResult:
    """All trainings of one variant, and what its model costs."""

    name: str
    changes: dict[str, Any]
    cost: ModelCost
    runs: tuple[Run, ...]
    printed_top1: float | None = None
    """What the paper prints for it, in percent."""

    @property
    def scores(self) -> list[float | None]:
        """The score of each seed."""
        return [run.score for run in self.runs]

    @property
    def diverged(self) -> list[Run]:
        return [run for run in self.runs if run.diverged is not None]

    @property
    def mean(self) -> float | None:
        """Mean over the seeds that did not diverge."""
        return mean(self._finished) if self._finished else None

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over the seeds that did not diverge; None for fewer than two."""
        return stdev(self._finished) if len(self._finished) > 1 else None

    @property
    def _finished(self) -> list[float]:
        return [run.score for run in self.runs if run.score is not None]


@dataclass(frozen=True)
class Comparison:
    title: str
    reference: str
    """The table of a paper that it repeats, and at what scale; empty if none."""
    metric: str
    """Name of the metric that scores are, such as top1 or mIoU."""
    unit: str
    """What samples are called: images, sequences."""
    seeds: tuple[int, ...]
    rows: tuple[VariantResult, ...]
    recipe: dict[str, Any]
    """What all variants share."""
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain numbers, strings, lists and dictionaries."""
        content = dataclasses.asdict(self)
        for plain, row in zip(content["rows"], self.rows, strict=True):
            plain |= {"scores": row.scores, "mean": row.mean, "spread": row.spread, "diverged": len(row.diverged)}
        plain_content: dict[str, Any] = json.loads(json.dumps(content))
        return plain_content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Comparison":
        rows = tuple(_read_row(row) for row in content["rows"])
        names = ("title", "reference", "metric", "unit", "recipe", "environment")
        return cls(**{name: content[name] for name in names}, seeds=tuple(content["seeds"]), rows=rows)


NotifyRuns: TypeAlias = Callable[[str, int, Event | Finished], None]
"""Receives the name of a variant, a seed, and what happened in that run."""


def compare(
    recipe: Recipe,
    variants: Sequence[Variant],
    *,
    seeds: Sequence[int],
    output: Path,
    jobs: int = 1,
    progress: NotifyRuns = lambda *_: None,
    title: str = "Comparison",
    reference: str = "",
) -> Comparison:
    """Train every variant with every seed, in ``output/<variant>/seed<k>``, and measure what the models cost.

    A run that is finished there is not repeated, and one that was interrupted is continued. A run whose loss or
    gradient is not finite is a result as well. If SIGTERM or Ctrl-C stops a run, KeyboardInterrupt is raised with the
    number of the signal. The output directory is locked, so that no other comparison runs in it.

    jobs: trainings at a time, each in a process with its share of torch's threads; 1 stays in this process. A script
        that asks for more needs ``if __name__ == "__main__":`` around what it does.
    """
    _check(variants, seeds, jobs)
    base = definition_of(recipe).settled(recipe)
    recipes = _recipes(base, variants)
    for changed in recipes.values():
        check_before_training(changed)
    with hold_directory(output):
        return _compare(base, variants, recipes, seeds, output, jobs, progress, (title, reference))


def _compare(
    base: Recipe,
    variants: Sequence[Variant],
    recipes: Mapping[str, Recipe],
    seeds: Sequence[int],
    output: Path,
    jobs: int,
    progress: NotifyRuns,
    headings: tuple[str, str],
) -> Comparison:
    # before the trainings: what cannot be built fails at once
    task = build_task(next(iter(recipes.values())).without_weights())
    costs = measure_costs(recipes, task)
    planned = [
        _PlannedRun(name, changed.replace(seed=seed, output=str(output / name / f"seed{seed}")), task.monitor)
        for name, changed in recipes.items()
        for seed in seeds
    ]
    runs = _run_here(planned, progress) if jobs == 1 else _run_in_processes(planned, jobs, progress)
    rows = tuple(
        VariantResult(
            variant.name,
            variant.changes,
            costs[variant.name],
            tuple(run for plan, run in zip(planned, runs, strict=True) if plan.name == variant.name),
            variant.printed.top1,
        )
        for variant in variants
    )
    described = dict(environment())
    return Comparison(*headings, task.monitor, task.unit, tuple(seeds), rows, to_dict(base), described)


def count_costs(
    recipe: Recipe,
    variants: Sequence[Variant],
    *,
    classes: int | None = None,
    progress: Callable[[str, int], None] = lambda *_: None,
) -> dict[str, CountedCost]:
    """Count what the models of all variants, which must classify images, cost; nothing is trained.

    classes: number of classes; None opens the data of the recipe to know it.
    progress: receives the name of the next variant and the number of those before it.
    """
    check_variants(variants)
    recipes = _recipes(definition_of(recipe).settled(recipe), variants)
    facts = build_task(recipe.without_weights()).facts() if classes is None else {"classes": range(classes)}
    costs: dict[str, CountedCost] = {}
    for name, changed in recipes.items():
        progress(name, len(costs))
        costs[name] = count_cost(changed, facts)
    return costs


def _recipes(base: Recipe, variants: Sequence[Variant]) -> dict[str, Recipe]:
    return {variant.name: variant_recipe(base, variant) for variant in variants}


def metric_label(metric: str) -> str:
    """Return what tables and figures call a metric."""
    return {"top1": "top-1"}.get(metric, metric)


def _check(variants: Sequence[Variant], seeds: Sequence[int], jobs: int) -> None:
    check_variants(variants)
    check_at_least("jobs", jobs, 1)
    check_seeds(seeds)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a comparison starts its own processes: use jobs rather than torchrun")


# the runs


class _PlannedRun(NamedTuple):
    name: str
    recipe: Recipe
    metric: str


def _run_here(planned: Sequence[_PlannedRun], progress: NotifyRuns) -> list[Run]:
    return [
        _run_once(plan, lambda event, plan=plan: progress(plan.name, plan.recipe.seed, event))  # type: ignore[misc]
        for plan in planned
    ]


def _run_in_processes(planned: Sequence[_PlannedRun], jobs: int, progress: NotifyRuns) -> list[Run]:
    threads = max(torch.get_num_threads() // jobs, 1)
    return run_in_processes(
        _run_and_notify, planned, processes=jobs, threads=threads, hear=lambda message: progress(*message)
    )


def _run_and_notify(plan: _PlannedRun, send: Send) -> Run:
    return _run_once(plan, lambda event: send((plan.name, plan.recipe.seed, event)))


def _run_once(plan: _PlannedRun, notify: NotifyRun) -> Run:
    return run_once(plan.recipe, lambda: _train(plan, notify), lambda kept: _read_run(kept, plan.metric), notify)


def _train(plan: _PlannedRun, notify: NotifyRun) -> Run:
    recipe, metric = plan.recipe, plan.metric
    result, directory = train_or_diverge(recipe, notify), Path(recipe.output)
    curve = _read_curve(directory, metric)
    if isinstance(result, NonFiniteError):
        return Run(recipe.seed, result.step, None, result.reason, curve, metric)
    return Run(recipe.seed, result.step, result.metrics[metric], None, curve, metric)


def _read_curve(directory: Path, metric: str) -> tuple[CurvePoint, ...]:
    points: list[CurvePoint] = []
    losses: list[float] = []
    path = directory / "log.jsonl"
    for line in read_log(path) if path.exists() else []:
        try:
            if line["event"] == "stepped":
                losses.append(line["loss"])
            elif line["event"] == "evaluated" and losses:
                points.append(CurvePoint(line["epoch"], mean(losses), line["metrics"][metric]))
                losses = []
        except KeyError as error:
            raise UserError(f"{path} is damaged: a line of the kind {line['event']} has no {error}") from error
    return tuple(points)


def _read_run(content: Mapping[str, Any], metric: str) -> Run:
    curve = tuple(CurvePoint(*point) for point in content["curve"])
    # results of softline 0.1 know one metric
    score = content["top1"] if "top1" in content else content["score"]
    return Run(content["seed"], content["step"], score, content["diverged"], curve, metric)


def _read_row(content: Mapping[str, Any]) -> VariantResult:
    runs = tuple(_read_run(run, run["metric"]) for run in content["runs"])
    cost = ModelCost(**content["cost"])
    return VariantResult(content["name"], content["changes"], cost, runs, content.get("printed_top1"))
