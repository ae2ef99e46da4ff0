"""Trainings as parts of a comparison: each is done once in its directory, and read from there afterwards."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from softline.checks import check_integer
from softline.engine.events import Event
from softline.engine.nonfinite import NonFiniteError
from softline.engine.reading import differing_keys, read_recipe, to_dict
from softline.engine.recipe import Recipe
from softline.engine.train import TrainResult, train_to_the_end
from softline.errors import UserError
from softline.files import make_directory, read_bytes, write_json
from softline.plain import check_entries, read_json

RESULT = "result.json"
R = TypeVar("R")


@dataclass(frozen=True)
class Finished:
    """A run is over."""

    run: Any
    """The result of the run; its ``text`` is a summary."""
    reused: bool
    """The result was there already."""


NotifyRun: TypeAlias = Callable[[Event | Finished], None]


def run_once(recipe: Recipe, run: Callable[[], R], read: Callable[[Mapping[str, Any]], R], notify: NotifyRun) -> R:
    """Return the result of ``run``, a dataclass, after keeping it in the recipe's directory; or the result kept there.

    read: converts the plain content of the dataclass back to it.
    """
    directory = Path(recipe.output)
    kept = _read_result(directory, recipe)
    if kept is not None:
        try:
            result = read(kept)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{directory / RESULT} is not the result of this run ({error}): delete it") from error
    else:
        result = run()
        make_directory(directory)
        plain: Any = result
        content = {"recipe": to_dict(recipe), "run": dataclasses.asdict(plain)}
        write_json(directory / RESULT, {**content, "checksum": _checksum(content)})
    notify(Finished(result, kept is not None))
    return result


def check_seeds(seeds: Sequence[int]) -> None:
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"seeds must be different whole numbers, at least one, got {list(seeds)}")
    for seed in seeds:
        check_integer("seed", seed, 0)


def is_finished(recipe: Recipe) -> bool:
    """Whether the result of this recipe is kept in its directory."""
    return _read_result(Path(recipe.output), recipe) is not None


def train_or_diverge(recipe: Recipe, notify: NotifyRun) -> TrainResult | NonFiniteError:
    """Train, or continue an interrupted training; KeyboardInterrupt with its number if a signal stops it."""
    try:
        return train_to_the_end(recipe, notify)
    except NonFiniteError as error:
        return error


def _read_result(directory: Path, recipe: Recipe) -> Mapping[str, Any] | None:
    path = directory / RESULT
    if not path.exists():
        return None
    content = read_json(read_bytes(path), str(path))
    check_entries(content, {"recipe": dict, "run": dict}, str(path))
    # softline 0.1 wrote none
    if "checksum" in content and _checksum({key: content[key] for key in ("recipe", "run")}) != content["checksum"]:
        raise UserError(f"{path} was changed or damaged: its checksum is wrong; delete it to train again")
    changed = differing_keys(read_recipe(content["recipe"], where=str(path)), recipe)
    if changed:
        raise UserError(
            f"{directory} was trained by another recipe, which differs in {', '.join(changed)}: "
            "name another directory by --output"
        )
    kept: Mapping[str, Any] = content["run"]
    return kept


def _checksum(content: dict[str, Any]) -> str:
    # through JSON, which has no tuples
    return hashlib.sha256(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode()).hexdigest()
