"""Generate one page per registered attention from its factory and its operator."""

import inspect
import re
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

import torch
from docstrings import Docstring, inline, parse, references, to_markdown
from tables import described_table, table
from torch import nn

import softline.ops
from softline.attention import ATTENTIONS, create_attention
from softline.attention.registry import option_names
from softline.layers import landmarks
from softline.measure.counting import count_macs

DIM, HEADS = 64, 2
GRIDS = (28, 56, 112)
SEE = re.compile(r"\bsee `(?:[\w.]+\.)?(\w+)`")
# options of every attention, which the factories do not document again
COMMON = {"qkv_bias": "whether the projections of queries, keys and values have a bias."}


def navigation() -> list[str]:
    return [f"attentions/{name}.md" for name in ATTENTIONS]


def pages() -> dict[str, str]:
    """Return the path and the Markdown of each page."""
    return {f"attentions/{name}.md": _page(name, _costs(name)) for name in ATTENTIONS}


def overview(_: str = "") -> str:
    """Return a table of all attentions, followed by what its columns mean."""
    rows = []
    for name in ATTENTIONS:
        _, link = _title(_module(_function(name)))
        costs = _costs(name)
        growth = f"{costs[-1] / costs[-2]:.1f}x"
        paper = "" if link is None else f"[{link.removeprefix('https://').removeprefix('arxiv.org/abs/')}]({link})"
        options = ", ".join(f"`{option}`" for option in option_names(name) or [] if option not in COMMON)
        rows.append([f"[`{name}`]({name}.md)", growth, paper, options, _headline(name)])
    head = ["name", "cost of 4x the tokens", "paper", "options", "description"]
    return f"""{described_table(head, rows)}

The second column is the ratio of the multiply-adds for {GRIDS[-1]} x {GRIDS[-1]} and {GRIDS[-2]} x {GRIDS[-2]} tokens,
counted for a layer with {DIM} channels and {HEADS} heads, including its projections. Linear cost gives 4 and quadratic
cost gives 16. All attentions also take {" and ".join(f"`{option}`" for option in COMMON)}."""


def _page(name: str, costs: list[int]) -> str:
    function = _function(name)
    title, link = _title(_module(function))
    paper = "" if link is None else f" ([paper]({link}))"
    parts = [
        f"# {name}",
        f"{inline(title, references())}{paper}.",
        _description(name),
        _example(name),
        "## Options",
        described_table(["option", "type", "default", "description"], _options(name)),
        _notes(_module(function)),
        *_operator(name),
        "## Cost",
        _cost_table(costs),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _function(name: str) -> Callable[..., nn.Module]:
    factory = ATTENTIONS[name]
    return factory.func if isinstance(factory, partial) else factory


def _module(function: Callable[..., Any]) -> str:
    return inspect.getdoc(inspect.getmodule(function)) or ""


def _title(documentation: str) -> tuple[str, str | None]:
    """Return the first sentence of a module's docstring without its URL, and the URL."""
    first = parse(documentation).summary
    address = re.search(r"https?://[^\s)]+", first)
    text = re.sub(r"\s*\(https?://[^\s)]+\)", "", first).rstrip(".")
    return text, None if address is None else address[0]


def _headline(name: str) -> str:
    own = parse(inspect.getdoc(ATTENTIONS[name]) or "")
    return _in_cell(inline(own.summary, references()))


def _description(name: str) -> str:
    own = inspect.getdoc(ATTENTIONS[name]) or ""
    texts = [to_markdown(own, references(), skip=frozenset(parse(own).entries))]
    if isinstance(ATTENTIONS[name], partial):
        inner = inspect.getdoc(_function(name)) or ""
        texts.append(to_markdown(inner, references(), skip=frozenset(parse(inner).entries)))
    return "\n\n".join(texts)


def _example(name: str) -> str:
    return f"""```python
import torch
from softline import create_attention

attention = create_attention("{name}", dim={DIM}, num_heads={HEADS})
out = attention(torch.randn(1, 28 * 20, {DIM}), grid_size=(28, 20))  # [1, 560, {DIM}]
```"""


def _notes(documentation: str) -> str:
    """Return what a factory's module says after its title, such as deviations from the paper."""
    rest = Docstring(parse(documentation).blocks[1:])
    if not rest.blocks:
        return ""
    _, _, text = to_markdown(documentation, references()).partition("\n\n")
    return f"## Notes\n\n{text}"


def _options(name: str) -> list[list[str]]:
    factory, function = ATTENTIONS[name], _function(name)
    rows = []
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.kind is not parameter.KEYWORD_ONLY or parameter.name == "num_prefix_tokens":
            continue
        text = inline(_text(parameter.name, function, name), references())
        kind = " \\| ".join(f"`{part}`" for part in _type(parameter.annotation))
        rows.append([f"`{parameter.name}`", kind, f"`{_value(parameter.default)}`", _in_cell(text)])
    return rows


def _in_cell(markdown: str) -> str:
    """Escape bars, which would end a cell; those in plain text are entities already."""
    return markdown.replace("|", "\\|")


def _text(option: str, function: Callable[..., Any], name: str) -> str:
    """Return the description of an option from the factory, the function it refers to, or the operator."""
    entry = _entry(option, function)
    if entry is not None:
        return entry
    operator = _operator_of(name)
    from_operator = None if operator is None else _entry(option, _unwrapped(operator.attention))
    return from_operator or COMMON.get(option, "see above.")


def _entry(option: str, function: Callable[..., Any]) -> str | None:
    entry = parse(inspect.getdoc(function) or "").entries.get(option)
    if entry is None:
        return None
    seen = SEE.search(entry)
    target = None if seen is None else getattr(softline.ops, seen[1], None) or getattr(landmarks, seen[1], None)
    return (None if target is None else _entry(option, target)) or entry


def _operator_of(name: str) -> Any:
    """Return the operator of an attention that is built on `MultiHeadAttention`, or None."""
    return getattr(create_attention(name, DIM, HEADS), "operator", None)


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return function.func if isinstance(function, partial) else function


def _operator(name: str) -> list[str]:
    """Return the description of the operator's module and functions, or nothing if there is no operator."""
    operator = _operator_of(name)
    if operator is None:
        return []
    attention = _unwrapped(operator.attention)
    parts = ["## Operator", to_markdown(_module(attention), references())]
    sections = {"Definition": operator.weights, "Fast form": attention, "Factors": operator.factors}
    for heading, function in sections.items():
        if function is not None:
            parts += [f"### {heading}", _signature(function), to_markdown(inspect.getdoc(function) or "", references())]
    return parts


def _signature(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    parameters, starred = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            parameters.append("*")
            starred = True
        default = "" if parameter.default is parameter.empty else f" = {_value(parameter.default)}"
        parameters.append(f"{parameter.name}: {' | '.join(_type(parameter.annotation))}{default}")
    result = " | ".join(_type(signature.return_annotation))
    line = f"{function.__name__}({', '.join(parameters)}) -> {result}"
    if len(line) > 80:
        inner = "".join(f"    {parameter},\n" for parameter in parameters)
        line = f"{function.__name__}(\n{inner}) -> {result}"
    return f"```python\n{line}\n```"


def _type(annotation: Any) -> list[str]:
    """Return the alternatives of an annotation as a reader would write them."""
    if get_origin(annotation) is Literal:
        return [_value(value) for value in get_args(annotation)]
    if get_origin(annotation) is not None and get_origin(annotation) is not tuple:
        return [part for inner in get_args(annotation) for part in _type(inner)]
    if annotation is type(None):
        return ["None"]
    return [str(annotation) if get_origin(annotation) else getattr(annotation, "__name__", str(annotation))]


def _value(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


@cache
def _costs(name: str) -> list[int]:
    """Count the multiply-adds of a layer for each grid without running it."""
    layer = create_attention(name, DIM, HEADS).to("meta").eval()
    inputs = {side: torch.empty(1, side * side, DIM, device="meta") for side in GRIDS}
    return [count_macs(partial(layer, inputs[side], (side, side))) for side in GRIDS]


def _cost_table(costs: list[int]) -> str:
    head = ["", *(f"{side} x {side} tokens" for side in GRIDS)]
    counts = ["million multiply-adds", *(f"{cost / 1e6:,.1f}" for cost in costs)]
    steps = ["relative to the previous column", "", *(f"{after / before:.2f}x" for before, after in pairwise(costs))]
    return (
        f"The multiply-adds are counted for one layer with {DIM} channels and {HEADS} heads, including projections. "
        f"Each column has four times the tokens of the previous one.\n\n{table(head, [counts, steps])}"
    )
