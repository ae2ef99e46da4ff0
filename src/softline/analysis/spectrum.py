"""The spectrum of SOFT's landmark kernel, and why SOFT++ normalises: Fig. 6 of the SOFT paper.

The figure shows the eigenvalues of A; the spectral norms ||A^+||_2 and ||D^-1/2 A^+ D^-1/2||_2, D = diag(A 1), over the
number of landmarks m; and the norm of the attention itself, P^T X P with Newton's iterate X in place of A^+, with and
without D^-1/2 on both sides of X. An attention with a ridge inverts A + ridge I. m grows with the image, because the
landmark grid is not capped here: it has the paper's fixed ratio. A number of landmarks that is no square, such as the
paper's 200, needs an image that is wider than high; its sides differ by a factor of 2 at most.

A^+ is the pseudo-inverse in float64 without the eigenvalues below m roundings of the largest. Where such eigenvalues
exist, A is singular as far as float64 can tell, and ||A^+|| only shows where the cut lies: these points are hollow in
the figure, and no exponent is fitted to them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from softline.analysis.newton import landmark_matrix, soft_layers, soft_operands
from softline.analysis.subjects import ImageSize, Picture, Subject
from softline.attention.hooks import uncapped_landmarks
from softline.backbones.inspection import Layer, LayerInput, one_of_each_stage
from softline.checks import check_at_least
from softline.errors import UserError
from softline.measure.growth import growth_exponent
from softline.ops.soft import soft_factors
from softline.plotting.colors import PALETTE
from softline.plotting.figures import log_ticks, new_axes, tidy

NORMS = ("inverse", "normalized", "attention", "attention_normalized")
"""The norms of `Norms`."""
WIDEST = 2
"""Largest ratio of the sides of an image that is made for a number of landmarks."""


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
    image_size: ImageSize
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
    samples: dict[str, list[float]]
    """Each of these norms for every image and head."""


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
    subject: Subject,
    pictures: Sequence[Picture],
    *,
    sizes: Sequence[ImageSize] | None = None,
    landmarks: Sequence[int] | None = None,
    layer: int = 0,
    size: int | None = None,
) -> Spectrum:
    """Compute the eigenvalues of the first SOFT layer of each stage, and the norms of one layer over growing images.

    sizes: image sizes at which the norms are computed; defaults to `growing_sizes`.
    landmarks: numbers of landmarks at which the norms are computed, instead of sizes. The eigenvalues are then those of
        the same layer at the largest number.
    layer: index of that layer among the SOFT layers.
    size: side of the images for the eigenvalues of each stage; it has no meaning with ``landmarks``.
    """
    chosen = _chosen_layer(subject, layer)
    if landmarks is None:
        found = [_at_size(subject, pictures, chosen, side) for side in sizes or growing_sizes(subject)]
        eigenvalues = _stage_eigenvalues(subject, pictures, size)
    else:
        if sizes is not None or size is not None:
            raise UserError("the number of landmarks decides the image size: give landmarks, or sizes, but not both")
        found = []
        for count, side in landmark_sizes(subject, landmarks, layer=layer).items():
            found.append(_at_size(subject, pictures, chosen, side))
            if found[-1][0].landmarks != count:
                raise UserError(
                    f"landmarks must grow with the image: {chosen.name} of {subject.name} has "
                    f"{found[-1][0].landmarks} of them, not {count}, for an image of {side[0]} x {side[1]} pixels"
                )
        eigenvalues = [_eigenvalues(chosen, found[-1][1])]
    return Spectrum(eigenvalues, [norms for norms, _ in found], chosen.name)


def _chosen_layer(subject: Subject, layer: int) -> Layer:
    layers = soft_layers(subject)
    if not -len(layers) <= layer < len(layers):
        raise UserError(f"layer must be below {len(layers)}, the SOFT layers of {subject.name}; got {layer}")
    return layers[layer]


def _stage_eigenvalues(subject: Subject, pictures: Sequence[Picture], size: int | None) -> list[Eigenvalues]:
    first = one_of_each_stage(soft_layers(subject))
    found: list[list[Tensor]] = [[] for _ in first]
    for picture in pictures:
        seen, _ = subject.look(subject.prepare(picture.image, size)[None], first)
        for values, given in zip(found, seen, strict=True):
            values.append(torch.linalg.eigvalsh(landmark_matrix(given, exact=True)).flatten(0, 1))
    return [_eigenvalues(one, torch.cat(values)) for one, values in zip(first, found, strict=True)]


def _eigenvalues(layer: Layer, values: Tensor) -> Eigenvalues:
    """Summarise eigenvalues [matrices, m], the largest last."""
    values = values.flip(-1)
    return Eigenvalues(layer.name, values.mean(0).tolist(), values.amin(0).tolist(), values.amax(0).tolist())


@torch.no_grad()
def _at_size(subject: Subject, pictures: Sequence[Picture], layer: Layer, size: ImageSize) -> tuple[Norms, Tensor]:
    """The norms of a layer, and the eigenvalues of its kernels [matrices, m], for images of one size."""
    ranks, norms, eigenvalues = [], [], []
    with uncapped_landmarks(layer.attention):
        for picture in pictures:
            (given,), _ = subject.look(subject.prepare(picture.image, size)[None], [layer])
            found = _norms_of(given)
            ranks.append(found[0])
            norms.append(found[1])
            eigenvalues.append(found[2])
    samples = torch.cat(norms)  # [images * heads, 4]
    means = dict(zip(NORMS, samples.mean(0).tolist(), strict=True))
    each = dict(zip(NORMS, samples.mT.tolist(), strict=True))
    values = torch.cat(eigenvalues)
    rank = float(torch.cat(ranks).double().mean())
    return Norms(landmarks=values.shape[-1], image_size=size, rank=rank, samples=each, **means), values


def _norms_of(given: LayerInput) -> tuple[Tensor, Tensor, Tensor]:
    """The rank [B * heads], the four norms [B * heads, 4] and the eigenvalues [B * heads, m] of every kernel."""
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
    return kept.sum(-1).flatten(), torch.stack(norms, -1).flatten(0, 1), values.flatten(0, 1)


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
    own, (step, _) = int(subject.settings["image_size"]), _pixels_of_a_cell(subject, soft_layers(subject)[0])
    return sorted({max(round(own * factor / step), 1) * step for factor in factors})


def landmark_sizes(subject: Subject, counts: Sequence[int], *, layer: int = 0) -> dict[int, tuple[int, int]]:
    """The height and width in pixels of images that give a SOFT layer these numbers of landmarks, the fewest first.

    The landmark grid is the one closest to a square; its sides differ by a factor of 2 at most.
    layer: index of the layer among the SOFT layers.
    """
    height, width = _pixels_of_a_cell(subject, _chosen_layer(subject, layer))
    sizes = {}
    for count in sorted(set(counts)):
        check_at_least("landmarks", count, 1)
        grid = _landmark_grid(count)
        if grid is None:
            raise UserError(
                f"landmarks must be rows * columns with columns <= {WIDEST} * rows, got {count}; {_near(count)}"
            )
        sizes[count] = (grid[0] * height, grid[1] * width)
    return sizes


def _landmark_grid(count: int) -> tuple[int, int] | None:
    """Rows and columns of the grid of ``count`` landmarks that is closest to a square; None if it is too wide."""
    rows = next(rows for rows in range(math.isqrt(count), 0, -1) if count % rows == 0)
    return (rows, count // rows) if count // rows <= WIDEST * rows else None


def _near(count: int) -> str:
    """The attainable numbers of landmarks next to one that is not."""
    below = next(one for one in range(count - 1, 0, -1) if _landmark_grid(one))
    above = next(one for one in range(count + 1, 4 * count) if _landmark_grid(one))
    return f"the nearest are {below} and {above}"


def _pixels_of_a_cell(subject: Subject, layer: Layer) -> tuple[int, int]:
    """Height and width of the part of the image that gives one landmark."""
    attention: Any = layer.attention
    side = int(subject.settings["image_size"])
    (given,), _ = subject.look(torch.zeros(1, len(subject.settings["mean"]), side, side), [layer])
    rows, columns = (
        side // tokens * cell for tokens, cell in zip(given.grid_size, attention.core.landmarks.plan.ratio, strict=True)
    )
    return rows, columns


def plot_spectrum(results: dict[str, Spectrum], *, samples: bool = False, linear: bool = False) -> Any:
    """Draw a row of three panels for each model.

    samples: whether to mark the norm of every image and head by a "+", as the paper does.
    linear: whether the axes are linear, as in the paper, or logarithmic.
    """
    figure, axes = new_axes(len(results), 3, figsize=(14.5, 4.1 * len(results)))
    for (left, middle, right), (name, one) in zip(axes, results.items(), strict=True):
        for color, values in zip(PALETTE, one.eigenvalues, strict=False):
            places = range(1, len(values.mean) + 1)
            left.fill_between(places, values.lowest, values.highest, color=color, alpha=0.15, linewidth=0)
            label = f"{values.layer}: m = {len(values.mean)}"
            left.plot(
                places, values.mean, color=color, linewidth=2, marker="." if len(places) == 1 else "", label=label
            )
        left.set_yscale("linear" if linear else "log")
        left.set_xlabel("eigenvalue, the largest first")
        left.legend(frameon=False, fontsize=9)
        tidy(left)
        left.set_title(f"{name}: eigenvalues of A", loc="left", fontsize=11)
        shown = {"samples": samples, "linear": linear}
        _plot_norms(middle, one, {"inverse": r"$\|A^+\|$", "normalized": r"$\|D^{-1/2} A^+ D^{-1/2}\|$"}, **shown)
        middle.set_title(f"{one.layer}: norm of the inverse", loc="left", fontsize=11)
        labels = {"attention": r"SOFT: $\|P^T A_T P\|$"}
        labels["attention_normalized"] = r"SOFT++: $\|P^T D^{-1/2} A_T D^{-1/2} P\|$"
        _plot_norms(right, one, labels, **shown)
        right.set_title(f"{one.layer}: norm of the attention", loc="left", fontsize=11)
    return figure


def _plot_norms(axis: Any, one: Spectrum, labels: dict[str, str], *, samples: bool, linear: bool) -> None:
    for (name, label), color in zip(labels.items(), ("#d9622b", "#0b6e99"), strict=True):
        exponent = one.exponent(name)
        grows = "" if exponent is None else rf" $\sim m^{{{exponent:.2f}}}$"
        points = [(norm.landmarks, getattr(norm, name)) for norm in one.norms]
        axis.plot(*zip(*points, strict=True), color=color, linewidth=2, label=label + grows)
        for norm, point in zip(one.norms, points, strict=True):
            full = name.startswith("attention") or norm.rank == norm.landmarks
            axis.plot(*point, "o", color=color, markerfacecolor=color if full else "white", markersize=6)
            if samples:
                every = norm.samples[name]
                axis.plot([norm.landmarks] * len(every), every, "+", color=color, markersize=7, alpha=0.7)
    landmarks = [norm.landmarks for norm in one.norms]
    if linear:
        axis.set_xticks(landmarks)
        axis.set_ylim(bottom=0)
    else:
        log_ticks(axis, landmarks)
    axis.set_xlabel("landmarks m")
    axis.legend(frameon=False, fontsize=9)
    tidy(axis)
