"""Ctrl-C and SIGTERM at any moment, sent to real processes."""

import _thread
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from softline.cli import main
from softline.cli.signals import interrupting
from softline.engine.checkpoint import load_checkpoint
from softline.engine.train import STOPPING
from softline.errors import UserError
from softline.locks import LOCK
from tests.engine.small import RECIPE, write_images

SOFTLINE = Path(sys.executable).with_name("softline")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


@contextmanager
def started(*arguments, **options):
    """Run a command in a group of its own, none of which is left afterwards."""
    with subprocess.Popen(
        [*map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **options,
    ) as run:
        try:
            yield run
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)


def wait_for(condition, run):
    begin = time.monotonic()
    while not condition():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() - begin < 120
        time.sleep(0.01)


@pytest.fixture
def root(tmp_path):
    write_images(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(root=tmp_path))
    return tmp_path


@pytest.mark.parametrize("number", list(CODES), ids=lambda number: number.name)
def test_a_run_that_is_stopped_saves_and_tells_the_signal_by_its_code(root, number):
    command = [SOFTLINE, "train", root / "recipe.yaml", "--schedule.epochs", "1000", "--workers", "1"]
    with started(*command) as run:
        wait_for(lambda: (root / "run/last.pt").exists(), run)
        # a terminal sends it to all processes of the command, and a launcher may pass it on too
        os.killpg(run.pid, number)
        os.kill(run.pid, number)
        out, errors = run.communicate(timeout=60)
    assert (run.returncode, errors) == (CODES[number], "")
    step = load_checkpoint(root / "run/last.pt")["step"]
    assert f"stopped by {number.name} after step {step}; continue with --resume\n" in out
    assert sorted(path.name for path in (root / "run").iterdir() if path.name.startswith(".")) == []


@pytest.mark.parametrize("number", list(CODES), ids=lambda number: number.name)
def test_a_comparison_that_is_stopped_tells_the_signal_by_its_code(root, number):
    sizes = ["--recipe", root / "recipe.yaml", "--schedule.epochs", "1000", "--model.options.drop_path_rate", "0"]
    command = [SOFTLINE, "compare", "--attentions", "softmax,inline", "--jobs", "2", *sizes, "--output", root / "out"]
    with started(*command) as run:
        wait_for(lambda: (root / "out/softmax/seed0/last.pt").exists(), run)
        os.killpg(run.pid, number)
        _, errors = run.communicate(timeout=50)
    assert run.returncode == CODES[number], errors
    assert "Traceback" not in errors
    # a process that has to be killed leaves its lock file, which locks nothing
    assert [path.name for path in (root / "out").rglob(".*") if path.name != LOCK] == []


@pytest.mark.parametrize("seed", range(6))
def test_a_signal_while_modules_are_imported_is_quiet(seed, tmp_path):
    """The first moments of Python itself, before it runs softline, cannot be covered."""
    numbers = random.Random(seed)
    number = numbers.choice(list(CODES))
    command = [[SOFTLINE], [sys.executable, "-m", "softline.cli"]][seed % 2]
    with started(*command, "train", "quickstart", "--output", "run", cwd=tmp_path) as run:
        wait_for(lambda: _has_run(run, seconds=0.3), run)
        time.sleep(numbers.uniform(0, 3))
        os.killpg(run.pid, number)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == CODES[number], errors
    assert "Traceback" not in errors
    assert errors in ("", "\ninterrupted\n", "\nterminated\n")


def _has_run(run, seconds):
    """Return whether the process has used this much time of a core, which is more than Python itself needs to start."""
    user, system = Path(f"/proc/{run.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return int(user) + int(system) > seconds * os.sysconf("SC_CLK_TCK")


def test_signals_that_python_cannot_raise_come_again():
    class Finalized:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGTERM)
            # a moment for the handler, whose exception is lost here
            time.sleep(0.01)

    def lose_it():
        with interrupting():
            Finalized()
            time.sleep(10)

    with pytest.raises(KeyboardInterrupt) as caught:
        lose_it()
    assert caught.value.args == (signal.SIGTERM,)


def test_handlers_are_restored_and_ignored_signals_stay_ignored():
    before = signal.getsignal(signal.SIGINT)
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with interrupting():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) is not before
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize("number", list(CODES), ids=lambda number: number.name)
def test_every_command_has_the_code_of_its_signal(number, monkeypatch, capsys):
    monkeypatch.setattr("softline.cli.models.run", lambda _: (_thread.interrupt_main(number), time.sleep(5)))
    assert main(["models"]) == CODES[number]
    assert capsys.readouterr().err == {130: "\ninterrupted\n", 143: "\nterminated\n"}[CODES[number]]


def test_the_signals_are_those_that_stop_a_run():
    assert {number.name for number in CODES} == set(STOPPING)


@pytest.mark.parametrize("number", list(CODES), ids=lambda number: number.name)
@pytest.mark.parametrize("turned", [UserError, AssertionError])
def test_a_signal_that_a_library_turns_into_another_error_is_told_by_its_code(turned, number, monkeypatch, capsys):
    def run(options):
        try:
            try:
                signal.raise_signal(number)
            finally:
                # as torch does, whose contexts were left in the wrong order
                raise RuntimeError("Trying to pop empty mode stack")
        except RuntimeError as error:
            raise turned("the network cannot be recorded") from error

    monkeypatch.setattr("softline.cli.models.run", run)
    assert main(["models"]) == CODES[number]
    assert "cannot be recorded" not in capsys.readouterr().err
