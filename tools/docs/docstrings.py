"""Convert softline's docstrings to Markdown.

A docstring is plain text with ``code`` and `code` spans. Lines ``name: text`` or ``name, name: text`` document
parameters and are continued by indented lines; other indented lines are equations and are kept as they are.
"""

import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from griffe import Extension, GriffeLoader, Object

# a parameter's name begins with a small letter or is one capital: "Deviations: ..." is text
NAME = r"(?:[a-z_]\w*|[A-Z])"
ENTRY = re.compile(rf"{NAME}(?:, {NAME})*: \S.*")
CODE = re.compile(r"(``.+?``|`[^`]+`)")
LINK = re.compile(r"(https?://[^\s)>,]+)")
# characters with a meaning in Markdown, its tables or its formulas, not all of which support backslashes
SPECIAL = re.compile(r"[\\*_\[\]<>|$#`]")


class Docstring(NamedTuple):
    """A docstring as a sequence of blocks."""

    blocks: list[tuple[str, str]]
    """Kind and text: "text", "code", "list" (lines that begin with a dash) or "entry" (NAMES: TEXT)."""

    @property
    def summary(self) -> str:
        """The first paragraph."""
        return self.blocks[0][1] if self.blocks else ""

    @property
    def entries(self) -> dict[str, str]:
        """The description of each parameter; parameters that are documented together share one."""
        split = (text.partition(": ") for kind, text in self.blocks if kind == "entry")
        return {name: text for names, _, text in split for name in names.split(", ")}


def parse(text: str) -> Docstring:
    blocks: list[tuple[str, str]] = []
    fresh = True
    for line in inspect.cleandoc(text).split("\n"):
        kind = _kind(line, blocks, fresh)
        fresh = not line
        if not line:
            continue
        if kind == "code":
            joined = blocks and blocks[-1][0] == "code"
            blocks[-1:] = [("code", f"{blocks[-1][1]}\n{line}")] if joined else [*blocks[-1:], ("code", line)]
        elif kind == "more":
            blocks[-1] = (blocks[-1][0], f"{blocks[-1][1]} {line.strip()}")
        else:
            blocks.append((kind, line.removeprefix("- ")))
    return Docstring(blocks)


def _kind(line: str, blocks: list[tuple[str, str]], fresh: bool) -> str:
    """Return the kind of a line, given the blocks before it; "more" continues the last block."""
    last = blocks[-1][0] if blocks and not fresh else ""
    if line.startswith("  "):
        return "more" if last in ("entry", "list") else "code"
    if line.startswith("- "):
        return "list"
    # the first line is the summary even if it looks like an entry
    if blocks and ENTRY.fullmatch(line) and last != "text":
        return "entry"
    ended = bool(blocks) and blocks[-1][1].endswith(".")
    if last == "text" or (last in ("entry", "list") and not ended):
        return "entry" if last == "text" and ended and ENTRY.fullmatch(line) else "more"
    return "text"


def to_markdown(text: str, references: Mapping[str, str], *, skip: frozenset[str] = frozenset()) -> str:
    """Return a docstring as Markdown; code spans that name a key of ``references`` become links to its value.

    skip: parameters whose entries are left out.
    """
    parts: list[str] = []
    previous = ""
    for kind, block in parse(text).blocks:
        if kind == "entry" and skip.issuperset(block.partition(": ")[0].split(", ")):
            continue
        gap = "\n" if kind == previous and kind in ("entry", "list") else "\n\n"
        parts.append((gap if parts else "") + _block(kind, block, references))
        previous = kind
    return "".join(parts)


def _block(kind: str, block: str, references: Mapping[str, str]) -> str:
    if kind == "code":
        return f"```text\n{inspect.cleandoc(chr(10) + block)}\n```"
    if kind == "entry":
        names, _, text = block.partition(": ")
        return f"- {', '.join(f'**`{name}`**' for name in names.split(', '))}: {inline(text, references)}"
    return ("- " if kind == "list" else "") + inline(block, references)


def inline(text: str, references: Mapping[str, str]) -> str:
    """Convert a paragraph: keep code spans, turn URLs into links and escape everything else."""
    parts = CODE.split(text)
    return "".join(_code(part, references) if place % 2 else _plain(part) for place, part in enumerate(parts))


def _code(span: str, references: Mapping[str, str]) -> str:
    name = span.strip("`")
    target = references.get(name.removesuffix("()"))
    return f"`{name}`" if target is None else f"[`{name.rpartition('.')[2]}`][{target}]"


def _plain(text: str) -> str:
    parts = LINK.split(text)
    return "".join(f"<{part}>" if place % 2 else SPECIAL.sub(_entity, part) for place, part in enumerate(parts))


def _entity(match: re.Match[str]) -> str:
    return f"&#{ord(match[0])};"


def references() -> dict[str, str]:
    """Return the names that the reference documents, with the identifiers of their anchors."""
    import softline.attention
    import softline.ops

    found = {name: f"softline.ops.{name}" for name in softline.ops.__all__}
    found |= {name: f"softline.attention.{name}" for name in ("ATTENTIONS", "Attention", "create_attention")}
    found["create_landmarks"] = "softline.layers.landmarks.create_landmarks"
    return found | {path: path for path in found.values()}


class SoftlineDocstrings(Extension):
    """Lets mkdocstrings read the docstrings as Markdown."""

    def __init__(self) -> None:
        self._references = references()

    def on_object(self, *, obj: Object, loader: GriffeLoader, **options: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value, self._references)
