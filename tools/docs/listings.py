"""Generate the parts of pages that come from the code and the recipes.

A page requests one with a comment on a line of its own:

    <!-- docs: attentions -->                   all attentions
    <!-- docs: models -->                       the backbones of each family
    <!-- docs: recipes -->                      the recipes in the package
    <!-- docs: presets -->                      the presets of `softline compare`
    <!-- docs: figure NAME, DESCRIPTION -->     a figure of `softline analyze` with its command and numbers
    <!-- docs: section FILE, HEADING -->        the text under a heading of another file of the repository
"""

import importlib
import re
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import attention_pages
import figures
import timm
import yaml
from docstrings import inline, references, to_markdown
from mkdocs.exceptions import PluginError
from tables import described_table, table

import softline.ops
from softline.backbones import MODEL_NAMES
from softline.checks import check_option
from softline.engine.reading import list_recipes, merge
from softline.engine.task import TASKS
from softline.experiments.presets import PRESETS
from softline.measure.catalog import REPORTED_TOP1

ROOT = Path(__file__).parents[2]
REQUEST = re.compile(r"^<!-- docs: (?P<what>\w+)(?: (?P<rest>.*?))? -->$", flags=re.MULTILINE)


def fill(markdown: str, page: str) -> str:
    """Return the page with every request replaced by its listing."""

    def answer(match: re.Match[str]) -> str:
        if match["what"] not in REQUESTS:
            raise PluginError(f"{page}: a listing is one of {', '.join(REQUESTS)}; got {match['what']!r}")
        return REQUESTS[match["what"]](*(match["rest"] or "").split(", "))

    try:
        return REQUEST.sub(answer, markdown)
    except ValueError as error:
        raise PluginError(f"{page}: {error}") from error


def section(path: str, heading: str) -> str:
    """Return the text under a heading of a Markdown file, up to the next heading of the same level."""
    text = (ROOT / path).read_text()
    found = re.search(rf"^(#+) {re.escape(heading)}\n(.*?)(?=^\1 |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{path} has no heading {heading!r}")
    return found[2].strip()


@cache
def models(_: str = "") -> str:
    """Return the description of each family and a table of its models."""
    families: dict[str, list[str]] = {}
    for name in MODEL_NAMES:
        families.setdefault(timm.model_entrypoint(name).__module__, []).append(name)
    return "\n\n".join(_family(module, names) for module, names in families.items())


def _family(module: str, names: list[str]) -> str:
    documentation = importlib.import_module(module).__doc__
    assert documentation is not None, "every family has a docstring"
    head = ["name", "image", "parameters", "reported top-1"]
    text = to_markdown(documentation, references())
    return f"### {module.rpartition('.')[2]}\n\n{text}\n\n{table(head, [_model(name) for name in names])}"


def _model(name: str) -> list[str]:
    model = timm.create_model(name, device="meta")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    configuration = timm.get_pretrained_cfg(name)
    assert configuration is not None, "every registered model has a configuration"
    top1 = REPORTED_TOP1.get(name)
    millions = f"{parameters / 1e6:.1f} M" if parameters >= 1e6 else f"{parameters / 1e6:.2f} M"
    return [f"`{name}`", str(configuration.input_size[-1]), millions, "" if top1 is None else f"{top1:.1f}"]


@cache
def recipes(_: str = "") -> str:
    """Return a table of recipes for each task."""
    texts = {name: (files("softline") / "recipes" / f"{name}.yaml").read_text() for name in list_recipes()}
    contents = {name: _resolve(name, texts) for name in texts}
    parts = []
    for task in sorted(TASKS):
        rows = [_recipe(name, texts[name], contents[name]) for name in texts if contents[name]["task"] == task]
        # a task of another package has its recipes elsewhere
        if rows:
            parts.append(f"### {task.capitalize()}\n\n{described_table(['recipe', 'model', 'description'], rows)}")
    return "\n\n".join(parts)


def _resolve(name: str, texts: dict[str, str]) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(texts[name])
    base = content.get("base")
    return content if base is None else merge(_resolve(base, texts), content)


def _recipe(name: str, text: str, content: dict[str, Any]) -> list[str]:
    base = yaml.safe_load(text).get("base")
    sentence = _first_sentence(text)
    comment = inline(f"{sentence[:1].upper()}{sentence[1:].removesuffix('.')}.", {}) if sentence else ""
    based = [] if base is None else [f"Based on `{base}`."]
    return [f"`{name}`", f"`{content['model']['name']}`", " ".join([*based, comment])]


def _first_sentence(text: str) -> str:
    """Return the first sentence of the comment at the top of a file, up to a colon that ends a line."""
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith("# ") or (lines and lines[-1].endswith(":")):
            break
        lines.append(line.removeprefix("# "))
    # a full stop before a digit, as in "Fig. 5", does not end a sentence
    return re.split(r"(?<=\.) (?=\D)", " ".join(lines))[0].rstrip(":")


def figure(name: str, description: str) -> str:
    check_option("a figure", name.partition("_")[0], figures.TABLES)
    text, tables = figures.figure(name, description)
    return "\n\n".join([text, *(table(head, rows) for head, rows in tables)])


@cache
def presets(_: str = "") -> str:
    """Return a table of the presets of `softline compare`."""
    rows = [
        [
            f"`{preset.name}`",
            preset.reference,
            ", ".join(variant.name for variant in preset.variants),
            ", ".join(variant.name for variant in preset.paper) or "-",
            preset.title,
        ]
        for preset in PRESETS.values()
    ]
    header = ["preset", "in the papers", "in miniature", "at the paper's scale", "what is compared"]
    return described_table(header, rows)


def operator_reference() -> str:
    """Return the reference of `softline.ops` with one section per file."""
    modules: dict[str, list[str]] = {}
    for name in softline.ops.__all__:
        home = getattr(getattr(softline.ops, name), "__module__", "softline.ops.linear")
        modules.setdefault(home, []).append(name)
    parts = [f"# Operators\n\n{to_markdown(softline.ops.__doc__ or '', references())}"]
    for module, names in sorted(modules.items()):
        members = "".join(f"        - {name}\n" for name in names)
        parts.append(f"::: {module}\n    options:\n      members:\n{members}")
    return "\n\n".join(parts)


REQUESTS: dict[str, Callable[..., str]] = {
    "attentions": attention_pages.overview,
    "models": models,
    "recipes": recipes,
    "presets": presets,
    "figure": figure,
    "section": section,
}
