"""One colour and one label for each attention, the same in every figure, report and page."""

from collections.abc import Sequence

COLORS = {"softmax": "#8c8c8c", "softpp": "#0b6e99", "inline": "#d9622b"}
"""Colours that no other attention or variant gets."""

LABELS = {
    "softmax": "softmax",
    "softmax-math": "softmax (math)",
    "gaussian": "Gaussian",
    "linear": "linear",
    "reformer": "Reformer",
    "efficient": "Efficient",
    "hydra": "Hydra",
    "focused": "FLatten",
    "angular": "Linear Angular",
    "enhanced": "Enhanced Linear",
    "soft": "SOFT",
    "softpp": "SOFT++",
    "inline": "InLine",
    "linformer": "Linformer",
    "performer": "Performer",
    "nystrom": "Nyströmformer",
}

PALETTE = (
    *("#0b6e99", "#d9622b", "#3c8d5a", "#8d5fb0", "#b8952a", "#c2487a", "#4b4b4b", "#5fb3ce"),
    *("#8fae3c", "#8b5a3c", "#3f51a3", "#e39ac0", "#1fa88f", "#d0b090", "#7a1f2b", "#9fb4c8"),
)
"""Colours for lines that are not attentions, in this order."""

WARM, COOL = (217, 98, 43), (11, 110, 153)
"""Red, green and blue of weights above and below the mean in heat maps."""


def comparison_colors(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name: softmax, SOFT++ and InLine have their own in every figure, the others take free ones."""
    free = [color for color in PALETTE if color not in COLORS.values()]
    others = [name for name in names if name not in COLORS]
    return {name: COLORS.get(name) or free[others.index(name) % len(free)] for name in names}


def label_of(name: str) -> str:
    """The label of an attention; any other name is its own label."""
    return LABELS.get(name, name)
