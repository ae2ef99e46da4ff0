"""Exports that are killed, stopped or run out of disk: the file is then the previous one, none, or whole.

`prepare` exports a small classifier once. A case exports it again, over an earlier file or where there is none, and
disturbs the command at a random moment. Afterwards the file is what it was before or equals the undisturbed one
bitwise; signals and a full disk end in their message and leave nothing beside it. Some cases then export once more,
which must succeed.
"""

import json
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from softline.cli.startup import TEXTS
from softline.files import write_json
from tests.deploy.small import saved_classifier
from tools.campaign import running
from tools.campaign.interface import Outcome, Verdict, case_random, worst
from tools.campaign.kills import source_code

OPTIONS = ("--size", "16", "--batch", "1", "--no-compiled")
PREVIOUS = b"an earlier file"
FRESH = 0.2
"""Share of the commands in processes of their own, which import everything anew."""
IMPORT_SECONDS = 6.0
AGAIN = 0.2
"""Share of the cases that export once more."""


@dataclass
class Case:
    """One disturbed export."""

    root: Path
    directory: Path
    numbers: Random
    faults: list[tuple[Verdict, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.whole = (self.root / "whole.onnx").read_bytes()
        self.seconds: float = json.loads((self.root / "seconds.json").read_text())
        self.fresh = self.numbers.random() < FRESH
        self.target = self.directory / "out" / "model.onnx"
        self.target.parent.mkdir(parents=True)
        self.before = PREVIOUS if self.numbers.random() < 0.5 else None
        if self.before is not None:
            self.target.write_bytes(self.before)

    def run(self) -> Outcome:
        (disturb,) = self.numbers.choices(list(DISTURBANCES), list(DISTURBANCES.values()))
        started = launch(self.root, self.target, self.directory / "command", fresh=self.fresh)
        finished, story = disturb(self, started)
        found = self.target.read_bytes() if self.target.exists() else None
        if found not in ((self.whole,) if finished.code == 0 else (self.before, self.whole)):
            self.fail(Verdict.WRONG, f"the file has {'nothing' if found is None else f'{len(found)} bytes'}", finished)
        if disturb not in (killed, killed_while_writing):
            self._check_order(finished)
        if self.numbers.random() < AGAIN:
            story += ", exported again"
            again = launch(self.root, self.target, self.directory / "again").wait()
            if running.judge(again, codes=(0,)) is not Verdict.SURVIVED or self.target.read_bytes() != self.whole:
                self.fail(Verdict.WRONG, "a second export failed", again)
        what = f"export{', fresh process' * self.fresh}, {'earlier file' if self.before else 'no file'}: {story}"
        detail = "\n".join(f"{verdict}: {reason}" for verdict, reason in self.faults)
        return Outcome(worst([verdict for verdict, _ in self.faults]), what, detail)

    def _check_order(self, finished: running.Finished) -> None:
        """Check what a command that could clean up has left."""
        left = sorted(path.name for path in self.target.parent.iterdir() if path != self.target)
        left += running.left_files(self.directory / "command")
        if left:
            self.fail(Verdict.WRONG, f"left behind: {', '.join(left)}", finished)

    def judge(self, finished: running.Finished, codes: tuple[int, ...], message: str) -> None:
        """Judge the end of a command that was not killed; an exit code other than 0 needs the message."""
        verdict = running.judge(finished, codes=codes)
        if verdict is not Verdict.SURVIVED:
            self.fail(verdict, f"expected an exit code of {codes}", finished)
        elif finished.code and message not in finished.errors:
            self.fail(Verdict.WRONG, f"the message is not {message!r}", finished)

    def fail(self, verdict: Verdict, reason: str, finished: running.Finished) -> None:
        self.faults.append((verdict, f"{reason}\n{finished.detail()}"))

    def pause(self) -> None:
        time.sleep(self.numbers.uniform(0, self.seconds + IMPORT_SECONDS * self.fresh))


Disturbance = Callable[[Case, running.Running], tuple[running.Finished, str]]


def killed(case: Case, started: running.Running) -> tuple[running.Finished, str]:
    case.pause()
    started.signal(signal.SIGKILL)
    return started.wait(), "killed"


def killed_while_writing(case: Case, started: running.Running) -> tuple[running.Finished, str]:
    """Kill it as soon as there is a part of the file."""
    while started.poll() is None and not any(_sizes(case.target)):
        time.sleep(0.0002)
    started.signal(signal.SIGKILL)
    return started.wait(), "killed while the file was written"


def _sizes(target: Path) -> list[int]:
    sizes = []
    for path in target.parent.glob(f".{target.name}.*"):
        try:
            # the lock file names its holder
            sizes += [path.stat().st_size] if path.suffix != ".lock" else []
        except FileNotFoundError:
            continue
    return sizes


def stopped(case: Case, started: running.Running) -> tuple[running.Finished, str]:
    """Send what Ctrl-C or a batch system sends."""
    number = case.numbers.choice([signal.SIGINT, signal.SIGTERM])
    # not before the process is softline
    time.sleep(0.1 + IMPORT_SECONDS / 2 * case.fresh)
    case.pause()
    started.signal(number)
    finished = started.wait()
    case.judge(finished, (0, 128 + number), TEXTS[number])
    return finished, number.name


def disk_filled(case: Case, started: running.Running) -> tuple[running.Finished, str]:
    """Let no file grow beyond a part of the exported one, as if the disk was full."""
    limit = int(len(case.whole) * case.numbers.uniform(0.3, 0.9))
    resource.prlimit(started.pid, resource.RLIMIT_FSIZE, (limit, limit))
    finished = started.wait()
    case.judge(finished, (2,), "could not write")
    return finished, f"files limited to {limit} bytes"


DISTURBANCES: dict[Disturbance, float] = {killed: 4, killed_while_writing: 2, stopped: 4, disk_filled: 1}


def launch(root: Path, target: Path, place: Path, *, fresh: bool = False) -> running.Running:
    """Start the export; `place` is the directory of the command."""
    return running.launch(["export", str(root / "timm"), "--to", str(target), *OPTIONS], place, fresh=fresh)


def prepare(root: Path) -> None:
    """Export the classifier without disturbance, unless this source code has."""
    import torch

    checksum, written = source_code(), root / "source_code"
    if written.exists() and written.read_text() == checksum:
        return
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    torch.manual_seed(0)
    saved_classifier(root / "timm")
    start = time.monotonic()
    finished = launch(root, root / "whole.onnx", root / "command").wait()
    if finished.code != 0:
        raise RuntimeError(f"the export fails undisturbed\n{finished.detail()}")
    write_json(root / "seconds.json", time.monotonic() - start)
    written.write_text(checksum)


class Exporting:
    name = "exporting"
    unit = "exports"
    target = 30
    share = 1.0

    def prepare(self, work: Path) -> None:
        prepare(work / self.name)

    def run(self, seed: int, work: Path) -> Outcome:
        with running.case_directory(work, self.name, seed) as directory:
            return Case(work / self.name, directory, case_random(self.name, seed)).run()


KIND = Exporting()
