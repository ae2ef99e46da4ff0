"""Show the figures of `softline analyze` in `docs/figures` with their numbers.

NAME.json next to a figure contains its numbers and the command that made it; the tables are made from it.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
STEPS = (0, 5, 10, 15, 20, 30)
NORMS = ("inverse", "normalized", "attention", "attention_normalized")

Table = tuple[list[str], list[list[str]]]


def figure(name: str, description: str) -> tuple[str, list[Table]]:
    """Return the Markdown of a figure and its command, and the tables of its numbers.

    name: the analysis, optionally followed by a suffix if there are several figures (``locality_deit``).
    """
    kind = name.partition("_")[0]
    # heat maps contain photographs
    image = FIGURES / f"{name}.{'png' if kind == 'heatmap' else 'svg'}"
    numbers = FIGURES / f"{name}.json"
    for path in (image, numbers):
        if not path.is_file():
            shown = path.relative_to(FIGURES.parents[1])
            raise ValueError(f"{shown} does not exist: create it with softline analyze {kind}")
    content = json.loads(numbers.read_text())
    # the output path does not influence the figure
    command = re.sub(r" --output \S+", "", content.pop("command"))
    if re.search(r"[ =]/", command):
        raise ValueError(f"{numbers.name} was made with absolute paths: {command}")
    # a click opens the figure alone and as large as the window, which phones need
    address = f"../figures/{image.name}"
    return f"[![{description}]({address})]({address})\n\nMade by `{command}`.", TABLES[kind](content)


def _newton(content: dict[str, Any]) -> list[Table]:
    rows = [
        [name, one["name"], str(one["landmarks"]), *(f"{one['mean'][step]:.1e}" for step in STEPS)]
        for name, stages in content["models"].items()
        for one in stages
    ]
    return [(["mean residual", "stage", "m", *(f"k = {step}" for step in STEPS)], rows)]


def _spectrum(content: dict[str, Any]) -> list[Table]:
    head = ["spectral norm", "m", "rank", "inverse", "normalised", "attention", "normalised"]
    rows = []
    for name, one in content["models"].items():
        for norm in one["norms"]:
            rows.append([name, str(norm["landmarks"]), f"{norm['rank']:g}", *(f"{norm[key]:.3g}" for key in NORMS)])
        powers = [one["exponents"][key] for key in NORMS]
        rows.append([name, "exponent p", "", *("-" if power is None else f"{power:.2f}" for power in powers)])
    return [(head, rows)]


def _injectivity(content: dict[str, Any]) -> list[Table]:
    head = [f"{content['images']} images", "confused pairs per image", "share of pairs that are far apart"]
    models = content["models"].items()
    return [(head, [[name, f"{one['mean']:,.1f}", f"{100 * one['share_of_far_pairs']:.3g} %"] for name, one in models])]


def _locality(content: dict[str, Any]) -> list[Table]:
    masses = [
        [name, one["layer"], "x".join(map(str, one["grid_size"])), f"{one['mass']:.3f}", f"{one['chance']:.3f}"]
        for name, layers in content["masses"].items()
        for one in layers
    ]
    tables = [(["", "layer", "grid", "local mass", "chance"], masses)]
    if content["accuracies"]:
        keys = [one["keys"] for one in next(iter(content["accuracies"].values()))]
        rows = [[name, *(f"{100 * one['top1']:.1f}" for one in found)] for name, found in content["accuracies"].items()]
        tables.append((["top-1 in percent, hidden keys", *keys], rows))
    return tables


def _cost(content: dict[str, Any]) -> list[Table]:
    tokens = sorted({one["tokens"] for one in content["costs"]})
    costs = {(one["attention"], one["tokens"]): one for one in content["costs"]}
    tables = []
    for key, title, unit in (("macs", "million multiply-adds", 1e6), ("peak_bytes", "peak MiB", 2**20)):
        rows = []
        for name, powers in content["exponents"].items():
            power = "-" if powers[key] is None else f"{powers[key]:.2f}"
            rows.append([f"`{name}`", *(f"{costs[name, count][key] / unit:,.1f}" for count in tokens), power])
        tables.append(([title, *(f"N = {count:,}" for count in tokens), "exponent p"], rows))
    return tables


def _accuracy(content: dict[str, Any]) -> list[Table]:
    rows = []
    for one in content["points"]:
        if one["kind"] != "published":
            published = next(other for other in content["points"] if other["name"] == one["name"])
            millions = [f"{point['parameters'] / 1e6:.1f}" for point in (published, one)]
            macs = (published["macs"], one["macs"] - one["newton_macs"], one["macs"])
            rows.append([one["name"], *millions, *(f"{count / 1e9:.1f}" for count in macs), f"{one['top1']:.1f}"])
    head = [
        "",
        "million parameters",
        "counted",
        "billion multiply-adds",
        "counted without Newton",
        "with Newton",
        "top-1",
    ]
    return [(head, rows)]


def _heatmap(content: dict[str, Any]) -> list[Table]:
    return []


TABLES: dict[str, Callable[[dict[str, Any]], list[Table]]] = {
    "heatmap": _heatmap,
    "newton": _newton,
    "spectrum": _spectrum,
    "injectivity": _injectivity,
    "locality": _locality,
    "cost": _cost,
    "accuracy": _accuracy,
}
