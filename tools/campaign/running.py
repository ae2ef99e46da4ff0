"""How a case runs a command of softline: quickly, watched, and within limits of time and memory.

Importing torch and softline takes seconds, so one server process per worker imports them once and forks for each
command. The fork runs `softline.cli.main` in a session and a working directory of its own under the hook of `audit`.
A part of the cases use a fresh process instead, so that nothing depends on the fork.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

from tools.campaign.audit import NETWORK, watch
from tools.campaign.interface import Outcome, Verdict

ROOT = Path(__file__).parents[2]
TIME_LIMIT = 90.0  # seconds
MEMORY_LIMIT = 3 * 2**30  # bytes beyond those of the imported modules
keep_cases = False  # set to look at the files of a case that is repeated
_EXIT_LIMIT = 10.0  # seconds that the processes of a command have to end after it
_IMPORTED = 2**30  # resident bytes of a process that has imported everything, at most

# imported by the server beside all modules of softline
_WARM = ("torch", "torchvision", "timm", "accelerate", "jsonargparse", "torchmetrics", "faster_coco_eval",
         "segmentation_models_pytorch", "matplotlib.pyplot", "tensorboard", "torch.utils.tensorboard",
         "torchvision.models.detection")  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """What became of a command."""

    arguments: tuple[str, ...]
    code: int | None  # negative after a signal; None if it was stopped at a limit
    output: str
    errors: str
    events: tuple[str, ...]  # programs and requests that the hook prevented
    stopped: str = ""  # "time" or "memory"
    left_running: bool = False  # whether processes survived the command

    def detail(self) -> str:
        """Return all of it for a person to read."""
        text = f"$ softline {' '.join(map(repr, self.arguments))}\nexit code {self.code}"
        parts = {"stopped": self.stopped, "events": "\n".join(self.events), "output": self.output}
        parts["errors"] = self.errors
        return "\n".join([text, *(f"--- {name}\n{part.rstrip()}" for name, part in parts.items() if part)])


class Running:
    """A command that was started. Its processes form the process group `pid`."""

    def __init__(self, arguments: Sequence[str], directory: Path, pid: int, process: subprocess.Popen[bytes] | None):
        self.arguments = tuple(arguments)
        self.directory = directory
        self.pid = pid
        self._process = process

    def poll(self) -> int | None:
        """Return the exit code, or None while the command is running."""
        if self._process is not None:
            return self._process.poll()
        return _server().code_of(self.pid)

    def signal(self, number: int) -> bool:
        """Send a signal to all its processes; return whether there were any."""
        if self.poll() is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)
            return True
        return False

    def wait(self, *, time_limit: float = TIME_LIMIT, memory_limit: int = MEMORY_LIMIT) -> Finished:
        """Wait for the end, or stop it at a limit."""
        stopped, pause = "", 0.005
        deadline = time.monotonic() + time_limit
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                stopped = "time"
            elif _memory(self.pid) > memory_limit:
                stopped = "memory"
            if stopped:
                self.stop()
                break
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
        left_running = not stopped and not self._group_ends()
        self.stop()
        return Finished(
            self.arguments,
            None if stopped else code,
            _text(self.directory / "stdout"),
            _text(self.directory / "stderr"),
            tuple(_text(self.directory / "events").splitlines()),
            stopped,
            left_running,
        )

    def stop(self) -> None:
        """Kill what is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        while self.poll() is None:
            time.sleep(0.005)

    def _group_ends(self) -> bool:
        """Return whether no process of the group is left soon after the first one has ended."""
        deadline = time.monotonic() + _EXIT_LIMIT
        while time.monotonic() < deadline:
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(0.01)
        return False


def launch(arguments: Sequence[str], directory: Path, *, fresh: bool = False, module: str = "softline.cli") -> Running:
    """Start ``softline ARGUMENT...`` without waiting.

    directory: of this command alone while it is running. Its working directory is ``directory/cwd``, its directory for
        temporary files ``directory/tmp``; both are created if they are missing.
    fresh: start a new process instead of a fork of the server.
    module: has a function `main` that takes the arguments and returns the exit code.
    """
    if fresh:
        hooked = [sys.executable, "-m", "tools.campaign.audit", str(directory / "events"), module]
        return launch_program([*hooked, *arguments], directory, arguments=arguments)
    _make_room(directory)
    return Running(arguments, directory, _server().fork(arguments, directory, module), None)


def launch_program(program: Sequence[str], directory: Path, *, arguments: Sequence[str] | None = None) -> Running:
    """Start any program, such as torchrun, with the directories of `launch`; no hook watches it."""
    _make_room(directory)
    with (directory / "stdout").open("wb") as output, (directory / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            program,
            cwd=directory / "cwd",
            env=environment(directory),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
    return Running(program if arguments is None else arguments, directory, process.pid, process)


def run(
    arguments: Sequence[str],
    directory: Path,
    *,
    fresh: bool = False,
    time_limit: float = TIME_LIMIT,
    memory_limit: int = MEMORY_LIMIT,
    module: str = "softline.cli",
) -> Finished:
    """Run ``softline ARGUMENT...`` to its end or a limit; see `launch`."""
    running = launch(arguments, directory, fresh=fresh, module=module)
    return running.wait(time_limit=time_limit, memory_limit=memory_limit)


def judge(finished: Finished, *, codes: Sequence[int] = (0, 2)) -> Verdict:
    """Judge what can be judged without knowing the case.

    codes: documented exit codes. 2 needs a message.
    """
    if finished.events:
        requests = [event.partition(" ")[0] in NETWORK for event in finished.events]
        return Verdict.REQUEST if all(requests) else Verdict.EXECUTION
    if finished.stopped:
        return Verdict.HANG
    if finished.code not in codes or "Traceback (most recent call last)" in finished.output + finished.errors:
        return Verdict.TRACEBACK
    if finished.left_running or (finished.code == 2 and "error: " not in finished.errors):
        return Verdict.WRONG
    return Verdict.SURVIVED


def outcome(finished: Finished, what: str, *, codes: Sequence[int] = (0, 2), tried: int = 1) -> Outcome:
    """Return the outcome of a case of one command."""
    return Outcome(judge(finished, codes=codes), what, finished.detail(), tried)


def left_files(directory: Path) -> list[str]:
    """Return the paths of what a command left in its working directory and its directory for temporary files."""
    paths = [path.relative_to(directory) for name in ("cwd", "tmp") for path in (directory / name).rglob("*")]
    # torch creates the directory of its compiler when it is imported
    return sorted(str(path) for path in paths if not any(part.startswith("torchinductor_") for part in path.parts))


def left_after_refusal(directory: Path) -> list[str]:
    """Return what a command that ended with exit code 2 left behind; a training that had begun keeps its files."""
    left = left_files(directory)
    return [] if any(name.endswith("log.jsonl") for name in left) else left


@contextlib.contextmanager
def case_directory(work: Path, name: str, seed: int) -> Iterator[Path]:
    """Provide an empty directory for a case and remove it afterwards, unless `keep_cases` is set."""
    directory = work / "cases" / f"{name}-{seed}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        if not keep_cases:
            shutil.rmtree(directory, ignore_errors=True)


def environment(directory: Path) -> dict[str, str]:
    """Return the environment variables of a command: one thread, no caches of the user, its own temporary files."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("SOFTLINE_")},
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
        # this checkout, whichever is installed
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "PYTHONHASHSEED": "0",
        "HOME": str(_home()),
        "MPLBACKEND": "Agg",
        # softline sets it when it is imported, which a fork does not repeat
        "ORT_DISABLE_TELEMETRY": "1",
        "TMPDIR": str(directory / "tmp"),
    }


def _home() -> Path:
    """Return a home directory without anything of the user; it only keeps matplotlib's list of fonts."""
    home = Path(tempfile.gettempdir()) / f"softline-campaign-{os.getuid()}"
    home.mkdir(exist_ok=True)
    return home


def _make_room(directory: Path) -> None:
    for name in ("cwd", "tmp"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    for name in ("stdout", "stderr", "events"):
        (directory / name).unlink(missing_ok=True)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _memory(pid: int) -> int:
    """Return the resident memory of a process and its descendants beyond what they have imported."""
    pages, waiting = 0, [pid]
    size = os.sysconf("SC_PAGE_SIZE")
    while waiting:
        process = waiting.pop()
        # a process may end at any moment
        with contextlib.suppress(OSError):
            resident = int(Path(f"/proc/{process}/statm").read_text().split()[1])
            pages += max(resident - _IMPORTED // size, 0)
            for children in Path(f"/proc/{process}/task").glob("*/children"):
                waiting += map(int, children.read_text().split())
    return pages * size


class Server:
    """A process that has imported everything and forks for each command."""

    def __init__(self) -> None:
        self._codes: dict[int, int] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.campaign.running"],
            cwd=ROOT,
            env=environment(_home()) | {"TMPDIR": tempfile.gettempdir()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        atexit.register(self.close)
        self._read()

    def fork(self, arguments: Sequence[str], directory: Path, module: str) -> int:
        """Start a command; return the id of its process."""
        request = {
            "module": module,
            "arguments": list(arguments),
            "directory": str(directory),
            "environment": environment(directory),
        }
        pipe = self._pipe(self._process.stdin)
        pipe.write(json.dumps(request).encode() + b"\n")
        pipe.flush()
        while "pid" not in (answer := self._read()):
            pass
        return answer["pid"]

    def code_of(self, pid: int) -> int | None:
        """Return the exit code of a command, or None while it is running."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe(self._process.stdout), selectors.EVENT_READ)
            while pid not in self._codes and selector.select(0):
                self._read()
        return self._codes.get(pid)

    def close(self) -> None:
        """End the server, which kills what it has started."""
        self._pipe(self._process.stdin).close()
        self._process.wait()
        self._pipe(self._process.stdout).close()

    def _read(self) -> dict[str, int]:
        """Read one answer; keep the exit code of a command that has ended."""
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError("the server of commands has ended")
        answer: dict[str, int] = json.loads(line)
        if "code" in answer:
            self._codes[answer["ended"]] = answer["code"]
        return answer

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe


@functools.cache
def _server() -> Server:
    return Server()


def _import_everything() -> None:
    import softline

    for name in _WARM:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    for module in pkgutil.walk_packages(softline.__path__, "softline."):
        # gradio, which starts threads, stays outside
        if "explore" not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)

    import torch

    torch.set_num_threads(1)


def _serve() -> int:
    """Answer requests until the input ends."""
    # what imported modules print is no answer
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    _import_everything()
    gc.collect()
    gc.freeze()
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    living: set[int] = set()
    answers.write(json.dumps({"ready": os.getpid()}) + "\n")
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        pending = b""
        while True:
            for key, _ in selector.select():
                received = os.read(key.fd, 65536)
                if key.fd == wake:
                    continue
                if not received:
                    for pid in living:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(pid, signal.SIGKILL)
                    return 0
                *requests, pending = (pending + received).split(b"\n")
                for request in requests:
                    pid = os.fork()
                    if pid == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for descriptor in (wake, woken, answers.fileno(), selector.fileno()):
                            os.close(descriptor)
                        _end(_command(**json.loads(request)))
                    living.add(pid)
                    with contextlib.suppress(PermissionError):
                        os.setpgid(pid, pid)
                    answers.write(json.dumps({"pid": pid}) + "\n")
            for pid in list(living):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    living.remove(pid)
                    answers.write(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}) + "\n")


def _command(module: str, arguments: Sequence[str], directory: str, environment: Mapping[str, str]) -> int:
    """Run a command in a fork; return its exit code."""
    with contextlib.suppress(PermissionError):
        # the server has made a process group of it if it was quicker
        os.setsid()
    place = Path(directory)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    os.chdir(place / "cwd")
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    file = os.open(os.devnull, os.O_RDONLY)
    os.dup2(file, 0)
    os.close(file)
    watch(place / "events")
    sys.argv = ["softline", *arguments]
    try:
        code: int = importlib.import_module(module).main(arguments)
        return code
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1


def _end(code: int) -> NoReturn:
    """End a fork as an interpreter ends, but for the destruction of what the server has imported."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    # what the server has imported need not be destroyed
    os._exit(_serve())
