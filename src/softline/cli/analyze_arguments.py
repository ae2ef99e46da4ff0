"""The arguments of the analyses of ``softline analyze``."""

import argparse
from collections.abc import Callable
from pathlib import Path

from softline.cli.arguments import Parser, integers, names, place

AddKind = Callable[..., Parser]
# defaults of softline.analysis.injectivity
QUERY_DISTANCE, WEIGHT_DISTANCE, MOST_QUERIES = 0.5, 0.01, 196


def add_kinds(add_kind: AddKind) -> None:
    """Add a sub-command for each analysis."""
    _add_heatmap(add_kind)
    _add_newton(add_kind)
    _add_spectrum(add_kind)
    _add_injectivity(add_kind)
    _add_locality(add_kind)
    _add_cost(add_kind)
    _add_accuracy(add_kind)


def _add_kind(add_kind: AddKind, name: str, summary: str, description: str) -> Parser:
    parser = add_kind(name, help=summary, description=description)
    parser.add_argument(
        "--output",
        type=place,
        default=Path("runs/analysis"),
        metavar="DIR",
        help=f"directory for {name}.png, {name}.svg and {name}.json (default: runs/analysis)",
    )
    return parser


def _add_models(parser: Parser, *, count: int, optional: bool = False, sets: bool = False) -> None:
    """Add the models and images.

    sets: whether there can be several sets of images.
    """
    parser.add_argument(
        "models",
        nargs="*" if optional else "+",
        metavar="MODEL",
        help="a .pt file of `softline train`, a directory that timm saved, or the name of a model, which then has "
        "random weights, such as softpp_tiny or softpp_tiny:attention=linear; NAME=MODEL sets its name in the figure",
    )
    parser.add_argument(
        "--images",
        action="append",
        default=[],
        metavar="NAME=PATH" if sets else "PATH",
        help="image file or folder of images; can be repeated"
        + ("; NAME=PATH gives each set of images its own panel" if sets else "")
        + " (default: the validation images of the first model, or two photographs if it has none)",
    )
    each = " of each set" if sets else ""
    parser.add_argument(
        "--count", type=int, default=count, metavar="N", help=f"largest number of images{each} (default: {count})"
    )
    parser.add_argument("--size", type=int, metavar="PIXELS", help="side of the images (default: as in training)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of random weights (default: 0)")


def _add_heatmap(add_kind: AddKind) -> None:
    parser = _add_kind(
        add_kind,
        "heatmap",
        "what queries attend to, by layer and head (Figs. 4 and 7 of SOFT, Fig. 4 of InLine)",
        "Draw the attention weights of chosen query patches over the image, with a row for each model. Weights above "
        "the mean of their query are orange, those below are blue; the largest difference has the full colour.",
    )
    _add_models(parser, count=2)
    parser.add_argument(
        "--query",
        type=_point,
        action="append",
        metavar="X,Y",
        help="point of the image, each coordinate from 0 (left, top) to 1; can be repeated (default: 0.5,0.5)",
    )
    parser.add_argument(
        "--layers",
        type=integers,
        metavar="N,...",
        help="layers, counted from 0, or from the end as in --layers=-2,-1 (default: the first of each stage)",
    )
    parser.add_argument(
        "--heads",
        type=_heads,
        default=[None],
        metavar="N,...",
        help="heads, counted from 0, or mean (default: the mean of all heads)",
    )
    parser.add_argument(
        "--rollout", action="store_true", help="add attention rollout: what the prediction depends on, over all layers"
    )
    parser.add_argument(
        "--scaling",
        choices=["difference", "unit"],
        default="difference",
        help="colours: difference, from the mean of the query's weights, or unit, from 0 for the lowest weight to 1 "
        "for the highest, as in SOFT's figures (default: difference)",
    )
    parser.add_argument(
        "--beside", action="store_true", help="draw the models side by side, with a row for each layer and head"
    )


def _add_newton(add_kind: AddKind) -> None:
    parser = _add_kind(
        add_kind,
        "newton",
        "how fast Newton's iteration inverts SOFT's landmark kernel (Fig. 5 of SOFT)",
        "Draw ||A A_k A - A|| / ||A|| (spectral norms) after k Newton steps: the mean and the range over images, heads "
        "and the layers of a stage.",
    )
    _add_models(parser, count=16, sets=True)
    parser.add_argument("--iterations", type=int, default=35, metavar="K", help="number of Newton steps (default: 35)")
    _add_linear(parser)


def _add_spectrum(add_kind: AddKind) -> None:
    parser = _add_kind(
        add_kind,
        "spectrum",
        "eigenvalues of SOFT's landmark kernel, and norms of its inverse (Fig. 6 of SOFT)",
        "Draw the eigenvalues of the landmark kernel A, and the spectral norms of A^+ and of D^-1/2 A^+ D^-1/2, and of "
        "the attention with either, against the number of landmarks m. It grows with the image here: there is no cap.",
    )
    _add_models(parser, count=4)
    parser.add_argument(
        "--sizes",
        type=integers,
        metavar="PIXELS,...",
        help="image sides at which the norms are computed (default: up to 3 times the model's)",
    )
    parser.add_argument(
        "--landmarks",
        type=integers,
        metavar="M,...",
        help="numbers of landmarks at which the norms are computed, instead of --sizes; the eigenvalues are then those "
        "of that layer at the largest number",
    )
    parser.add_argument(
        "--layer", type=int, default=0, metavar="N", help="SOFT layer whose norms are drawn, from 0 (default: 0)"
    )
    parser.add_argument("--samples", action="store_true", help='mark the norm of every image and head by a "+"')
    _add_linear(parser)


def _add_linear(parser: Parser) -> None:
    parser.add_argument(
        "--linear", action="store_true", help="linear axes, as in the paper, instead of logarithmic ones"
    )


def _add_injectivity(add_kind: AddKind) -> None:
    parser = _add_kind(
        add_kind,
        "injectivity",
        "whether different queries get different weights (Figs. 1 and 2 of InLine)",
        "Draw the toy example of InLine's Fig. 1 and, for models, how often they confuse queries: pairs of one image, "
        "layer and head that are farther apart than --query-distance times the mean length of a query, while no weight "
        "differs by --weight-distance / N. The criterion of the paper is not published.",
    )
    _add_models(parser, count=32, optional=True)
    for option, value, text in (
        ("--query-distance", QUERY_DISTANCE, "queries farther apart than T times their mean length are different"),
        ("--weight-distance", WEIGHT_DISTANCE, "weights that differ by less than T / N, for N tokens, are alike"),
    ):
        parser.add_argument(option, type=float, default=value, metavar="T", help=f"{text} (default: {value})")
    parser.add_argument(
        "--most-queries",
        type=int,
        default=MOST_QUERIES,
        metavar="N",
        help=f"queries to compare in a layer with more tokens, spread over them (default: {MOST_QUERIES})",
    )


def _add_locality(add_kind: AddKind) -> None:
    parser = _add_kind(
        add_kind,
        "locality",
        "how local attention is, and the accuracy without local keys (Fig. 3 and Table 2 of InLine)",
        "Draw the share of the weights on the 3 x 3 tokens around the query, for each layer, and compare it with "
        "chance. For trained classifiers, also draw the accuracy when local keys, or as many random keys, are hidden "
        "from all queries.",
    )
    _add_models(parser, count=32)
    parser.add_argument(
        "--accuracy-count",
        type=int,
        default=500,
        metavar="N",
        help="number of validation images for the accuracy; 0 leaves it out (default: 500)",
    )
    parser.add_argument(
        "--sums",
        action="store_true",
        help="also draw the sum of the weights around the query, negative ones included, as in InLine's Fig. 3",
    )


def _add_cost(add_kind: AddKind) -> None:
    parser = _add_kind(
        add_kind,
        "cost",
        "multiply-adds and memory against the number of tokens, for every attention",
        "Count the multiply-adds and the peak memory of one layer of each attention on square grids of tokens; "
        "`softline bench` also measures time.",
    )
    parser.add_argument(
        "--attentions", type=names, metavar="NAME,...", help="attentions (default: all that are registered)"
    )
    parser.add_argument(
        "--grids",
        type=integers,
        default=[14, 28, 56, 112],
        metavar="SIDE,...",
        help="sides of the grids, with N = side² tokens (default: 14,28,56,112)",
    )
    parser.add_argument("--dim", type=int, default=64, metavar="C", help="number of channels (default: 64)")
    parser.add_argument("--heads", type=int, default=2, metavar="H", help="number of heads (default: 2)")


def _add_accuracy(add_kind: AddKind) -> None:
    parser = _add_kind(
        add_kind,
        "accuracy",
        "accuracy against parameters, multiply-adds and speed (Figs. 1a and 3 of SOFT)",
        "Draw the published accuracy of both papers' models and their rivals against parameters and multiply-adds, as "
        "published and, for softline's models, as softline counts them; and the accuracy of your own runs.",
    )
    parser.add_argument(
        "--papers",
        type=names,
        metavar="NAME,...",
        help="comparisons to draw: soft, inline, or none (default: both, or none if there are --runs)",
    )
    parser.add_argument(
        "--models",
        metavar="PATTERN",
        help="softline's models to count, as a shell pattern such as 'softpp_*' (default: all of the papers)",
    )
    parser.add_argument(
        "--runs", nargs="+", default=[], metavar="DIR", help="directories of `softline train`, or NAME=DIR"
    )
    parser.add_argument(
        "--imagenet",
        action="store_true",
        help="the runs are on ImageNet-1K: draw them beside the published models instead of on axes of their own",
    )
    parser.add_argument(
        "--throughput", action="store_true", help="also draw and measure images per second; takes minutes on a CPU"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="batch size of --throughput (default: 8)")
    parser.add_argument("--device", metavar="NAME", help="device of --throughput: cpu, cuda or cuda:N (default: cpu)")


# values


def _point(text: str) -> tuple[float, float]:
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected X,Y such as 0.5,0.3; got {text!r}") from None
    return x, y


def _heads(text: str) -> list[int | None]:
    try:
        return [None if part.strip() == "mean" else int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected heads from 0 or mean, separated by commas; got {text!r}") from None
