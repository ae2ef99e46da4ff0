"""``softline analyze``: the figures of both papers, on any model and any images."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from softline.checks import check_integer
from softline.cli.analyze_arguments import add_kinds
from softline.cli.arguments import Parser
from softline.cli.outputs import check_outputs
from softline.cli.progress import Progress
from softline.cli.table import format_table, number
from softline.errors import UserError
from softline.files import write_json
from softline.locks import hold_file
from softline.plotting.figures import FORMATS

if TYPE_CHECKING:
    from softline.analysis.locality import MaskedAccuracy
    from softline.analysis.subjects import Picture, Subject
    from softline.backbones.inspection import Layer


def add_arguments(parser: Parser) -> None:
    parser.describe(
        """Draw a figure of one of the papers for any model and any images. Each command writes WHAT.png, WHAT.svg and
        the numbers as WHAT.json.""",
        epilog="""\
            examples, after softline quickstart:
              softline analyze heatmap runs/quickstart/*/seed0/best.pt
              softline analyze newton runs/quickstart/softpp/seed0/best.pt
              softline analyze locality softpp_tiny --images photographs/
              softline analyze accuracy --runs runs/quickstart/*/seed0
            """,
    )
    add_kinds(parser.sub_commands("kind", "WHAT"))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    # a missing package should be reported before the work
    import matplotlib  # noqa: F401

    results = options.output / f"{options.kind}.json"
    with hold_file(results):
        check_outputs(*(results.with_suffix(f".{ending}") for ending in ("json", *FORMATS)))
        ANALYSES[options.kind](options)


def _heatmap(options: argparse.Namespace) -> None:
    from softline.analysis.heatmap import heat_maps, plot_heat_maps, plot_models_beside

    subjects, pictures = _open(options)
    groups = []
    for picture in pictures:
        for query in options.query or [(0.5, 0.5)]:
            group = []
            for subject in _each(subjects, picture.name):
                chosen = _chosen(subject, options.layers, picture, options.size)
                found = heat_maps(
                    subject, picture, query, chosen, options.heads, size=options.size, with_rollout=options.rollout
                )
                group.append(found)
            groups.append(group)
    rows = [maps for group in groups for maps in group]
    lines = [one.to_dict() for _, maps in rows for one in maps]
    print(f"{len(lines)} maps of {len(pictures)} images by {', '.join(subject.name for subject in subjects)}")
    scaling = options.scaling
    figure = plot_models_beside(groups, scaling=scaling) if options.beside else plot_heat_maps(rows, scaling=scaling)
    _write(options, figure, {"maps": lines})


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
    from softline.analysis.subjects import choose_sets

    subjects = _open_subjects(options)
    sets = choose_sets(subjects[0], options.images, options.count)
    found = {
        f"{subject.name} on {title}" if title else subject.name: newton_convergence(
            subject, pictures, iterations=options.iterations, size=options.size
        )
        for title, pictures in sets.items()
        for subject in _each(subjects, title)
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
    counts = {title: len(pictures) for title, pictures in sets.items()} if "" not in sets else len(sets[""])
    _write(options, plot_newton(found, linear=options.linear), {"images": counts, "models": plain})


def _spectrum(options: argparse.Namespace) -> None:
    from softline.analysis.spectrum import NORMS as keys
    from softline.analysis.spectrum import plot_spectrum, spectrum

    for name in ("sizes", "size"):
        if options.landmarks and getattr(options, name):
            raise UserError(f"--landmarks decides the size of the images: leave out --{name}")
    subjects, pictures = _open(options)
    found = {
        subject.name: spectrum(
            subject,
            pictures,
            sizes=sorted(set(options.sizes)) if options.sizes else None,
            landmarks=options.landmarks,
            layer=options.layer,
            size=options.size,
        )
        for subject in _each(subjects)
    }
    rows, content = [], {}
    for name, one in found.items():
        for norm in one.norms:
            cells = [str(norm.landmarks), f"{norm.rank:g}", *(f"{getattr(norm, key):.3g}" for key in keys)]
            rows.append([name, *cells])
        exponents = {key: one.exponent(key) for key in keys}
        rows.append([name, "~ m^", "", *(number(power, ".2f") for power in exponents.values())])
        content[name] = {**dataclasses.asdict(one), "exponents": exponents}
    print(format_table(["spectral norm of", "m", "rank", "A^+", "normalized", "attention", "normalized"], rows))
    figure = plot_spectrum(found, samples=options.samples, linear=options.linear)
    _write(options, figure, {"models": content})


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
        [name, one.layer, "x".join(map(str, one.grid_size)), one.operator]
        + [f"{value:.3f}" for value in (one.mass, one.chance, *([one.sum, one.whole_window] if options.sums else []))]
        for name, found in masses.items()
        for one in found
    ]
    sums = ["sum", "9 / N"] if options.sums else []
    print(format_table(["local mass", "layer", "grid", "attention", "mass", "chance", *sums], layers))
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
    _write(options, plot_locality(masses, accuracies, sums=options.sums), plain)


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


def _accuracy(options: argparse.Namespace) -> None:
    from softline.analysis.accuracy import (
        Stopwatch,
        among_published,
        catalog_points,
        plot_accuracy,
        published_points,
        run_points,
    )

    papers = options.papers if options.papers is not None else [] if options.runs else ["soft", "inline"]
    _check_accuracy(options, papers)
    chosen = {key: value for key in ("batch", "device") if (value := getattr(options, key)) is not None}
    stopwatch = Stopwatch(**chosen) if options.throughput else None
    runs = run_points(options.runs, stopwatch=stopwatch)
    points = published_points(papers)
    if papers:
        with Progress() as progress:
            points += catalog_points(
                papers, pattern=options.models or "*", stopwatch=stopwatch, hear=lambda name: progress.show("", name)
            )
    points += among_published(runs, papers) if options.imagenet else runs
    rows = []
    for point in points:
        macs = point.macs_without_newton
        cost = [f"{point.parameters / 1e6:.1f}", number(None if macs is None else macs / 1e9, ".3g")]
        speed = [number(point.per_second, ",.0f"), point.device or ""] if options.throughput else []
        rows.append([point.name, *cost, f"{point.top1:.1f}", *speed, point.kind, point.source])
    speed = ["img/s", "on"] if options.throughput else []
    print(format_table(["model", "params M", "GMACs, no Newton", "top-1 %", *speed, "numbers", "source"], rows))
    content = {"points": [dataclasses.asdict(point) for point in points]}
    _write(options, plot_accuracy(points, speed=options.throughput), content)


def _check_accuracy(options: argparse.Namespace, papers: Sequence[str]) -> None:
    """Refuse options that would have no effect."""
    if not papers and not options.runs:
        raise UserError("there is nothing to draw: name a paper by --papers, or runs by --runs")
    if options.models is not None and not papers:
        raise UserError("--models are those of the papers: name a paper by --papers")
    if options.imagenet and not (options.runs and papers):
        raise UserError("--imagenet draws runs beside published models: it needs --runs and --papers")
    for name in ("batch", "device"):
        if getattr(options, name) is not None and not options.throughput:
            raise UserError(f"--{name} is for measuring: add --throughput")


ANALYSES: dict[str, Callable[[argparse.Namespace], None]] = {
    "heatmap": _heatmap,
    "newton": _newton,
    "spectrum": _spectrum,
    "injectivity": _injectivity,
    "locality": _locality,
    "cost": _cost,
    "accuracy": _accuracy,
}


# shared by all of them


def _open(options: argparse.Namespace) -> "tuple[list[Subject], list[Picture]]":
    """Open the models, and the images that all of them are shown."""
    from softline.analysis.subjects import choose_pictures

    subjects = _open_subjects(options)
    return subjects, choose_pictures(subjects[0], options.images, options.count)


def _open_subjects(options: argparse.Namespace) -> "list[Subject]":
    from softline.analysis.subjects import open_subjects

    subjects = open_subjects(options.models, seed=options.seed)
    fresh = [subject.name for subject in subjects if not subject.trained]
    if fresh:
        print(f"random weights, nothing trained: {', '.join(fresh)}")
    return subjects


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
