"""Tables as aligned text, and the numbers in them."""

from collections.abc import Sequence

from softline.cli.terminal import one_line


class Table:
    """Aligned columns, two spaces apart, for tables that are printed line by line.

    header: names of the columns.
    widths: smallest width of each column; a column is at least as wide as its name.
    left: number of columns, counted from the first, that are aligned on the left; the others are on the right.
    """

    def __init__(self, header: Sequence[str], *, widths: Sequence[int] = (), left: int = 1) -> None:
        least = [*widths, *[0] * (len(header) - len(widths))]
        self.widths = [max(len(name), width) for name, width in zip(header, least, strict=True)]
        self.left = left
        self.head = self.line(header)

    def line(self, cells: Sequence[str]) -> str:
        """Align the cells of a line, which may have fewer of them than the header."""
        shown = map(one_line, cells)
        placed = [
            cell.ljust(width) if column < self.left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(shown, self.widths, strict=False))
        ]
        return "  ".join(placed).rstrip()


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Align a whole table; see `Table`."""
    widths = [max(len(one_line(row[column])) for row in [header, *rows]) for column in range(len(header))]
    table = Table(header, widths=widths, left=left)
    return "\n".join([table.head, *(table.line(row) for row in rows)])


def number(value: float | None, form: str, suffix: str = "", *, unit: float = 1) -> str:
    """Format a number; a dash stands for one that was not measured."""
    return "-" if value is None else f"{value / unit:{form}}{suffix}"


def percent(fraction: float | None) -> str:
    """Format a fraction in percent; "none" where there is nothing to measure, for which COCO's metrics give -1."""
    return "none" if fraction is None or fraction < 0 else f"{100 * fraction:.2f} %"


def metric_text(name: str, value: float) -> str:
    """Format a metric: losses as they are, all others in percent."""
    return f"{value:.4f}" if is_loss(name) else percent(value)


def metrics_text(metrics: dict[str, float]) -> str:
    """Put metrics into one line."""
    return "  ".join(f"{name} {metric_text(name, metrics[name])}" for name in sorted(metrics, key=is_loss))


def is_loss(name: str) -> bool:
    """Return whether a metric of this name is a loss, which is printed after the others; the others are fractions."""
    return name.endswith("loss")


def rate(per_second: float) -> str:
    """Format a number of samples per second, with decimals if it is small."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.2f}"


def duration(seconds: float) -> str:
    """Format seconds as minutes, and hours if there are any: 2:05, 1:00:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
