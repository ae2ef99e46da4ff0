"""An exported network against its original, on the same inputs: differences and time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from softline.engine.graph import BATCH, HEIGHT, LENGTH, WIDTH, Graph, Sizes
from softline.errors import UserError
from softline.measure.turns import take_turns

BATCHES = (1, 3)
ROUNDS = 5
# scores that differ by no more have no order
SAME_SCORE = 1e-5
# largest difference, relative to the largest output
TOLERANCES = {"fp32": 1e-4, "fp16": 2e-2, "int8": 0.2}


@dataclass(frozen=True)
class ParityRow:
    """An exported network and its original on one input."""

    sizes: dict[str, int]
    difference: float
    """Largest difference of an output, relative to its largest absolute value."""
    agreement: float | None
    """Share of samples, or pixels, with the same most probable class; None if the outputs are no classes."""
    milliseconds: dict[str, float]
    """Median time of one run by way of running: eager, exported, and compiled if it was measured."""


def compare(
    graph: Graph, runs: Mapping[str, Callable[[Tensor], Any]], sizes: Sequence[Sizes], *, rounds: int = ROUNDS
) -> list[ParityRow]:
    """Run an exported network and its original in turns on inputs of each size.

    runs: functions of the input, of which "eager" is the original and "exported" is compared with it.
    """
    found = []
    for lengths in sizes:
        x = graph.sample(lengths)
        with torch.no_grad():
            try:
                wanted = _tensors(runs["eager"](x))
            except AssertionError as error:
                # timm asserts that sizes are whole numbers of patches
                shown = " x ".join(str(lengths[axis]) for axis in graph.usual)
                raise UserError(f"the network cannot take an input of {shown} ({error}): fix the size") from error
            got = _tensors(runs["exported"](x))
            timings = take_turns({name: partial(run, x) for name, run in runs.items()}, rounds)
        found.append(
            ParityRow(
                dict(lengths),
                _largest_difference(graph, wanted, got),
                _agreement(graph, wanted, got),
                {name: 1e3 * timing.median for name, timing in timings.items()},
            )
        )
    return found


def sizes_to_compare(graph: Graph, fixed: Sizes) -> list[dict[str, int]]:
    """Choose sizes for a comparison: that of use, smaller, larger and oblong ones, as far as they are not fixed."""
    batches = [fixed[BATCH]] if BATCH in fixed else list(BATCHES) if BATCH in graph.axes else [1]
    chosen = []
    if LENGTH in graph.usual:
        usual, least = graph.usual[LENGTH], graph.least.get(LENGTH, 1)
        places = [{LENGTH: length} for length in dict.fromkeys((usual, max(usual // 2, least), max(usual // 3, least)))]
    else:
        height, width = graph.usual[HEIGHT], graph.usual[WIDTH]
        least = max(graph.least.get(HEIGHT, 1), 1)
        factors = ((1, 1), (0.9, 1.5), (1.2, 0.7), (2, 2))
        places = [{HEIGHT: max(int(a * height), least), WIDTH: max(int(b * width), least)} for a, b in factors]
        # the smallest grids
        places.append({HEIGHT: least, WIDTH: least})
    for place in places:
        lengths = {**place, **{axis: length for axis, length in fixed.items() if axis != BATCH}}
        if lengths not in chosen:
            chosen.append(lengths)
    return [{BATCH: batch, **lengths} for lengths in chosen for batch in batches]


def _tensors(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def _largest_difference(graph: Graph, wanted: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    if "boxes" not in graph.outputs:
        return max(_difference(a, b) for a, b in zip(wanted, got, strict=True))
    return _detection_difference(*(dict(zip(graph.outputs, found, strict=True)) for found in (wanted, got)))


def _detection_difference(wanted: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    """Compare each object with the most similar one, because equal scores have no order.

    Boxes are relative to the largest coordinate. Of objects whose score is that of the last one only the scores are
    compared: which of them are among those that are kept is arbitrary, as are all of a detector that has not learned.
    """
    if len(wanted["scores"]) != len(got["scores"]):
        return float("inf")
    if len(wanted["scores"]) == 0:
        return 0.0
    boxes = (wanted["boxes"][:, None] - got["boxes"]).abs().amax(-1) / wanted["boxes"].abs().max().clamp(min=1)
    pairs = torch.maximum(boxes, (wanted["scores"][:, None] - got["scores"]).abs())
    pairs = pairs.masked_fill(wanted["labels"][:, None] != got["labels"], torch.inf)
    if "masks" in wanted:
        masks = (wanted["masks"].flatten(1)[:, None] - got["masks"].flatten(1)).abs().amax(-1)
        pairs = torch.maximum(pairs, masks)
    certain = wanted["scores"] > wanted["scores"].min() + SAME_SCORE
    scores = (wanted["scores"].sort().values - got["scores"].sort().values).abs().max()
    return float(torch.cat([pairs[certain].amin(1), scores[None]]).max())


def _difference(wanted: Tensor, got: Tensor) -> float:
    if wanted.shape != got.shape:
        return float("inf")
    if wanted.numel() == 0:
        return 0.0
    largest = wanted.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float(((got.to(wanted.dtype) - wanted).abs().max() / largest).nan_to_num(nan=float("inf")))


def _agreement(graph: Graph, wanted: Sequence[Tensor], got: Sequence[Tensor]) -> float | None:
    if list(graph.outputs) != ["logits"] or wanted[0].shape != got[0].shape:
        return None
    return float((wanted[0].argmax(1) == got[0].argmax(1)).float().mean())


def compiled(network: nn.Module) -> Callable[[Tensor], Any]:
    """Compile a network for any size."""
    # graphs of other networks count towards torch's limit on recompilation
    torch.compiler.reset()
    return torch.compile(network, dynamic=True)
