"""What figures share: axes, ticks and files. It needs matplotlib (extra ``train`` or ``explore``)."""

from functools import partial
from pathlib import Path
from typing import Any

from softline.files import write_whole

FORMATS = ("png", "svg")
FIGURE_ENDINGS = (".png", ".svg", ".pdf")
"""Names of files that `write_figure` can write."""


def new_axes(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    """A figure and its axes [rows, columns], drawn without a screen."""
    return plotting().subplots(rows, columns, squeeze=False, layout="constrained", **options)


def plotting() -> Any:
    """`matplotlib.pyplot` for drawing without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def tidy(axis: Any) -> None:
    """Remove the top and right edges and draw a light grid behind the data."""
    axis.grid(alpha=0.25)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def log_ticks(axis: Any, values: list[int]) -> None:
    """Make both axes logarithmic, with ticks at these values of x."""
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.minorticks_off()
    axis.set_xticks(values, [f"{value:,}" for value in values])


def write_figure(figure: Any, path: Path) -> None:
    """Write a figure to one file, in the format that its name tells, and close it."""
    write_whole(path, partial(figure.savefig, format=path.suffix[1:].lower(), dpi=160))
    plotting().close(figure)


def save_figure(figure: Any, directory: Path, name: str) -> list[Path]:
    """Write a figure as PNG and as SVG, and close it."""
    import matplotlib

    paths = [directory / f"{name}.{kind}" for kind in FORMATS]
    # the same numbers give the same file
    with matplotlib.rc_context({"svg.hashsalt": name}):
        for path, kind in zip(paths, FORMATS, strict=True):
            metadata = {"Date": None} if kind == "svg" else None
            write_whole(path, partial(figure.savefig, format=kind, dpi=160, metadata=metadata))
    plotting().close(figure)
    return paths
