"""Sentences about the numbers of a linearisation, computed from them, as plain text."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from timm.utils import natural_key

from softline.linearizing.cost import LINEARIZED, ORIGINAL
from softline.linearizing.measuring import Scores
from softline.linearizing.work import Linearized, ModelStep
from softline.measure.measuring import Row
from softline.report.findings import enumerated, memory_ratio, milliseconds, percent, signed
from softline.report.linearization_maps import MapExample

STEADY = 2.0
"""Points of agreement that may be lost on larger images before the page says that it falls."""
ALIKE = 1.05
"""Times as fast, or times the memory, up to which two models are called alike."""


# what a result holds


def step_named(result: Linearized, *names: str) -> ModelStep | None:
    """Return the step of the first of these names that the result has."""
    return next((step for name in names for step in result.steps if step.name == name), None)


def scores_at(step: ModelStep, size: int) -> Scores:
    return next(scores for scores in step.scores if scores.size == size)


def usable_sizes(result: Linearized) -> list[int]:
    """Return the image sizes at which the linearised model could be measured, smallest first."""
    return sorted(scores.size for scores in result.steps[-1].scores if scores.agreement is not None)


def main_size(result: Linearized) -> int | None:
    """Return the size of the training images if it was measured, otherwise the smallest; None if all sizes failed."""
    sizes = usable_sizes(result)
    trained: int = next(iter(result.recipes.values()))["data"]["image_size"]
    return trained if trained in sizes else next(iter(sizes), None)


def sort_layers(names: Iterable[str]) -> list[str]:
    """Sort names of layers as a network has them: blocks.2 before blocks.10."""
    return sorted(names, key=natural_key)


class CostPair(NamedTuple):
    """Time and memory of both models at one size."""

    original: Row
    linearized: Row


def cost_pairs(result: Linearized) -> list[CostPair]:
    """Return the costs at each size, smallest first."""
    rows = {(row.case, row.size): row for row in result.cost}
    sizes = sorted({row.size for row in result.cost})
    return [CostPair(rows[ORIGINAL, size], rows[LINEARIZED, size]) for size in sizes]


# accuracy


def distance(result: Linearized) -> str:
    """How far the linearised model is from the original, at the size of the training images."""
    size = main_size(result)
    if size is None:
        return "The model could not be measured at any of these image sizes."
    before, after = (scores_at(step, size) for step in (result.steps[0], result.steps[-1]))
    assert after.agreement is not None, "measured"
    same = f"gives {percent(after.agreement)} of the validation images the class that the original gives them"
    if before.top1 is None or after.top1 is None:
        return f"At {square(size)} the linearised model {same}."
    points = 100 * (after.top1 - before.top1)
    compared = f"is {abs(points):.1f} points {'less' if points < 0 else 'more'} accurate than the original"
    if abs(points) < 0.05:
        compared = "is as accurate as the original"
    return (
        f"At {square(size)} the linearised model {compared} ({percent(after.top1)} instead of {percent(before.top1)} "
        f"top-1), and {same}."
    )


def progress(result: Linearized) -> str:
    """How each step changed the agreement, at the size of the training images."""
    size = main_size(result)
    when = {
        "replaced": "with the new attention and the old weights",
        "transferred": "after transfer",
        "mixed": f"with {_layers(len(result.effects) - len(result.replaced))} as before",
        "finetuned": "after fine-tuning",
    }
    reached = [
        f"{percent(scores.agreement)} {when[step.name]}"
        for step in result.steps[1:]
        for scores in step.scores
        if scores.size == size and scores.agreement is not None
    ]
    return f"This agreement was {enumerated(reached)}." if len(reached) > 1 else ""


def larger_images(result: Linearized) -> str:
    """Whether images with more pixels than those of the training keep the agreement."""
    size, sizes = main_size(result), usable_sizes(result)
    if size is None or sizes[-1] <= size:
        return ""
    near, far = (scores_at(result.steps[-1], one).agreement for one in (size, sizes[-1]))
    assert near is not None, "measured"
    assert far is not None, "measured"
    points = 100 * (far - near)
    numbers = f"at {square(sizes[-1])} it is {percent(far)} ({signed(points, '+.1f')} points)"
    if points < -STEADY:
        return f"The agreement falls on larger images: {numbers}. If you need that size, train at it."
    return f"Larger images keep the agreement: {numbers}."


def failures(result: Linearized) -> str:
    """Why images of some sizes could not be used."""
    reasons = {scores.size: scores.failure for step in result.steps for scores in step.scores if scores.failure}
    return " ".join(
        f"Images of {square(size)} could not be used: {ended(reason)}" for size, reason in sorted(reasons.items())
    )


# layers


def layer_errors(result: Linearized) -> str:
    """How close each new attention is to the old one."""
    before, after = step_named(result, "replaced"), step_named(result, "transferred", "mixed")
    if before is None or not before.errors:
        return ""
    if after is None or not after.errors:
        return f"Before any training the relative error of a layer is {fmean(before.errors.values()):.2f} on average."
    ranked = sorted(after.errors, key=lambda layer: after.errors[layer])
    nearest, furthest = (f"{layer} ({after.errors[layer]:.2f})" for layer in (ranked[0], ranked[-1]))
    # layers that got their attention back have no error afterwards
    start, end = (fmean(errors[layer] for layer in ranked) for errors in (before.errors, after.errors))
    return (
        f"Transfer brings the mean error from {start:.2f} to {end:.2f}; the layer closest to what it replaces is "
        f"{nearest}, the one furthest from it {furthest}."
    )


def layer_effects(result: Linearized) -> str:
    """Which layers change the output most, and which of them kept their attention."""
    if not result.effects:
        return ""
    kept = [effect.layer for effect in result.effects if effect.layer in result.kept]
    ranked = sorted(result.effects, key=lambda effect: effect.divergence)
    least, most = (f"{effect.layer} (divergence {effect.divergence:.3f})" for effect in (ranked[0], ranked[-1]))
    chosen = f" The original attention was therefore kept in {enumerated(kept)}." if kept else ""
    return f"Replacing a single layer changes the output most in {most} and least in {least}.{chosen}"


# cost


def speed(pairs: Sequence[CostPair]) -> str:
    """From which size on the linearised model is faster, and by how much at the largest size."""
    timed = [pair for pair in pairs if pair.linearized.speedup is not None]
    if not timed:
        return ""
    gains = [pair.linearized.speedup or 0.0 for pair in timed]
    start = next((index for index in range(len(gains)) if min(gains[index:]) > ALIKE), None)
    sizes = [square(pair.linearized.size) for pair in timed]
    largest = f"at {sizes[-1]} {_takes(timed[-1])}"
    if start is None:
        return f"The linearised model is no faster than the original at these sizes: {largest}."
    where = f"from {sizes[start]} on" if start else "at all of these sizes"
    faster = f"The linearised model is faster {where}: {largest}."
    if start == len(timed) - 1:
        faster = f"The linearised model is faster at {sizes[-1]}, where {_takes(timed[-1])}."
    if start:
        faster += (
            " On smaller images attention is a smaller part of the work, and there is less to gain: at "
            f"{sizes[start - 1]} {_takes(timed[start - 1])}."
        )
    return faster


def _takes(pair: CostPair) -> str:
    before, after = pair
    assert before.milliseconds is not None, "timed"
    assert after.milliseconds is not None, "timed"
    assert after.speedup is not None, "timed"
    times = f"{after.speedup:.2f} times as fast" if after.speedup >= 1 else f"{1 / after.speedup:.2f} times as long"
    memory = ""
    if before.peak_bytes and after.peak_bytes:
        ratio = before.peak_bytes / after.peak_bytes
        alike = 1 / ALIKE < ratio < ALIKE
        memory = f", with {'about the same memory' if alike else memory_ratio(ratio)}"
    took = f"{milliseconds(after.milliseconds)} instead of {milliseconds(before.milliseconds)}"
    return f"it takes {took} ({times}){memory}"


def impossible(pairs: Sequence[CostPair]) -> str:
    """Which model could not be measured at which size, and why."""
    named = ("The original", "The linearised model")
    return " ".join(
        f"{name} could not be measured at {square(row.size)}: {ended(row.failure)}"
        for pair in pairs
        for name, row in zip(named, pair, strict=True)
        if row.failure
    )


# maps


def likeness(maps: Sequence[MapExample]) -> str:
    """How alike the maps of both models are, by layer."""
    parts = []
    for layer in maps[0].maps:
        pairs = [torch.stack([one.values.flatten() for one in example.maps[layer]]) for example in maps]
        # an even map has no correlation with any other
        found = [value for pair in pairs if math.isfinite(value := float(torch.corrcoef(pair)[0, 1]))]
        if found:
            parts.append(f"{signed(fmean(found), '.2f')} in {layer}")
    if not parts:
        return ""
    return (
        f"The correlation of both maps, averaged over these images, is {enumerated(parts)}; 1 would be the same "
        "pattern, 0 two that have nothing in common."
    )


# numbers as text


def square(size: int) -> str:
    return f"{size} x {size} pixels"


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def ended(sentence: str) -> str:
    """End a sentence with one full stop."""
    return f"{sentence.rstrip('.')}."
