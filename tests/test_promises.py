"""Every promise in the documentation names tests that exist."""

import ast
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


def functions(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}
