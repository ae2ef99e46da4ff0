"""docs/fidelity.md has a row for everything in both papers, and everything that it names exists."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from softline.cli import parse
from softline.engine.reading import load_recipe
from softline.experiments.presets import PRESETS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "fidelity.md").read_text()
SOFT = [
    *(f"Eq. {number}" for number in range(1, 18)),
    *("Algorithm 1", "Algorithm 2"),
    *(f"Proposition {number}" for number in range(1, 7)),
    *(f"Appendix {letter}" for letter in "ABCDE"),
    *(f"Table {number}" for number in (*range(1, 11), "11a", "11b", 12)),
    *("Fig. 1a", "Fig. 1b", *(f"Fig. {number}" for number in range(2, 8))),
]
INLINE = [
    *("Softmax attention", "Linear attention", "InLine attention", "InLine in linear time", "Local residual"),
    *(f"Proposition {number}" for number in range(1, 4)),
    *(f"Fig. {number}" for number in range(1, 6)),
    *(f"Table {number}" for number in range(1, 14)),
    "Tables 14 to 17",
]


def rows(part: str) -> list[list[str]]:
    """The cells of the table's rows."""
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


SOFT_ROWS, INLINE_ROWS = (rows(part) for part in PAGE.split("\n## InLine\n"))


def test_everything_in_both_papers_has_a_row():
    assert [row[0] for row in SOFT_ROWS] == SOFT
    # the equations of the appendices are named with them
    ranges = [re.search(r"Eqs\. (\d+) to (\d+)", row[1]) for row in SOFT_ROWS if row[0].startswith("Appendix")]
    named = [number for found in ranges if found for number in range(int(found[1]), int(found[2]) + 1)]
    assert named == list(range(18, 40))
    assert [row[0] for row in INLINE_ROWS] == INLINE


@pytest.mark.parametrize("row", [*SOFT_ROWS, *INLINE_ROWS], ids=lambda row: row[0])
def test_every_row_names_what_exists_and_says_whether_it_is_faithful(row):
    name, what, place, verdict = row
    assert what
    assert re.match(r"(faithful|deviates|in miniature|not possible here: )", verdict), verdict
    (named,) = re.findall(r"`([^`]+)`", place)
    if not named.startswith("softline "):
        module, _, attribute = named.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), f"{name} names {named}"
        return
    options = parse(shlex.split(named)[1:])
    if options.command == "train":
        load_recipe(options.recipe)
    elif options.command == "compare":
        assert PRESETS[options.preset].reference.startswith(f"{name} of"), PRESETS[options.preset].reference


def test_every_link_leads_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        path, _, anchor = target.partition("#")
        if path.startswith("https://arxiv.org/abs/"):
            continue
        if path == "reference/ops.md":
            continue  # generated
        headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / path).read_text(), flags=re.MULTILINE)
        anchors = [re.sub(r"[^\w]+", "-", heading.lower()).strip("-") for heading in headings]
        assert not anchor or anchor in anchors, target
    for path in re.findall(r"`(tests/[^`]+)`", PAGE):
        assert (ROOT / path).exists(), path
