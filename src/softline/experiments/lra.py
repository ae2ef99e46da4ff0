"""Every attention on every task of the Long Range Arena, as in Table 12 of SOFT (https://arxiv.org/abs/2207.03341)."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from softline.attention import ATTENTIONS
from softline.checks import check_option
from softline.data.sequences.lra import LRA_TASKS, has_listops_files
from softline.engine import distributed
from softline.engine.checkpoint import BEST
from softline.engine.events import Evaluating, Event, Notice, Preparing
from softline.engine.nonfinite import NonFiniteError
from softline.engine.reading import load_recipe
from softline.engine.train import check_before_training
from softline.engine.trained import Evaluator
from softline.errors import UserError
from softline.experiments.compare import NotifyRuns
from softline.experiments.presets import attention_variant, variant_recipe
from softline.experiments.runs import Finished, NotifyRun, check_seeds, is_finished, run_once, train_or_diverge
from softline.locks import hold_directory
from softline.measure.environment import environment
from softline.tasks.loading import load_trained
from softline.tasks.sequence.build import open_sequences, sequence_facts, sequence_model
from softline.tasks.sequence.recipe import SequenceRecipe

TITLES = {"listops": "ListOps", "text": "Text", "retrieval": "Retrieval", "image": "Image", "pathfinder": "Pathfinder"}
TABLE_TASKS = ("listops", "text", "retrieval", "image")
"""The tasks of Table 12, which gives their average."""
PAPER: Mapping[str, tuple[float, ...]] = {
    "softmax": (37.10, 65.02, 79.35, 38.20),
    "reformer": (19.05, 64.88, 78.64, 43.29),
    "linformer": (37.25, 55.91, 79.37, 37.84),
    "performer": (18.80, 63.81, 78.62, 37.07),
    "nystrom": (37.15, 65.52, 79.56, 41.58),
    "soft": (37.40, 63.49, 81.77, 46.91),
}
"""Accuracy in percent on TABLE_TASKS, as Table 12 prints it."""
SOME_FACTS = {"classes": ["0", "1"], "vocabulary": 2, "positions": 64, "parts": 1}
"""Of any data, to find out whether a network can be built."""
SMALL_TASKS = ("listops", "image")
"""Tasks that have a recipe for two cores."""


@dataclass(frozen=True)
class LraRun:
    """One training of one attention on one task."""

    task: str
    attention: str
    seed: int
    step: int
    """The last step."""
    parameters: int | None
    val_accuracy: float | None
    """Best validation accuracy, from 0 to 1; None if the run diverged."""
    test_accuracy: float | None
    """Test accuracy of the weights that were best in validation."""
    diverged: str | None
    """What was not finite and where, if the run diverged."""

    @property
    def text(self) -> str:
        if self.test_accuracy is None:
            return f"diverged at step {self.step}: {self.diverged}"
        return f"test accuracy {100 * self.test_accuracy:.2f} %"


@dataclass(frozen=True)
class LraResults:
    runs: tuple[LraRun, ...]
    small: bool
    """Whether these are the small versions of the tasks, which the paper's numbers are not about."""
    environment: dict[str, Any]

    def mean(self, task: str, attention: str) -> float | None:
        """Mean test accuracy in percent, over the seeds that did not diverge."""
        found = self._accuracies(task, attention)
        return mean(found) if found else None

    def spread(self, task: str, attention: str) -> float | None:
        """Sample standard deviation over the seeds that did not diverge; None for fewer than two."""
        found = self._accuracies(task, attention)
        return stdev(found) if len(found) > 1 else None

    def diverged(self, task: str, attention: str) -> int:
        """Number of seeds that diverged."""
        return len(self._runs(task, attention)) - len(self._accuracies(task, attention))

    def _runs(self, task: str, attention: str) -> list[LraRun]:
        return [run for run in self.runs if (run.task, run.attention) == (task, attention)]

    def _accuracies(self, task: str, attention: str) -> list[float]:
        runs = self._runs(task, attention)
        return [100 * run.test_accuracy for run in runs if run.test_accuracy is not None]

    def to_dict(self) -> dict[str, Any]:
        keys = dict.fromkeys((run.task, run.attention) for run in self.runs)
        means = [
            {"task": task, "attention": name, "mean": self.mean(task, name), "spread": self.spread(task, name)}
            for task, name in keys
        ]
        paper = {name: dict(zip(TABLE_TASKS, row, strict=True)) for name, row in PAPER.items()}
        return {**dataclasses.asdict(self), "accuracy_percent": means, "paper_percent": paper}


def lra_recipe(
    task: str, *, small: bool = False, data: str | None = None, overrides: Sequence[str] = ()
) -> SequenceRecipe:
    """Load the recipe of a task.

    small: take the recipe for two cores, which listops and image have.
    data: directory with the tasks' files, see `softline.data.sequences.lra`. ListOps is read from it if its files are
        there and generated otherwise; the small recipe always generates it.
    overrides: keys that are set for all tasks; those below data.generate only for listops.
    """
    check_option("task", task, LRA_TASKS)
    if small and task not in SMALL_TASKS:
        raise UserError(f"{task} has no small recipe; {', '.join(SMALL_TASKS)} have")
    if data is not None and not Path(data).is_dir():
        raise UserError(f"no such directory: {data}")
    given = list(overrides) if task == "listops" else without_generate(overrides)
    if data is not None and task != "listops":
        given += ["--data.source", data]
    elif data is not None and not small and has_listops_files(Path(data)):
        given += ["--data.source", data, "--data.generate", "null"]
    recipe = load_recipe(f"lra_{task}_small" if small else f"lra_{task}", given)
    assert isinstance(recipe, SequenceRecipe), "its file says so"
    return recipe


def without_generate(overrides: Sequence[str]) -> list[str]:
    """Leave out overrides that are about generating expressions."""
    kept: list[str] = []
    dropping = False
    for part in overrides:
        if part.startswith("--"):
            dropping = part.startswith("--data.generate")
        if not dropping:
            kept.append(part)
    return kept


def run_lra(
    recipes: Mapping[str, SequenceRecipe],
    attentions: Sequence[str],
    *,
    seeds: Sequence[int],
    output: Path,
    small: bool = False,
    progress: NotifyRuns = lambda *_: None,
) -> Iterator[LraResults]:
    """Train every attention on every task with every seed, in ``output/TASK/ATTENTION/seedK``; after each run, all
    results so far.

    A run that is finished is not repeated, and one that was interrupted goes on. What cannot be read or built is found
    out before the first training.

    recipes: by task.
    small: whether they are those for two cores; for the results.
    """
    check_attentions(attentions, seeds)
    planned = [
        _Planned(task, attention, _variant(recipe, attention, seed, output / task / attention / f"seed{seed}"))
        for task, recipe in recipes.items()
        for attention in attentions
        for seed in seeds
    ]
    for plan in planned:
        check_before_training(plan.recipe)
        # before the data, which takes minutes to generate
        sequence_model(plan.recipe, SOME_FACTS)
    with hold_directory(output):
        for task in recipes:
            _rehearse(task, [plan for plan in planned if plan.task == task], progress)
        runs: list[LraRun] = []
        for plan in planned:
            runs.append(_run(plan, progress))
            yield LraResults(tuple(runs), small, dict(environment()))


class _Planned(NamedTuple):
    task: str
    attention: str
    recipe: SequenceRecipe

    @property
    def name(self) -> str:
        return f"{self.task}, {self.attention}"


def _variant(recipe: SequenceRecipe, attention: str, seed: int, output: Path) -> SequenceRecipe:
    changed: Any = variant_recipe(recipe, attention_variant(attention))
    varied: SequenceRecipe = changed.replace(seed=seed, output=str(output))
    return varied


def _rehearse(task: str, planned: Sequence[_Planned], progress: NotifyRuns) -> None:
    """Open the task's data once, and build its networks, unless all its runs are finished."""
    todo = [plan for plan in planned if not is_finished(plan.recipe)]
    if not todo:
        return
    data, seed = todo[0].recipe.data, todo[0].recipe.seed

    def prepare(what: str, done: int, total: int) -> None:
        progress(task, seed, Preparing(what, done, total))

    sources = [
        open_sequences(data, split, notify=lambda text: progress(task, seed, Notice(text)), preparing=prepare)
        for split in dict.fromkeys((data.train_split, data.val_split, "test"))
    ]
    for plan in todo:
        sequence_model(plan.recipe, sequence_facts(plan.recipe, sources[0]))


def _run(plan: _Planned, progress: NotifyRuns) -> LraRun:
    def notify(event: Event | Finished) -> None:
        progress(plan.name, plan.recipe.seed, event)

    return run_once(plan.recipe, lambda: _train(plan, notify), lambda kept: LraRun(**kept), notify)


def _train(plan: _Planned, notify: NotifyRun) -> LraRun:
    recipe = plan.recipe
    result = train_or_diverge(recipe, notify)
    if isinstance(result, NonFiniteError):
        return LraRun(plan.task, plan.attention, recipe.seed, result.step, None, None, None, result.reason)
    # a split is an option of its task
    trained: Any = load_trained(str(result.output / BEST))
    evaluator = Evaluator(
        distributed.start(precision=recipe.precision, device=recipe.device),
        batch_size=recipe.eval_batch_size or max(recipe.batch_size // recipe.accumulate, 1),
        workers=recipe.workers,
        progress=lambda done, total: notify(Evaluating(done, total)),
    )
    (tested,) = trained.evaluate(None, evaluator, split="test")
    return LraRun(
        task=plan.task,
        attention=plan.attention,
        seed=recipe.seed,
        step=result.step,
        parameters=sum(parameter.numel() for parameter in trained.model.parameters()),
        val_accuracy=result.best["accuracy"],
        test_accuracy=tested.result.metrics["accuracy"],
        diverged=None,
    )


def check_attentions(attentions: Sequence[str], seeds: Sequence[int]) -> None:
    check_seeds(seeds)
    if not attentions or len(set(attentions)) < len(attentions):
        raise UserError(f"attentions must be different, at least one, got {list(attentions)}")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("softline lra trains in one process: with torchrun, use softline train lra_TASK")
    for attention in attentions:
        check_option("attention", attention, ATTENTIONS)
