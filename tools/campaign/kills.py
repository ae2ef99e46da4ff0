"""Training runs that are killed at random moments and resumed, until they end as if nothing had happened.

`prepare` trains each setting once without any disturbance. A case starts a run of a setting, kills it with all its
processes at a random moment (while it starts, trains, evaluates or writes a checkpoint), resumes it, kills it again,
and lets it end in the last attempt. Some runs receive SIGTERM or Ctrl-C instead, are suspended, reach the end of the
disk while they write, or meet a second run in their output directory. In the end

- last.pt and best.pt equal those of the undisturbed run bitwise: weights, averaged weights, optimizer, metrics, steps,
- log.jsonl has each step once, with the same losses and metrics,
- no temporary file is left, and the exit code is 0.

In between, last.pt can be read whenever it exists.
"""

import contextlib
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

import softline
from softline.engine.checkpoint import BEST, LAST, load_checkpoint
from softline.errors import UserError
from softline.files import write_json
from tests.engine.small import RECIPE, write_images
from tests.engine.two_processes import PLAIN
from tests.tasks.small_dense import DETECTION, MODEL, SEGMENTATION, write_coco, write_scenes
from tests.tasks.small_sequence import small_overrides
from tools.campaign import running
from tools.campaign.interface import Outcome, Verdict, case_random, worst

RECIPES = {
    "classification": RECIPE.replace("{root}", "ROOT").replace("{{", "{").replace("}}", "}"),
    "detection": DETECTION + MODEL,
    "segmentation": SEGMENTATION + MODEL,
}
MOST_KILLS = 5
"""In one case."""
FRESH = 0.1
"""Share of the runs in processes of their own, which import everything anew."""
TIME_LIMIT = 120.0
IMPORT_SECONDS = 6.0
"""How much longer a fresh process takes."""
START_SECONDS = 0.5
"""In which a run that was forked has begun to train."""
EVALUATION_SECONDS = 0.2
SECONDS = "seconds.json"
TIMES = ("per_second", "seconds_left")
"""Entries of a log line that no two runs share."""
AVERAGE = "--ema.decay=0.9"


@dataclass(frozen=True)
class Setting:
    """A training run of a few seconds.

    weight: how often it is drawn.
    """

    recipe: str
    options: tuple[str, ...]
    processes: int = 1
    weight: float = 1.0

    def arguments(self, root: Path, output: Path) -> list[str]:
        """Return the arguments of ``softline`` for data and recipes in `root`."""
        name = str(root / f"{self.recipe}.yaml") if self.recipe in RECIPES else self.recipe
        given = small_overrides(root) if self.recipe == "lra_listops_small" else []
        return ["train", name, *given, *self.options, "--log_every=1", "--output", str(output)]

    def launch(self, root: Path, output: Path, place: Path, *more: str, fresh: bool = False) -> running.Running:
        """Start the run; `place` is the directory of the command."""
        arguments = [*self.arguments(root, output), *more]
        if self.processes == 1:
            return running.launch(arguments, place, fresh=fresh)
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes)]
        return running.launch_program([sys.executable, *torchrun, "-m", "softline.cli", *arguments], place)


SETTINGS = {
    "classification": Setting("classification", ("--schedule.epochs=4", "--save_every=1")),
    "classification, loading process, average": Setting(
        "classification", ("--schedule.epochs=4", "--save_every=2", "--workers=1", AVERAGE)
    ),
    "classification, rarely saved": Setting("classification", ("--schedule.epochs=4", AVERAGE)),
    "clothes": Setting("quickstart", ("--schedule.epochs=0.15", "--schedule.warmup_epochs=0.05", "--save_every=3")),
    "detection": Setting("detection", ("--schedule.epochs=3", "--save_every=1", AVERAGE)),
    "detection, loading process": Setting("detection", ("--schedule.epochs=3", "--save_every=3", "--workers=1")),
    "segmentation": Setting("segmentation", ("--schedule.epochs=4", "--save_every=1")),
    "segmentation, loading process, average": Setting(
        "segmentation", ("--schedule.epochs=4", "--save_every=2", "--workers=1", AVERAGE)
    ),
    "sequence": Setting("lra_listops_small", ("--schedule.epochs=4", "--save_every=1")),
    "sequence, loading process, average": Setting(
        "lra_listops_small", ("--schedule.epochs=4", "--save_every=3", "--workers=1", AVERAGE)
    ),
    # seconds to start, so they are drawn less often
    "two processes": Setting(
        "classification", (*PLAIN, "--schedule.epochs=4", "--save_every=1"), processes=2, weight=0.3
    ),
}


class Kills:
    """Kind "kills"."""

    name = "kills"
    unit = "kills"
    target = 200
    share = 2.0

    def prepare(self, work: Path) -> None:
        """Write the data, and train every setting without disturbance."""
        prepare(work / self.name, SETTINGS)

    def run(self, seed: int, work: Path) -> Outcome:
        numbers = case_random(self.name, seed)
        weights = [setting.weight for setting in SETTINGS.values()]
        (name,) = numbers.choices(list(SETTINGS), weights)
        with running.case_directory(work, self.name, seed) as directory:
            return Case(name, SETTINGS[name], work / self.name, directory, numbers).run()


KIND = Kills()


def prepare(root: Path, settings: dict[str, Setting]) -> None:
    """Write data and recipes to `root`, and train those of the settings that this source code has not trained there."""
    if not (root / "written").exists():
        root.mkdir(parents=True, exist_ok=True)
        for write in (write_images, write_coco, write_scenes):
            write(root)
        for name, text in RECIPES.items():
            (root / f"{name}.yaml").write_text(text.replace("ROOT", str(root)))
        (root / "written").touch()
    checksum, written = source_code(), root / "reference" / "source_code"
    if not written.exists() or written.read_text() != checksum:
        # other code may compute other numbers
        shutil.rmtree(written.parent, ignore_errors=True)
        written.parent.mkdir()
        written.write_text(checksum)
    for name, setting in settings.items():
        if not (reference(root, name) / SECONDS).exists():
            _train_undisturbed(root, name, setting)


def reference(root: Path, name: str) -> Path:
    """Return the output directory of a setting's undisturbed run; `SECONDS` in it says how long it took."""
    return root / "reference" / name.replace(", ", "-").replace(" ", "-")


def source_code() -> str:
    """Return a checksum of softline's source code."""
    checksum = hashlib.sha256()
    for path in sorted(Path(softline.__file__).parent.rglob("*.py")):
        checksum.update(path.read_bytes())
    return checksum.hexdigest()


def _train_undisturbed(root: Path, name: str, setting: Setting) -> None:
    output = reference(root, name)
    shutil.rmtree(output, ignore_errors=True)
    if setting.processes == 1:
        # the time is that of a server that has been started
        running.run(["--version"], root / "prepared")
    begin = time.monotonic()
    finished = setting.launch(root, output, root / "prepared").wait(time_limit=TIME_LIMIT)
    if running.judge(finished, codes=(0,)) is not Verdict.SURVIVED:
        raise RuntimeError(f"the undisturbed run of {name!r} failed:\n{finished.detail()}")
    write_json(output / SECONDS, time.monotonic() - begin)


@dataclass
class Case:
    """A run that is disturbed several times."""

    name: str
    setting: Setting
    root: Path
    directory: Path
    numbers: Random
    kills: int = 0
    """Kills that hit a living run."""
    story: list[str] = field(default_factory=list)
    faults: list[tuple[Verdict, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reference = reference(self.root, self.name)
        self.output = self.directory / "run"
        self.fresh = self.setting.processes == 1 and self.numbers.random() < FRESH
        self.seconds = json.loads((self.reference / SECONDS).read_text())
        self.steps = load_checkpoint(self.reference / LAST)["step"]
        self.step = 0
        """That of the last checkpoint."""
        self.resume = self.numbers.random() < 0.5

    def run(self) -> Outcome:
        """Disturb the run as often as is planned, let it end, and compare it with the undisturbed one."""
        planned = self.numbers.randint(1, MOST_KILLS if self.setting.processes == 1 else 2)
        disturbances = ALONE if self.setting.processes == 1 else TOGETHER
        ended = False
        while self.kills < planned and not ended and not self.faults:
            (disturb,) = self.numbers.choices(list(disturbances), list(disturbances.values()))
            ended = disturb(self)
            self._check_checkpoints()
        if not ended and not self.faults:
            self.story.append("resumed to the end")
            self.judge(self.start().wait(time_limit=TIME_LIMIT), codes=(0,))
        if not self.faults and (fault := difference(self.reference, self.output)):
            self.fail(Verdict.WRONG, fault)
        what = f"{self.name}{', fresh processes' * self.fresh}: {', '.join(self.story)}"
        detail = "\n".join(f"{verdict}: {reason}" for verdict, reason in self.faults)
        return Outcome(worst([verdict for verdict, _ in self.faults]), what, detail, tried=self.kills)

    def start(self, place: str = "command") -> running.Running:
        """Start the run anew; a run that has been started before is resumed."""
        resume = ["--resume"] if self.resume else []
        self.resume = True
        return self.setting.launch(self.root, self.output, self.directory / place, *resume, fresh=self.fresh)

    def pause(self, longest: float | None = None) -> None:
        """Wait for a random time, by default up to the time that the rest of the run takes."""
        if longest is None:
            longest = self.seconds * (1 - self.step / self.steps) + IMPORT_SECONDS * self.fresh
        time.sleep(self.numbers.uniform(0, longest))

    def fail(self, verdict: Verdict, reason: str) -> None:
        self.faults.append((verdict, reason))

    def judge(self, finished: running.Finished, *, codes: tuple[int, ...]) -> bool:
        """Judge the end of a command; return whether the run has ended."""
        verdict = running.judge(finished, codes=codes)
        if verdict is not Verdict.SURVIVED:
            self.fail(verdict, f"{self.story[-1]}: expected an exit code of {codes}\n{finished.detail()}")
        return finished.code == 0

    def kill(self, started: running.Running, how: str) -> bool:
        """Kill all processes of a run; return whether it had ended before."""
        if started.poll() is not None:
            self.story.append(f"ended before it was {how}")
            return self.judge(started.wait(time_limit=TIME_LIMIT), codes=(0,))
        processes = [started.pid, *descendants(started.pid)]
        for process in processes:
            send(process, signal.SIGKILL)
        finished = started.wait(time_limit=TIME_LIMIT)
        wait_for_end(processes)
        if finished.code == 0:
            self.story.append(f"ended while it was {how}")
            return True
        self.kills += 1
        self.story.append(how)
        return False

    def _check_checkpoints(self) -> None:
        """Check that the checkpoints can be read, however the run was ended."""
        for name in (LAST, BEST):
            if (path := self.output / name).exists():
                try:
                    content = load_checkpoint(path)
                    self.step = content["step"] if name == LAST else self.step
                except UserError as error:
                    self.fail(Verdict.WRONG, f"{self.story[-1]}: {name} is unreadable: {error}")


# disturbances; each starts the run and returns whether it ended by itself


def killed(case: Case) -> bool:
    started = case.start()
    case.pause()
    return case.kill(started, "killed")


def killed_at_start(case: Case) -> bool:
    started = case.start()
    case.pause(START_SECONDS + IMPORT_SECONDS * case.fresh)
    return case.kill(started, "killed at the start")


def killed_while_writing(case: Case) -> bool:
    """Kill the run as soon as a temporary file of a checkpoint is there; not always the first one."""
    started = case.start()
    case.pause()
    while started.poll() is None and not any(partial_files(case.output)):
        time.sleep(0.0005)
    return case.kill(started, "killed while a checkpoint was written")


def killed_after_saving(case: Case) -> bool:
    """Kill the run shortly after a checkpoint was written, which is when it evaluates."""
    started = case.start()
    case.pause()
    before = _moment(case.output / LAST)
    while started.poll() is None and _moment(case.output / LAST) == before:
        time.sleep(0.001)
    case.pause(EVALUATION_SECONDS)
    return case.kill(started, "killed after a checkpoint")


def killed_twice(case: Case) -> bool:
    return killed(case) or killed_at_start(case)


def killed_while_suspended(case: Case) -> bool:
    started = case.start()
    case.pause()
    started.signal(signal.SIGSTOP)
    case.pause(0.2)
    return case.kill(started, "killed while suspended")


def suspended(case: Case) -> bool:
    started = case.start()
    case.pause()
    started.signal(signal.SIGSTOP)
    case.pause(0.3)
    started.signal(signal.SIGCONT)
    case.pause()
    return case.kill(started, "suspended, continued and killed")


def terminated(case: Case) -> bool:
    """Send SIGTERM to the first process, as `kill` does, or to all, as batch systems do."""
    return _stopped(case, signal.SIGTERM)


def interrupted(case: Case) -> bool:
    """Send SIGINT to all processes, as Ctrl-C does, or to the first one."""
    return _stopped(case, signal.SIGINT)


def _stopped(case: Case, number: signal.Signals) -> bool:
    started = case.start()
    # not before the fork is softline
    time.sleep(0.1)
    case.pause()
    everyone = case.numbers.random() < 0.5
    if everyone:
        started.signal(number)
    elif started.poll() is None:
        send(started.pid, number)
    case.story.append(f"{number.name} to {'all processes' if everyone else 'the first process'}")
    # 0 if it had ended; the signal itself ends a process that has not begun to train
    return case.judge(started.wait(time_limit=TIME_LIMIT), codes=(0, 128 + number, -number))


def disk_filled(case: Case) -> bool:
    """Let no file of the run grow beyond a part of a checkpoint, as if the disk was full."""
    started = case.start()
    case.pause()
    limit = int((case.reference / LAST).stat().st_size * case.numbers.uniform(0.3, 0.9))
    with contextlib.suppress(ProcessLookupError):
        for process in (started.pid, *descendants(started.pid)):
            resource.prlimit(process, resource.RLIMIT_FSIZE, (limit, limit))
    finished = started.wait(time_limit=TIME_LIMIT)
    case.story.append(f"files limited to {limit} bytes")
    if finished.code == 2 and "could not write" not in finished.errors:
        case.fail(Verdict.WRONG, f"the error does not name the file\n{finished.detail()}")
    if left := list(partial_files(case.output)):
        case.fail(Verdict.WRONG, f"a failed write left {', '.join(path.name for path in left)}\n{finished.detail()}")
    return case.judge(finished, codes=(0, 2))


def met_by_rival(case: Case) -> bool:
    """Start a second run in the same directory: one of them goes on, the other names it."""
    first = case.start()
    if case.numbers.random() < 0.5:
        case.pause()
    second = case.start("rival")
    case.story.append("met by a second run")
    ends = [one.wait(time_limit=TIME_LIMIT) for one in (first, second)]
    for finished, other in zip(ends, (second, first), strict=True):
        case.judge(finished, codes=(0, 2))
        if finished.code == 2 and f"in use by process {other.pid} " not in finished.errors:
            case.fail(Verdict.WRONG, f"the error does not name process {other.pid}\n{finished.detail()}")
    if ends[0].code == ends[1].code and not (ends[0].code == 0 and started_finished(case.output)):
        case.fail(Verdict.WRONG, "two runs in one directory ended alike\n" + "\n".join(end.detail() for end in ends))
    return 0 in (ends[0].code, ends[1].code)


def one_process_killed(case: Case) -> bool:
    """Kill one of the processes that train together; torchrun then ends the others."""
    started = case.start()
    case.pause()
    training = descendants(started.pid)
    if not training:
        return case.kill(started, "killed")
    send(case.numbers.choice(training), signal.SIGKILL)
    finished = started.wait(time_limit=TIME_LIMIT)
    wait_for_end(training)
    if finished.code == 0:
        case.story.append("ended before one process was killed")
        return True
    if finished.stopped:
        case.fail(Verdict.HANG, f"the other processes did not end\n{finished.detail()}")
    case.kills += 1
    case.story.append("one process killed")
    return False


ALONE: dict[Callable[[Case], bool], float] = {
    killed: 6,
    killed_at_start: 1,
    killed_while_writing: 3,
    killed_after_saving: 2,
    killed_twice: 1,
    killed_while_suspended: 1,
    suspended: 0.5,
    terminated: 1,
    interrupted: 1,
    disk_filled: 1,
    met_by_rival: 1,
}
"""Disturbances of a run in one process, with their weights."""
TOGETHER: dict[Callable[[Case], bool], float] = {killed: 3, killed_while_writing: 1, one_process_killed: 1}


# processes


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, directly and indirectly."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        # a process may end at any moment
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
                started = [int(child) for child in children.read_text().split()]
                found += started
                waiting += started
    return found


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_for_end(processes: list[int]) -> None:
    """Wait until all these processes are gone or are zombies."""
    deadline = time.monotonic() + TIME_LIMIT
    while any(_is_running(process) for process in processes):
        if time.monotonic() > deadline:
            raise RuntimeError(f"one of the processes {processes} survived SIGKILL")
        time.sleep(0.005)


def _is_running(pid: int) -> bool:
    try:
        # the state follows the name, which is in brackets and may contain anything
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# results


def partial_files(output: Path) -> Iterator[Path]:
    """Yield the temporary files of checkpoints that are being written."""
    for name in (LAST, BEST):
        yield from output.glob(f".{name}.*")


def _moment(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def started_finished(output: Path) -> bool:
    """Return whether the last start in this directory found a run that had ended."""
    starts = [line for line in read_lines(output) if line["event"] == "started"]
    return bool(starts) and starts[-1]["start_step"] == starts[-1]["steps"]


def difference(expected: Path, output: Path) -> str | None:
    """Describe the first difference between the output directories of two runs of one recipe; None if there is none."""
    names = [{path.name for path in directory.iterdir()} - {SECONDS} for directory in (expected, output)]
    if names[0] != names[1]:
        return f"the directory has {sorted(names[1])}, expected {sorted(names[0])}"
    for name in (LAST, BEST):
        one, other = (load_checkpoint(directory / name) for directory in (expected, output))
        one["recipe"]["output"] = other["recipe"]["output"]
        if (where := first_difference(one, other)) is not None:
            return f"{name} differs in {where}"
    return _log_difference(read_lines(expected), read_lines(output))


def first_difference(one: Any, other: Any, where: str = "") -> str | None:
    """Return the place of the first difference between two nested values; tensors are compared bit by bit."""
    if type(one) is not type(other) and not isinstance(one, (list, tuple)):
        return f"{where}: {type(other).__name__} instead of {type(one).__name__}"
    if isinstance(one, torch.Tensor):
        same = (
            one.dtype == other.dtype and one.shape == other.shape and one.numpy().tobytes() == other.numpy().tobytes()
        )
        return None if same else where
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return f"{where}: keys {sorted(map(str, one.keys() ^ other.keys()))}"
        pairs = [(f"{where}.{key}".lstrip("."), one[key], other[key]) for key in one]
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            return f"{where}: {len(other)} items instead of {len(one)}"
        pairs = [(f"{where}[{index}]", *items) for index, items in enumerate(zip(one, other, strict=True))]
    else:
        return None if one == other or (one != one and other != other) else f"{where}: {other!r} instead of {one!r}"
    return next((found for place, a, b in pairs if (found := first_difference(a, b, place)) is not None), None)


def read_lines(output: Path) -> list[dict[str, Any]]:
    """Read log.jsonl strictly: every line of it is whole."""
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def _log_difference(expected: list[dict[str, Any]], lines: list[dict[str, Any]]) -> str | None:
    for event, once in (("stepped", True), ("evaluated", False)):
        ours, theirs = (
            [{key: value for key, value in line.items() if key not in TIMES} for line in log if line["event"] == event]
            for log in (lines, expected)
        )
        if not once:
            # an evaluation whose result was not saved is repeated
            ours = [line for line, previous in zip(ours, [None, *ours], strict=False) if line != previous]
        if ours != theirs:
            different = [line for line in ours if line not in theirs] or [line for line in theirs if line not in ours]
            steps = [line["step"] for line in ours]
            return f"log.jsonl: {event} steps {steps}, expected {len(theirs)} lines; first difference: {different[:1]}"
    return None
