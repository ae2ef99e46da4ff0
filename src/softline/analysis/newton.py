"""How fast Newton's iteration inverts the landmark kernel of SOFT: Fig. 5 of the SOFT paper.

The residual after k steps is ||A A_k A - A||_2 / ||A||_2; its mean and its range are over images, heads and the layers
of a stage. What is inverted is A + ridge I where the attention has a ridge.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from softline import ops
from softline.analysis.figures import new_axes, tidy
from softline.analysis.subjects import Picture, Subject
from softline.attention.multihead import MultiHeadAttention
from softline.attention.soft import SoftCore
from softline.backbones.inspection import Layer, LayerInput
from softline.bench.figure import PALETTE


@dataclass(frozen=True)
class StageResiduals:
    """Residuals after 0, 1, ... steps."""

    stage: int
    layers: int
    matrices: int
    """Of all images, heads and layers."""
    landmarks: int
    mean: list[float]
    lowest: list[float]
    highest: list[float]


def newton_convergence(
    subject: Subject, pictures: Sequence[Picture], *, iterations: int = 35, size: int | None = None
) -> list[StageResiduals]:
    """Of each stage that has SOFT layers."""
    layers = soft_layers(subject)
    residuals: dict[int, list[Tensor]] = {layer.stage: [] for layer in layers}
    landmarks: dict[int, int] = {}
    for picture in pictures:
        seen, _ = subject.look(subject.prepare(picture.image, size)[None], layers)
        for given in seen:
            A = landmark_matrix(given)
            found = ops.newton_residuals(A, iterations=iterations, start=_options(given)["start"])
            residuals[given.layer.stage].append(found.flatten(1))
            landmarks[given.layer.stage] = A.shape[-1]
    return [
        _summarise(stage, torch.cat(found, 1), sum(layer.stage == stage for layer in layers), landmarks[stage])
        for stage, found in residuals.items()
    ]


def soft_layers(subject: Subject) -> list[Layer]:
    """The subject's SOFT and SOFT++ layers; windows are left aside, so that what is inverted can be had."""
    layers = [replace(layer, attention=layer.inner) for layer in subject.layers if has_landmarks(layer)]
    if not layers:
        operators = ", ".join(dict.fromkeys(layer.operator for layer in subject.layers))
        raise ValueError(f"{subject.name} inverts no matrix: it has {operators} attention, not soft or softpp")
    return layers


def has_landmarks(layer: Layer) -> bool:
    return isinstance(layer.inner, MultiHeadAttention) and isinstance(layer.inner.core, SoftCore)


def landmark_matrix(given: LayerInput, *, exact: bool = False) -> Tensor:
    """What a SOFT layer inverts [B, heads, m, m]; in float64 if ``exact``."""
    options = _options(given)
    landmarks = options["landmarks"].double() if exact else options["landmarks"]
    return ops.soft_kernel(landmarks, ridge=options["ridge"])


def layer_residual(given: LayerInput) -> float | None:
    """What is left after the layer's own number of steps, the mean of its heads; None if it does not use Newton."""
    if not has_landmarks(given.layer) or given.layer.inner is not given.layer.attention:
        return None
    options = _options(given)
    if options["inverse"] != "newton":
        return None
    names = ("iterations", "start", "ridge")
    residual = ops.soft_residual(options["landmarks"], **{name: options[name] for name in names})
    return float(residual.mean())


@torch.no_grad()
def _options(given: LayerInput) -> dict[str, Any]:
    attention = given.layer.attention
    assert isinstance(attention, MultiHeadAttention), "SOFT layers are"
    return attention.operands(given.x, given.grid_size)


def _summarise(stage: int, residuals: Tensor, layers: int, landmarks: int) -> StageResiduals:
    """residuals: [steps + 1, matrices]."""
    return StageResiduals(
        stage=stage,
        layers=layers,
        matrices=residuals.shape[1],
        landmarks=landmarks,
        mean=residuals.mean(1).tolist(),
        lowest=residuals.amin(1).tolist(),
        highest=residuals.amax(1).tolist(),
    )


def plot_newton(results: dict[str, list[StageResiduals]]) -> Any:
    """A panel for each model: a line for each stage, the mean, with a band from the lowest to the highest."""
    figure, axes = new_axes(1, len(results), figsize=(5.2 * len(results) + 0.6, 4.2), sharey=True)
    for axis, (name, stages) in zip(axes[0], results.items(), strict=True):
        # one landmark is its own inverse
        for color, one in zip(PALETTE, [one for one in stages if one.landmarks > 1], strict=False):
            steps = range(len(one.mean))
            label = f"stage {one.stage + 1}: m = {one.landmarks}, {one.matrices} matrices"
            axis.fill_between(steps, one.lowest, one.highest, color=color, alpha=0.15, linewidth=0)
            axis.plot(steps, one.mean, color=color, linewidth=2, label=label)
        axis.axvline(20, color="#8c8c8c", linewidth=1, linestyle="--")
        axis.text(20.4, 0.98, "20 steps", transform=axis.get_xaxis_transform(), va="top", fontsize=9, color="#6c6c6c")
        axis.set_yscale("log")
        tidy(axis)
        axis.set_title(name, loc="left", fontsize=11)
        axis.set_xlabel("Newton steps k")
        axis.legend(frameon=False, fontsize=9, loc="lower left")
    axes[0][0].set_ylabel(r"$\|A A_k A - A\|_2\;/\;\|A\|_2$")
    return figure
