"""A run's progress: a bar on a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Any

from softline.engine.events import Evaluated, Evaluating, Event, Notice, Preparing, Saved, Started, Stepped


class Progress:
    """A listener for one run, to be used as a context."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(highlight=False, soft_wrap=True)
        self.bar: Any = None
        self.task: Any = None
        self.started = False
        self.unit = "samples"
        self.last_line = 0.0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Preparing):
            self._prepare(event)
        elif isinstance(event, Started):
            self._start(event)
        elif isinstance(event, Stepped):
            self._step(event)
        elif isinstance(event, Evaluating):
            if self.bar is not None:
                self.bar.update(self.task, numbers=evaluating_line(event, self.unit))
        elif isinstance(event, Evaluated):
            self.say(evaluation_line(event))
        elif isinstance(event, Notice):
            self.say(event.text)
        else:
            assert isinstance(event, Saved), "that is all there is"

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def _prepare(self, event: Preparing) -> None:
        """A bar of its own; elsewhere a line every ten seconds."""
        line = f"{event.done:,} of {event.total:,} {event.what}"
        if self.console.is_terminal:
            if self.bar is None:
                self._open_bar(total=event.total)
            self.bar.update(self.task, completed=event.done, numbers=line)
        elif time.monotonic() - self.last_line > 10:
            self.last_line = time.monotonic()
            self.say(line)

    def _open_bar(self, *, total: int, completed: int = 0) -> None:
        self.bar = _bar(self.console)
        self.task = self.bar.add_task("", total=total, completed=completed, numbers="")
        self.bar.start()

    def _start(self, event: Started) -> None:
        if self.bar is not None:
            # that of the preparation
            self.bar.stop()
        self.started = True
        self.unit = event.unit
        several = f"{event.processes} processes on " if event.processes > 1 else ""
        self.say(
            f"{event.model}: {event.parameters / 1e6:.2f} M parameters, {several}{event.device}, to {event.output}"
        )
        epochs = event.steps / event.steps_per_epoch
        resumed = f", from step {event.start_step}" if event.start_step else ""
        self.say(f"{event.steps} steps, {epochs:.4g} epochs of {event.steps_per_epoch}{resumed}")
        if self.console.is_terminal:
            self._open_bar(total=event.steps, completed=event.start_step)

    def _step(self, event: Stepped) -> None:
        line = step_line(event, self.unit)
        if self.bar is not None:
            self.bar.update(self.task, completed=event.step, numbers=line)
        elif time.monotonic() - self.last_line > 10 or event.seconds_left == 0:
            self.last_line = time.monotonic()
            self.say(f"step {event.step}: {line}")


def step_line(event: Stepped, unit: str) -> str:
    logs = "".join(f"  {name} {value:.3f}" for name, value in event.logs.items())
    return (
        f"epoch {event.epoch:.2f}  loss {event.loss:.4f}{logs}  lr {event.lr:.2e}  {event.per_second:,.0f} {unit}/s"
        f"  {duration(event.seconds_left)} left"
    )


def evaluating_line(event: Evaluating, unit: str) -> str:
    of = "" if event.total is None else f" of {event.total:,}"
    return f"evaluating: {event.done:,}{of} {unit}"


def evaluation_line(event: Evaluated) -> str:
    best = "  best so far" if event.best else ""
    return f"epoch {event.epoch:.4g}: {metrics_text(event.metrics)}{best}"


def metrics_text(metrics: dict[str, float]) -> str:
    """All but losses as percentages."""
    fractions = [f"{name} {percent(value)}" for name, value in metrics.items() if name != "loss"]
    losses = [f"{name} {value:.4f}" for name, value in metrics.items() if name == "loss"]
    return "  ".join(fractions + losses)


def percent(fraction: float | None) -> str:
    """COCO gives -1 where there is nothing to measure."""
    return "none" if fraction is None or fraction < 0 else f"{100 * fraction:.2f} %"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _bar(console: Any) -> Any:
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn
    from rich.progress import Progress as Bar

    return Bar(
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[numbers]}", markup=False),
        console=console,
        transient=True,
    )
