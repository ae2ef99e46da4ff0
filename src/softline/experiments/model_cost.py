"""What training and using a recipe's model costs: counted sizes and operations, measured memory and speed."""

import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import IterableDataset

from softline.engine.recipe import Recipe
from softline.engine.task import Task, definition_of
from softline.errors import UserError
from softline.measure.counting import count_macs, count_operations, cuda_peak_bytes, peak_bytes
from softline.measure.turns import take_turns
from softline.tasks.classification.recipe import ClassificationRecipe
from softline.tasks.images import image_settings

# of an image in ImageNet's usual size
PIXELS = 224 * 224


@dataclass(frozen=True)
class ModelCost:
    """Costs for each sample; training is forward and backward pass, without optimizer and not compiled."""

    parameters: int
    macs: int
    """Multiply-adds of one sample in the forward pass."""
    peak_bytes: int
    """Peak memory of a training step beyond the weights, divided by the samples of the step."""
    train_per_second: float
    infer_per_second: float


@dataclass(frozen=True)
class CountedCost:
    """Costs that are counted, without the data of the recipe and whatever else the machine does."""

    parameters: int
    macs: int
    """Multiply-adds of one image in the forward pass, with Newton's iterations."""
    newton_macs: int
    """Those of Newton's iterations."""
    image_bytes: int
    """Memory that a further image of the batch takes in a training step, on the CPU in float32."""


def count_cost(recipe: Recipe, facts: Mapping[str, Any]) -> CountedCost:
    """Count what an image classifier costs; its data is not opened.

    facts: what its network must know of the data, see `softline.engine.task.Task.facts`; for a classifier the names of
        the classes.
    """
    if not isinstance(recipe, ClassificationRecipe):
        raise UserError(f"costs can be counted without data for classifiers of images only, got task {recipe.task}")
    definition = definition_of(recipe)
    with torch.device("meta"):
        counted = definition.network(recipe, facts)
    settings = image_settings(counted, recipe.data)
    shape = (len(settings["mean"]), settings["image_size"], settings["image_size"])
    macs, newton = count_operations(counted, torch.empty(1, *shape, device="meta"))
    model = definition.network(recipe, facts).train()
    for parameter in model.parameters():
        # gradients, which do not grow with the batch, would hide what the images of a small one take
        parameter.register_post_accumulate_grad_hook(_free)
    # enough small images that the memory of the layers, which does not grow with them, does not matter
    few = max(2, 2 * PIXELS // (shape[1] * shape[2]))
    more = few + few // 2
    peaks = {count: peak_bytes(partial(_step, model, torch.randn(count, *shape))) for count in (few, more)}
    image_bytes = (peaks[more] - peaks[few]) // (more - few)
    return CountedCost(sum(parameter.numel() for parameter in model.parameters()), macs, newton, image_bytes)


def _step(model: nn.Module, images: torch.Tensor) -> None:
    labels = torch.zeros(len(images), dtype=torch.long)
    F.cross_entropy(model(images), labels).backward()


def _free(parameter: torch.Tensor) -> None:
    parameter.grad = None


def measure_costs(recipes: Mapping[str, Recipe], task: Task, *, rounds: int = 3) -> dict[str, ModelCost]:
    """Measure each recipe's model on samples of a task; the timings of the models are interleaved.

    recipes: by name; they differ in their models alone.
    """
    probes = {name: Probe(recipe, task) for name, recipe in recipes.items()}
    wait = next(iter(probes.values())).wait
    infer = take_turns({name: probe.infer for name, probe in probes.items()}, rounds, wait=wait)
    train = take_turns({name: probe.train for name, probe in probes.items()}, rounds, wait=wait)
    return {
        name: ModelCost(
            parameters=sum(parameter.numel() for parameter in probe.model.parameters()),
            macs=probe.macs(),
            peak_bytes=probe.peak_bytes() // probe.batch_size,
            train_per_second=probe.batch_size / train[name].median,
            infer_per_second=probe.batch_size / infer[name].median,
        )
        for name, probe in probes.items()
    }


class Probe:
    """A recipe's model and samples of a task to run it on, as many as the recipe trains in one backward pass."""

    def __init__(self, recipe: Recipe, task: Task) -> None:
        on_cpu = recipe.device == "cpu" or not torch.cuda.is_available()
        self.device = torch.device("cpu" if on_cpu else "cuda")
        self.precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision)
        self.task = task
        self.model: nn.Module = definition_of(recipe).network(recipe, task.facts()).to(self.device)
        self.batch_size = max(recipe.batch_size // recipe.accumulate, 1)
        self.train_batch = self._batch(task.train_set, self.batch_size)
        self.val_batch = self._batch(task.val_set, self.batch_size)
        self.one_sample = self._batch(task.val_set, 1)
        # metrics are updated as in an evaluation, which takes little time, and never read
        self.metrics = task.metrics().to(self.device)

    def infer(self) -> None:
        self._infer(self.val_batch, self.batch_size)

    def train(self) -> None:
        self.model.train()
        with self._autocast():
            loss = self.task.loss(self.model, self.train_batch).value
        loss.backward()
        self.model.zero_grad()

    def macs(self) -> int:
        return count_macs(lambda: self._infer(self.one_sample, 1))

    def peak_bytes(self) -> int:
        return cuda_peak_bytes(self.train) if self.device.type == "cuda" else peak_bytes(self.train)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _infer(self, batch: Any, valid: int) -> None:
        self.model.eval()
        with torch.no_grad(), self._autocast():
            self.task.update(self.metrics, self.model, batch, valid)

    def _batch(self, dataset: Any, size: int) -> Any:
        """Return the first samples of a dataset, repeated if there are too few."""
        if isinstance(dataset, IterableDataset):
            first = list(itertools.islice(dataset, size))
        else:
            first = [dataset[index] for index in range(min(size, len(dataset)))]
        samples = itertools.islice(itertools.cycle(first), size)
        return send_to_device(self.task.collate(list(samples)), self.device)

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self.precision is None else torch.autocast(self.device.type, self.precision)
