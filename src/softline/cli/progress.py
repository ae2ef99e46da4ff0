"""Progress of long work: bars on a terminal, plain lines at intervals elsewhere."""

import functools
import os
import shutil
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from softline.cli.table import duration, metrics_text
from softline.cli.terminal import controlled, one_line

if TYPE_CHECKING:
    from softline.engine.events import Event, Started, Stepped
    from softline.experiments.runs import Finished

SECONDS_BETWEEN_LINES = 10.0
BAR_WIDTH = 20


class Progress:
    """Shows how far work is, and prints lines that stay. Use it as a context, which removes what is shown.

    stream: where the bars, or the plain lines instead of them, go. Commands that print results use standard error.
    runs: number of training runs that `hear_run` will be told about.
    """

    def __init__(self, stream: TextIO | None = None, *, runs: int = 1) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.terminal = self.stream.isatty()
        self.bars: dict[str, Any] = {}
        self.last_line: dict[str, float] = {}
        self.begin = time.monotonic()
        # of training runs
        self.runs, self.finished = runs, 0
        self.started: dict[str, tuple[float, Started]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def say(self, text: str, stream: TextIO | None = None) -> None:
        """Print a line that stays, above the bars.

        stream: defaults to that of the bars.
        """
        stream = self.stream if stream is None else stream
        if self.bars:
            next(iter(self.bars.values())).write(text, file=stream)
            stream.flush()
        else:
            print(text, file=stream, flush=True)

    def show(
        self, name: str, text: str, *, done: int | None = None, total: int | None = None, last: bool = False
    ) -> None:
        """Show how far a piece of work is.

        name: tells pieces of work apart that go on at the same time; empty for the only one.
        text: numbers, or what is being done.
        done, total: draw a bar; without them, there is the text alone.
        last: print the line where there is no terminal, even if the last one was printed a moment ago.
        """
        if self.terminal:
            self._draw(name, text, done, total)
        elif last or time.monotonic() - self.last_line.get(name, self.begin) > SECONDS_BETWEEN_LINES:
            self.last_line[name] = time.monotonic()
            self.say(f"{name}: {text}" if name else text)

    def end(self, name: str) -> None:
        """Stop showing a piece of work."""
        if name in self.bars:
            others = {other: bar for other, bar in self.bars.items() if other != name}
            # the bars below it move up
            self._close()
            for other, bar in others.items():
                self._draw(other, bar.desc, bar.n, bar.total)

    def _draw(self, name: str, text: str, done: int | None, total: int | None) -> None:
        if name not in self.bars:
            self.bars[name] = _bar_class()(total=0, file=controlled(self.stream), leave=False, bar_format=" ")
        bar = self.bars[name]
        bar.ncols, bar.nrows = _size_of(self.stream)
        bar.desc, bar.n, bar.total = text, done or 0, total
        bar.bar_format = self._format(name, text, bar.ncols, with_bar=total is not None)
        bar.refresh()

    def _close(self) -> None:
        """Remove all bars, the lowest first."""
        while self.bars:
            self.bars.popitem()[1].close()
            # tqdm leaves the cursor where the bar ended
            print(end="\r", file=controlled(self.stream), flush=True)

    def _format(self, name: str, text: str, columns: int, *, with_bar: bool) -> str:
        """Return a line in tqdm's notation; on a narrow terminal, the bar gives way to the text."""
        width = max(len(other) for other in self.bars)
        label = f"{one_line(name):<{width}}  " if width else ""
        text = one_line(text)
        free = columns - len(label) - (len("100 %  ") if with_bar else 0) - 1
        text = text[: max(free, 0)]
        free -= len(text) + len("||  ")
        bar = f"|{{bar:{min(free, BAR_WIDTH)}}}|  " if free >= 4 else ""
        return _literal(label) + (f"{{percentage:3.0f}} %  {bar}" if with_bar else "") + _literal(text)

    # training runs

    def hear(self, event: "Event", run: str = "") -> None:
        """Show an event of a training run.

        run: name of the run; empty for the only one, whose start and evaluations are lines that stay.
        """
        from softline.engine.events import Evaluated, Evaluating, Notice, Preparing, Started, Stepped

        if isinstance(event, Preparing):
            self.show(run, f"{event.done:,} of {event.total:,} {event.what}", done=event.done, total=event.total)
        elif isinstance(event, Notice):
            self.say(one_line(f"{run}: {event.text}" if run else event.text))
        elif isinstance(event, Started):
            self._start(event, run)
        elif isinstance(event, Stepped):
            self._step(event, run)
        elif isinstance(event, Evaluating):
            of = "" if event.total is None else f" of {event.total:,}"
            unit = self.started[run][1].unit if run in self.started else "samples"
            self.show(run, f"evaluating: {event.done:,}{of} {unit}", done=event.done, total=event.total)
        elif isinstance(event, Evaluated):
            text = f"epoch {event.epoch:.4g}: {metrics_text(event.metrics)}"
            if run:
                self.show(run, text, done=event.step, total=self._steps(run))
            else:
                self.say(text + ("  best so far" if event.best else ""))

    def hear_run(self, name: str, seed: int, event: "Event | Finished") -> None:
        """Show an event of one of several runs, as comparisons report them."""
        from softline.engine.events import Notice, Preparing
        from softline.experiments.runs import Finished

        run = f"{name}, seed {seed}"
        if isinstance(event, Preparing | Notice):
            # data is prepared before the runs, and for all seeds
            self.hear(event, name)
            return
        for other in ("", name):
            self.end(other)
        if isinstance(event, Finished):
            self._finish(event, run)
        else:
            self.hear(event, run)

    def _start(self, event: "Started", run: str) -> None:
        self.end(run)
        self.started[run] = time.monotonic(), event
        if not run:
            several = f"{event.processes} processes on " if event.processes > 1 else ""
            size = f"{event.parameters / 1e6:.2f} M parameters"
            self.say(f"{event.model}: {size}, {several}{event.device}, to {event.output}")
            epochs = event.steps / event.steps_per_epoch
            resumed = f", from step {event.start_step}" if event.start_step else ""
            self.say(f"{event.steps} steps, {epochs:.4g} epochs of {event.steps_per_epoch}{resumed}")
        self.show(run, "the first steps", done=event.start_step, total=event.steps)

    def _step(self, event: "Stepped", run: str) -> None:
        text = f"epoch {event.epoch:.2f}  {duration(event.seconds_left)} left  loss {event.loss:.3f}{_logs(event.logs)}"
        if not run:
            unit = self.started[run][1].unit
            text += f"  {event.per_second:,.0f} {unit}/s  lr {event.lr:.1e}"
        last = not run and event.seconds_left == 0
        plain = "" if self.terminal else f"step {event.step}: "
        self.show(run, plain + text, done=event.step, total=self._steps(run), last=last)

    def _steps(self, run: str) -> int:
        return self.started[run][1].steps

    def _finish(self, event: "Finished", run: str) -> None:
        self.end(run)
        self.finished += 1
        begin = self.started[run][0] if run in self.started else time.monotonic()
        how = "done before" if event.reused else duration(time.monotonic() - begin)
        self.say(f"[{self.finished}/{self.runs}] {run}: {event.run.text} ({how})")


def _logs(logs: dict[str, float]) -> str:
    """Format scalars; those whose names share what is before a slash are one list."""
    groups: dict[str, list[str]] = {}
    for name, value in logs.items():
        groups.setdefault(name.partition("/")[0], []).append(f"{value:.3f}")
    return "".join(f"  {name} {' '.join(values)}" for name, values in groups.items())


@functools.cache
def _bar_class() -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        # no thread that redraws bars which nobody updates
        monitor_interval = 0

    # tqdm's default lock is for bars in several processes
    Bar.set_lock(threading.RLock())
    return Bar


def _size_of(stream: TextIO) -> tuple[int, int]:
    """Return columns and rows of a terminal; some do not know them, and then the environment's or 80 x 24 are taken."""
    known, other = os.get_terminal_size(stream.fileno()), shutil.get_terminal_size()
    return known.columns or other.columns, known.lines or other.lines


def _literal(text: str) -> str:
    """Escape a text for tqdm's notation."""
    return text.replace("{", "{{").replace("}", "}}")
