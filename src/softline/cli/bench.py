"""``softline bench``: what operators, layers and models cost on this machine."""

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from softline.attention import ATTENTIONS
from softline.checks import check_at_least, check_option
from softline.cli.arguments import Commands, add_attentions, check_parent, integers, names
from softline.cli.bench_tables import CostTable, growth_text, memory_table
from softline.errors import UserError
from softline.files import write_json
from softline.measure.cases import (
    DTYPES,
    MATH,
    OPERATORS,
    Case,
    LayerCase,
    Mode,
    OperatorCase,
    SequenceCase,
    Setting,
    VitCase,
    check_attentions,
    check_device,
    parse_model,
)
from softline.measure.environment import environment, with_settings
from softline.measure.measuring import Row, measure
from softline.measure.memory import GIB, ProcessMeter, available_memory, can_measure
from softline.measure.results import Results

MODES: dict[str, tuple[Mode, ...]] = {"infer": ("infer",), "train": ("train",), "both": ("infer", "train")}
# of the memory that is available at the start, for one measured process
LIMIT_SHARE = 0.9
# quadratic even when no softmax needs all weights at once
NOT_IN_MEMORY = ("gaussian",)
FIGURES = (".png", ".svg", ".pdf")


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="time and memory of operators, layers and models over growing sizes",
        description="Measure what operators, layers or whole models cost on this machine. Cases take turns in every "
        "round, together with a matrix product that tells what the machine reaches at that moment; memory is measured "
        "in a process of its own for each row. A row that fails says why, and the rest goes on.",
    )
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    _add_ops(kinds)
    _add_layers(kinds)
    _add_models(kinds)
    _add_sequences(kinds)
    _add_memory(kinds)


def _add_ops(kinds: Commands) -> None:
    parser = kinds.add_parser(
        "ops",
        help="every attention operator on tensors [B, H, N, D]",
        description="Measure the operators of softline.ops on random tensors [B, H, N, D], 49 landmarks where they "
        f"take some. {MATH} is torch's softmax attention with all N x N weights in memory.",
    )
    parser.add_argument(
        "--ops",
        type=names,
        default=list(OPERATORS),
        metavar="NAME,...",
        help=f"operators, comma-separated (default: all, {', '.join(OPERATORS)})",
    )
    _add_sizes(parser, "--tokens", "N,...", [784, 3136, 12544], "numbers of tokens N")
    parser.add_argument("--heads", type=int, default=16, metavar="H", help="heads (default: 16)")
    parser.add_argument("--head-dim", type=int, default=32, metavar="D", help="channels of a head (default: 32)")
    _add_common(parser, mode="both")
    parser.set_defaults(run=run, cases=_operator_cases)


def _add_layers(kinds: Commands) -> None:
    parser = kinds.add_parser(
        "layers",
        help="one attention layer with its projections on growing images",
        description="Measure one attention layer of each kind (projections included; patches of 8x8 pixels, random "
        "tokens) on growing square images.",
    )
    add_attentions(parser)
    _add_sizes(parser, "--sizes", "PIXELS,...", [224, 448, 896, 1344], "image sides")
    parser.add_argument("--dim", type=int, default=64, metavar="C", help="channels (default: 64)")
    parser.add_argument("--heads", type=int, default=2, metavar="H", help="heads (default: 2)")
    _add_common(parser, mode="both")
    parser.set_defaults(run=run, cases=_layer_cases)


def _add_models(kinds: Commands) -> None:
    parser = kinds.add_parser(
        "models",
        help="whole models, softline's or timm's, on growing images",
        description="Measure models of timm.create_model, softline's included, on random square images. Options follow "
        "a colon, their values are YAML: softpp_tiny:attention=inline,drop_path_rate=0.1. A training step is the "
        "forward and the backward pass, without optimizer.",
    )
    parser.add_argument(
        "names",
        nargs="+",
        metavar="MODEL[:KEY=VALUE,...]",
        help="names; the first is what the others are compared with unless --baseline names another",
    )
    _add_sizes(parser, "--sizes", "PIXELS,...", [224, 512, 1024], "image sides")
    _add_common(parser, mode="infer")
    parser.set_defaults(run=run, cases=_model_cases)


def _add_sequences(kinds: Commands) -> None:
    parser = kinds.add_parser(
        "sequences",
        help="the encoder of the Long Range Arena on growing sequences",
        description="Measure the encoder by which `softline lra` compares attentions (2 layers, 64 channels, 2 heads, "
        "at most 64 landmarks) on random sequences.",
    )
    add_attentions(parser, default=["softmax", "soft", "softpp", "inline"])
    _add_sizes(parser, "--lengths", "N,...", [1024, 2048, 4096, 8192], "numbers of tokens")
    _add_common(parser, mode="train")
    parser.set_defaults(run=run, cases=_sequence_cases)


def _add_memory(kinds: Commands) -> None:
    parser = kinds.add_parser(
        "memory",
        help="Fig. 1b of the SOFT paper: memory of a ViT over the number of tokens",
        description="Measure the peak memory of 12 transformer layers (384 channels, 12 heads, 49 landmarks) on 784 p "
        "tokens, each attention in a process of its own, and fit how it grows. Nothing is timed.",
    )
    attentions = ["softmax", MATH, *(name for name in ATTENTIONS if name not in ("softmax", *NOT_IN_MEMORY))]
    parser.add_argument(
        "--attentions",
        type=names,
        default=attentions,
        metavar="NAME,...",
        help=f"comma-separated (default: {', '.join(attentions)}); {MATH} is softmax with all N x N weights in memory",
    )
    _add_sizes(parser, "--steps", "P,...", list(range(1, 9)), "multiples p of 784 tokens")
    _add_machine(parser, mode="train")
    parser.set_defaults(run=run, cases=_vit_cases, rounds=0, compile=False, baseline=None, no_memory=False)


def _add_sizes(parser: argparse.ArgumentParser, flag: str, metavar: str, default: list[int], what: str) -> None:
    listed = ",".join(map(str, default))
    parser.add_argument(
        flag,
        dest="sizes",
        type=integers,
        default=default,
        metavar=metavar,
        help=f"{what}, comma-separated (default: {listed})",
    )


def _add_common(parser: argparse.ArgumentParser, *, mode: str) -> None:
    parser.add_argument("--baseline", metavar="NAME", help="what speeds are compared with (default: the first)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each case (default: 5)")
    parser.add_argument("--compile", action="store_true", help="time through torch.compile; compiling does not count")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory: no further processes")
    _add_machine(parser, mode=mode)


def _add_machine(parser: argparse.ArgumentParser, *, mode: str) -> None:
    parser.add_argument(
        "--mode",
        choices=MODES,
        default=mode,
        help=f"forward passes, forward and backward passes, or both (default: {mode})",
    )
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="samples at once (default: 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and inputs (default: float32)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch (default: torch's own choice)")
    parser.add_argument(
        "--memory-limit",
        type=float,
        metavar="GIB",
        help=f"most that one row may take (default: {LIMIT_SHARE:.0%} of what is available)".replace("%", "%%"),
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the measurements here, after every row")
    parser.add_argument(
        "--figure", type=Path, metavar="PATH", help="draw them here (.png, .svg or .pdf; needs matplotlib)"
    )


# what is measured


def _operator_cases(options: argparse.Namespace) -> list[Case]:
    for name in options.ops:
        check_option("operator", name, OPERATORS)
    return [OperatorCase(name, options.heads, options.head_dim) for name in options.ops]


def _layer_cases(options: argparse.Namespace) -> list[Case]:
    check_attentions(options.attentions)
    return [LayerCase(name, options.dim, options.heads) for name in options.attentions]


def _model_cases(options: argparse.Namespace) -> list[Case]:
    return [parse_model(name) for name in options.names]


def _sequence_cases(options: argparse.Namespace) -> list[Case]:
    check_attentions(options.attentions)
    return [SequenceCase(name) for name in options.attentions]


def _vit_cases(options: argparse.Namespace) -> list[Case]:
    check_attentions(options.attentions)
    return [VitCase(name) for name in options.attentions]


# the command


def run(options: argparse.Namespace) -> int:
    """0 if anything could be measured, else 1."""
    cases: list[Case] = options.cases(options)
    _check(options, cases)
    with _threads(options.threads):
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


def _check(options: argparse.Namespace, cases: Sequence[Case]) -> None:
    listed = [case.name for case in cases]
    if not listed or len(set(listed)) < len(listed):
        raise UserError(f"names must be given and differ, got {', '.join(listed) or 'none'}")
    if options.baseline is not None:
        check_option("baseline", options.baseline, listed)
    for name, least in (("batch", 1), ("threads", 1), ("heads", 1), ("head_dim", 1), ("dim", 1)):
        if getattr(options, name, None) is not None:
            check_at_least(f"--{name.replace('_', '-')}", getattr(options, name), least)
    if options.kind != "memory":
        check_at_least("--rounds", options.rounds, 1)
    check_device(options.device)
    _check_memory(options)
    _check_figure(options.figure)
    for case in cases:
        for size in options.sizes:
            case.tokens(size)
    check_parent(options.json, options.figure)


def _check_memory(options: argparse.Namespace) -> None:
    if options.kind == "memory" and not can_measure():
        raise UserError("this system does not tell how much memory a process took")
    if options.memory_limit is None:
        return
    if not options.memory_limit > 0:
        raise UserError(f"--memory-limit must be more than 0 GiB, got {options.memory_limit}")
    if options.no_memory:
        raise UserError(f"--no-memory cannot keep to a --memory-limit (got {options.memory_limit}): leave out one")


def _check_figure(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix.lower() not in FIGURES:
        raise UserError(f"--figure must end in {', '.join(FIGURES)}; got {str(path)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("--figure needs matplotlib: pip install 'softline[train]'")


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _results(options: argparse.Namespace, cases: Sequence[Case], meter: ProcessMeter | None) -> Results:
    common = ("batch", "dtype", "device", "compile", "rounds", "mode")
    shared: dict[str, Any] = {name: getattr(options, name) for name in common}
    shared["sizes"] = sorted(set(options.sizes))
    # of one row, beyond what its process has at its start
    shared["memory_limit_bytes"] = None if meter is None else meter.limit
    for name in ("heads", "head_dim", "dim"):
        if hasattr(options, name):
            shared[name] = getattr(options, name)
    machine = dict(environment(options.device))
    return Results(
        options.kind, with_settings(options.command_line), options.baseline or cases[0].name, shared, machine
    )


def _machine(results: Results) -> str:
    machine, shared = results.environment, results.options
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    compiled = ", compiled" if shared["compile"] else ""
    processor = machine.get("gpu") or machine["cpu"]
    return f"{processor}, {threads}, {shared['dtype']}, batch {shared['batch']}{compiled}"


def _heading(results: Results) -> str:
    machine, shared = results.environment, results.options
    lines = [f"{_machine(results)}, torch {machine['torch']}"]
    if shared["dtype"] == "bfloat16" and shared["device"] == "cpu" and machine["native_bfloat16"] is False:
        lines.append("this processor emulates bfloat16: expect it to be slower than float32")
    return "\n".join(lines) + "\n"


def _measure(options: argparse.Namespace, cases: Sequence[Case], results: Results, meter: ProcessMeter | None) -> None:
    table = CostTable([case.name for case in cases], results.baseline)
    timed = options.rounds > 0
    if timed:
        print(table.head(), flush=True)
    progress = Progress(len(cases) * len(set(options.sizes)) * len(MODES[options.mode]))

    def hear(row: Row) -> None:
        results.hear(row)
        if options.json is not None:
            write_json(options.json, results.to_dict())
        progress.show(row)

    groups = measure(
        cases,
        results.options["sizes"],
        modes=MODES[options.mode],
        setting=Setting(options.batch, options.dtype, options.device, options.compile),
        rounds=options.rounds,
        meter=meter,
        baseline=options.baseline,
        hear=hear,
    )
    try:
        for group in groups:
            results.end_group(group)
            progress.clear()
            if timed:
                print(table.group(group), flush=True)
    finally:
        progress.clear()


def _meter(options: argparse.Namespace) -> ProcessMeter | None:
    if options.no_memory or not can_measure():
        return None
    if options.memory_limit is not None:
        limit: int | None = int(options.memory_limit * GIB)
    else:
        available = available_memory()
        limit = None if available is None else int(LIMIT_SHARE * available)
    return ProcessMeter(limit, torch.get_num_threads())


class Progress:
    """What is being measured, on stderr: one line that changes on a terminal, a line for each row elsewhere."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.seen: set[tuple[str, str, int]] = set()

    def show(self, row: Row) -> None:
        self.seen.add((row.case, row.mode, row.size))
        known = [] if row.peak_bytes is None else [f"{row.peak_bytes / 2**20:,.1f} MiB"]
        known += [] if row.milliseconds is None else [f"{row.milliseconds:,.2f} ms"]
        text = row.failure or ", ".join(known) or "to be timed"
        line = f"[{len(self.seen)}/{self.rows}] {row.label} {row.case} {row.mode}: {text}"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line[:118]}", end="", file=sys.stderr, flush=True)
        elif row.milliseconds is None:
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _finish(options: argparse.Namespace, results: Results) -> None:
    results.finished = True
    if options.kind == "memory":
        for mode in MODES[options.mode]:
            rows = [row for row in results.rows if row.mode == mode]
            growths = [growth for growth in results.growths() if growth.mode == mode]
            print(f"{mode}\n{memory_table(rows, growths)}")
    elif text := growth_text(results.growths()):
        print(f"\n{text}")
    if options.json is not None:
        write_json(options.json, results.to_dict())
        print(f"measurements: {options.json}")
    if options.figure is not None and any(row.failure is None for row in results.rows):
        _draw(options, results)
        print(f"figure: {options.figure}")


def _draw(options: argparse.Namespace, results: Results) -> None:
    from softline.measure.figures import plot_costs, plot_memory

    on = _machine(results)
    if options.kind == "memory" and options.mode != "both":
        plot_memory(results.rows, options.figure, title=f"12 layers, 384 channels, 12 heads, 49 landmarks; {on}")
    else:
        plot_costs(results.rows, options.figure, title=f"softline bench {options.kind}; {on}")
