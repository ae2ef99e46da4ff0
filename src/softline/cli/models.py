"""``softline models``: what there is."""

import argparse
from pathlib import Path

from softline.bench.catalog import describe, list_models
from softline.cli.arguments import Commands, check_parent
from softline.engine.files import write_json


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "models",
        help="list the models with their size, cost and reported accuracy",
        description="List softline's models. All are built by timm.create_model(NAME) after `import softline`.",
    )
    parser.add_argument("pattern", nargs="?", default="*", help="shell pattern, such as 'softpp_*' (default: all)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the list here")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    names = list_models(options.pattern)
    check_parent(options.json)
    print(f"{'model':<24}{'image':>6}{'params M':>10}{'GMACs':>8}{'top-1 %*':>10}")
    cards = []
    for name in names:
        card = describe(name)
        cards.append(card)
        reported = "-" if card.reported_top1 is None else f"{card.reported_top1:.1f}"
        size = f"{card.image_size:>6}{card.parameters / 1e6:>10.2f}{card.macs / 1e9:>8.3f}"
        print(f"{name:<24}{size}{reported:>10}", flush=True)
    print("* on ImageNet-1K, as reported by the papers; not measured here")
    if options.json is not None:
        write_json(options.json, [card._asdict() for card in cards])
