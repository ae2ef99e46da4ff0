"""README.md is short, its example runs, and what it names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_it_is_short():
    assert len(README.splitlines()) < 170


def test_the_first_screen_has_commands_example_picture_and_table():
    commands, example, picture, table = (
        README.index(part) for part in ("make quickstart", "```python", "![", "<!-- speed: layers -->")
    )
    assert commands < example < picture < table < README.index("\n## ")


def test_it_has_one_example_of_ten_lines_that_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(example.splitlines()) <= 10
    exec(compile(example, "README.md", "exec"), {})


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
