"""Linearise a pretrained vision transformer: replace its attention, transfer, fine-tune, and measure each step."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias

from accelerate.utils import set_seed
from torch import nn

from softline.checks import check_integer
from softline.data.images import ImageStream
from softline.engine import distributed
from softline.engine.checkpoint import LAST, load_checkpoint, save_checkpoint
from softline.engine.events import Evaluating, Event, Notice
from softline.engine.reading import differing_keys, read_recipe, to_dict
from softline.engine.train import train_to_the_end
from softline.engine.trained import Evaluator
from softline.errors import UserError
from softline.files import read_bytes, write_json
from softline.linearizing.cost import measure_cost
from softline.linearizing.measuring import Judge, LayerEffect, Scores, larger_sizes, worst
from softline.linearizing.plan import Plan, chosen_layers, open_classifier, open_original
from softline.locks import hold_directory
from softline.measure.environment import environment
from softline.measure.measuring import Row
from softline.plain import check_entries, read_json
from softline.replacing.replace import replaceable, replaced_attention
from softline.tasks.classification.trained import Classifier
from softline.tasks.linearization.build import student, weights_digest
from softline.tasks.linearization.recipe import LinearizationRecipe, Stage

MIXED = "mixed.pt"
LAYERS = "layers.json"
RESULT = "linearized.json"
LAYER_IMAGES = 256

NotifyStage: TypeAlias = Callable[[str, Event], None]
"""Receives "transfer", "finetune" or "measure", and what happens there."""


@dataclass(frozen=True)
class ModelStep:
    """The model at one point of its way."""

    name: str
    """original, replaced, transferred, mixed or finetuned."""
    checkpoint: str | None
    """File with its weights; None for the original and for the model whose attention has just been replaced."""
    scores: tuple[Scores, ...]
    """On validation images of growing sizes."""
    errors: dict[str, float]
    """Relative error of each new attention, given what the old one is given; of the steps before fine-tuning."""

    @property
    def text(self) -> str:
        """A summary at the first size."""
        error = f", mean error of a layer {mean(self.errors.values()):.3f}" if self.errors else ""
        return f"{self.name}: {self.scores[0].text}{error}"


@dataclass(frozen=True)
class Linearized:
    """A linearised model, and how it came about."""

    source: str
    attention: str
    replaced: tuple[str, ...]
    """Attention modules that are the new ones."""
    kept: tuple[str, ...]
    """Attention modules that are still the original's."""
    effects: tuple[LayerEffect, ...]
    """What replacing each layer alone does, if there is a limit to the layers that are kept."""
    steps: tuple[ModelStep, ...]
    cost: tuple[Row, ...]
    """Time and memory of the original and of the linearised model."""
    images: int
    """Passes of training images that all stages took."""
    recipes: dict[str, dict[str, Any]]
    """By stage."""
    environment: dict[str, Any]

    @property
    def checkpoint(self) -> str:
        """The checkpoint of the last step."""
        path = self.steps[-1].checkpoint
        assert path is not None, "there is at least one stage"
        return path

    def load(self) -> Classifier:
        """Open the linearised model, which can be used, evaluated and exported."""
        return open_classifier(self.checkpoint)

    def load_original(self) -> Classifier:
        """Open the model that was linearised."""
        return open_classifier(self.source)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain numbers, strings, lists and dictionaries."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Linearized":
        """Convert back what `to_dict` returned."""
        steps = [{**step, "scores": tuple(Scores(**scores) for scores in step["scores"])} for step in content["steps"]]
        read = {
            "replaced": tuple(content["replaced"]),
            "kept": tuple(content["kept"]),
            "effects": tuple(LayerEffect(**effect) for effect in content["effects"]),
            "steps": tuple(ModelStep(**step) for step in steps),
            "cost": tuple(Row.from_dict(row) for row in content["cost"]),
        }
        return cls(**{**content, **read})


def carry_out(
    plan: Plan, *, sizes: Sequence[int] | None, cost_sizes: Sequence[int], progress: NotifyStage
) -> Linearized:
    """Do what a plan says; see `softline.linearize`."""
    for name, given in (("sizes", sizes or ()), ("cost_sizes", cost_sizes)):
        for size in given:
            check_integer(name, size, 1)
    original = open_original(plan.source)
    # before its position embeddings are adapted to other images
    digest = weights_digest(original.model)
    if plan.image_size is not None:
        original.resize(plan.image_size)
    accelerator = distributed.start(device="auto")
    if not accelerator.is_main_process:
        progress = _silent
    evaluator = Evaluator(accelerator, progress=lambda done, total: progress("measure", Evaluating(done, total)))
    work = _Work(plan, original, digest, sizes, evaluator, progress)
    held = hold_directory(plan.output, notify=lambda text: progress("measure", Notice(text)))
    with distributed.in_first_process(held):
        result = work.run(cost_sizes)
        if accelerator.is_main_process:
            write_json(plan.output / RESULT, result.to_dict())
    return result


def _silent(stage: str, event: Event) -> None:
    """Hear nothing: one process reports for all."""


class _Work:
    """A linearisation under way."""

    def __init__(
        self,
        plan: Plan,
        original: Classifier,
        digest: str,
        sizes: Sequence[int] | None,
        evaluator: Evaluator,
        progress: NotifyStage,
    ) -> None:
        self.plan, self.original, self.digest = plan, original, digest
        self.layers = chosen_layers(plan, original)
        self.evaluator, self.progress = evaluator, progress
        self.start: Path | None = None
        """Weights that the next stage starts from."""
        self.transferred = plan.output / "transfer" / LAST
        # those of both stages, so that a mistake in either is found before the first
        self.recipes = {stage: self._recipe(stage) for stage in plan.stages}
        self.first = next(iter(self.recipes.values()))
        self.judge = Judge(original, self.first, evaluator)
        self.sizes = tuple(sizes or (self.judge.size, *larger_sizes(original, self.judge.size)))
        self.steps: list[ModelStep] = []
        self.effects: tuple[LayerEffect, ...] = ()
        self.images = 0
        self._check_before_measuring()

    def run(self, cost_sizes: Sequence[int]) -> Linearized:
        plan = self.plan
        self._measure("original", self.original.model, None)
        self._measure("replaced", self._inheriting(self.first), None)
        if "transfer" in plan.stages:
            self.start = self._train("transfer")
            self._measure("transferred", self._load(self.start), self.start)
        elif self.transferred.exists():
            self.start = self.transferred
        if plan.softmax_layers is not None:
            self._mix(plan.softmax_layers)
        if "finetune" in plan.stages:
            path = self._train("finetune")
            self._measure("finetuned", self._load(path), path)
        return self._result(cost_sizes)

    def _recipe(self, stage: Stage) -> LinearizationRecipe:
        return self.plan.recipe(stage, self.original, start=self.start, layers=self.layers, digest=self.digest)

    def _check_before_measuring(self) -> None:
        """Refuse what would end a stage after minutes of other work."""
        images = self.judge.sources[self.first.data.train_split]
        for stage, recipe in self.recipes.items():
            if not isinstance(images, ImageStream) and recipe.batch_size > len(images):
                raise UserError(
                    f"batch_size ({recipe.batch_size}) of {stage} must be at most the number of training images "
                    f"({len(images)})"
                )
            path = Path(recipe.output) / LAST
            # which layers are replaced is not known yet
            mixes = stage == "finetune" and self.plan.softmax_layers is not None
            if path.exists() and not mixes:
                self._compare(path, recipe, "continue")
        if "transfer" not in self.plan.stages and self.transferred.exists():
            self._take_over(self.transferred)

    def _compare(self, path: Path, recipe: LinearizationRecipe, purpose: str, *, about: str = "") -> dict[str, Any]:
        """Refuse the checkpoint of another linearisation; return its content.

        about: the start of the keys that have to be the same.
        """
        content = load_checkpoint(path)
        changed = [
            key
            for key in differing_keys(read_recipe(content["recipe"], where=str(path)), recipe)
            if key.startswith(about) or key == "teacher_digest"
        ]
        if "teacher_digest" in changed:
            raise UserError(f"{path} has learned from another model than {self.plan.source}: name another directory")
        if changed:
            raise UserError(
                f"{path} cannot {purpose}: it was trained by another recipe, which differs in {', '.join(changed)}; "
                "name another directory"
            )
        return content

    def _train(self, stage: Stage) -> Path:
        recipe = self.recipes[stage] = self._recipe(stage)
        result = train_to_the_end(recipe, lambda event: self.progress(stage, event))
        self.images += result.step * recipe.batch_size
        return result.output / LAST

    def _take_over(self, transferred: Path) -> None:
        """Check that an earlier transfer is one of the same layers and attention, and count its images."""
        planned = self.plan.recipe("transfer", self.original, layers=self.layers, digest=self.digest)
        content = self._compare(transferred, planned, "be fine-tuned", about="model.")
        recipe = read_recipe(content["recipe"], where=str(transferred))
        if content["epoch"] < int(recipe.schedule.epochs):
            done = f"{content['epoch']} of {recipe.schedule.epochs:g} epochs"
            self.progress("measure", Notice(f"{transferred} is fine-tuned as it is, after {done}"))
        self.images += content["step"] * recipe.batch_size

    # between the stages

    def _mix(self, most: int) -> None:
        """Give the layers whose replacement hurts most their original attention back."""
        replaced = self._network()
        count = most - (len(replaceable(replaced)) - len(self.layers))
        if not count:
            return
        self.effects = self._effects(replaced)
        kept = worst(self.effects, count)
        self.layers = [layer for layer in self.layers if layer not in kept]
        if self.start is not None:
            self.start = self._write_mixed(self.start)
            self._measure("mixed", self._load(self.start), self.start)

    def _effects(self, replaced: nn.Module) -> tuple[LayerEffect, ...]:
        """Measure the layers, or read what an interrupted call has measured: another order would be another model."""
        path = self.plan.output / LAYERS
        known = distributed.broadcast_object(
            read_json(read_bytes(path), str(path)) if self._is_first() and path.exists() else None
        )
        if known is not None:
            effects = tuple(_read_effect(entry, path) for entry in known)
            if [effect.layer for effect in effects] != self.layers:
                raise UserError(f"{path} is about other layers: delete it, or name another directory")
            return effects
        measured = []
        for index, layer in enumerate(self.layers):
            self.progress("measure", Notice(f"layer {index + 1} of {len(self.layers)}", routine=True))
            effect = self.judge.effect(replaced, layer, LAYER_IMAGES)
            measured.append(effect)
            self.progress("measure", Notice(f"{layer} alone: {effect.text}"))
        if self._is_first():
            write_json(path, [dataclasses.asdict(effect) for effect in measured])
        return tuple(measured)

    def _write_mixed(self, transferred: Path) -> Path:
        """Write the transferred weights of the layers that are replaced, and the original's of the others."""
        path = self.plan.output / MIXED
        if self._is_first():
            content = load_checkpoint(transferred)
            recipe = self.plan.recipe("transfer", self.original, start=None, layers=self.layers)
            network = self._inheriting(recipe)
            weights = content["state_dict"] if content["state_dict_ema"] is None else content["state_dict_ema"]
            own = {key: value for key, value in network.state_dict().items() if key not in weights}
            kept = {key: weights[key] for key in network.state_dict() if key in weights}
            mixed = {**content, "recipe": to_dict(recipe), "state_dict": {**own, **kept}}
            save_checkpoint(path, {**mixed, "state_dict_ema": None, "optimizer": {}, "metrics": {}, "best": {}})
        self.evaluator.accelerator.wait_for_everyone()
        return path

    # measurements

    def _measure(self, name: str, network: nn.Module, checkpoint: Path | None) -> None:
        self.progress("measure", Notice(f"measuring the model as {name}", routine=True))
        step = ModelStep(
            name,
            None if checkpoint is None else str(checkpoint),
            tuple(self.judge.scores(network, size) for size in self.sizes),
            self.judge.errors(network) if replaced_attention(network) and name != "finetuned" else {},
        )
        self.steps.append(step)
        self.progress("measure", Notice(step.text))

    def _network(self) -> nn.Module:
        """Return the replaced network as the next stage will find it."""
        if self.start is not None:
            return self._load(self.start)
        return self._inheriting(self._recipe("finetune"))

    def _inheriting(self, recipe: LinearizationRecipe) -> nn.Module:
        """Return the network of a recipe with the original's weights, the same in every process."""
        set_seed(recipe.seed)
        return student(recipe, self.original.model, len(self.judge.classes))

    def _load(self, path: Path) -> nn.Module:
        return open_classifier(str(path)).model

    def _is_first(self) -> bool:
        return self.evaluator.accelerator.is_main_process

    def _result(self, cost_sizes: Sequence[int]) -> Linearized:
        last = list(self.recipes.values())[-1]
        cost: list[Row] = []
        if self._is_first() and cost_sizes:
            told = f"measuring time and memory at {', '.join(map(str, cost_sizes))} pixels"
            self.progress("measure", Notice(told, routine=True))
            model = dataclasses.replace(last.model, replace=self.plan.replacement(self.layers))
            cost = measure_cost(model, cost_sizes, num_classes=len(self.judge.classes))
        names = replaceable(self.original.model)
        return Linearized(
            source=self.plan.source,
            attention=self.plan.attention,
            replaced=tuple(self.layers),
            kept=tuple(name for name in names if name not in self.layers),
            effects=self.effects,
            steps=tuple(self.steps),
            cost=tuple(cost),
            images=self.images,
            recipes={stage: to_dict(recipe) for stage, recipe in self.recipes.items()},
            environment=dict(environment()),
        )


def _read_effect(entry: Any, path: Path) -> LayerEffect:
    check_entries(entry, {"layer": str, "agreement": float, "divergence": float}, str(path))
    return LayerEffect(entry["layer"], entry["agreement"], entry["divergence"])
