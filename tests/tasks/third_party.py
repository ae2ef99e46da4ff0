"""A task of another package: guess whether a number is odd, by a linear layer on its bits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy

from softline.engine.recipe import Recipe
from softline.engine.task import Loss, Setup, TaskDefinition
from softline.engine.trained import Evaluator, Measured, Result, Trained
from softline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class NumberData:
    highest: int = 63


@dataclass(frozen=True, kw_only=True)
class ParityRecipe(Recipe):
    data: NumberData


def bits(numbers: Tensor, count: int) -> Tensor:
    return (numbers[:, None] >> torch.arange(count) & 1).float()


class Numbers(TensorDataset):
    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key[1] if isinstance(key, tuple) else key)


class Parity:
    groups = None
    monitor = "accuracy"
    unit = "numbers"

    def __init__(self, model: nn.Module, highest: int) -> None:
        self.model = model
        numbers = torch.arange(highest + 1)
        self.train_set = self.val_set = Numbers(bits(numbers, 8), (numbers % 2).float())

    def collate(self, samples: Sequence[Any]) -> Any:
        return default_collate(list(samples))

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, odd = batch
        return Loss(F.binary_cross_entropy_with_logits(model(x)[:, 0], odd), {})

    def metrics(self) -> MetricCollection:
        return MetricCollection({"accuracy": BinaryAccuracy()})

    def update(self, metrics: MetricCollection, model: nn.Module, batch: Any, valid: int) -> None:
        x, odd = batch
        metrics.update(model(x)[:valid, 0].sigmoid(), odd[:valid])

    def details(self, metrics: MetricCollection) -> dict[str, Any]:
        return {}

    def facts(self) -> dict[str, Any]:
        return {"classes": ["even", "odd"]}


@dataclass(frozen=True)
class FoundParity(Result):
    parity: str
    name: str | None = None

    def __str__(self) -> str:
        return f"  {self.parity}"

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "parity": self.parity}


class TrainedParity(Trained):
    kind = "a judge of parity"
    recipe: ParityRecipe

    def evaluate(self, data: str | None, evaluator: Evaluator, *, highest: int | None = None) -> Iterator[Measured]:
        chosen = highest or self.recipe.data.highest
        yield Measured({"highest": chosen}, evaluator.run(Parity(self.model, chosen), batch_size=16))

    def predict(self, inputs: Any, *, batch_size: int = 32) -> Any:
        if isinstance(inputs, list):
            return [self.predict(each) for each in inputs]
        number = torch.tensor([int(inputs.read_text())])
        name = self.classes[int(self.model(bits(number, 8).to(self.device))[0, 0] > 0)]
        return FoundParity(name, str(inputs))


class ParityDefinition(TaskDefinition[ParityRecipe]):
    recipe_type = ParityRecipe

    def build(self, recipe: ParityRecipe, setup: Setup) -> Parity:
        return Parity(self.network(recipe, {}), recipe.data.highest)

    def network(self, recipe: ParityRecipe, facts: Mapping[str, Any]) -> nn.Module:
        if recipe.model.options:
            raise UserError(f"model.options: {recipe.model.name} has none, got {recipe.model.options}")
        return nn.Linear(8, 1)

    def trained(self, model: nn.Module, recipe: ParityRecipe, facts: Mapping[str, Any]) -> TrainedParity:
        return TrainedParity(recipe.model.name, model, facts["classes"], recipe)


definition = ParityDefinition()
