"""Every promise in the documentation names tests that exist."""

import ast
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "promises.md").read_text()


def test_every_promise_names_tests_that_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 30
    missing = [f"{file}::{name}" for file, name in named if name not in functions(ROOT / file)]
    assert missing == []


def test_every_promise_has_a_test_below_it():
    promises = re.findall(r"^- .*\n(?:  \S.*\n)*(.*)$", PAGE, flags=re.MULTILINE)
    assert len(promises) > 25
    assert [line for line in promises if not re.fullmatch(r" {4}- `tests/[\w/.]+::\w+`", line)] == []


def test_the_figures_of_the_campaign_are_those_that_it_wrote():
    runs = json.loads((ROOT / "docs" / "figures" / "campaign.json").read_text())["runs"]
    section = PAGE.partition("## The campaign")[2]
    assert f"{sum(run['minutes'] for run in runs)} minutes" in section
    for rows in zip(*(run["rows"] for run in runs), strict=True):
        tried, *failed = (
            sum(row[name] for row in rows) for name in ("tried", "execution", "request", "hang", "traceback", "wrong")
        )
        assert f"| {rows[0]['unit']} | {tried:,} | {' | '.join(map(str, failed))} |" in section


def functions(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
