"""``softline analyze``: the figures of both papers, on any model and any images."""

import argparse
import dataclasses
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softline.cli.arguments import Commands, integers, names
from softline.errors import UserError

if TYPE_CHECKING:
    from softline.analysis.locality import MaskedAccuracy
    from softline.analysis.subjects import Picture, Subject
    from softline.backbones.inspection import Layer

MODELS_HELP = (
    "a .pt file of `softline train`, a directory that timm saved, or a model's name with random weights, such "
)
MODELS_HELP += "as softpp_tiny or softpp_tiny:attention=linear; NAME=MODEL to choose what figures call it"


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "analyze",
        help="see what attention does: heat maps, Newton's convergence, spectra, injectivity, locality, cost",
        description="Make a figure of one of the papers on any model and any images. Each writes WHAT.png, WHAT.svg "
        "and the numbers as WHAT.json.",
        epilog=textwrap.dedent("""\
            examples, after softline quickstart:
              softline analyze heatmap runs/quickstart/*/seed0/best.pt
              softline analyze newton runs/quickstart/softpp/seed0/best.pt
              softline analyze locality softpp_tiny --images photographs/
            """),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    _add_heatmap(kinds)
    _add_newton(kinds)
    _add_spectrum(kinds)
    _add_injectivity(kinds)
    _add_locality(kinds)
    _add_cost(kinds)


def _add_kind(
    kinds: Commands, name: str, analyse: Callable[[argparse.Namespace], None], help_text: str, description: str
) -> argparse.ArgumentParser:
    parser = kinds.add_parser(name, help=help_text, description=description)
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help=f"where {name}.png, .svg and .json go (default: runs/analysis)"
    )
    parser.set_defaults(run=run, analyse=analyse)
    return parser


def _add_models(parser: argparse.ArgumentParser, *, count: int, optional: bool = False) -> None:
    parser.add_argument("models", nargs="*" if optional else "+", metavar="MODEL", help=MODELS_HELP)
    parser.add_argument(
        "--images",
        action="append",
        default=[],
        metavar="PATH",
        help="an image file or a folder of images; may be repeated (default: a checkpoint's own validation images, "
        "else two photographs)",
    )
    parser.add_argument("--count", type=int, default=count, metavar="N", help=f"images at most (default: {count})")
    parser.add_argument("--size", type=int, metavar="PIXELS", help="side of the images (default: the model's own)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of random weights (default: 0)")


def _add_heatmap(kinds: Commands) -> None:
    parser = _add_kind(
        kinds,
        "heatmap",
        _heatmap,
        "where queries look, per layer and head (Figs. 4 and 7 of SOFT, Fig. 4 of InLine)",
        "Rows of the attention weights for chosen query patches, laid on the image, models below each other. More "
        "than the row's mean is orange, less is blue; the largest difference has the full colour.",
    )
    _add_models(parser, count=2)
    parser.add_argument(
        "--query",
        type=_point,
        action="append",
        metavar="X,Y",
        help="a point of the image, each from 0 (left, top) to 1; may be repeated (default: 0.5,0.5)",
    )
    parser.add_argument(
        "--layers",
        type=integers,
        metavar="N,...",
        help="from 0, or from the end as in --layers=-2,-1 (default: the first of each stage)",
    )
    parser.add_argument(
        "--heads", type=_heads, default=[None], metavar="N,...", help="from 0, or mean (default: mean of all heads)"
    )
    parser.add_argument(
        "--rollout", action="store_true", help="add attention rollout: what the prediction depends on, over all layers"
    )


def _add_newton(kinds: Commands) -> None:
    parser = _add_kind(
        kinds,
        "newton",
        _newton,
        "how fast Newton's iteration inverts SOFT's landmark kernel (Fig. 5 of SOFT)",
        "||A A_k A - A|| / ||A|| (spectral norms) after k Newton steps: mean and range over images, heads and the "
        "layers of a stage.",
    )
    _add_models(parser, count=16)
    parser.add_argument("--iterations", type=int, default=35, metavar="K", help="Newton steps (default: 35)")


def _add_spectrum(kinds: Commands) -> None:
    parser = _add_kind(
        kinds,
        "spectrum",
        _spectrum,
        "eigenvalues of SOFT's landmark kernel, and norms of its inverse over m (Fig. 6 of SOFT)",
        "Eigenvalues of the landmark kernel A; spectral norms of A^+ and of D^-1/2 A^+ D^-1/2, and of the attention "
        "with either, over the number of landmarks m, which grows with the image: the cap on landmarks is lifted.",
    )
    _add_models(parser, count=4)
    parser.add_argument(
        "--sizes",
        type=integers,
        metavar="PIXELS,...",
        help="images over which m grows (default: up to 3 x the model's)",
    )
    parser.add_argument(
        "--layer", type=int, default=0, metavar="N", help="which SOFT layer's norms, from 0 (default: 0)"
    )


def _add_injectivity(kinds: Commands) -> None:
    from softline.analysis.injectivity import MOST_QUERIES, QUERY_DISTANCE, WEIGHT_DISTANCE

    parser = _add_kind(
        kinds,
        "injectivity",
        _injectivity,
        "whether different queries get different weights (Figs. 1 and 2 of InLine)",
        "The toy example of InLine's Fig. 1, and of models how often they confuse queries: pairs of one image, layer "
        "and head that are farther apart than --query-distance times the mean length of a query, while no weight "
        "differs by --weight-distance / N. The paper's own criterion is not known.",
    )
    _add_models(parser, count=32, optional=True)
    for option, value, text in (
        ("--query-distance", QUERY_DISTANCE, "queries farther apart than T times their mean length are different"),
        ("--weight-distance", WEIGHT_DISTANCE, "weights closer than T / N, for N tokens, are alike"),
    ):
        parser.add_argument(option, type=float, default=value, metavar="T", help=f"{text} (default: {value})")
    parser.add_argument(
        "--most-queries",
        type=int,
        default=MOST_QUERIES,
        metavar="N",
        help=f"compare so many queries of a layer, spread over its tokens, where it has more (default: {MOST_QUERIES})",
    )


def _add_locality(kinds: Commands) -> None:
    parser = _add_kind(
        kinds,
        "locality",
        _locality,
        "how local attention is, and what hiding local keys costs (Fig. 3 and Table 2 of InLine)",
        "The share of the weights on the 3 x 3 tokens around the query, per layer, against chance; and for checkpoints "
        "that were trained for classification the accuracy with local or as many random keys hidden from every query.",
    )
    _add_models(parser, count=32)
    parser.add_argument(
        "--accuracy-count",
        type=int,
        default=500,
        metavar="N",
        help="validation images for the accuracy; 0 leaves it out (default: 500)",
    )


def _add_cost(kinds: Commands) -> None:
    from softline.attention import ATTENTIONS

    parser = _add_kind(
        kinds,
        "cost",
        _cost,
        "multiply-adds and memory against the number of tokens, for every attention",
        "Count the multiply-adds and the peak memory of one layer of each attention on square grids; `softline bench` "
        "measures time as well.",
    )
    parser.add_argument(
        "--attentions",
        type=names,
        default=list(ATTENTIONS),
        metavar="NAME,...",
        help="default: all that are registered",
    )
    parser.add_argument(
        "--grids",
        type=integers,
        default=[14, 28, 56, 112],
        metavar="SIDE,...",
        help="default: 14,28,56,112 (N = side²)",
    )
    parser.add_argument("--dim", type=int, default=64, metavar="C", help="channels (default: 64)")
    parser.add_argument("--heads", type=int, default=2, metavar="H", help="heads (default: 2)")


def run(options: argparse.Namespace) -> None:
    # what is missing is better found out before the work
    import matplotlib  # noqa: F401

    from softline.files import make_directory

    options.output = options.output or Path("runs/analysis")
    make_directory(options.output)
    options.analyse(options)


def _heatmap(options: argparse.Namespace) -> None:
    from softline.analysis.heatmap import heat_maps, plot_heat_maps

    subjects, pictures = _open(options)
    rows, lines = [], []
    for picture in pictures:
        for query in options.query or [(0.5, 0.5)]:
            for subject in subjects:
                chosen = _chosen(subject, options.layers, picture, options.size)
                found = heat_maps(
                    subject, picture, query, chosen, options.heads, size=options.size, with_rollout=options.rollout
                )
                rows.append(found)
                lines += [one.to_dict() for one in found[1]]
    print(f"{len(lines)} maps of {len(pictures)} images by {', '.join(subject.name for subject in subjects)}")
    _write(options, plot_heat_maps(rows), {"maps": lines})


def _chosen(subject: "Subject", places: Sequence[int] | None, picture: "Picture", size: int | None) -> "list[Layer]":
    from softline.backbones.inspection import choose_layers, one_of_each_stage

    if places is not None:
        return list(dict.fromkeys(choose_layers(subject.layers, places)))
    image = subject.prepare(picture.image, size)
    seen, _ = subject.look(image[None])
    # one token has nowhere else to look
    return one_of_each_stage([given.layer for given in seen if given.grid_size != (1, 1)] or subject.layers)


def _newton(options: argparse.Namespace) -> None:
    from softline.analysis.newton import newton_convergence, plot_newton

    subjects, pictures = _open(options)
    found = {
        subject.name: newton_convergence(subject, pictures, iterations=options.iterations, size=options.size)
        for subject in subjects
    }
    shown = [*(step for step in range(0, 35, 5) if step < options.iterations), options.iterations]
    rows = []
    for name, stages in found.items():
        for one in stages:
            means = [one.mean[step] for step in shown]
            cells = ["not finite" if mean is None else f"{mean:.1e}" for mean in means]
            rows.append([name, one.name, str(one.landmarks), *cells])
    _print_table(["mean residual", "where", "m", *(f"k={step}" for step in shown)], rows)
    plain = {name: [dataclasses.asdict(one) for one in stages] for name, stages in found.items()}
    _write(options, plot_newton(found), {"models": plain})


def _spectrum(options: argparse.Namespace) -> None:
    from softline.analysis.spectrum import growing_sizes, plot_spectrum, spectrum

    subjects, pictures = _open(options)
    found = {
        subject.name: spectrum(
            subject,
            pictures,
            sizes=sorted(set(options.sizes or growing_sizes(subject))),
            layer=options.layer,
            size=options.size,
        )
        for subject in subjects
    }
    keys = ("inverse", "normalized", "attention", "attention_normalized")
    rows, content = [], {}
    for name, one in found.items():
        for norm in one.norms:
            cells = [str(norm.landmarks), f"{norm.rank:g}", *(f"{getattr(norm, key):.3g}" for key in keys)]
            rows.append([name, *cells])
        exponents = {key: one.exponent(key) for key in keys}
        rows.append([name, "~ m^", "", *("-" if power is None else f"{power:.2f}" for power in exponents.values())])
        content[name] = {**dataclasses.asdict(one), "exponents": exponents}
    _print_table(["spectral norm of", "m", "rank", "A^+", "normalized", "attention", "normalized"], rows)
    _write(options, plot_spectrum(found), {"models": content})


def _injectivity(options: argparse.Namespace) -> None:
    from softline.analysis.injectivity import TOYS, count_confusions, plot_injectivity

    if options.images and not options.models:
        raise UserError("--images are for models: name at least one MODEL")
    subjects, pictures = _open(options) if options.models else ([], [])
    limits = {"query_distance": options.query_distance, "weight_distance": options.weight_distance}
    criterion = (
        f"confused: ||p - q|| > {options.query_distance:g} mean ||q||  and  "
        f"max |w(p) - w(q)| < {options.weight_distance:g} / N"
    )
    found = {
        subject.name: count_confusions(
            subject, pictures, size=options.size, most_queries=options.most_queries, **limits
        )
        for subject in subjects
    }
    toys = [{"panel": toy.title, **{name: rows.tolist() for name, rows in toy.weights().items()}} for toy in TOYS]
    for toy in toys:
        print(f"{toy['panel']}: weights of 4 queries to 4 keys")
        for name in ("softmax", "linear", "inline"):
            print(f"  {name:<8}", "   ".join(" ".join(f"{weight:.2f}" for weight in row) for row in toy[name]))
    if found:
        print(f"\n{criterion}")
        _print_table(
            ["", "confused pairs per image", "of pairs far apart"],
            [[name, f"{one.mean:,.1f}", f"{100 * one.share:.3g} %"] for name, one in found.items()],
        )
        for name, one in found.items():
            if one.left_out:
                print(f"{name}: not counted, because their queries are not known: {', '.join(one.left_out)}")
    models = {
        name: {**dataclasses.asdict(one), "mean": one.mean, "share_of_far_pairs": one.share}
        for name, one in found.items()
    }
    content = {"toy": toys, "criterion": criterion, **limits, "images": len(pictures), "models": models}
    _write(options, plot_injectivity(found, criterion), content)


def _locality(options: argparse.Namespace) -> None:
    from softline.analysis.locality import key_names, local_masses, masked_accuracies, plot_locality
    from softline.analysis.subjects import own_source
    from softline.checks import check_integer

    check_integer("--accuracy-count", options.accuracy_count, 0)
    subjects, pictures = _open(options)
    masses = {subject.name: local_masses(subject, pictures, size=options.size) for subject in subjects}
    _print_table(
        ["local mass", "layer", "grid", "attention", "mass", "chance"],
        [
            [name, one.layer, "x".join(map(str, one.grid_size)), one.operator, f"{one.mass:.3f}", f"{one.chance:.3f}"]
            for name, found in masses.items()
            for one in found
        ],
    )
    accuracies, reasons = {}, {}
    for subject in subjects if options.accuracy_count else []:
        try:
            source, count = own_source(subject), options.accuracy_count
            accuracies[subject.name] = masked_accuracies(subject, source, count=count, size=options.size)
        except ValueError as error:
            reasons[subject.name] = str(error)
    if accuracies:
        keys = key_names(accuracies)
        print()
        rows = [[name, *_top1_cells(found, keys)] for name, found in accuracies.items()]
        _print_table(["top-1 % with hidden keys", *keys], rows)
    for reason in reasons.values():
        print(f"no accuracy: {reason}")
    plain = {
        "masses": {name: [dataclasses.asdict(one) for one in found] for name, found in masses.items()},
        "accuracies": {name: [dataclasses.asdict(one) for one in found] for name, found in accuracies.items()},
        "without_accuracy": reasons,
    }
    _write(options, plot_locality(masses, accuracies), plain)


def _top1_cells(found: "Sequence[MaskedAccuracy]", keys: Sequence[str]) -> list[str]:
    top1 = {one.keys: f"{100 * one.top1:.1f}" for one in found}
    return [top1.get(key, "-") for key in keys]


def _cost(options: argparse.Namespace) -> None:
    from softline.analysis.cost import cost_exponents, layer_costs, plot_layer_costs

    costs = layer_costs(options.attentions, options.grids, dim=options.dim, num_heads=options.heads)
    exponents = cost_exponents(costs)
    tokens = [side**2 for side in sorted(set(options.grids))]
    rows = []
    for name, powers in exponents.items():
        mine = [one for one in costs if one.attention == name]
        cells = [f"{one.macs / 1e6:,.1f}, {one.peak_bytes / 2**20:,.1f}" for one in mine]
        rows.append([name, *cells, ", ".join("-" if power is None else f"{power:.2f}" for power in powers.values())])
    _print_table(["million multiply-adds, MiB", *(f"N={count:,}" for count in tokens), "~ N^"], rows)
    content = {
        "costs": [dataclasses.asdict(one) for one in costs],
        "exponents": exponents,
        "dim": options.dim,
        "heads": options.heads,
    }
    _write(options, plot_layer_costs(costs), content)


# what they share


def _open(options: argparse.Namespace) -> "tuple[list[Subject], list[Picture]]":
    """The models and the images of all: those of the first, unless they are named."""
    from softline.analysis.subjects import choose_pictures, open_subjects

    subjects = open_subjects(options.models, seed=options.seed)
    fresh = [subject.name for subject in subjects if not subject.trained]
    if fresh:
        print(f"random weights, nothing trained: {', '.join(fresh)}")
    return subjects, choose_pictures(subjects[0], options.images, options.count)


def _write(options: argparse.Namespace, figure: Any, content: dict[str, Any]) -> None:
    from softline.files import write_json
    from softline.plotting.figures import save_figure

    paths = save_figure(figure, options.output, options.kind)
    numbers = options.output / f"{options.kind}.json"
    write_json(numbers, {"command": options.command_line, **content})
    print(f"\nfigure: {', '.join(map(str, paths))}\nnumbers: {numbers}")


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[column]) for line in [header, *rows]) for column in range(len(header))]
    for line in [header, *rows]:
        print(
            "  ".join(
                [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
            )
        )


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
