"""The record of a campaign: one line of JSON per finished case, and the table of all of them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from softline.cli.table import format_table
from tools.campaign.interface import Kind, Outcome, Verdict

DETAIL_LIMIT = 20_000  # characters of output that are kept of a failure; `--repeat` shows all
FAILURES = [verdict for verdict in Verdict if verdict is not Verdict.SURVIVED]


@dataclass(frozen=True)
class Entry:
    """One finished case."""

    kind: str
    seed: int
    verdict: Verdict
    tried: int
    seconds: float
    what: str
    detail: str


class Ledger:
    """The finished cases of a campaign, on disk before the next one starts, so that a killed campaign goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Entry] = []
        if path.exists():
            # the last line has no end if the campaign was killed while it was written
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            self.entries = [self._parse(line) for line in whole.splitlines()]
            if whole != content:
                path.write_bytes(whole)

    def add(self, kind: str, seed: int, outcome: Outcome, seconds: float) -> Entry:
        """Append a case."""
        detail = "" if outcome.verdict is Verdict.SURVIVED else outcome.detail[-DETAIL_LIMIT:]
        entry = Entry(kind, seed, outcome.verdict, outcome.tried, round(seconds, 3), outcome.what, detail)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(entry)) + "\n")
        self.entries.append(entry)
        return entry

    def of(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind]

    @staticmethod
    def _parse(line: bytes) -> Entry:
        fields = json.loads(line)
        return Entry(**fields | {"verdict": Verdict(fields["verdict"])})


def failures(entries: Iterable[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.verdict is not Verdict.SURVIVED]


def counts(ledger: Ledger, kinds: Iterable[Kind]) -> list[dict[str, Any]]:
    """Return the row of each kind: what was tried and survived, in the kind's unit, and the failed cases by verdict."""
    rows = []
    for kind in kinds:
        entries = ledger.of(kind.name)
        failed = failures(entries)
        row: dict[str, Any] = {"kind": kind.name, "unit": kind.unit, "target": kind.target, "cases": len(entries)}
        row["tried"] = sum(entry.tried for entry in entries)
        row["survived"] = row["tried"] - sum(entry.tried for entry in failed)
        row |= {verdict.value: sum(entry.verdict is verdict for entry in failed) for verdict in FAILURES}
        row["seconds"] = round(sum(entry.seconds for entry in entries), 1)
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows of `counts`."""
    header = ["kind", "unit", "tried", "target", "survived", *(verdict.value for verdict in FAILURES), "minutes"]
    lines = [
        [
            row["kind"],
            row["unit"],
            *(f"{row[name]:,}" for name in ("tried", "target", "survived")),
            *(str(row[verdict.value]) for verdict in FAILURES),
            f"{row['seconds'] / 60:.1f}",
        ]
        for row in rows
    ]
    return format_table(header, lines, left=2)
