"""How one attention layer's cost grows with the image."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from softline.attention import create_attention
from softline.bench.cost import count_macs, peak_bytes
from softline.bench.turns import take_turns
from softline.layers.grid import GridSize


@dataclass(frozen=True)
class ScalingRow:
    """One attention at one image size, forward pass, batch 1."""

    image_size: int
    tokens: int
    attention: str
    milliseconds: float
    macs: int
    peak_bytes: int
    output_mean: float
    output_std: float


def measure_scaling(
    attentions: Sequence[str],
    image_sizes: Sequence[int],
    *,
    dim: int = 64,
    num_heads: int = 2,
    patch_size: int = 8,
    rounds: int = 3,
) -> Iterator[list[ScalingRow]]:
    """Cost of each attention layer on square images, one list of rows for each image size, smallest first.

    Attentions take turns within a round and the median of the rounds counts, so that a busy moment of the machine
    meets all of them.
    """
    for image_size in image_sizes:
        if image_size < patch_size:
            raise ValueError(f"image size must be at least one patch of {patch_size} pixels, got {image_size}")
    torch.manual_seed(0)
    layers = {name: create_attention(name, dim, num_heads).eval() for name in attentions}
    for image_size in sorted(image_sizes):
        side = image_size // patch_size
        x = torch.randn(1, side * side, dim)
        runs = {name: _forward(layer, x, (side, side)) for name, layer in layers.items()}
        seconds = take_turns(runs, rounds)
        yield [_row(image_size, side * side, name, run, 1e3 * seconds[name]) for name, run in runs.items()]


def growth_exponent(tokens: Sequence[int], costs: Sequence[float]) -> float:
    """The p of cost ~ tokens^p, fitted by least squares on both logarithms: 1 is linear, 2 quadratic."""
    if len(tokens) < 2:
        raise ValueError(f"an exponent needs at least 2 sizes, got {len(tokens)}")
    x, y = [math.log(t) for t in tokens], [math.log(c) for c in costs]
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - x_mean) ** 2 for a in x)


def _forward(layer: nn.Module, x: Tensor, grid_size: GridSize) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.no_grad():
            out: Tensor = layer(x, grid_size)
        return out

    return run


def _row(image_size: int, tokens: int, name: str, run: Callable[[], Tensor], milliseconds: float) -> ScalingRow:
    out = run()
    return ScalingRow(
        image_size=image_size,
        tokens=tokens,
        attention=name,
        milliseconds=milliseconds,
        macs=count_macs(run),
        peak_bytes=peak_bytes(run),
        output_mean=out.mean().item(),
        output_std=out.std().item(),
    )
