"""The map of the source tree in CONTRIBUTING.md matches the tree."""

import re
from pathlib import Path

import softline
from tests.test_architecture import LEVEL

PACKAGE = Path(softline.__file__).parent
NOT_CODE = {"__init__", "__pycache__", "py.typed", "recipes"}
CONTRIBUTING = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


def mapped_names() -> list[str]:
    """Return the names in the map, from the top layer to the bottom."""
    tree = re.search(r"^## Source tree\n.*?^```\n(.*?)^```", CONTRIBUTING, flags=re.MULTILINE | re.DOTALL)
    assert tree is not None, "CONTRIBUTING.md has a map of the source tree"
    lines = [re.fullmatch(r"(\w+) {2,}\S.*", line) for line in tree[1].splitlines()]
    assert None not in lines, "each line of the map is a name and a description"
    return [line[1] for line in lines]


def test_the_map_names_every_package_and_module_once():
    present = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if not path.name.startswith(".")} - NOT_CODE
    assert sorted(mapped_names()) == sorted(present)


def test_the_map_is_ordered_by_layer():
    names = mapped_names()
    assert names == sorted(names, key=LEVEL.__getitem__, reverse=True)


def test_files_named_in_the_text_exist():
    paths = re.findall(r"`(src/softline/[\w/.]+|tests/[\w/.]+|docs/[\w/.-]+)`", CONTRIBUTING)
    assert len(paths) > 10
    root = Path(__file__).parents[1]
    assert [path for path in paths if not (root / path).exists()] == []


def test_classes_named_for_a_task_exist():
    from softline.engine.recipe import Recipe
    from softline.engine.task import TASKS, TaskDefinition
    from softline.engine.trained import Trained

    for owner in (Recipe, TaskDefinition, Trained):
        assert f"`{owner.__module__}.{owner.__name__}`" in CONTRIBUTING
    for method in (*TaskDefinition.__abstractmethods__, "settled", "recipe_type", "evaluate", "predict", "view"):
        assert f"`{method}`" in CONTRIBUTING
    assert f'[project.entry-points."{TASKS.group}"]' in CONTRIBUTING
