"""The oldest versions that are tested are the oldest that may be installed."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def minima() -> dict[str, Version]:
    """The lower bounds in pyproject.toml, of the packages and of the extras that the tests install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = list(project["dependencies"])
    for extra in ("train", "data", "dense", "explore", "export", "docs", "dev"):
        listed += project["optional-dependencies"][extra]
    found = {}
    for text in listed:
        requirement = Requirement(text)
        for bound in requirement.specifier:
            assert bound.operator == ">=", f"{text}: only lower bounds are stated"
            found[requirement.name] = Version(bound.version)
    return found


def test_the_constraints_of_the_oldest_versions_are_the_lower_bounds():
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints-oldest.txt").read_text(), flags=re.MULTILINE))
    # tools for developers, whose version does not reach a user
    stated = {name: bound for name, bound in minima().items() if name not in ("mypy", "pre-commit", "ruff")}
    assert sorted(pins) == sorted(stated)
    for name, bound in stated.items():
        assert Version(pins[name]).release[: len(bound.release)] == bound.release, f"{name} {pins[name]}"


def test_timm_never_loads_pickled_code():
    """timm loads with weights_only=True by default since 1.0.26."""
    assert minima()["timm"] >= Version("1.0.26")
