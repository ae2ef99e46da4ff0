"""The Long Range Arena: tasks by attentions, as in Table 12 of the SOFT paper (https://arxiv.org/abs/2207.03341)."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypeAlias

from softline.attention import ATTENTIONS
from softline.bench.environment import environment
from softline.bench.presets import attention_variant, variant_recipe
from softline.bench.runs import Finished, TellRun, run_once, train_or_diverge
from softline.data.lra import LRA_TASKS
from softline.engine import distributed
from softline.engine.build_sequence import build_sequence, evaluate_sequence
from softline.engine.checkpoint import BEST
from softline.engine.events import Event
from softline.engine.nonfinite import NonFiniteError
from softline.engine.reading import load_recipe
from softline.engine.recipe import SequenceRecipe
from softline.engine.trained import load_trained
from softline.ops.inputs import check_integer, check_option

TITLES = {"listops": "ListOps", "text": "Text", "retrieval": "Retrieval", "image": "Image", "pathfinder": "Pathfinder"}
TABLE_TASKS = ("listops", "text", "retrieval", "image")
"""Those of Table 12, whose average it gives."""
PAPER: Mapping[str, tuple[float, ...]] = {
    "softmax": (37.10, 65.02, 79.35, 38.20),
    "reformer": (19.05, 64.88, 78.64, 43.29),
    "linformer": (37.25, 55.91, 79.37, 37.84),
    "performer": (18.80, 63.81, 78.62, 37.07),
    "nystrom": (37.15, 65.52, 79.56, 41.58),
    "soft": (37.40, 63.49, 81.77, 46.91),
}
"""Accuracy in percent on TABLE_TASKS, as Table 12 prints it."""
SMALL_TASKS = ("listops", "image")
"""Tasks that have a recipe for two cores."""


@dataclass(frozen=True)
class LraRun:
    """One training of one attention on one task."""

    task: str
    attention: str
    seed: int
    step: int
    """The last one."""
    parameters: int
    val_accuracy: float | None
    """The best one, 0 to 1; None if the run diverged."""
    test_accuracy: float | None
    """Of the weights that were best in validation."""
    diverged: str | None
    """What was not finite and where, if the run ended so."""

    @property
    def text(self) -> str:
        if self.test_accuracy is None:
            return f"diverged at step {self.step}: {self.diverged}"
        return f"test accuracy {100 * self.test_accuracy:.2f} %"


@dataclass(frozen=True)
class LraResults:
    runs: tuple[LraRun, ...]
    recipes: dict[str, Any]
    """By task, what all attentions share."""
    environment: dict[str, Any]

    def mean(self, task: str, attention: str) -> float | None:
        """Test accuracy in percent, over the seeds that did not diverge."""
        found = self._accuracies(task, attention)
        return mean(found) if found else None

    def spread(self, task: str, attention: str) -> float | None:
        """Sample standard deviation over the seeds; None for fewer than two."""
        found = self._accuracies(task, attention)
        return stdev(found) if len(found) > 1 else None

    def _accuracies(self, task: str, attention: str) -> list[float]:
        runs = [run for run in self.runs if (run.task, run.attention) == (task, attention)]
        return [100 * run.test_accuracy for run in runs if run.test_accuracy is not None]

    def to_dict(self) -> dict[str, Any]:
        paper = {name: dict(zip(TABLE_TASKS, row, strict=True)) for name, row in PAPER.items()}
        return {**dataclasses.asdict(self), "runs": [dataclasses.asdict(run) for run in self.runs], "paper": paper}


Progress: TypeAlias = Callable[[str, int, Event | Finished], None]
"""Called with task and attention, a seed and what happened there."""


def lra_recipe(
    task: str, *, small: bool = False, data: str | None = None, overrides: Sequence[str] = ()
) -> SequenceRecipe:
    """The recipe of a task.

    small: that for two cores, which listops and image have.
    data: directory with the tasks' files, see `softline.data.lra`. ListOps is read from it if it has them, and else
        generated.
    """
    check_option("task", task, LRA_TASKS)
    if small and task not in SMALL_TASKS:
        raise ValueError(f"{task} has no small recipe; {', '.join(SMALL_TASKS)} have")
    given = list(overrides)
    if data is not None and task != "listops":
        given += ["--data.source", data]
    elif data is not None and not small and (Path(data) / "listops-1000").is_dir():
        given += ["--data.source", data, "--data.generate", "null"]
    recipe = load_recipe(f"lra_{task}_small" if small else f"lra_{task}", given)
    assert isinstance(recipe, SequenceRecipe), "its file says so"
    return recipe


def run_lra(
    recipes: Mapping[str, SequenceRecipe],
    attentions: Sequence[str],
    *,
    seeds: Sequence[int],
    output: Path,
    progress: Progress = lambda *_: None,
) -> Iterator[LraResults]:
    """Train every attention on every task with every seed, in ``output/TASK/ATTENTION/seedK``; after each run, all
    results so far.

    recipes: by task. A run that is finished is not repeated, and one that was interrupted goes on.
    """
    _check(attentions, seeds)
    shared = {task: dataclasses.asdict(recipe) for task, recipe in recipes.items()}
    runs: list[LraRun] = []
    for task, recipe in recipes.items():
        # what cannot be read or built is found out before the first training
        for attention in attentions:
            build_sequence(_with_attention(recipe, attention), notify=lambda _: None)
        for attention in attentions:
            for seed in seeds:
                directory = output / task / attention / f"seed{seed}"
                changed: Any = _with_attention(recipe, attention).replace(seed=seed, output=str(directory))
                runs.append(_run(task, attention, changed, progress))
                yield LraResults(tuple(runs), shared, dict(environment()))


def _with_attention(recipe: SequenceRecipe, attention: str) -> SequenceRecipe:
    changed = variant_recipe(recipe, attention_variant(attention))
    assert isinstance(changed, SequenceRecipe), "an attention does not change the task"
    return changed


def _run(task: str, attention: str, recipe: SequenceRecipe, progress: Progress) -> LraRun:
    def tell(event: Event | Finished) -> None:
        progress(f"{task}, {attention}", recipe.seed, event)

    return run_once(recipe, lambda: _train(task, attention, recipe, tell), lambda kept: LraRun(**kept), tell)


def _train(task: str, attention: str, recipe: SequenceRecipe, tell: TellRun) -> LraRun:
    result = train_or_diverge(recipe, tell)
    if isinstance(result, NonFiniteError):
        return LraRun(task, attention, recipe.seed, result.step, 0, None, None, result.reason)
    trained = load_trained(str(result.output / BEST))
    on_test: Any = recipe.replace(data=dataclasses.replace(recipe.data, val_split="test"))
    accelerator = distributed.start(precision=recipe.precision, device=recipe.device)
    tested = evaluate_sequence(
        trained.model, trained.settings, on_test, accelerator, batch_size=recipe.eval_batch_size or recipe.batch_size
    )
    return LraRun(
        task=task,
        attention=attention,
        seed=recipe.seed,
        step=result.step,
        parameters=sum(parameter.numel() for parameter in trained.model.parameters()),
        val_accuracy=result.best["accuracy"],
        test_accuracy=tested.metrics["accuracy"],
        diverged=None,
    )


def _check(attentions: Sequence[str], seeds: Sequence[int]) -> None:
    for what, values in (("attentions", list(attentions)), ("seeds", list(seeds))):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{what} must be different, at least one, got {values}")
    for attention in attentions:
        check_option("attention", attention, ATTENTIONS)
    for seed in seeds:
        check_integer("seed", seed, 0)
