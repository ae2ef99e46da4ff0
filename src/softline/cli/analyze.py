"""``softline analyze``: the figures of both papers, on any model and any images."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softline.checks import check_integer
from softline.cli.arguments import Parser, integers, names
from softline.cli.progress import Progress
from softline.cli.table import format_table, number
from softline.errors import UserError
from softline.files import make_directory, write_json

if TYPE_CHECKING:
    from softline.analysis.locality import MaskedAccuracy
    from softline.analysis.subjects import Picture, Subject
    from softline.backbones.inspection import Layer

AddKind = Callable[..., Parser]
# defaults of softline.analysis.injectivity
QUERY_DISTANCE, WEIGHT_DISTANCE, MOST_QUERIES = 0.5, 0.01, 196


def add_arguments(parser: Parser) -> None:
    parser.describe(
        """Draw a figure of one of the papers for any model and any images. Each command writes WHAT.png, WHAT.svg and
        the numbers as WHAT.json.""",
        epilog="""\
            examples, after softline quickstart:
              softline analyze heatmap runs/quickstart/*/seed0/best.pt
              softline analyze newton runs/quickstart/softpp/seed0/best.pt
              softline analyze locality softpp_tiny --images photographs/
            """,
    )
    add_kind = parser.sub_commands("kind", "WHAT")
    _add_heatmap(add_kind)
    _add_newton(add_kind)
    _add_spectrum(add_kind)
    _add_injectivity(add_kind)
    _add_locality(add_kind)
    _add_cost(add_kind)


def _add_kind(
    add_kind: AddKind, name: str, analyse: Callable[[argparse.Namespace], None], summary: str, description: str
) -> Parser:
    parser = add_kind(name, help=summary, description=description)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/analysis"),
        metavar="DIR",
        help=f"directory for {name}.png, {name}.svg and {name}.json (default: runs/analysis)",
    )
    parser.set_defaults(run=run, analyse=analyse)
    return parser


def _add_models(parser: Parser, *, count: int, optional: bool = False) -> None:
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
        metavar="PATH",
        help="image file or folder of images; can be repeated (default: the validation images of the first model, or "
        "two photographs if it has none)",
    )
    parser.add_argument(
        "--count", type=int, default=count, metavar="N", help=f"largest number of images (default: {count})"
    )
    parser.add_argument("--size", type=int, metavar="PIXELS", help="side of the images (default: as in training)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of random weights (default: 0)")


def _add_heatmap(add_kind: AddKind) -> None:
    parser = _add_kind(
        add_kind,
        "heatmap",
        _heatmap,
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


def _add_newton(add_kind: AddKind) -> None:
    parser = _add_kind(
        add_kind,
        "newton",
        _newton,
        "how fast Newton's iteration inverts SOFT's landmark kernel (Fig. 5 of SOFT)",
        "Draw ||A A_k A - A|| / ||A|| (spectral norms) after k Newton steps: the mean and the range over images, heads "
        "and the layers of a stage.",
    )
    _add_models(parser, count=16)
    parser.add_argument("--iterations", type=int, default=35, metavar="K", help="number of Newton steps (default: 35)")


def _add_spectrum(add_kind: AddKind) -> None:
    parser = _add_kind(
        add_kind,
        "spectrum",
        _spectrum,
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
        "--layer", type=int, default=0, metavar="N", help="SOFT layer whose norms are drawn, from 0 (default: 0)"
    )


def _add_injectivity(add_kind: AddKind) -> None:
    parser = _add_kind(
        add_kind,
        "injectivity",
        _injectivity,
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
        _locality,
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


def _add_cost(add_kind: AddKind) -> None:
    parser = _add_kind(
        add_kind,
        "cost",
        _cost,
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


def run(options: argparse.Namespace) -> None:
    # a missing package should be reported before the work
    import matplotlib  # noqa: F401

    make_directory(options.output)
    options.analyse(options)


def _heatmap(options: argparse.Namespace) -> None:
    from softline.analysis.heatmap import heat_maps, plot_heat_maps

    subjects, pictures = _open(options)
    rows, lines = [], []
    for picture in pictures:
        for query in options.query or [(0.5, 0.5)]:
            for subject in _each(subjects, picture.name):
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
        for subject in _each(subjects)
    }
    shown = [*(step for step in range(0, 35, 5) if step < options.iterations), options.iterations]
    rows = []
    for name, stages in found.items():
        for one in stages:
            means = [one.mean[step] for step in shown]
            cells = ["not finite" if mean is None else f"{mean:.1e}" for mean in means]
            rows.append([name, one.name, str(one.landmarks), *cells])
    print(format_table(["mean residual", "where", "m", *(f"k={step}" for step in shown)], rows))
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
        for subject in _each(subjects)
    }
    keys = ("inverse", "normalized", "attention", "attention_normalized")
    rows, content = [], {}
    for name, one in found.items():
        for norm in one.norms:
            cells = [str(norm.landmarks), f"{norm.rank:g}", *(f"{getattr(norm, key):.3g}" for key in keys)]
            rows.append([name, *cells])
        exponents = {key: one.exponent(key) for key in keys}
        rows.append([name, "~ m^", "", *(number(power, ".2f") for power in exponents.values())])
        content[name] = {**dataclasses.asdict(one), "exponents": exponents}
    print(format_table(["spectral norm of", "m", "rank", "A^+", "normalized", "attention", "normalized"], rows))
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
        for subject in _each(subjects)
    }
    toys = [{"panel": toy.title, **{name: rows.tolist() for name, rows in toy.weights().items()}} for toy in TOYS]
    for toy in toys:
        print(f"{toy['panel']}: weights of 4 queries to 4 keys")
        for name in ("softmax", "linear", "inline"):
            print(f"  {name:<8}", "   ".join(" ".join(f"{weight:.2f}" for weight in row) for row in toy[name]))
    if found:
        print(f"\n{criterion}")
        rows = [[name, f"{one.mean:,.1f}", f"{100 * one.share:.3g} %"] for name, one in found.items()]
        print(format_table(["", "confused pairs per image", "of pairs far apart"], rows))
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

    check_integer("--accuracy-count", options.accuracy_count, 0)
    subjects, pictures = _open(options)
    masses = {subject.name: local_masses(subject, pictures, size=options.size) for subject in _each(subjects)}
    layers = [
        [name, one.layer, "x".join(map(str, one.grid_size)), one.operator, f"{one.mass:.3f}", f"{one.chance:.3f}"]
        for name, found in masses.items()
        for one in found
    ]
    print(format_table(["local mass", "layer", "grid", "attention", "mass", "chance"], layers))
    accuracies, reasons = {}, {}
    for subject in _each(subjects if options.accuracy_count else [], "accuracy"):
        try:
            source, count = own_source(subject), options.accuracy_count
            accuracies[subject.name] = masked_accuracies(subject, source, count=count, size=options.size)
        except UserError as error:
            reasons[subject.name] = str(error)
    if accuracies:
        keys = key_names(accuracies)
        print()
        rows = [[name, *_top1_cells(found, keys)] for name, found in accuracies.items()]
        print(format_table(["top-1 % with hidden keys", *keys], rows))
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
    from softline.attention import ATTENTIONS

    attentions = list(ATTENTIONS) if options.attentions is None else options.attentions
    costs = layer_costs(attentions, options.grids, dim=options.dim, num_heads=options.heads)
    exponents = cost_exponents(costs)
    tokens = [side**2 for side in sorted(set(options.grids))]
    rows = []
    for name, powers in exponents.items():
        mine = [one for one in costs if one.attention == name]
        cells = [f"{one.macs / 1e6:,.1f}, {one.peak_bytes / 2**20:,.1f}" for one in mine]
        rows.append([name, *cells, ", ".join(number(power, ".2f") for power in powers.values())])
    print(format_table(["million multiply-adds, MiB", *(f"N={count:,}" for count in tokens), "~ N^"], rows))
    content = {
        "costs": [dataclasses.asdict(one) for one in costs],
        "exponents": exponents,
        "dim": options.dim,
        "heads": options.heads,
    }
    _write(options, plot_layer_costs(costs), content)


# shared by all of them


def _open(options: argparse.Namespace) -> "tuple[list[Subject], list[Picture]]":
    """Open the models, and the images that all of them are shown."""
    from softline.analysis.subjects import choose_pictures, open_subjects

    subjects = open_subjects(options.models, seed=options.seed)
    fresh = [subject.name for subject in subjects if not subject.trained]
    if fresh:
        print(f"random weights, nothing trained: {', '.join(fresh)}")
    return subjects, choose_pictures(subjects[0], options.images, options.count)


def _each(subjects: "Sequence[Subject]", what: str = "") -> "Iterator[Subject]":
    """Go through the models, showing how many of them are done.

    what: what is done with them.
    """
    with Progress() as progress:
        for done, subject in enumerate(subjects):
            text = f"{subject.name}, {what}" if what else subject.name
            progress.show("", text, done=done, total=len(subjects))
            yield subject


def _write(options: argparse.Namespace, figure: Any, content: dict[str, Any]) -> None:
    from softline.plotting.figures import save_figure

    paths = save_figure(figure, options.output, options.kind)
    numbers = options.output / f"{options.kind}.json"
    write_json(numbers, {"command": options.command_line, **content})
    print(f"\nfigure: {', '.join(map(str, paths))}\nnumbers: {numbers}")


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
