"""``softline models``: what there is."""

import argparse
import textwrap
from pathlib import Path
from typing import Any

from softline.cli.arguments import Commands, check_parent
from softline.errors import UserError
from softline.files import write_json
from softline.measure.catalog import describe, list_models


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "models",
        help="list the models with their size, cost and reported accuracy",
        description="List softline's models. All are built by timm.create_model(NAME) after `import softline`.",
    )
    parser.add_argument("pattern", nargs="?", default="*", help="shell pattern, such as 'softpp_*' (default: all)")
    parser.add_argument(
        "--dense",
        action="store_true",
        help="the SOFT paper's detectors and segmenters instead, their parameters beside the paper's",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the list here")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    check_parent(options.json)
    cards = _dense(options.pattern) if options.dense else _backbones(options.pattern)
    if options.json is not None:
        write_json(options.json, cards)


def _backbones(pattern: str) -> list[dict[str, Any]]:
    names = list_models(pattern)
    print(f"{'model':<24}{'image':>6}{'params M':>10}{'GMACs':>8}{'top-1 %*':>10}")
    cards = []
    for name in names:
        card = describe(name)
        cards.append(card._asdict())
        reported = "-" if card.reported_top1 is None else f"{card.reported_top1:.1f}"
        size = f"{card.image_size:>6}{card.parameters / 1e6:>10.2f}{card.macs / 1e9:>8.3f}"
        print(f"{name:<24}{size}{reported:>10}", flush=True)
    print("* on ImageNet-1K, as reported by the papers; not measured here")
    return cards


def _dense(pattern: str) -> list[dict[str, Any]]:
    from fnmatch import fnmatch

    from softline.measure.dense_catalog import DIFFERENCE, REPORTED_MILLIONS, describe_dense

    names = [name for name in REPORTED_MILLIONS if fnmatch(name, pattern)]
    if not names:
        raise UserError(f"no recipe matches {pattern!r}; those of the paper are {', '.join(REPORTED_MILLIONS)}")
    print(f"{'recipe':<32}{'backbone M':>11}{'head M':>9}{'all M':>9}{'paper M':>9}{'difference':>12}")
    cards = []
    for name in names:
        card = describe_dense(name)
        cards.append({**card._asdict(), "parameters": card.parameters})
        counted = f"{card.backbone / 1e6:>11.2f}{card.head / 1e6:>9.2f}{card.parameters / 1e6:>9.2f}"
        difference = card.parameters / 1e6 - card.reported_millions
        print(f"{name:<32}{counted}{card.reported_millions:>9}{difference:>+12.2f}", flush=True)
    print(textwrap.fill(DIFFERENCE, 100))
    return cards
