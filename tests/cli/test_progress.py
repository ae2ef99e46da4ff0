"""What long commands show: on a terminal, and in a file or a pipe."""

import fcntl
import io
import os
import pty
import re
import struct
import termios
import time
from types import SimpleNamespace

import pytest

from softline.cli.progress import Progress
from softline.engine.events import Evaluated, Evaluating, Notice, Preparing, Saved, Started, Stepped
from softline.experiments.runs import Finished

STARTED = Started("runs/x", "softpp_micro", 650_000, "cpu", 1, 40, 10, 0, "images")


def stepped(step, left=9.0):
    return Stepped(step, step / 10, 1.5, {"accuracy": 0.25}, 1.0, 1e-3, 1234.5, left)


class Screen:
    """A terminal of some width."""

    def __init__(self, columns):
        self.ours, theirs = pty.openpty()
        self.stream = os.fdopen(theirs, "w")
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self):
        """What was written since the last time."""
        self.stream.flush()
        time.sleep(0.05)
        return os.read(self.ours, 2**16).decode()


@pytest.fixture
def screen():
    made = []

    def make(columns=110):
        made.append(Screen(columns))
        return made[-1]

    yield make
    for one in made:
        one.stream.close()
        os.close(one.ours)


def test_a_run_in_a_pipe_is_plain_lines():
    pipe = io.StringIO()
    with Progress(pipe) as progress:
        events = [
            Preparing("expressions", 5, 10),
            Notice("train: 0 of 40 images are corrupt"),
            STARTED,
            stepped(20),
            Evaluating(10, 20),
            Evaluated(20, 2.0, {"loss": 1.25, "top1": 0.5}, 100.0, True),
            Saved(20, "last.pt"),
            stepped(40, left=0.0),
        ]
        for event in events:
            progress.hear(event)
    # the last step is always there, others every ten seconds
    assert pipe.getvalue().splitlines() == [
        "train: 0 of 40 images are corrupt",
        "softpp_micro: 0.65 M parameters, cpu, to runs/x",
        "40 steps, 4 epochs of 10",
        "epoch 2: top1 50.00 %  loss 1.2500  best so far",
        "step 40: epoch 4.00  0:00 left  loss 1.500  accuracy 0.250  1,234 images/s  lr 1.0e-03",
    ]


def test_lines_come_at_intervals(monkeypatch):
    pipe, now = io.StringIO(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Progress(pipe) as progress:
        for second in range(25):
            now[0] = 100.0 + second
            progress.show("", f"{second} seconds")
            progress.show("other", f"{second}")
    assert pipe.getvalue().splitlines() == ["11 seconds", "other: 11", "22 seconds", "other: 22"]


def test_a_terminal_shows_a_bar_that_goes_away(screen):
    terminal = screen()
    with Progress(terminal.stream) as progress:
        progress.hear(STARTED)
        progress.hear(stepped(20))
        shown = terminal.read()
        assert re.search(r"\r 50 %  \|█{10} {10}\|  epoch 2\.00  0:09 left  loss 1\.500 .* 1,234 images/s", shown)
        progress.say("a {line} that stays")
        # the bar is drawn again below it
        assert re.search(r"\r +\ra \{line\} that stays\r\n.*\r 50 %", terminal.read(), re.DOTALL)
    assert terminal.read().endswith("\r")


# a terminal without a size is taken for one of 80 columns
@pytest.mark.parametrize(
    ("columns", "line"), [(60, " 50 %  epoch 2.00  0:09 left"), (15, " 50 %  epoch 2"), (0, " 50 %  epoch 2.00")]
)
def test_the_bar_gives_way_to_the_text_on_a_narrow_terminal(screen, columns, line, monkeypatch):
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((80, 24)))
    terminal = screen(columns)
    with Progress(terminal.stream) as progress:
        progress.hear(STARTED)
        progress.hear(stepped(20))
        shown = terminal.read().split("\r")[-1]
    assert shown.startswith(line)
    assert len(shown) < (columns or 80)


def test_several_runs_have_a_bar_each_and_a_line_in_the_end(screen):
    terminal = screen()
    done = SimpleNamespace(text="top-1 80.00 %")
    with Progress(terminal.stream, runs=3) as progress:
        progress.show("", "measuring")
        for name in ("softpp", "inline-residual"):
            progress.hear_run(name, 0, STARTED)
        progress.hear_run("softpp", 0, stepped(10))
        progress.hear_run("softpp", 0, Evaluated(10, 1.0, {"top1": 0.5}, 1.0, True))
        shown = terminal.read()
        assert "softpp, seed 0            25 %" in shown
        assert "inline-residual, seed 0    0 %" in shown
        assert set(progress.bars) == {"softpp, seed 0", "inline-residual, seed 0"}
        progress.hear_run("softpp", 0, Finished(done, reused=False))
        progress.hear_run("softmax", 0, Finished(done, reused=True))
        shown = terminal.read()
        # the bar that is left has moved up
        assert [bar.pos for bar in progress.bars.values()] == [0]
    assert "[1/3] softpp, seed 0: top-1 80.00 % (0:00)\r\n" in shown
    assert "[2/3] softmax, seed 0: top-1 80.00 % (done before)\r\n" in shown
