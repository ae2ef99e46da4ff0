"""Pieces of HTML that all reports are made of. Strings are HTML already, unless the docstring says text."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from softline.plotting.colors import COLORS

VARIABLES = {color: f"var(--{name})" for name, color in COLORS.items()}
"""Colours that the style sheet has under a name, with another value for a dark page."""

SCALE = '<div class="scale"><span>less</span><i></i><span>more than the average</span></div>\n'
"""The key of heat maps."""


class Reference(NamedTuple):
    """Something that the footer links to; texts."""

    subject: str
    title: str
    address: str


SOFT_PAPER = Reference("SOFT and SOFT++", "Softmax-free Linear Transformers", "https://arxiv.org/abs/2207.03341")
INLINE_PAPER = Reference(
    "InLine",
    "Bridging the Divide: Reconsidering Softmax and Linear Attention",
    "https://arxiv.org/abs/2412.06590",
)


def whole_page(title: str, sections: Iterable[str]) -> str:
    """A page that loads nothing from elsewhere; empty sections are left out.

    title: text.
    """
    style = (files("softline.report") / "report.css").read_text()
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} - softline</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body>\n</html>\n"
    )


def score_card(name: str, value: str, meaning: str, color: str) -> str:
    """A number in large type; all texts."""
    return (
        f'<div class="score" style="{hue(color)}"><span class="name">{escape(name)}</span>'
        f"<b>{escape(value)}</b><span>{escape(meaning)}</span></div>"
    )


def fact_list(facts: Mapping[str, str]) -> str:
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items())
    return f"<dl>{listed}</dl>"


def machine_facts(environment: Mapping[str, Any]) -> dict[str, str]:
    """The machine and the versions of an `softline.measure.environment.environment`."""
    return {
        "Machine": escape(f"{environment['cpu']}, {environment['cores']} cores"),
        "Versions": escape(
            f"softline {environment['softline']}, torch {environment['torch']}, Python {environment['python']}"
        ),
    }


def thread_count(environment: Mapping[str, Any]) -> str:
    count = environment["threads"]
    return "1 thread" if count == 1 else f"{count} threads"


def table(head: str, rows: Iterable[str]) -> str:
    """A table that scrolls where it is wider than the page.

    head: rows of the head.
    rows: rows of the body.
    """
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>\n'


def head_cells(heads: Iterable[tuple[str, str]]) -> str:
    """Cells with a name and, in smaller type, a unit or an explanation, which may be empty."""
    return "".join(f"<th>{name}{f'<small>{unit}</small>' if unit else ''}</th>" for name, unit in heads)


def table_row(cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def panel_figure(panels: Sequence[str]) -> str:
    return f'<figure><div class="panels">{"".join(panels)}</div></figure>\n'


def color_key(entries: Mapping[str, str]) -> str:
    """What the colours of figures mean.

    entries: colours by their meaning, a text.
    """
    listed = "".join(f"<span>{dot(color)}{escape(text)}</span>" for text, color in entries.items())
    return f'<div class="key">{listed}</div>\n'


def dot(color: str) -> str:
    return f'<span class="dot" style="{hue(color)}"></span>'


def hue(color: str) -> str:
    return f"--hue: {VARIABLES.get(color, color)}"


def footer(references: Iterable[Reference]) -> str:
    linked = "".join(
        f'{escape(subject)}: <a href="{escape(address)}">{escape(title)}</a>. '
        for subject, title, address in references
    )
    return f"<footer>{linked}This file works offline.</footer>"
