"""What is to be linearised, and the recipes of its stages."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch

from softline.attention import ATTENTIONS
from softline.checks import check_integer, check_option
from softline.engine.reading import load_recipe
from softline.engine.recipe import ReplaceRecipe
from softline.errors import UserError
from softline.replacing.replace import Queries, replaceable, replaced_attention
from softline.tasks.classification.trained import Classifier
from softline.tasks.linearization.recipe import LinearizationRecipe, Stage
from softline.tasks.loading import load_trained
from softline.tasks.networks import build_model, put_attention

STAGES: tuple[Stage, ...] = get_args(Stage)
# keys of the recipes that the plan itself sets, and its fields
FIXED = {
    **{"task": "nothing", "base": "nothing", "stage": "stages", "output": "output", "labelled": "labelled"},
    **{"teacher": "source", "teacher_digest": "source", "model.name": "source", "model.checkpoint": "source"},
    **{"model.pretrained": "source", "model.replace": "attention, layers, options, queries and drop_position_bias"},
    **{"data.source": "data", "data.root": "root", "data.image_size": "image_size"},
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be linearised and how; the fields are arguments of `softline.linearize`, which explains them."""

    source: str
    attention: str
    data: str
    output: Path
    root: str | None = None
    labelled: bool = True
    layers: tuple[int | str, ...] | None = None
    softmax_layers: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    queries: Queries = "mean"
    drop_position_bias: bool = False
    stages: tuple[Stage, ...] = STAGES
    image_size: int | None = None
    overrides: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_option("attention", self.attention, ATTENTIONS)
        for stage in self.stages:
            check_option("stages", stage, STAGES)
        if not self.stages:
            raise UserError(f"stages must name at least one of {', '.join(STAGES)}")
        if self.softmax_layers is not None:
            check_integer("softmax_layers", self.softmax_layers, 0)
        if self.image_size is not None:
            check_integer("image_size", self.image_size, 1)
        for text in self.overrides:
            if text.startswith("--"):
                self._check_override(text[2:].partition("=")[0])

    def _check_override(self, text: str) -> None:
        """Refuse a key that would contradict the plan, or that no stage reads."""
        owner, _, rest = text.partition(".")
        key = rest if owner in STAGES else text
        if owner in STAGES and owner not in self.stages:
            raise UserError(f"--{text} is for the stage {owner}, and the stages are {', '.join(self.stages)}")
        for fixed, field_name in FIXED.items():
            if key == fixed or key.startswith(f"{fixed}."):
                raise UserError(f"--{text} cannot be set: {fixed} follows from {field_name}")

    def replacement(self, layers: Sequence[int | str] | None) -> ReplaceRecipe:
        """Return the replacement of these layers."""
        return ReplaceRecipe(
            attention=self.attention,
            layers=None if layers is None else tuple(layers),
            options=dict(self.options),
            queries=self.queries,
            drop_position_bias=self.drop_position_bias,
        )

    def recipe(
        self,
        stage: Stage,
        original: Classifier,
        *,
        start: Path | None = None,
        layers: Sequence[int | str] | None,
        digest: str | None = None,
    ) -> LinearizationRecipe:
        """Return the recipe of a stage.

        start: the checkpoint whose weights it starts from; None starts from those of the original.
        layers: attention modules that are replaced; None is all.
        digest: of the original's weights.
        """
        own = original.architecture
        # the size is that of the images
        options = {key: value for key, value in own.options.items() if key != "img_size"}
        settings = {key: value for key, value in original.settings.items() if key != "mode"}
        size = {} if self.image_size is None else {"image_size": self.image_size}
        changes: dict[str, Any] = {
            "output": str(self.output / stage),
            "teacher": self.source,
            "teacher_digest": digest,
            "labelled": self.labelled,
            "model": {"name": own.name, "options": options, "replace": asdict(self.replacement(layers))},
            "data": {"source": self.data, "root": self.root, **settings, **size},
        }
        if start is not None:
            changes["model"]["checkpoint"] = str(start)
        recipe = load_recipe(f"linearize_{stage}", self._overrides(stage), changes=changes)
        assert isinstance(recipe, LinearizationRecipe), "the recipes in the package are"
        return recipe

    def _overrides(self, stage: Stage) -> list[str]:
        """Return the overrides of a stage, without the names of stages."""
        chosen: list[str] = []
        mine = True
        for text in self.overrides:
            if text.startswith("--"):
                owner, _, key = text[2:].partition(".")
                mine = owner not in STAGES or owner == stage
                text = f"--{key}" if owner == stage else text
            if mine:
                chosen.append(text)
        return chosen


def open_classifier(source: str) -> Classifier:
    trained = load_trained(source)
    if not isinstance(trained, Classifier):
        raise UserError(f"only classifiers of images can be linearised; {source} is {trained.kind}")
    return trained


def open_original(source: str) -> Classifier:
    """Open the model that is to be linearised."""
    original = open_classifier(source)
    if original.architecture.replace is not None:
        raise UserError(f"the attention of {source} has been replaced already: start from the original")
    return original


def chosen_layers(plan: Plan, original: Classifier) -> list[str]:
    """Return the names of the attention modules that ``layers`` means; refuse what cannot be replaced."""
    # overrides may change options of the model, such as a dropout that the new attention cannot have
    model = plan.recipe(plan.stages[0], original, layers=plan.layers).model
    network: Any = original.model
    with torch.device("meta"):
        trial = build_model(dataclasses.replace(model, replace=None), network.num_classes)
    put_attention(trial, plan.replacement(plan.layers))
    chosen = list(replaced_attention(trial))
    kept = len(replaceable(trial)) - len(chosen)
    if plan.softmax_layers is not None:
        if plan.softmax_layers < kept:
            raise UserError(f"layers leaves {kept} layers as they are, more than softmax_layers={plan.softmax_layers}")
        if plan.softmax_layers - kept >= len(chosen):
            raise UserError(f"softmax_layers must be below the {len(chosen) + kept} layers, got {plan.softmax_layers}")
    return chosen
