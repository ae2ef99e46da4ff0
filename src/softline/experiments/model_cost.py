"""What models of several recipes cost: counted sizes and operations, measured memory and speed."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softline.measure.counting import count_macs, cuda_peak_bytes, peak_bytes
from softline.measure.turns import take_turns
from softline.tasks.classification.recipe import ClassificationRecipe
from softline.tasks.images import image_settings
from softline.tasks.networks import build_model


@dataclass(frozen=True)
class ModelCost:
    """Per image; training is the forward and the backward pass, without the optimizer and not compiled."""

    parameters: int
    macs: int
    """Multiply-adds of one image, forward."""
    peak_bytes: int
    """Most bytes held at once in a training step beyond the weights, divided by the images of the step."""
    train_per_second: float
    infer_per_second: float


def measure_costs(
    recipes: Mapping[str, ClassificationRecipe], num_classes: int, *, rounds: int = 3
) -> dict[str, ModelCost]:
    """Costs of each recipe's model on random images, at its batch size; the models take turns in being timed."""
    probes = {name: Probe(recipe, num_classes) for name, recipe in recipes.items()}
    wait = next(iter(probes.values())).wait
    infer = take_turns({name: probe.infer for name, probe in probes.items()}, rounds, wait=wait)
    train = take_turns({name: probe.train for name, probe in probes.items()}, rounds, wait=wait)
    return {
        name: ModelCost(
            parameters=sum(parameter.numel() for parameter in probe.model.parameters()),
            macs=probe.macs(),
            peak_bytes=probe.peak_bytes() // probe.batch,
            train_per_second=probe.batch / train[name].median,
            infer_per_second=probe.batch / infer[name].median,
        )
        for name, probe in probes.items()
    }


class Probe:
    """A model and a batch of random images for it, as the recipe trains them in one backward pass."""

    def __init__(self, recipe: ClassificationRecipe, num_classes: int) -> None:
        on_cpu = recipe.device == "cpu" or not torch.cuda.is_available()
        self.device = torch.device("cpu" if on_cpu else "cuda")
        self.precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(recipe.precision)
        self.batch = max(recipe.batch_size // recipe.accumulate, 1)
        self.model: nn.Module = build_model(recipe.model, num_classes, recipe.data.image_size).to(self.device)
        settings = image_settings(self.model, recipe.data)
        shape = (self.batch, len(settings["mean"]), settings["image_size"], settings["image_size"])
        layout = torch.channels_last if recipe.model.channels_last else torch.contiguous_format
        self.images = torch.randn(shape, device=self.device).contiguous(memory_format=layout)
        self.labels = torch.randint(num_classes, (self.batch,), device=self.device)

    def infer(self) -> Tensor:
        self.model.eval()
        with torch.no_grad(), self._autocast():
            logits: Tensor = self.model(self.images)
        return logits

    def train(self) -> None:
        self.model.train()
        with self._autocast():
            logits = self.model(self.images).float()
        F.cross_entropy(logits, self.labels).backward()
        self.model.zero_grad()

    def macs(self) -> int:
        self.model.eval()
        with torch.no_grad():
            return count_macs(lambda: self.model(self.images[:1]))

    def peak_bytes(self) -> int:
        return cuda_peak_bytes(self.train) if self.device.type == "cuda" else peak_bytes(self.train)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self.precision is None else torch.autocast(self.device.type, self.precision)
