"""Two results of `softline bench`: what has become slower, or larger, by more than the noise.

Times are not compared as they are, because machines differ and are shared. A time counts in units of a reference of the
same run: the matrix product, and every model of timm that both results have measured. A case has become slower if it
has by all of its references.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softline.backbones import MODEL_NAMES
from softline.errors import UserError
from softline.files import read_bytes
from softline.measure.measuring import Row
from softline.measure.turns import Timing
from softline.plain import check_entries, read_json

LEAST = 0.1
"""Changes below this share are not reported, however small the noise is."""
# standard errors that count as noise
ERRORS = 3
# the kernel counts the memory of a process by threads, each of which tells it only now and then
MEMORY_NOISE = 2**20
SHARED = ("batch", "dtype", "device", "compile")
FIELDS = {"kind": str, "command": str, "finished": bool, "options": dict, "environment": dict, "rows": list}
NUMBER = float | int | None
ROW = {
    **{"case": str, "mode": str, "label": str, "size": int, "tokens": int, "rounds": list, "failure": str | None},
    **{"milliseconds": NUMBER, "spread": NUMBER, "share": NUMBER, "macs": NUMBER, "peak_bytes": NUMBER},
}
Key = tuple[str, str, int]


@dataclass(frozen=True)
class BenchFile:
    """A file that `softline bench --json` has written."""

    path: str
    kind: str
    command: str
    settings: dict[str, Any]
    """What has to be equal in results that are compared."""
    rows: dict[Key, Row]
    """By case, mode and size."""


@dataclass(frozen=True)
class Change:
    """How a case differs between two results; factors are above 1 if it costs more."""

    case: str
    mode: str
    label: str
    time: float | None
    """Factor of its time, by the reference that shows the smallest; None if it was not timed twice."""
    noise: float
    """Part of the factor above 1 that the spread of the rounds explains."""
    memory: float | None
    more_bytes: int
    """How many bytes more it needs."""
    failure: str | None
    """Why it cannot be measured any more."""

    def is_slower(self, least: float = LEAST) -> bool:
        return self.time is not None and self.time > 1 + max(least, self.noise)

    def is_larger(self, least: float = LEAST) -> bool:
        return self.memory is not None and self.memory > 1 + least and self.more_bytes > MEMORY_NOISE

    def is_worse(self, least: float = LEAST) -> bool:
        return self.failure is not None or self.is_slower(least) or self.is_larger(least)


def read_bench_file(path: Path) -> BenchFile:
    """Read a file that `softline bench --json` has written to the end."""
    content = read_json(read_bytes(path), str(path))
    check_entries(content, FIELDS, str(path))
    if not content["finished"]:
        raise UserError(f"{path} is incomplete because its command was interrupted: measure again")
    rows = [_read_row(entry, str(path)) for entry in content["rows"]]
    settings = {name: content["options"].get(name) for name in SHARED}
    settings["threads"] = content["environment"].get("threads")
    by_key: dict[Key, Row] = {(row.case, row.mode, row.size): row for row in rows}
    return BenchFile(str(path), content["kind"], content["command"], settings, by_key)


def _read_row(entry: Any, where: str) -> Row:
    check_entries(entry, ROW, where)
    known = {field.name for field in dataclasses.fields(Row)}
    return Row.from_dict({key: value for key, value in entry.items() if key in known})


def changes(before: BenchFile, after: BenchFile) -> list[Change]:
    """Compare what both have measured, in the order of the first; the references themselves are left out."""
    for name, one, other in _pairs(before, after):
        if one != other:
            raise UserError(
                f"results can be compared if they have the same {name}: {before.path} has {one}, {after.path} has "
                f"{other}"
            )
    common = [key for key in before.rows if key in after.rows]
    compared = [key for key in common if not _is_reference(before.kind, key[0])]
    if not compared:
        raise UserError(f"{before.path} and {after.path} have no case in common at the same size")
    return [_change(before.rows, after.rows, key, _references(before, key, common)) for key in compared]


def _pairs(before: BenchFile, after: BenchFile) -> Iterator[tuple[str, Any, Any]]:
    yield "kind", before.kind, after.kind
    for name in before.settings:
        yield name, before.settings[name], after.settings[name]


def _is_reference(kind: str, case: str) -> bool:
    return kind == "models" and case.partition(":")[0] not in MODEL_NAMES


def _references(before: BenchFile, key: Key, common: Sequence[Key]) -> list[Key]:
    """Return the models of timm in the same rounds."""
    return [other for other in common if other[1:] == key[1:] and _is_reference(before.kind, other[0])]


def _change(before: Mapping[Key, Row], after: Mapping[Key, Row], key: Key, references: Sequence[Key]) -> Change:
    old, new = before[key], after[key]
    known = old.failure is None
    factors = []
    if old.relative_time and new.relative_time:
        factors.append((new.relative_time / old.relative_time, _noise(old, new)))
    for reference in references:
        theirs, ours = before[reference], after[reference]
        if old.milliseconds and new.milliseconds and theirs.milliseconds and ours.milliseconds:
            factor = new.milliseconds / old.milliseconds * theirs.milliseconds / ours.milliseconds
            factors.append((factor, _noise(old, new, theirs, ours)))
    time, noise = min(factors, default=(None, 0.0), key=lambda pair: pair[0] - pair[1])
    memory, more = None, 0
    if old.peak_bytes and new.peak_bytes:
        memory, more = new.peak_bytes / old.peak_bytes, new.peak_bytes - old.peak_bytes
    return Change(*key[:2], old.label, time, noise, memory, more, new.failure if known else None)


def _noise(*rows: Row) -> float:
    """Return what the spreads of the rounds of these rows explain of a ratio of their medians."""
    return ERRORS * math.sqrt(sum(_relative_error(row) ** 2 for row in rows))


def _relative_error(row: Row) -> float:
    """Return the standard error of the median of the rounds, relative to it."""
    timing = Timing(row.rounds)
    if not row.rounds:
        return 0.0
    # the half distance of the quartiles of a normal distribution is 0.674 standard deviations
    deviation = timing.spread / 0.674
    return math.sqrt(math.pi / 2 / len(row.rounds)) * deviation / max(timing.median, 1e-12)
