"""The numbers of the page as HTML."""

from collections.abc import Sequence
from html import escape

from softline.explorer.view import USUAL_SIZE, Answer, Cost, Details

LEGEND = '<div class="legend"><span>takes less than average</span><i></i><span>takes more</span></div>'


def answer_table(answer: Answer) -> str:
    """A table of what the map shows, and of the numbers that come with it."""
    height, width = answer.grid_size
    rows = [("Patches of this layer", f"{width} x {height}" + _class_token(answer))]
    if answer.residual is not None:
        rows.append(("Newton residual", f"{answer.residual:.1e}"))
    if answer.mass is None:
        rows.append(("Weight on the 3 x 3 patches around it", "all of it: there are no other patches"))
    else:
        assert answer.mean_mass is not None, "both are shares of the same grid"
        rows.append(("Weight on the 3 x 3 patches around it", _against_chance(answer.mass, answer.chance)))
        rows.append(("The same, mean over this layer", _against_chance(answer.mean_mass, answer.mean_chance)))
    rows.append(("Predicted", _predicted(answer)))
    return _table(rows)


def details_table(details: Details | None) -> str:
    """A table of the numbers that take longer; rows without numbers until they are known."""
    names = ("Time for one image", "Multiply-adds for one image")
    if details is None:
        return _table([(name, "...") for name in names])
    runs = "one run" if details.time.runs == 1 else f"median of {details.time.runs} runs"
    seconds = f"{1000 * details.time.seconds:,.0f} ms <small>whole model, {runs}</small>"
    return _table(list(zip(names, (seconds, _billions(details.cost.macs)), strict=True)))


def message(text: str) -> str:
    """A paragraph that says why there is nothing to show."""
    return f'<p class="message" role="alert">{escape(text)}</p>'


def cost_line(size: int, sides: Sequence[tuple[str, Cost]]) -> str:
    """Compare the multiply-adds of both sides at this size, and with those at 224 if it is another size.

    sides: names and costs.
    """
    if not sides:
        return ""
    largest = max(cost.macs for _, cost in sides)
    bars = "".join(
        f'<div class="bar {name.lower()}"><b>{name}</b><i style="width:{max(45 * cost.macs / largest, 1):.1f}%"></i>'
        f"<span>{_billions(cost.macs)}{_growth(size, cost)}</span></div>"
        for name, cost in sides
    )
    pixels = ""
    if size != USUAL_SIZE:
        pixels = f", {_times(size**2 / USUAL_SIZE**2)} the pixels of {USUAL_SIZE} x {USUAL_SIZE}"
    return f'<div class="cost"><p>Multiply-adds at {size} x {size}{pixels}:</p>{bars}</div>'


def _growth(size: int, cost: Cost) -> str:
    if size == USUAL_SIZE or cost.usual_macs is None:
        return ""
    return f" <small>{_times(cost.macs / cost.usual_macs)}</small>"


def _billions(macs: int) -> str:
    if macs < 1e8:
        return f"{macs / 1e6:,.1f} million"
    return f"{macs / 1e9:,.2f} billion" if macs < 1e10 else f"{macs / 1e9:,.0f} billion"


def _times(value: float) -> str:
    return f"{value:.2g}x" if value < 10 else f"{value:,.0f}x"


def _class_token(answer: Answer) -> str:
    height, width = answer.grid_size
    return " and a class token" if answer.tokens > height * width else ""


def _against_chance(mass: float, chance: float) -> str:
    return f"{_percent(mass)} <small>by chance {_percent(chance)}</small>"


def _percent(part: float) -> str:
    return f"{100 * part:.1f}&nbsp;%" if part >= 0.01 else f"{100 * part:.2g}&nbsp;%"


def _predicted(answer: Answer) -> str:
    if not answer.trained:
        return "nothing: this model is not trained, its weights are random"
    if not answer.predictions:
        return "nothing: this model has no class names"
    listed = ", ".join(f"{escape(name)} {100 * probability:.0f}&nbsp;%" for name, probability in answer.predictions)
    return f"{listed} <small>trained at {answer.trained_size} x {answer.trained_size}</small>"


def _table(rows: Sequence[tuple[str, str]]) -> str:
    lines = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in rows)
    return f'<table class="facts">{lines}</table>'
