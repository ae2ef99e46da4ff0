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


def test_every_row_of_a_promise_names_a_test():
    rows = re.findall(r"^\| (?!Promise|---|Kind)(.*?) \| (.*) \|$", PAGE, flags=re.MULTILINE)
    tables = PAGE.partition("## The campaign")[0].count("\n| Promise")
    assert tables >= 5
    assert [promise for promise, shown in rows if "::" not in shown and "|" not in shown] == []


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
