"""Sentences about the numbers of a comparison, computed from them, as plain text."""

from collections.abc import Mapping, Sequence

from softline.analysis.heatmap import HeatMap
from softline.experiments.compare import VariantResult
from softline.measure.growth import growth_exponent
from softline.measure.scaling import ScalingRow
from softline.plotting.colors import label_of
from softline.report.examples import Example

WORTH_NAMING = 0.03
"""Accuracy that attention must add for the comparison to say something about attention."""


def uncertainty(rows: Sequence[VariantResult], test_images: int) -> str:
    """How far apart two accuracies must be to be different."""
    best = max((row.mean for row in rows if row.mean is not None), default=None)
    if best is None:
        return ""
    error = 100 * (best * (1 - best) / test_images) ** 0.5
    return (
        f"On {test_images:,} test images an accuracy of {100 * best:.0f} % has a standard error of {error:.1f} points: "
        "smaller differences are noise."
    )


def switched_off(rows: Sequence[VariantResult], without: Mapping[str, float]) -> str:
    """How much of the accuracies is due to attention."""
    gains = {row.name: row.mean - without[row.name] for row in rows if row.mean is not None and row.name in without}
    if not gains:
        return ""
    parts = [f"{label_of(name)} {signed(100 * gain, '+.1f')}" for name, gain in gains.items()]
    verdict = (
        "These accuracies therefore show that every variant trains, not which attention is better: here the "
        "convolutions do the work."
        if max(gains.values()) < WORTH_NAMING
        else "This is how much the trained network depends on it."
    )
    return (
        "“Attention off” is the trained network with everything that its attention gathers replaced by zeros; a class "
        "token, if the classifier reads one, then sees nothing of the image. "
        f"Points that attention adds: {', '.join(parts)}. {verdict}"
    )


def small_images(rows: Sequence[VariantResult], image_size: int, tokens: int | None) -> str:
    """How fast the other attentions train, relative to the first, at the size of the training images."""
    baseline, *others = rows
    if not others:
        return ""
    speeds = [
        f"{label_of(row.name)} trains at {row.cost.train_per_second / baseline.cost.train_per_second:.2f} times"
        for row in others
    ]
    counted = "" if tokens is None else f" ({tokens} tokens)"
    return (
        f"At {image_size} x {image_size} pixels{counted} linear cost saves next to nothing: {enumerated(speeds)} the "
        f"speed of {label_of(baseline.name)}. It pays off on larger images."
    )


def crossings(rows: Sequence[ScalingRow]) -> str:
    """From which size each attention is faster than the first, and by how much at the largest size."""
    (first, baseline), *others = _by_attention(rows).items()
    return " ".join(_crossing(label_of(name), group, label_of(first), baseline) for name, group in others)


def _crossing(name: str, group: Sequence[ScalingRow], first: str, baseline: Sequence[ScalingRow]) -> str:
    gains = [base.milliseconds / row.milliseconds for base, row in zip(baseline, group, strict=True)]
    start = next((index for index in range(len(gains)) if min(gains[index:]) > 1), None)
    if start is None:
        return f"{name} was faster than {first} at none of these sizes."
    size, largest = group[start].image_size, group[-1].image_size
    memory = baseline[-1].peak_bytes / max(group[-1].peak_bytes, 1)
    return (
        f"{name} was faster than {first} from {size} x {size} pixels ({group[start].tokens:,} tokens) on; at "
        f"{largest} x {largest} it took {milliseconds(group[-1].milliseconds)} instead of "
        f"{milliseconds(baseline[-1].milliseconds)} "
        f"({gains[-1]:.3g} times as fast), with {memory_ratio(memory)}."
    )


def exponents(rows: Sequence[ScalingRow]) -> str:
    """How operations grow between the two largest sizes, where constant costs count least."""
    parts = []
    for name, group in _by_attention(rows).items():
        if len(group) < 2:
            return ""
        power = growth_exponent([row.tokens for row in group[-2:]], [row.macs for row in group[-2:]])
        parts.append(f"{power:.2f} for {label_of(name)}")
    return f"Between the two largest sizes operations grow as the number of tokens to the power of {enumerated(parts)}."


def faint_weights(examples: Sequence[Example]) -> str:
    """Which attentions pass on next to nothing in these maps."""
    sentences = []
    for name, group in maps_by_name(examples).items():
        largest = max(abs(float(one.values.sum())) for one in group)
        if largest < 0.01:
            sentences.append(
                f"The weights of {label_of(name)} add up to at most {largest:.1g} in these rows, where a row of "
                "softmax adds up to 1: after such a short training the attention of this layer passes on next to "
                "nothing, and the colours only show how that is distributed."
            )
    return " ".join(sentences)


def maps_by_name(examples: Sequence[Example]) -> dict[str, list[HeatMap]]:
    return {name: [example.maps[name] for example in examples] for name in examples[0].maps}


def negative_weights(maps: Mapping[str, Sequence[HeatMap]]) -> str:
    """Which attentions have negative weights in these maps, which are given by attention."""
    names = [label_of(name) for name, group in maps.items() if any(float(one.values.min()) < 0 for one in group)]
    return f"Negative weights, which softmax cannot have, occur here in {enumerated(names)}." if names else ""


def _by_attention(rows: Sequence[ScalingRow]) -> dict[str, list[ScalingRow]]:
    names = dict.fromkeys(row.attention for row in rows)
    return {name: [row for row in rows if row.attention == name] for name in names}


# numbers as text


def milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def memory_ratio(ratio: float) -> str:
    return f"{1 / ratio:.0%} of the memory" if ratio >= 1.5 else f"{1 / ratio:.1f} times the memory"


def percent(fraction: float | None) -> str:
    return "diverged" if fraction is None else f"{100 * fraction:.1f} %"


def signed(value: float, form: str = ".3g") -> str:
    return f"{value:{form}}".replace("-", "\N{MINUS SIGN}")


def verdict(predicted: str, probability: float, label: str | None) -> str:
    """A prediction, and whether it is right if there is a label."""
    mark = "" if label is None else "✓ " if predicted == label else "✗ "
    return f"{mark}{predicted}, {100 * probability:.0f} %"


def weight_range(heat_map: HeatMap) -> str:
    """The smallest and the largest weight."""
    return f"{signed(float(heat_map.values.min()))} … {signed(float(heat_map.values.max()))}"


def enumerated(parts: Sequence[str]) -> str:
    """Join parts as in a sentence: "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
