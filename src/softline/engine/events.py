"""Events of a run, which are written to log files here and shown on a terminal by ``softline.cli``."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from softline.files import read_bytes, write_text
from softline.plain import check_entries, read_json


@dataclass(frozen=True)
class Started:
    output: str
    model: str
    parameters: int
    device: str
    processes: int
    steps: int
    steps_per_epoch: int
    start_step: int
    unit: str


@dataclass(frozen=True)
class Stepped:
    """Progress of the training; values are means since the previous event, over all processes."""

    step: int
    epoch: float
    loss: float
    logs: dict[str, float]
    grad_norm: float
    lr: float
    per_second: float
    seconds_left: float


@dataclass(frozen=True)
class Evaluated:
    step: int
    epoch: float
    metrics: dict[str, float]
    per_second: float
    best: bool


@dataclass(frozen=True)
class Evaluating:
    """Progress of an evaluation: samples of this process that are done, and how many there are."""

    done: int
    total: int | None


@dataclass(frozen=True)
class Preparing:
    """Progress of data that is generated before the run."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class Saved:
    step: int
    path: str


@dataclass(frozen=True)
class Notice:
    text: str
    routine: bool = False
    """Whether it reports something that is expected."""


Event: TypeAlias = Preparing | Started | Stepped | Evaluating | Evaluated | Saved | Notice
Listener: TypeAlias = Callable[[Event], None]


class JsonLines:
    """Writes one JSON object a line to ``log.jsonl``; lines of steps that a resumed run repeats are dropped."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        kept = [line for line in read_log(path) if line.get("step", 0) <= after_step] if path.exists() else []
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self.path = path

    def __call__(self, event: Event) -> None:
        if isinstance(event, (Preparing, Evaluating)):
            return
        line = {"event": type(event).__name__.lower(), **dataclasses.asdict(event)}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


class TensorBoard:
    """Writes scalars for TensorBoard."""

    def __init__(self, directory: Path, *, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(directory), purge_step=after_step + 1)

    def __call__(self, event: Event) -> None:
        scalars: dict[str, float] = {}
        if isinstance(event, Stepped):
            scalars = {"loss": event.loss, "lr": event.lr, "grad_norm": event.grad_norm, "per_second": event.per_second}
            scalars = {f"train/{name}": value for name, value in (scalars | event.logs).items()}
        elif isinstance(event, Evaluated):
            scalars = {f"val/{name}": value for name, value in event.metrics.items()}
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, event.step)  # type: ignore[union-attr]
        if isinstance(event, Evaluated):
            self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a ``log.jsonl``, without a last line that a kill cut short."""
    lines = read_bytes(path).split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        # only a whole line ends in a newline
        if line and number < len(lines):
            entry = read_json(line, f"{path}, line {number},")
            check_entries(entry, {}, f"{path}, line {number},")
            kinds = {"event": str, "step": int, "epoch": float, "loss": float, "metrics": dict[str, float]}
            needed = {key: kind for key, kind in kinds.items() if key == "event" or key in entry}
            check_entries(entry, needed, f"{path}, line {number},")
            found.append(entry)
    return found
