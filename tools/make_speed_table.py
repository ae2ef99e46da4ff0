"""Write the tables of speed, growth and memory in README.md and the documentation from benchmarks/results.

A block between ``<!-- speed: NAME TABLE -->`` and ``<!-- /speed -->`` becomes the table of the newest
``benchmarks/results/YYYY-MM-DD-NAME.json``, which `softline bench --json` wrote. TABLE is one of

    time     milliseconds and the speed-up over the baseline (the default)
    growth   fitted exponents and the growth from each size to the next
    memory   peak MiB at each size, its slope and its exponent
    roofline parts of an operator or a model, measured by tools/roofline_*.py: operations and bytes per second
    dense    whole segmenters or detectors, measured by tools/measure_dense_models.py: seconds and peak MiB
    photographs  commands on one large photograph, measured by tools/measure_photographs.py: seconds and peak GB

Without arguments, README.md and every page under docs/ are updated. With --check nothing is written: the exit code is 1
if a table differs from its results. It is 2 if a table cannot be made because its results are missing or incomplete.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
DATED = re.compile(r"\d{4}-\d\d-\d\d-(?P<name>.+)\.json")
BLOCK = re.compile(r"(<!-- speed: (?P<name>\S+)(?: (?P<table>\S+))? -->\n).*?(<!-- /speed -->)", flags=re.DOTALL)
MIB = 2**20


def default_pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def newest(results: Path) -> dict[str, Path]:
    """Return the latest file of each name."""
    found = [(match["name"], path) for path in sorted(results.glob("*.json")) if (match := DATED.fullmatch(path.name))]
    return dict(found)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def columns_of(content: dict[str, Any]) -> dict[tuple[int, str], str]:
    """Return the heading of each size and mode."""
    modes = {row["mode"] for row in content["rows"]}
    return {
        (row["size"], row["mode"]): row["label"] + (f", {row['mode']}" if len(modes) > 1 else "")
        for row in content["rows"]
    }


def row_lines(content: dict[str, Any], cell: Callable[[dict[str, Any]], str]) -> list[list[str]]:
    """Return one line per case with one cell per size and mode."""
    cells = {(row["case"], row["size"], row["mode"]): row for row in content["rows"]}
    names = dict.fromkeys(row["case"] for row in content["rows"])
    empty = ""
    return [
        [f"`{name}`", *(cell(cells[name, *key]) if (name, *key) in cells else empty for key in columns_of(content))]
        for name in names
    ]


def time_table(content: dict[str, Any]) -> str:
    def cell(row: dict[str, Any]) -> str:
        if row["milliseconds"] is None:
            return row["failure"] or "-"
        faster = row["case"] != content["baseline"] and row["speedup"] is not None
        return f"{significant(row['milliseconds'])} ms" + (f" ({significant(row['speedup'])}x)" if faster else "")

    return markdown(["", *columns_of(content).values()], row_lines(content, cell))


def memory_table(content: dict[str, Any]) -> str:
    def cell(row: dict[str, Any]) -> str:
        return row["failure"] or "-" if row["peak_bytes"] is None else significant(row["peak_bytes"] / MIB)

    lines = row_lines(content, cell)
    head = ["peak MiB", *columns_of(content).values()]
    growths = {(f"`{growth['case']}`", growth["mode"]): growth for growth in content["growth"]}
    modes = dict.fromkeys(row["mode"] for row in content["rows"])
    for mode in modes:
        which = f", {mode}" if len(modes) > 1 else ""
        head += [f"MiB per 1,000 tokens{which}", f"exponent{which}"]
        for line in lines:
            line += slope_and_power(growths.get((line[0], mode)))
    return markdown(head, lines)


def slope_and_power(growth: dict[str, Any] | None) -> list[str]:
    """Return the two cells that describe how memory grows."""
    if growth is None:
        return ["-", "-"]
    slope = growth["bytes_per_token"]
    return ["-" if slope is None else significant(1000 * slope / MIB), power(growth["memory"])]


def growth_table(content: dict[str, Any]) -> str:
    if not content["growth"]:
        raise ValueError("growth needs results of at least two sizes")
    steps = content["growth"][0]["steps"]
    head = ["", "mode", "time ~ N^", "memory ~ N^"]
    head += [lines_of(step["first"], f"to {step['last']}", f"({step['tokens']:.3g}x tokens)") for step in steps]
    lines = []
    for growth in content["growth"]:
        ratios = [
            lines_of(f"time {times(step['time'])}", f"memory {times(step['memory'])}") for step in growth["steps"]
        ]
        lines.append([f"`{growth['case']}`", growth["mode"], power(growth["time"]), power(growth["memory"]), *ratios])
    return markdown(head, lines)


def dense_table(content: dict[str, Any]) -> str:
    rows = {(row["height"], row["width"], row["backbone"], row["head"]): row for row in content["rows"]}
    heads = [head for head in dict.fromkeys(row["head"] for row in content["rows"]) if head is not None]
    lines = []
    for height, width, backbone in dict.fromkeys(key[:3] for key in rows):
        alone = rows[height, width, backbone, None]
        line = [lines_of(f"{height} x {width}"), f"`{backbone}`", _dense_cell(alone)]
        for head in heads:
            whole = rows.get((height, width, backbone, head))
            line.append("-" if whole is None else _dense_cell(whole, whole["seconds"] - alone["seconds"]))
        lines.append(line)
    return markdown(["image", "backbone", "backbone alone", *(f"with `{head}`" for head in heads)], lines)


def _dense_cell(row: dict[str, Any], head_seconds: float | None = None) -> str:
    """Time, memory and, if there is a head, the time that it adds."""
    added = [] if head_seconds is None else [f"+{significant(head_seconds)} s"]
    return lines_of(f"{significant(row['seconds'])} s", f"{significant(row['peak_bytes'] / MIB)} MiB", *added)


def lines_of(*parts: str) -> str:
    """Parts of a cell, a line each, which stay whole in a narrow column."""
    return "<br>".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)


def photographs_table(content: dict[str, Any]) -> str:
    rows = {(row["model"], row["command"]): row for row in content["rows"]}
    commands = list(dict.fromkeys(command for _, command in rows))
    lines = []
    for model in dict.fromkeys(model for model, _ in rows):
        found = [rows[model, command] for command in commands]
        lines.append([model, *(f"{row['peak_bytes'] / 1e9:.2f} GB, {row['seconds']:,.0f} s" for row in found)])
    return markdown(["model", *(f"`softline {command}`" for command in commands)], lines)


def roofline_table(content: dict[str, Any]) -> str:
    """Shares of what the matrix product computes and the copy moves in a second."""
    rows = {row["part"]: row for row in content["rows"]}
    peaks = {key: rows[part][key] / rows[part]["milliseconds"] for part, key in PEAKS.items()}
    lines = []
    for row in content["rows"]:
        speeds = {key: row[key] / row["milliseconds"] for key in peaks}
        units = [f"{speeds[key] / 1e6:,.0f}" if row[key] else "-" for key in peaks]
        shares = [f"{100 * speeds[key] / peak:.0f} %" if row[key] else "-" for key, peak in peaks.items()]
        lines.append([row["part"], f"{row['milliseconds']:.2f} ms", units[0], shares[0], units[1], shares[1]])
    return markdown(["part", "time", "GFLOP/s", "of the matrix product", "GB/s", "of a copy"], lines)


PEAKS = {"matrix product": "operations", "copy": "bytes"}
TABLES = {
    "roofline": roofline_table,
    "time": time_table,
    "growth": growth_table,
    "memory": memory_table,
    "dense": dense_table,
    "photographs": photographs_table,
}


def significant(value: float) -> str:
    """Format with about three significant digits and without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1f}x"


def power(fit: dict[str, Any] | None) -> str:
    return "-" if fit is None else f"{fit['exponent']:.2f}"


def made_by(content: dict[str, Any]) -> str:
    machine, options = content["environment"], content["options"]
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    commit = "" if machine["commit"] is None else f", commit {machine['commit']}"
    compiled = ", compiled" if options["compile"] else ""
    processor = machine.get("gpu") or machine["cpu"]
    # output and cache paths do not influence the numbers
    command = re.sub(r" --(json|figure) \S+|\bTORCHINDUCTOR_CACHE_DIR=\S+ ", "", content["command"])
    return (
        f"`{command}` on {machine['date'][:10]}: {processor}, {threads}, torch {machine['torch']}, "
        f"{options['dtype']}, batch {options['batch']}{compiled}{commit}.{spread_of(content['rows'])}"
    )


def spread_of(rows: Sequence[dict[str, Any]]) -> str:
    """Say how much the times differ between rounds, in per cent of their medians; nothing if nothing was timed."""
    times_of = [(row.get("spread"), row.get("milliseconds") or row.get("seconds")) for row in rows]
    shares = [100 * spread / middle for spread, middle in times_of if spread is not None and middle]
    if not any(shares):
        return ""
    return f" Half the interquartile range of a time is {median(shares):.1f} % of it, and {max(shares):.1f} % at most."


def read(path: Path) -> dict[str, Any]:
    """Read complete results."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not content.get("finished"):
        raise ValueError(f"{path} is incomplete because the command was interrupted: measure again")
    return content


def fill(text: str, results: Path) -> str:
    """Return the page with the table of every block rewritten."""
    files = newest(results)

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in files:
            raise ValueError(f"no results are named {name}; {results} has {', '.join(files) or 'none'}")
        content = read(files[name])
        table = match["table"] or ("memory" if content["kind"] == "memory" else "time")
        if table not in TABLES:
            raise ValueError(f"a table of {name} is one of {', '.join(TABLES)}; got {table!r}")
        return f"{match[1]}{TABLES[table](content)}\n\n{made_by(content)}\n{match[4]}"

    return BLOCK.sub(block, text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path, metavar="PAGE", help="default: README.md and docs/**/*.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a table is out of date")
    options = parser.parse_args(arguments)
    before = {page: page.read_text() for page in options.pages or default_pages()}
    try:
        # all pages are made before any is written
        after = {page: fill(text, options.results) for page, text in before.items()}
    except ValueError as error:
        sys.stderr.write(f"make_speed_table: {error}\n")
        return 2
    changed = [page for page, text in after.items() if text != before[page]]
    for page in changed:
        if options.check:
            sys.stderr.write(f"make_speed_table: {page} is out of date\n")
        else:
            page.write_text(after[page])
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
