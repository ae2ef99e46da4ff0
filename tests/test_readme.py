import re
from pathlib import Path

import pytest

from softline import ATTENTIONS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_examples():
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example):
    exec(compile(example, "README.md", "exec"), {})


def test_every_attention_is_in_the_table():
    for name in ATTENTIONS:
        assert re.search(rf"^\|.*`{name}`.*\|", README, flags=re.MULTILINE), name


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_commands_and_files_that_pages_name_exist(page):
    text = (ROOT / page).read_text()
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for target in re.findall(r"make ([a-z]+(?:-[a-z]+)*)\b", text):
        assert target in targets, f"{page} names make {target}"
    for path in re.findall(r"\]\(([^)#]+)\)", text):
        assert path.startswith("https://") or (ROOT / path).exists(), f"{page} links to {path}"
