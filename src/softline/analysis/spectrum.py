"""The spectrum of SOFT's landmark kernel, and why SOFT++ normalises: Fig. 6 of the SOFT paper.

The figure shows the eigenvalues of A; the spectral norms ||A^+||_2 and ||D^-1/2 A^+ D^-1/2||_2, D = diag(A 1), over the
number of landmarks m; and the norm of the attention itself, P^T X P with Newton's iterate X in place of A^+, with and
without D^-1/2 on both sides of X. An attention with a ridge inverts A + ridge I. m grows with the image, because the
landmark grid is not capped here (`max_landmarks=None`, the paper's fixed ratio).

A^+ is the pseudo-inverse in float64 without the eigenvalues below m roundings of the largest. Where such eigenvalues
exist, A is singular as far as float64 can tell, and ||A^+|| only shows where the cut lies: these points are hollow in
the figure, and no exponent is fitted to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from softline.analysis.newton import landmark_matrix, soft_layers, soft_operands
from softline.analysis.subjects import Picture, Subject
from softline.attention.hooks import uncapped_landmarks
from softline.backbones.inspection import Layer, LayerInput, one_of_each_stage
from softline.errors import UserError
from softline.measure.growth import growth_exponent
from softline.ops.soft import soft_factors
from softline.plotting.colors import PALETTE
from softline.plotting.figures import log_ticks, new_axes, tidy


@dataclass(frozen=True)
class Eigenvalues:
    """Eigenvalues of a layer's kernels, the largest first: mean and range over images and heads."""

    layer: str
    mean: list[float]
    lowest: list[float]
    highest: list[float]


@dataclass(frozen=True)
class Norms:
    """Spectral norms at one number of landmarks, averaged over images and heads."""

    landmarks: int
    image_size: int
    rank: float
    """Number of eigenvalues of A above the rounding error."""
    inverse: float
    """||A^+||_2"""
    normalized: float
    """||D^-1/2 A^+ D^-1/2||_2"""
    attention: float
    """||P^T X P||_2 with Newton's iterate X in place of A^+."""
    attention_normalized: float
    """||P^T D^-1/2 X D^-1/2 P||_2"""


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of several layers, and the norms of one of them."""

    eigenvalues: list[Eigenvalues]
    norms: list[Norms]
    layer: str
    """The layer that the norms belong to."""

    def exponent(self, name: str) -> float | None:
        """The exponent p of norm ~ m^p by least squares; None for fewer than two numbers of landmarks.

        Norms of the inverse count only where A has full rank.
        """
        norms = [one for one in self.norms if name.startswith("attention") or one.rank == one.landmarks]
        landmarks = [one.landmarks for one in norms]
        return growth_exponent(landmarks, [getattr(one, name) for one in norms]) if len(set(landmarks)) > 1 else None


def spectrum(
    subject: Subject, pictures: Sequence[Picture], *, sizes: Sequence[int], layer: int = 0, size: int | None = None
) -> Spectrum:
    """Compute the eigenvalues of the first SOFT layer of each stage, and the norms of one layer over growing images.

    sizes: image sides, one for each number of landmarks.
    layer: index of that layer among the SOFT layers.
    """
    layers = soft_layers(subject)
    if not -len(layers) <= layer < len(layers):
        raise UserError(f"layer must be below {len(layers)}, the SOFT layers of {subject.name}; got {layer}")
    first = one_of_each_stage(layers)
    found: list[list[Tensor]] = [[] for _ in first]
    for picture in pictures:
        seen, _ = subject.look(subject.prepare(picture.image, size)[None], first)
        for values, given in zip(found, seen, strict=True):
            values.append(torch.linalg.eigvalsh(landmark_matrix(given, exact=True)).flatten(0, 1).flip(-1))
    eigenvalues = [_eigenvalues(one, torch.cat(values)) for one, values in zip(first, found, strict=True)]
    return Spectrum(eigenvalues, [_norms(subject, pictures, layers[layer], side) for side in sizes], layers[layer].name)


def _eigenvalues(layer: Layer, values: Tensor) -> Eigenvalues:
    """Summarise eigenvalues [matrices, m]."""
    return Eigenvalues(layer.name, values.mean(0).tolist(), values.amin(0).tolist(), values.amax(0).tolist())


@torch.no_grad()
def _norms(subject: Subject, pictures: Sequence[Picture], layer: Layer, size: int) -> Norms:
    found = []
    with uncapped_landmarks(layer.attention):
        for picture in pictures:
            (given,), _ = subject.look(subject.prepare(picture.image, size)[None], [layer])
            found.append(_norms_of(given))
    landmarks, *means = torch.stack(found).mean(0).tolist()
    return Norms(round(landmarks), size, *means)


def _norms_of(given: LayerInput) -> Tensor:
    """The number of landmarks, the rank and the four norms, averaged over heads: [6]."""
    A = landmark_matrix(given, exact=True)
    values, vectors = torch.linalg.eigh(A)
    kept = values > A.shape[-1] * torch.finfo(A.dtype).eps * values.amax(-1, keepdim=True)
    inverse = (vectors * torch.where(kept, 1 / values, 0)[..., None, :]) @ vectors.mT
    root = degrees(given).rsqrt()
    left, iterate, right = _plain_factors(given)
    # apart from zeros, P^T X P has the eigenvalues of G^1/2 X G^1/2 with G = P P^T
    half = _square_root(right @ left)
    normalized = root * iterate * root.mT
    matrices = [inverse, root * inverse * root.mT, half @ iterate @ half, half @ normalized @ half]
    norms = [torch.linalg.eigvalsh(matrix).abs().amax(-1) for matrix in matrices]
    counts = [values.new_tensor(A.shape[-1]), kept.sum(-1).double().mean()]
    return torch.stack([*counts, *(norm.mean() for norm in norms)])


def degrees(given: LayerInput) -> Tensor:
    """The row sums of A without its ridge: [B, heads, m, 1]."""
    A = landmark_matrix(given, exact=True, ridge=False)
    return A.sum(-1, keepdim=True)


def _square_root(G: Tensor) -> Tensor:
    """The square root of symmetric positive semi-definite matrices [..., m, m]."""
    values, vectors = torch.linalg.eigh(G)
    return (vectors * values.clamp(min=0).sqrt()[..., None, :]) @ vectors.mT


def _plain_factors(given: LayerInput) -> tuple[Tensor, Tensor, Tensor]:
    """P^T, Newton's iterate and P of a layer in float64, without SOFT++'s normalisation."""
    options = {**soft_operands(given), "normalize": False, "inverse": "newton"}
    left, iterate, right = soft_factors(**options)
    return left.double(), iterate.double(), right.double()


def growing_sizes(subject: Subject, *, factors: Sequence[float] = (1, 1.25, 1.5, 2, 3)) -> list[int]:
    """Image sides from the subject's own size to three times that, each a multiple of the landmark cells."""
    own, step = int(subject.settings["image_size"]), _pixels_of_a_cell(subject)
    return sorted({max(round(own * factor / step), 1) * step for factor in factors})


def _pixels_of_a_cell(subject: Subject) -> int:
    layer = soft_layers(subject)[0]
    attention: Any = layer.attention
    (given,), _ = subject.look(
        torch.zeros(1, len(subject.settings["mean"]), *[subject.settings["image_size"]] * 2), [layer]
    )
    return int(subject.settings["image_size"] // given.grid_size[0] * attention.core.landmarks.plan.ratio[0])


def plot_spectrum(results: dict[str, Spectrum]) -> Any:
    """Draw a row of three panels for each model."""
    figure, axes = new_axes(len(results), 3, figsize=(14.5, 4.1 * len(results)))
    for (left, middle, right), (name, one) in zip(axes, results.items(), strict=True):
        for color, values in zip(PALETTE, one.eigenvalues, strict=False):
            places = range(1, len(values.mean) + 1)
            left.fill_between(places, values.lowest, values.highest, color=color, alpha=0.15, linewidth=0)
            label = f"{values.layer}: m = {len(values.mean)}"
            left.plot(
                places, values.mean, color=color, linewidth=2, marker="." if len(places) == 1 else "", label=label
            )
        left.set_yscale("log")
        left.set_xlabel("eigenvalue, the largest first")
        left.legend(frameon=False, fontsize=9)
        tidy(left)
        left.set_title(f"{name}: eigenvalues of A", loc="left", fontsize=11)
        _plot_norms(middle, one, {"inverse": r"$\|A^+\|$", "normalized": r"$\|D^{-1/2} A^+ D^{-1/2}\|$"})
        middle.set_title(f"{one.layer}: norm of the inverse", loc="left", fontsize=11)
        labels = {"attention": r"SOFT: $\|P^T A_T P\|$"}
        labels["attention_normalized"] = r"SOFT++: $\|P^T D^{-1/2} A_T D^{-1/2} P\|$"
        _plot_norms(right, one, labels)
        right.set_title(f"{one.layer}: norm of the attention", loc="left", fontsize=11)
    return figure


def _plot_norms(axis: Any, one: Spectrum, labels: dict[str, str]) -> None:
    for (name, label), color in zip(labels.items(), ("#d9622b", "#0b6e99"), strict=True):
        exponent = one.exponent(name)
        grows = "" if exponent is None else rf" $\sim m^{{{exponent:.2f}}}$"
        points = [(norm.landmarks, getattr(norm, name)) for norm in one.norms]
        axis.plot(*zip(*points, strict=True), color=color, linewidth=2, label=label + grows)
        for norm, point in zip(one.norms, points, strict=True):
            full = name.startswith("attention") or norm.rank == norm.landmarks
            axis.plot(*point, "o", color=color, markerfacecolor=color if full else "white", markersize=6)
    log_ticks(axis, [norm.landmarks for norm in one.norms])
    axis.set_xlabel("landmarks m")
    axis.legend(frameon=False, fontsize=9)
    tidy(axis)
