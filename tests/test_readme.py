"""README.md is short, its example runs, and what it names exists."""

import re
from pathlib import Path

import pytest

from tests.documented_run import write_documented_run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_it_is_short():
    assert len(README.splitlines()) < 170


def test_the_first_screen_has_commands_example_picture_and_table():
    commands, example, picture, table = (
        README.index(part) for part in ("make quickstart", "```python", "![", "<!-- speed: layers -->")
    )
    assert commands < example < picture < table < README.index("\n## ")


def test_its_examples_of_ten_and_three_lines_run(tmp_path, monkeypatch):
    monkeypatch.chdir(write_documented_run(tmp_path))
    examples = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert [len(example.splitlines()) <= most for example, most in zip(examples, (10, 3), strict=True)] == [True, True]
    names = {}
    for example in examples:
        exec(compile(example, "README.md", "exec"), names)
    assert names["result"].name == "shoe.png"


def test_it_has_one_picture_and_one_speed_table():
    assert len(re.findall(r"!\[", README)) == 1
    assert re.findall(r"<!-- speed: (.*?) -->", README) == ["layers"]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_commands_and_files_that_pages_name_exist(page):
    text = (ROOT / page).read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for target in re.findall(r"`?make ([a-z]+(?:-[a-z]+)*)(?=`| {2,})", text):
        assert target in targets, f"{page} names make {target}"
    for path in re.findall(r"\]\(([^)#]+)\)", text):
        assert path.startswith("https://") or (ROOT / path).exists(), f"{page} links to {path}"
