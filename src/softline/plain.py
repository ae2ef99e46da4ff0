"""Plain values from outside: numbers, texts, lists and dictionaries in YAML, JSON and checkpoints.

What is read here is checked before anything walks through it: a few hundred bytes can describe a structure without end,
by aliases in YAML or by shared lists in a checkpoint.
"""

import json
import re
import reprlib
import types
import typing
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from softline.errors import UserError

MAX_TEXT = 2**20
"""Characters of a YAML text."""
MAX_VALUES = 10**6
MAX_LETTERS = 2**24
MAX_PLAIN = 1000
"""Characters of a YAML scalar without quotes, which is compared with the patterns of numbers."""
MAX_DEPTH = 64
MAX_BITS = 64


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


class _YamlLoader(yaml.SafeLoader):
    """Takes 1e-3 for a number, as YAML 1.2 does (PyYAML wants 1.0e-3), and a date for the text that it is."""


_YamlLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_yaml(text: str, where: str) -> Any:
    """Read a YAML document; repeated keys, of which YAML silently keeps the last, are refused.

    where: what messages call the text, such as the name of the file.
    """
    if len(text) > MAX_TEXT:
        raise UserError(f"{where} has {len(text):,} characters of YAML, more than the {MAX_TEXT:,} that are read")
    try:
        # the nodes first: an alias is one more reference to its node, whose values are not yet copied
        _check_node(yaml.compose(text, _YamlLoader), where)
        value = yaml.load(text, _YamlLoader)
    except yaml.YAMLError as error:
        text = " ".join(str(error).replace(' in "<unicode string>",', "").split())
        raise UserError(f"{where} is not YAML: {text}") from None
    except RecursionError:
        raise UserError(f"{where} is nested too deeply") from None
    except UserError:
        raise
    except (OverflowError, TypeError, ValueError) as error:
        # PyYAML's constructors, such as int for 0x or a list as a key
        raise UserError(f"{where} holds a value that YAML cannot represent: {error}") from None
    check_plain(value, where)
    return value


def read_json(text: str | bytes, where: str) -> Any:
    """Read a JSON document; repeated keys are refused. ``where`` is what messages call it."""
    try:
        return json.loads(text, object_pairs_hook=_without_repetition)
    except RecursionError:
        raise UserError(f"{where} is nested too deeply") from None
    except ValueError as error:
        # also UnicodeDecodeError, and integers of more than 4,300 digits
        raise UserError(f"{where} is not JSON: {error}") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"the key {short(name)} is there twice")
        content[name] = value
    return content


def check_plain(value: Any, where: str, *, beside: tuple[type, ...] = ()) -> list[Any]:
    """Raise UserError unless ``value`` consists of numbers, texts, lists and dictionaries, not too many nor too deep.

    A value that several lists share counts for each of them, as it does for everything that walks through it.

    beside: further types that it may hold; values of these are returned.
    """
    left, values, letters = [(value, 0)], 0, 0
    found: list[Any] = []
    while left:
        item, depth = left.pop()
        values += 1
        letters += len(item) if isinstance(item, str) else 0
        if depth > MAX_DEPTH:
            raise UserError(f"{where} is out of proportion: nested more than {MAX_DEPTH} deep")
        if values > MAX_VALUES:
            raise UserError(f"{where} is out of proportion: more than {MAX_VALUES:,} values")
        if letters > MAX_LETTERS:
            raise UserError(f"{where} is out of proportion: more than {MAX_LETTERS:,} characters")
        if isinstance(item, beside):
            found.append(item)
        elif isinstance(item, dict):
            left += [(key, depth + 1) for key in item]
            left += [(inner, depth + 1) for inner in item.values()]
        elif isinstance(item, list | tuple):
            left += [(inner, depth + 1) for inner in item]
        elif isinstance(item, int) and item.bit_length() > MAX_BITS:
            raise UserError(f"{where} holds a whole number of {item.bit_length():,} bits, more than {MAX_BITS}")
        elif not isinstance(item, int | float | str | None):
            raise UserError(f"{where} must hold numbers, texts, lists and dictionaries, got a {type(item).__name__}")
    return found


def check_entries(content: Any, kinds: Mapping[str, Any], where: str) -> None:
    """Check that ``content`` is a dictionary that has each of the keys, with a value of its kind.

    kinds: types by key, such as ``int``, ``float | None``, ``list[str]`` or ``dict[str, float]``.
    """
    if not isinstance(content, dict):
        raise UserError(f"{where} must be a dictionary, got {short(content)}")
    for key, kind in kinds.items():
        if key not in content:
            raise UserError(f"{where} has no {key}")
        if not _matches(content[key], kind):
            raise UserError(f"{key} in {where} must be {_name(kind)}, got {short(content[key])}")


def _matches(value: Any, kind: Any) -> bool:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType or origin is typing.Union:
        return any(_matches(value, option) for option in inner)
    if origin is list:
        return isinstance(value, list) and all(_matches(item, inner[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            _matches(key, inner[0]) and _matches(item, inner[1]) for key, item in value.items()
        )
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, int | float if kind is float else kind)


def _name(kind: Any) -> str:
    return (kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)).replace("torch.", "")


def short(value: Any) -> str:
    """Return a value as messages show it, in at most 80 characters; of what is not plain, its type."""
    if not isinstance(value, bool | int | float | str | list | tuple | dict | None):
        return f"a {type(value).__name__}"
    text = _REPR.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_node(root: yaml.Node | None, where: str) -> None:
    """Refuse repeated keys, aliases that contain themselves, and aliases that unfold to more than `MAX_VALUES`."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        known = sizes.get(id(node))
        if known is not None:
            if not known:
                raise UserError(f"{where}, line {node.start_mark.line + 1}: an alias refers to what it is a part of")
            return known
        # 0 until all that it contains is known
        sizes[id(node)] = 0
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            _check_repeated(node, where)
            inner = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        else:
            _check_scalar(node, where)
        # letters of a text count as values do, because an alias repeats them
        total = 1 + sum(map(size, inner)) + (0 if inner else len(node.value))
        if total > MAX_LETTERS:
            raise UserError(f"{where} is out of proportion: its aliases unfold to more than {MAX_LETTERS:,} characters")
        sizes[id(node)] = total
        return total

    if root is not None:
        size(root)


def _check_scalar(node: yaml.Node, where: str) -> None:
    # numbers with colons, of base 60, take the square of their length to read
    if node.tag != "tag:yaml.org,2002:str" and len(node.value) > MAX_PLAIN:
        line = node.start_mark.line + 1
        raise UserError(f"{where}, line {line}: a number has {len(node.value):,} digits, more than {MAX_PLAIN:,}")


def _check_repeated(node: yaml.MappingNode, where: str) -> None:
    seen: set[Hashable] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            if key.value in seen:
                raise UserError(f"{where}, line {key.start_mark.line + 1}: the key {key.value} is there twice")
            seen.add(key.value)
