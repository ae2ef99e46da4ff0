"""Imports point downwards only."""

import ast
from pathlib import Path

import softline

PACKAGE = Path(softline.__file__).parent
# lowest first; packages on one line may not import each other
LEVELS = [
    ["errors"],
    ["checks", "files", "plain", "process", "registry"],
    ["locks"],
    ["ops"],
    ["layers"],
    ["attention"],
    ["weights"],
    ["backbones"],
    ["checkpoints", "heads", "data", "replacing"],
    ["engine"],
    ["tasks"],
    ["plotting"],
    ["measure"],
    ["deploy", "linearizing"],
    ["experiments"],
    ["analysis"],
    ["report"],
    ["explorer"],
    ["cli"],
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(file: Path) -> set[str]:
    """The parts of softline that a file imports; relative imports are not used."""
    parts = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("softline.")}
    return parts & set(LEVEL)


def test_every_part_has_a_level():
    parts = {part_of(file) for file in PACKAGE.rglob("*.py")} - {"__init__"}
    assert parts <= set(LEVEL), f"parts without a level: {parts - set(LEVEL)}"


def test_imports_point_downwards():
    upward = [
        f"{file.relative_to(PACKAGE)} imports softline.{part}"
        for file in PACKAGE.rglob("*.py")
        for part in imported_parts(file)
        if part_of(file) in LEVEL and part != part_of(file) and LEVEL[part] >= LEVEL[part_of(file)]
    ]
    assert upward == []


def test_the_walk_sees_imports():
    assert imported_parts(PACKAGE / "attention" / "soft.py") >= {"ops", "layers", "attention"}


def names_of_classes() -> list[tuple[str, str]]:
    return [
        (node.name, str(file.relative_to(PACKAGE)))
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    ]


def test_a_class_name_has_one_meaning():
    places: dict[str, list[str]] = {}
    for name, file in names_of_classes():
        places.setdefault(name, []).append(file)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_neither_the_engine_nor_anything_above_the_tasks_names_one():
    """No name of a task is compared or looked up there."""
    tasks = {path.name for path in (PACKAGE / "tasks").iterdir() if (path / "recipe.py").exists()}
    assert len(tasks) == 5
    asking = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}"
        for file in PACKAGE.rglob("*.py")
        if LEVEL.get(part_of(file), 0) >= LEVEL["engine"] and part_of(file) != "tasks"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in tasks
    ]
    assert asking == []


def test_only_the_command_line_prints():
    printing = [
        part_of(file)
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert set(printing) == {"cli"}
