"""The results of one `softline bench` command as plain data, complete after every row."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from softline.measure.growth import Growth, growths
from softline.measure.measuring import Group, Row


@dataclass
class Results:
    """Collects rows while the command runs.

    kind: ops, layers, models, sequences, memory or inline.
    command: the command as typed.
    options: what all rows have in common: batch, dtype, ...
    """

    kind: str
    command: str
    baseline: str
    options: dict[str, Any]
    environment: dict[str, Any]
    finished: bool = False
    peaks: list[dict[str, Any]] = field(default_factory=list)
    _rows: dict[tuple[str, str, int], Row] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def hear(self, row: Row) -> None:
        """Add a row, or replace it by one that holds more."""
        self._rows[row.case, row.mode, row.size] = row

    def end_group(self, group: Group) -> None:
        if group.peak_gflops is not None:
            self.peaks.append({"size": group.size, "mode": group.mode, "gflops": group.peak_gflops})

    def growths(self) -> list[Growth]:
        return growths(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dictionaries."""
        return {
            "kind": self.kind,
            "command": self.command,
            "finished": self.finished,
            "baseline": self.baseline,
            "options": self.options,
            "environment": self.environment,
            "peaks": self.peaks,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "growth": [dataclasses.asdict(growth) for growth in self.growths()],
        }
