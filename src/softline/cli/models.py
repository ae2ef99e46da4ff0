"""``softline models``: list the models."""

import argparse
import textwrap
from typing import Any

from softline.cli.arguments import Parser, place
from softline.cli.outputs import check_outputs
from softline.cli.table import Table, number
from softline.errors import UserError
from softline.files import write_json


def add_arguments(parser: Parser) -> None:
    parser.describe(
        "List softline's models. After `import softline`, timm.create_model(NAME) creates any of them.",
        epilog="""\
            examples:
              softline models
              softline models 'softpp_*' --json models.json
            """,
    )
    parser.add_argument(
        "pattern", nargs="?", default="*", metavar="PATTERN", help="shell pattern such as 'softpp_*' (default: all)"
    )
    parser.add_argument(
        "--dense",
        action="store_true",
        help="list the SOFT paper's detectors and segmenters instead, and compare their parameters and operations with "
        "the paper's",
    )
    parser.add_argument("--json", type=place, metavar="PATH", help="also write the list to this file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    check_outputs(options.json)
    cards = _dense(options.pattern) if options.dense else _backbones(options.pattern)
    if options.json is not None:
        write_json(options.json, cards)


def _backbones(pattern: str) -> list[dict[str, Any]]:
    from softline.measure.catalog import DIFFERENCE, describe, list_models

    names = list_models(pattern)
    header = ["model", "image", "params M", "GMACs", "no Newton*", "paper*", "top-1 %**"]
    table = Table(header, widths=[max(map(len, names)), 5, 8, 7])
    print(table.head)
    cards = []
    for name in names:
        card = describe(name)
        cards.append(card._asdict())
        counted = [f"{macs / 1e9:.3f}" for macs in (card.macs, card.macs - card.newton_macs)]
        reported = [number(value, ".1f") for value in (card.reported_gmacs, card.reported_top1)]
        print(table.line([name, str(card.image_size), f"{card.parameters / 1e6:.2f}", *counted, *reported]), flush=True)
    print(textwrap.fill(f"* {DIFFERENCE}", 100))
    print("** on ImageNet-1K, as reported by the papers; not measured here")
    return cards


def _dense(pattern: str) -> list[dict[str, Any]]:
    from fnmatch import fnmatch

    from softline.measure.dense_catalog import DIFFERENCE, REPORTED, describe_dense

    names = [name for name in REPORTED if fnmatch(name, pattern)]
    if not names:
        raise UserError(f"no recipe matches {pattern!r}; those of the paper are {', '.join(REPORTED)}")
    header = ["recipe", "backbone M", "head M", "all M", "paper M", "diff M", "image", "GMACs", "paper", "diff %"]
    table = Table(header, widths=[max(map(len, names)), 10, 6, 6])
    print(table.head)
    cards = []
    for name in names:
        card = describe_dense(name)
        operations = None if card.operations is None else card.operations._asdict()
        cards.append({**card._asdict(), "parameters": card.parameters, "operations": operations})
        counted = [f"{count / 1e6:.2f}" for count in (card.backbone, card.head, card.parameters)]
        difference = card.parameters / 1e6 - card.reported_millions
        cells = [name, *counted, str(card.reported_millions), f"{difference:+.2f}"]
        if card.operations is not None and card.reported_gmacs is not None:
            gmacs = card.operations.macs / 1e9
            share = gmacs / card.reported_gmacs - 1
            cells += [str(card.image_size), f"{gmacs:.1f}", str(card.reported_gmacs), f"{100 * share:+.1f}"]
        print(table.line(cells), flush=True)
    print(textwrap.fill(DIFFERENCE, 100))
    return cards
