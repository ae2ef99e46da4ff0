"""``softline bench``: the cost of operators, layers and models on this machine."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from softline.checks import check_at_least, check_option, check_range
from softline.cli.arguments import Parser, add_attentions, integers, names, place
from softline.cli.bench_check import add_check
from softline.cli.bench_tables import CostTable, growth_text, memory_table
from softline.cli.outputs import held_outputs
from softline.cli.progress import Progress
from softline.cli.table import format_table, rate
from softline.errors import UserError
from softline.files import write_json
from softline.process import available_memory

if TYPE_CHECKING:
    from softline.measure.cases import Case, Mode
    from softline.measure.measuring import Row
    from softline.measure.memory import ProcessMeter
    from softline.measure.results import Results

AddKind = Callable[..., Parser]
MODES: "dict[str, tuple[Mode, ...]]" = {"infer": ("infer",), "train": ("train",), "both": ("infer", "train")}
# names of softline.measure.cases: MATH, OPERATORS, DTYPES and FIGURE_5
MATH = "softmax-math"
OPERATORS = (
    *("softmax", MATH, "soft", "softpp", "inline", "angular", "efficient", "focused", "gaussian", "hydra", "linear"),
    *("linformer", "nystrom", "performer", "reformer"),
)
DTYPES = ("float32", "bfloat16", "float16")
PANELS = ("runtime", "windows", "resolution")
# forward passes of the release's speed measurement
RELEASE_WARM_UPS, RELEASE_ROUNDS = 50, 30
MOST_ROUNDS = 10**6
# share of the available memory that one measured process may take
LIMIT_SHARE = 0.9
# quadratic in memory, and no baseline
NOT_IN_MEMORY = ("gaussian",)


def add_arguments(parser: Parser) -> None:
    parser.describe(
        """Measure the cost of operators, layers or whole models on this machine. The cases take turns in every round,
        together with a matrix product that shows what the machine reaches at that moment. Memory is measured in a
        process of its own for each row. The row of a case that fails says why, and the others are measured.""",
        epilog="""\
            examples:
              softline bench layers --sizes 224,448
              softline bench models softpp_tiny vit_small_patch16_224 --sizes 224,512 --json models.json
              softline bench memory --figure memory.png
              softline bench inline windows --rounds 5 --warm-ups 1
              softline bench check models.json
            """,
    )
    add_kind = parser.sub_commands("kind", "WHAT")
    _add_ops(add_kind)
    _add_layers(add_kind)
    _add_models(add_kind)
    _add_sequences(add_kind)
    _add_memory(add_kind)
    _add_inline(add_kind)
    add_check(add_kind)


def _add_ops(add_kind: AddKind) -> None:
    parser = add_kind(
        "ops",
        help="every attention operator on tensors [B, H, N, D]",
        description="Measure the operators of softline.ops on random tensors [B, H, N, D], with 49 landmarks where "
        f"they take landmarks. {MATH} is torch's softmax attention with all N x N weights in memory.",
    )
    parser.add_argument(
        "--ops", type=names, metavar="NAME,...", help=f"operators (default: all, which are {', '.join(OPERATORS)})"
    )
    _add_sizes(parser, "--tokens", "N,...", [784, 3136, 12544], "numbers of tokens N")
    parser.add_argument("--heads", type=int, default=16, metavar="H", help="number of heads (default: 16)")
    parser.add_argument("--head-dim", type=int, default=32, metavar="D", help="channels of each head (default: 32)")
    _add_common(parser, mode="both")
    parser.set_defaults(run=run, cases=_operator_cases)


def _add_layers(add_kind: AddKind) -> None:
    parser = add_kind(
        "layers",
        help="one attention layer with its projections on growing images",
        description="Measure one layer of each attention, projections included, on growing square images, which are "
        "random tokens for patches of 8 x 8 pixels.",
    )
    add_attentions(parser)
    _add_sizes(parser, "--sizes", "PIXELS,...", [224, 448, 896, 1344], "image sides")
    parser.add_argument("--dim", type=int, default=64, metavar="C", help="number of channels (default: 64)")
    parser.add_argument("--heads", type=int, default=2, metavar="H", help="number of heads (default: 2)")
    _add_common(parser, mode="both")
    parser.set_defaults(run=run, cases=_layer_cases)


def _add_models(add_kind: AddKind) -> None:
    parser = add_kind(
        "models",
        help="whole models, softline's or timm's, on growing images",
        description="Measure models of timm.create_model, softline's included, on random square images. Options follow "
        "a colon, and their values are YAML: softpp_tiny:attention=inline,drop_path_rate=0.1. A training step is the "
        "forward and the backward pass, without the optimizer; with grad_checkpointing=true it computes blocks twice "
        "and needs less memory.",
    )
    parser.add_argument(
        "names",
        nargs="+",
        metavar="MODEL[:KEY=VALUE,...]",
        help="names of models, the first being the baseline unless --baseline names another",
    )
    _add_sizes(parser, "--sizes", "PIXELS,...", [224, 512, 1024], "image sides")
    _add_common(parser, mode="infer")
    parser.set_defaults(run=run, cases=_model_cases)


def _add_sequences(add_kind: AddKind) -> None:
    parser = add_kind(
        "sequences",
        help="the encoder of the Long Range Arena on growing sequences",
        description="Measure the encoder with which `softline lra` compares attentions (2 layers, 64 channels, "
        "2 heads, at most 64 landmarks) on random sequences.",
    )
    add_attentions(parser, default=["softmax", "soft", "softpp", "inline"])
    _add_sizes(parser, "--lengths", "N,...", [1024, 2048, 4096, 8192], "numbers of tokens")
    _add_common(parser, mode="train")
    parser.set_defaults(run=run, cases=_sequence_cases)


def _add_memory(add_kind: AddKind) -> None:
    parser = add_kind(
        "memory",
        help="Fig. 1b of the SOFT paper: memory of a ViT against the number of tokens",
        description="Measure the peak memory of 12 transformer layers (384 channels, 12 heads, 49 landmarks) on 784 p "
        "tokens, each attention in a process of its own, and fit its growth. Nothing is timed.",
    )
    parser.add_argument(
        "--attentions",
        type=names,
        metavar="NAME,...",
        help=f"attentions; {MATH} is softmax with all N x N weights in memory (default: all but "
        f"{', '.join(NOT_IN_MEMORY)})",
    )
    _add_sizes(parser, "--steps", "P,...", list(range(1, 9)), "multiples p of 784 tokens")
    _add_machine(parser, mode="train")
    _add_memory_limit(parser)
    parser.set_defaults(run=run, cases=_vit_cases, rounds=0, compile=False, baseline=None, no_memory=False)


def _add_inline(add_kind: AddKind) -> None:
    parser = add_kind(
        "inline",
        help="Fig. 5 of the InLine paper: speed of PVT, Swin and DeiT with softmax and InLine attention",
        description="Measure one panel of the figure. runtime: PVT and Swin of all sizes on images of 224 pixels; "
        "windows: Swin-T on such images with growing windows; resolution: DeiT-T on growing images. The models with "
        "softmax attention are softline's too and differ in the attention and its heads alone. Memory is not measured.",
    )
    parser.add_argument("panel", choices=PANELS, metavar="PANEL", help=f"one of {', '.join(PANELS)}")
    parser.add_argument(
        "--sizes",
        type=integers,
        metavar="N,...",
        help="image sides in pixels, or sides of windows in tokens (default: those of the figure)",
    )
    parser.add_argument(
        "--warm-ups",
        type=int,
        default=RELEASE_WARM_UPS,
        metavar="N",
        help=f"runs of each model before it is timed (default: {RELEASE_WARM_UPS}, as in the release)",
    )
    _add_time(parser, rounds=RELEASE_ROUNDS)
    _add_machine(parser, mode="infer")
    parser.set_defaults(run=run, cases=_inline_cases, no_memory=True, memory_limit=None)


def _add_sizes(parser: Parser, flag: str, metavar: str, default: list[int], what: str) -> None:
    listed = ",".join(map(str, default))
    parser.add_argument(
        flag, dest="sizes", type=integers, default=default, metavar=metavar, help=f"{what} (default: {listed})"
    )


def _add_common(parser: Parser, *, mode: str) -> None:
    _add_time(parser, rounds=5)
    parser.add_argument(
        "--interleave",
        action="store_true",
        help="time all sizes and modes in the same rounds, so that a machine whose speed varies does not distort "
        "growth; times are known at the end",
    )
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory, and start no processes")
    _add_machine(parser, mode=mode)
    _add_memory_limit(parser)


def _add_time(parser: Parser, *, rounds: int) -> None:
    parser.add_argument("--baseline", metavar="NAME", help="case that speeds are compared with (default: the first)")
    parser.add_argument(
        "--rounds", type=int, default=rounds, metavar="N", help=f"how often each case is timed (default: {rounds})"
    )
    parser.add_argument("--compile", action="store_true", help="use torch.compile; the time to compile does not count")


def _add_machine(parser: Parser, *, mode: str) -> None:
    parser.add_argument(
        "--mode",
        choices=MODES,
        default=mode,
        help=f"forward passes, forward and backward passes, or both (default: {mode})",
    )
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="batch size (default: 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="weights and inputs (default: float32)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="number of torch's threads (default: torch's choice)")
    parser.add_argument(
        "--json", type=place, metavar="PATH", help="write the measurements to this file after every row"
    )
    parser.add_argument(
        "--figure", type=place, metavar="PATH", help="draw the measurements (.png, .svg or .pdf; needs matplotlib)"
    )


def _add_memory_limit(parser: Parser) -> None:
    parser.add_argument(
        "--memory-limit",
        type=float,
        metavar="GIB",
        help=f"largest memory of one row (default: {LIMIT_SHARE:.0%} of what is available)".replace("%", "%%"),
    )


# what is measured


def _operator_cases(options: argparse.Namespace) -> "list[Case]":
    from softline.measure.cases import OPERATORS, OperatorCase

    chosen = list(OPERATORS) if options.ops is None else options.ops
    for name in chosen:
        check_option("operator", name, OPERATORS)
    return [OperatorCase(name, options.heads, options.head_dim) for name in chosen]


def _layer_cases(options: argparse.Namespace) -> "list[Case]":
    from softline.measure.cases import LayerCase, check_attentions

    check_attentions(options.attentions)
    return [LayerCase(name, options.dim, options.heads) for name in options.attentions]


def _model_cases(options: argparse.Namespace) -> "list[Case]":
    from softline.measure.cases import parse_model

    return [parse_model(name) for name in options.names]


def _sequence_cases(options: argparse.Namespace) -> "list[Case]":
    from softline.measure.cases import SequenceCase, check_attentions

    check_attentions(options.attentions)
    return [SequenceCase(name) for name in options.attentions]


def _vit_cases(options: argparse.Namespace) -> "list[Case]":
    from softline.attention import ATTENTIONS
    from softline.measure.cases import VitCase, check_attentions

    chosen = options.attentions
    if chosen is None:
        chosen = ["softmax", MATH, *(name for name in ATTENTIONS if name not in ("softmax", *NOT_IN_MEMORY))]
    check_attentions(chosen)
    return [VitCase(name) for name in chosen]


def _inline_cases(options: argparse.Namespace) -> "list[Case]":
    from softline.measure.cases import FIGURE_5

    panel = FIGURE_5[options.panel]
    if options.sizes is None:
        options.sizes = list(panel.sizes)
    return list(panel.cases)


# the command


def run(options: argparse.Namespace) -> int:
    """Return 0 if anything could be measured, and 1 otherwise."""
    cases: list[Case] = options.cases(options)
    _check(options, cases)
    with held_outputs(options.json, figure=options.figure), _threads(options.threads):
        return _bench(options, cases)


def _bench(options: argparse.Namespace, cases: "list[Case]") -> int:
    meter = _meter(options)
    results = _results(options, cases, meter)
    print(_heading(results))
    try:
        _measure(options, cases, results, meter)
    except KeyboardInterrupt:
        if options.json is not None and results.rows:
            print(f"\nwhat was measured so far: {options.json}", file=sys.stderr)
        raise
    _finish(options, results)
    return 0 if any(row.failure is None for row in results.rows) else 1


def _check(options: argparse.Namespace, cases: "Sequence[Case]") -> None:
    from softline.engine.machine import check_workers
    from softline.measure.cases import check_device

    listed = [case.name for case in cases]
    if not listed or len(set(listed)) < len(listed):
        raise UserError(f"names must be given and differ, got {', '.join(listed) or 'none'}")
    if options.baseline is not None:
        check_option("baseline", options.baseline, listed)
    for name, least in (("batch", 1), ("threads", 1), ("heads", 1), ("head_dim", 1), ("dim", 1)):
        if getattr(options, name, None) is not None:
            check_at_least(f"--{name.replace('_', '-')}", getattr(options, name), least)
    if options.threads is not None:
        check_workers("--threads", options.threads)
    if options.kind != "memory":
        check_range("--rounds", options.rounds, 1, MOST_ROUNDS)
    if getattr(options, "interleave", False) and options.compile:
        raise UserError("--interleave cannot be used with --compile, which makes graphs for one size after the other")
    if options.kind == "inline":
        check_range("--warm-ups", options.warm_ups, 0, MOST_ROUNDS)
        if options.figure is not None and len(set(options.sizes)) == 1:
            raise UserError(f"--figure draws cost against size: name several --sizes, got {options.sizes[0]}")
    check_device(options.device)
    _check_memory(options)
    for case in cases:
        for size in options.sizes:
            case.tokens(size)


def _check_memory(options: argparse.Namespace) -> None:
    from softline.measure.memory import can_measure

    if options.kind == "memory" and not can_measure():
        raise UserError("this system does not record the peak memory of a process")
    if options.memory_limit is None:
        return
    if not options.memory_limit > 0:
        raise UserError(f"--memory-limit must be more than 0 GiB, got {options.memory_limit}")
    if options.no_memory:
        raise UserError(f"--no-memory cannot keep to a --memory-limit (got {options.memory_limit}): leave out one")


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _meter(options: argparse.Namespace) -> "ProcessMeter | None":
    import torch

    from softline.engine.machine import GIB
    from softline.measure.memory import ProcessMeter, can_measure

    if options.no_memory or not can_measure():
        return None
    if options.memory_limit is not None:
        limit: int | None = int(options.memory_limit * GIB)
    else:
        available = available_memory()
        limit = None if available is None else int(LIMIT_SHARE * available)
    return ProcessMeter(limit, torch.get_num_threads())


def _results(options: argparse.Namespace, cases: "Sequence[Case]", meter: "ProcessMeter | None") -> "Results":
    from softline.measure.environment import environment, with_settings
    from softline.measure.results import Results

    common = ("batch", "dtype", "device", "compile", "rounds", "mode")
    shared: dict[str, Any] = {name: getattr(options, name) for name in common}
    shared["sizes"] = sorted(set(options.sizes))
    # for one row, beyond what its process has at its start
    shared["memory_limit_bytes"] = None if meter is None else meter.limit
    for name in ("heads", "head_dim", "dim", "panel", "warm_ups"):
        if hasattr(options, name):
            shared[name] = getattr(options, name)
    machine = dict(environment(options.device))
    return Results(
        options.kind, with_settings(options.command_line), options.baseline or cases[0].name, shared, machine
    )


def _machine(results: "Results") -> str:
    machine, shared = results.environment, results.options
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    compiled = ", compiled" if shared["compile"] else ""
    processor = machine.get("gpu") or machine["cpu"]
    return f"{processor}, {threads}, {shared['dtype']}, batch {shared['batch']}{compiled}"


def _heading(results: "Results") -> str:
    machine, shared = results.environment, results.options
    lines = [f"{_machine(results)}, torch {machine['torch']}"]
    if shared["dtype"] == "bfloat16" and shared["device"] == "cpu" and machine["native_bfloat16"] is False:
        lines.append("this processor emulates bfloat16: expect it to be slower than float32")
    return "\n".join(lines) + "\n"


def _measure(
    options: argparse.Namespace, cases: "Sequence[Case]", results: "Results", meter: "ProcessMeter | None"
) -> None:
    from softline.measure.cases import Setting
    from softline.measure.measuring import measure

    table = CostTable([case.name for case in cases], results.baseline)
    timed = options.rounds > 0
    if timed:
        print(table.head(), flush=True)
    count = len(cases) * len(set(options.sizes)) * len(MODES[options.mode])
    with Progress() as progress:
        progress.show("", f"[0/{count}] starting", done=0, total=count)

        def hear(row: "Row") -> None:
            results.hear(row)
            if options.json is not None:
                write_json(options.json, results.to_dict())
            done = len(results.rows)
            progress.show("", f"[{done}/{count}] {_row_text(row)}", done=done, total=count)

        for group in measure(
            cases,
            results.options["sizes"],
            modes=MODES[options.mode],
            setting=Setting(
                options.batch, options.dtype, options.device, options.compile, getattr(options, "warm_ups", 0)
            ),
            rounds=options.rounds,
            meter=meter,
            baseline=options.baseline,
            interleave=getattr(options, "interleave", False),
            hear=hear,
        ):
            results.end_group(group)
            if timed:
                progress.say(table.group(group), sys.stdout)


def _row_text(row: "Row") -> str:
    known = [] if row.peak_bytes is None else [f"{row.peak_bytes / 2**20:,.1f} MiB"]
    known += [] if row.milliseconds is None else [f"{row.milliseconds:,.2f} ms"]
    return f"{row.label} {row.case} {row.mode}: {row.failure or ', '.join(known) or 'to be timed'}"


def _finish(options: argparse.Namespace, results: "Results") -> None:
    from softline.engine.machine import GIB
    from softline.measure.failures import OUT_OF_MEMORY

    results.finished = True
    if options.kind == "memory":
        for mode in MODES[options.mode]:
            rows = [row for row in results.rows if row.mode == mode]
            growths = [growth for growth in results.growths() if growth.mode == mode]
            print(f"{mode}\n{memory_table(rows, growths)}")
    elif text := growth_text(results.growths()):
        print(f"\n{text}")
    if options.kind == "inline":
        print(f"\n{_speeds(options, results)}")
    limit = results.options["memory_limit_bytes"]
    if limit is not None and any(row.failure == OUT_OF_MEMORY for row in results.rows):
        print(
            f"\n{OUT_OF_MEMORY}: a row may take {limit / GIB:.1f} GiB, which --memory-limit changes; smaller sizes or "
            "batches take less"
        )
    if options.json is not None:
        write_json(options.json, results.to_dict())
        print(f"measurements: {options.json}")
    if options.figure is not None and any(row.failure is None for row in results.rows):
        _draw(options, results)
        print(f"figure: {options.figure}")


def _speeds(options: argparse.Namespace, results: "Results") -> str:
    """Format images per second, and in brackets how many times as fast InLine makes the same model."""
    from softline.measure.turns import Timing

    rows = {(row.case, row.mode, row.size): row for row in results.rows if row.milliseconds is not None}
    sizes = {row.size: row.label.removesuffix(" tokens") for row in results.rows}

    def cell(name: str, mode: "Mode", size: int) -> str:
        row, other = rows.get((name, mode, size)), rows.get((name.removeprefix("inline_"), mode, size))
        if row is None or row.milliseconds is None:
            return "failed"
        speed = rate(1e3 * options.batch / row.milliseconds)
        if other is None or other is row:
            return speed
        return f"{speed} ({Timing(row.rounds).ratio_to(Timing(other.rounds)):.2f}x)"

    named = dict.fromkeys((row.case, row.mode) for row in results.rows)
    lines = [[name, mode, *(cell(name, mode, size) for size in sizes)] for name, mode in named]
    return format_table(["images per second", "", *sizes.values()], lines, left=2)


def _draw(options: argparse.Namespace, results: "Results") -> None:
    from softline.measure.figures import plot_costs, plot_memory

    on = _machine(results)
    if options.kind == "memory" and options.mode != "both":
        plot_memory(results.rows, options.figure, title=f"12 layers, 384 channels, 12 heads, 49 landmarks; {on}")
    else:
        what = f"inline {options.panel}" if options.kind == "inline" else options.kind
        plot_costs(results.rows, options.figure, title=f"softline bench {what}; {on}")
