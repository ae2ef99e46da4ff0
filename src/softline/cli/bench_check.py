"""``softline bench check``: what has become slower since an earlier measurement."""

import argparse
import re
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from softline.checks import check_range
from softline.cli.arguments import Parser, place
from softline.cli.table import format_table, number
from softline.errors import UserError

if TYPE_CHECKING:
    from softline.measure.checking import BenchFile, Change

# names of softline.measure.checking: LEAST, in percent
LEAST = 10.0
SETTING = re.compile(r"[A-Z_][A-Z0-9_]*=")
OUTPUTS = ("--json", "--figure")


def add_check(add_kind: Callable[..., Parser]) -> None:
    parser = add_kind(
        "check",
        help="compare with an earlier measurement, and fail if something has become slower",
        description="Compare two files that softline bench --json has written, or measure again here what one of them "
        "holds. Times are compared in units of the matrix product, and of timm's models if both have "
        "them, which were timed in the same rounds; never as they are. A case is slower if it is by all of these, by "
        "more than three standard errors of its rounds. The exit code is 1 if a case is slower, takes more memory, by "
        "more than 1 MiB, or cannot be measured any more.",
    )
    parser.add_argument("before", type=Path, metavar="BEFORE.json", help="earlier results")
    parser.add_argument(
        "after",
        type=Path,
        nargs="?",
        metavar="AFTER.json",
        help="later results (default: measured now, here)",
    )
    parser.add_argument(
        "--least",
        type=float,
        default=LEAST,
        metavar="PERCENT",
        help=f"changes below this are not reported, however small the noise is (default: {LEAST:g})",
    )
    parser.add_argument(
        "--json", type=place, metavar="PATH", help="write the measurements made now to this file; not with AFTER.json"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Return 0 if nothing has become worse, and 1 otherwise."""
    from softline.measure.checking import changes, read_bench_file

    check_range("--least", options.least, 0)
    if options.after is not None and options.json is not None:
        raise UserError(f"--json is the file of a new measurement, got {options.json} beside {options.after}")
    before = read_bench_file(options.before)
    after = _measure_again(before, options.json) if options.after is None else read_bench_file(options.after)
    found = changes(before, after)
    print(_table(found, options.least / 100))
    worse = [change for change in found if change.is_worse(options.least / 100)]
    print(_summary(worse, len(found), before))
    return 1 if worse else 0


def _measure_again(before: "BenchFile", kept: Path | None) -> "BenchFile":
    from softline.cli import parse
    from softline.measure.checking import read_bench_file

    words = _command(before)
    with tempfile.TemporaryDirectory() as folder:
        path = kept or Path(folder) / "now.json"
        options = parse([*words, "--json", str(path)])
        if before.settings["threads"] is not None and options.threads is None:
            options.threads = before.settings["threads"]
        options.run(options)
        print()
        return read_bench_file(path)


def _command(before: "BenchFile") -> list[str]:
    """Return the arguments of the command that has made these results, without its outputs."""
    words = shlex.split(before.command)
    settings = [word for word in words if SETTING.match(word)]
    words = words[len(settings) :]
    if words[:2] != ["softline", "bench"] or "check" in words:
        raise UserError(f"{before.path} is no result of softline bench, but of {before.command!r}")
    if settings:
        print(f"measured then with {' '.join(settings)}\n")
    kept = [word for index, word in enumerate(words) if word not in OUTPUTS and words[index - 1] not in OUTPUTS]
    return kept[1:]


def _table(found: "Sequence[Change]", least: float) -> str:
    rows = [
        [
            change.case,
            change.mode,
            change.label,
            number(change.time, ".2f", "x"),
            f"{change.noise:.0%}",
            number(change.memory, ".2f", "x"),
            _verdict(change, least),
        ]
        for change in found
    ]
    return format_table(["", "", "size", "time", "noise", "memory", ""], rows, left=3)


def _verdict(change: "Change", least: float) -> str:
    if change.failure is not None:
        return f"fails: {change.failure}"
    said = [word for word, is_so in (("slower", change.is_slower(least)), ("larger", change.is_larger(least))) if is_so]
    return ", ".join(said)


def _summary(worse: "Sequence[Change]", count: int, before: "BenchFile") -> str:
    if not worse:
        return f"\nnone of {count} cases costs more than in {before.path}"
    return f"\n{len(worse)} of {count} cases cost more than in {before.path}"
