"""How fast Newton's iteration inverts the landmark kernel of SOFT: Fig. 5 of the SOFT paper.

The residual after k steps is ||A A_k A - A||_2 / ||A||_2. Its mean and range are taken over images, heads and the
layers of a stage. An attention with a ridge inverts A + ridge I. The paper's axis is linear; the logarithmic one, which
is the default here, shows how far the iteration gets.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from softline import ops
from softline.analysis.subjects import Picture, Subject
from softline.attention.multihead import MultiHeadAttention
from softline.attention.soft import SoftCore
from softline.backbones.inspection import Layer, LayerInput
from softline.errors import UserError
from softline.plotting.colors import PALETTE
from softline.plotting.figures import new_axes, tidy


@dataclass(frozen=True)
class StageResiduals:
    """Residuals of a stage after 0, 1, ... steps; None where the iterate is no longer finite."""

    stage: int
    name: str
    layers: int
    matrices: int
    """Number of matrices in all images, heads and layers."""
    landmarks: int
    mean: list[float | None]
    lowest: list[float | None]
    highest: list[float | None]


def newton_convergence(
    subject: Subject, pictures: Sequence[Picture], *, iterations: int = 35, size: int | None = None
) -> list[StageResiduals]:
    """Measure the residuals of each stage that has SOFT layers."""
    layers = soft_layers(subject)
    residuals: dict[int, list[Tensor]] = {layer.stage: [] for layer in layers}
    landmarks: dict[int, int] = {}
    for picture in pictures:
        seen, _ = subject.look(subject.prepare(picture.image, size)[None], layers)
        for given in seen:
            options = _newton_options(soft_operands(given))
            found = ops.soft_residuals(**{**options, "iterations": iterations})
            residuals[given.layer.stage].append(found.flatten(1))
            landmarks[given.layer.stage] = options["landmarks"].shape[-2]
    return [
        _summarise([layer for layer in layers if layer.stage == stage], torch.cat(found, 1), landmarks[stage])
        for stage, found in residuals.items()
    ]


def soft_layers(subject: Subject) -> list[Layer]:
    """The subject's SOFT and SOFT++ layers; a windowed one is represented by the attention inside its windows."""
    layers = [replace(layer, attention=layer.inner) for layer in subject.layers if has_landmarks(layer)]
    if not layers:
        operators = ", ".join(dict.fromkeys(layer.operator for layer in subject.layers))
        raise UserError(f"{subject.name} inverts no matrix: it has {operators} attention, not soft or softpp")
    return layers


def has_landmarks(layer: Layer) -> bool:
    return isinstance(layer.inner, MultiHeadAttention) and isinstance(layer.inner.core, SoftCore)


def landmark_matrix(given: LayerInput, *, exact: bool = False, ridge: bool = True) -> Tensor:
    """The matrix that a SOFT layer inverts [B, heads, m, m], with or without its ridge; in float64 if ``exact``."""
    options = soft_operands(given)
    landmarks = options["landmarks"].double() if exact else options["landmarks"]
    return ops.soft_kernel(landmarks, ridge=options["ridge"] * ridge, landmark_mask=options["landmark_mask"])


def layer_residual(given: LayerInput) -> float | None:
    """The residual after the layer's own number of steps, averaged over heads; None if it does not use Newton."""
    if not has_landmarks(given.layer) or given.layer.inner is not given.layer.attention:
        return None
    options = soft_operands(given)
    if options["inverse"] != "newton":
        return None
    return float(ops.soft_residual(**_newton_options(options)).mean())


def _newton_options(operands: dict[str, Any]) -> dict[str, Any]:
    """The arguments that `softline.ops.soft_residual` has in common with a SOFT layer's operator."""
    names = ("landmarks", "normalize", "iterations", "start", "ridge", "landmark_mask")
    return {name: operands[name] for name in names}


@torch.no_grad()
def soft_operands(given: LayerInput) -> dict[str, Any]:
    """The arguments of a SOFT layer's operator: landmarks, their mask, and how the kernel is inverted."""
    return given.call.operands()


def _summarise(layers: Sequence[Layer], residuals: Tensor, landmarks: int) -> StageResiduals:
    """Summarise the residuals [steps + 1, matrices] of the layers of one stage."""
    return StageResiduals(
        stage=layers[0].stage,
        # a flat network has a stage for each block
        name=layers[0].name.partition(",")[0],
        layers=len(layers),
        matrices=residuals.shape[1],
        landmarks=landmarks,
        mean=_finite(residuals.mean(1)),
        lowest=_finite(residuals.amin(1)),
        highest=_finite(residuals.amax(1)),
    )


def _finite(values: Tensor) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def plot_newton(results: dict[str, list[StageResiduals]], *, linear: bool = False) -> Any:
    """Draw a panel for each model, or for each model and set of images, with the mean and the range of each stage.

    linear: whether the axis of the residual is linear, as in the paper, or logarithmic.
    """
    figure, axes = new_axes(1, len(results), figsize=(5.2 * len(results) + 0.6, 4.2), sharey=True)
    for axis, (name, stages) in zip(axes[0], results.items(), strict=True):
        # the kernel of a single landmark is its own inverse
        drawn = [one for one in stages if one.landmarks > 1]
        for color, one in zip(itertools.cycle(PALETTE), drawn, strict=False):
            steps = [step for step, value in enumerate(one.highest) if value is not None]
            low, middle, high = ([values[step] for step in steps] for values in (one.lowest, one.mean, one.highest))
            label = f"{one.name}: m = {one.landmarks}, {one.matrices} matrices"
            axis.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
            axis.plot(steps, middle, color=color, linewidth=2, label=label)
        axis.axvline(20, color="#8c8c8c", linewidth=1, linestyle="--")
        axis.text(20.4, 0.98, "20 steps", transform=axis.get_xaxis_transform(), va="top", fontsize=9, color="#6c6c6c")
        axis.set_yscale("linear" if linear else "log")
        tidy(axis)
        axis.set_title(name, loc="left", fontsize=11)
        axis.set_xlabel("Newton steps k")
        # below the text at the top, where the curves of a linear axis have gone
        place = {"loc": "upper right", "bbox_to_anchor": (1, 0.9)} if linear else {"loc": "lower left"}
        axis.legend(frameon=False, fontsize=9 if len(drawn) < 6 else 6, **place)
    axes[0][0].set_ylabel(r"$\|A A_k A - A\|_2\;/\;\|A\|_2$")
    return figure
