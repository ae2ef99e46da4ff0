"""Read recipes from YAML and the command line, write them back, and compare two.

Unknown keys, wrong types and values out of range fail with the name of the key. A file may extend another one:
``base: NAME`` takes over every key that the file does not set itself.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from softline.checks import check_option
from softline.engine.recipe import Recipe
from softline.engine.task import TASKS
from softline.errors import UserError
from softline.plain import check_plain, read_yaml, short


def list_recipes() -> list[str]:
    """Return the names of the recipes inside the package."""
    root = files("softline") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in root.iterdir() if entry.name.endswith(".yaml"))


def load_recipe(name: str, overrides: Sequence[str] = (), *, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Load a recipe of the package by its name, or a YAML file, with ``--key value`` overrides.

    changes: nested keys and values that replace the recipe's before the overrides do.
    """
    content = _content(name)
    return read_recipe(content if changes is None else merge(content, _plain(dict(changes))), overrides, where=name)


def parse_recipe(text: str, overrides: Sequence[str] = (), *, where: str = "recipe") -> Recipe:
    """Read a recipe from YAML text."""
    return read_recipe(_resolve(_parse(text, where), Path(), (where,)), overrides, where=where)


def read_recipe(content: dict[str, Any], overrides: Sequence[str] = (), *, where: str = "recipe") -> Recipe:
    """Read a recipe from nested keys and values, with ``--key value`` or ``--key=value`` overrides."""
    from jsonargparse import ArgumentError

    try:
        check_plain(content, "the recipe")
        if "task" not in content:
            raise UserError(f"missing key task: one of {', '.join(TASKS)}")
        check_option("task", content["task"], TASKS)
        kind = TASKS[content["task"]].recipe_type
        _check_keys(content, kind)
        content = _override(content, overrides, kind)
        _check_keys(content, kind)
        parser = _parser(kind)
        return kind(**vars(parser.instantiate(parser.parse_object(content))))
    except ArgumentError as error:
        raise UserError(f"{where}: {_tidy(str(error))}") from error
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def dump_recipe(recipe: Recipe) -> str:
    """Write the whole recipe as YAML, which ``load_recipe`` reads back."""
    import yaml

    return yaml.safe_dump(to_dict(recipe), sort_keys=False)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Convert a recipe to plain numbers, strings, lists and dictionaries."""
    plain: dict[str, Any] = _plain(dataclasses.asdict(recipe))
    return plain


def differing_keys(old: Recipe, new: Recipe) -> list[str]:
    """Return the keys because of which two recipes train differently."""
    before, after = _flat(to_dict(old)), _flat(to_dict(new))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return [key for key in keys if key not in new.free_keys]


def _content(name: str, chain: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a recipe merged with those that it extends."""
    if name in chain:
        raise UserError(f"recipes extend each other in a circle: {' -> '.join((*chain, name))}")
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        check_recipe_name(name)
        entry = files("softline") / "recipes" / f"{name}.yaml"
        return _resolve(_parse(entry.read_text(), name), Path(), (*chain, name))
    if not path.is_file():
        raise UserError(f"no such recipe file: {name}")
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        raise UserError(f"{name} is not text") from None
    return _resolve(_parse(text, name), path.parent, (*chain, name))


def check_recipe_name(name: str) -> None:
    names = list_recipes()
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(f"no recipe is named {name!r}.{hint} `softline train --list` lists them; a file ends in .yaml")


def _parse(text: str, where: str) -> dict[str, Any]:
    content = read_yaml(text, where)
    if not isinstance(content, dict):
        raise UserError(f"{where} must hold keys and values, such as 'task: classification', got {short(content)}")
    return content


def _resolve(content: dict[str, Any], folder: Path, chain: tuple[str, ...]) -> dict[str, Any]:
    base = content.pop("base", None)
    if base is None:
        return content
    if not isinstance(base, str):
        raise UserError(f"{chain[-1]}: base must be the name of a recipe or a .yaml file, got {short(base)}")
    if base.endswith((".yaml", ".yml")):
        base = os.path.normpath(folder / base)
    return merge(_content(base, chain), content)


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge ``changes`` into ``base``, section by section."""
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = merge(base[key], value) if both else value
    return merged


def _parser(kind: type[Recipe]) -> Any:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False, add_help=False, default_env=False)
    parser.add_class_arguments(kind, None)
    return parser


def recipe_keys(kind: type[Recipe]) -> list[str]:
    """Return every key of a recipe, with dots between sections."""
    keys = []
    for entry in dataclasses.fields(kind):
        section = _section(entry.type)
        if section is None:
            keys.append(entry.name)
        else:
            keys += [f"{entry.name}.{inner}" for inner in recipe_keys(section)]
    return keys


def _section(annotation: Any) -> type[Any] | None:
    """Find the dataclass in an annotation such as ``EmaRecipe | None``."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if dataclasses.is_dataclass(candidate):
            assert isinstance(candidate, type)
            return candidate
    return None


def _check_keys(content: dict[str, Any], kind: type[Any], prefix: str = "") -> None:
    fields = {entry.name: entry for entry in dataclasses.fields(kind)}
    for key, value in content.items():
        if key not in fields:
            raise UserError(f"unknown key {prefix}{key}{_suggest(str(key), list(fields), prefix)}")
        section = _section(fields[key].type)
        if section is None or (value is None and section is not fields[key].type):
            continue
        if not isinstance(value, dict):
            raise UserError(f"{prefix}{key} must hold keys and values, got {short(value)}")
        _check_keys(value, section, f"{prefix}{key}.")


def _override(content: dict[str, Any], overrides: Sequence[str], kind: type[Recipe]) -> dict[str, Any]:
    """Set the overrides in the content."""
    keys = recipe_keys(kind)
    for key, text in _pairs(overrides):
        if not _is_key(key, keys):
            raise UserError(f"unknown key {key}{_suggest(key, keys)}")
        if not text:
            raise UserError(f"--{key} needs a value")
        content = _set(content, key.split("."), _value(key, text, kind))
    check_option("task", content["task"], TASKS)
    if TASKS[content["task"]].recipe_type is not kind:
        raise UserError(f"task cannot be overridden: this recipe has the keys of another, got {content['task']!r}")
    return content


def _set(content: Any, path: Sequence[str], value: Any) -> Any:
    """Return the content with another value at the path, whose missing sections are created."""
    if not path:
        return value
    content = content if isinstance(content, dict) else {}
    return {**content, path[0]: _set(content.get(path[0]), path[1:], value)}


def _pairs(overrides: Sequence[str]) -> list[tuple[str, str]]:
    """Split overrides into keys and values; a missing value is an empty text."""
    pairs: list[tuple[str, str]] = []
    for part in overrides:
        if part.startswith("--"):
            key, _, value = part[2:].partition("=")
            pairs.append((key, value))
        elif pairs and not pairs[-1][1]:
            pairs[-1] = (pairs[-1][0], part)
        else:
            raise UserError(f"expected --key value, got {part!r}")
    return pairs


def _is_key(key: str, keys: Sequence[str]) -> bool:
    """Check for a key, a section of keys, or an entry of free options."""
    return any(key == known or known.startswith(f"{key}.") for known in keys) or any(
        known.endswith("options") and key.startswith(f"{known}.") for known in keys
    )


def _value(key: str, text: str, kind: type[Any]) -> Any:
    """Read the value of a key: text where the key is text, YAML elsewhere."""
    name, _, rest = key.partition(".")
    annotation = {entry.name: entry.type for entry in dataclasses.fields(kind)}.get(name)
    section = _section(annotation)
    if rest and section is not None:
        return _value(rest, text, section)
    if annotation is str or (annotation == str | None and text != "null"):
        return text
    return read_yaml(text, f"--{key} {text!r}")


def _suggest(key: str, keys: Sequence[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(key, keys, 1) or [known for known in keys if known.split(".")[-1] == key][:1]
    return (
        f"; did you mean {prefix}{near[0]}?" if near else f"; known are {', '.join(prefix + known for known in keys)}"
    )


def _tidy(message: str) -> str:
    """Rewrite a message of jsonargparse or PyYAML as one readable line."""
    message = re.sub(r"\s+", " ", message).strip()
    message = re.sub(r"the following arguments are required: (.*)", r"missing key \1", message)
    # a section that may be null
    message = re.sub(
        r'Parser key "(.+?)": Does not validate against .*? Problem with given class_path .*?: '
        r'Parser key "(.+?)": Expected an? (.+?)\. Got value: (.*?) - Expected an? .*',
        r"\1.\2 must be a \3, got \4",
        message,
    )
    message = re.sub(r'Parser key "(.+?)": Expected an? (.+?)\. Got value: (.*)', r"\1 must be a \2, got \3", message)
    message = re.sub(
        r'Parser key "(.+?)": Does not validate against .*?Subtypes: \[(.+)\] Errors: .* Given value: (.*)',
        r"\1 must be one of \2, got \3",
        message,
    )
    message = re.sub(r"<class '(\w+)'>", r"\1", message).replace("NoneType", "null").replace("a int,", "an int,")
    return re.sub(r"a typing\.Literal\[(.+?)\]", r"one of \1", message)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _flat(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
