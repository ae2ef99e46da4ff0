"""Peak memory of one run, measured in a process of its own.

The process first runs the case at a small size if it takes one, so that code pages and what libraries keep from their
first use are there; then it returns all freed memory, resets the kernel's record of the peak, runs and reads it. On
systems that cannot reset it, the first run is measured, with all of that in it.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from softline.measure.cases import Case, Mode, Setting, prepare
from softline.measure.counting import cuda_peak_bytes
from softline.measure.failures import CASE_ERRORS, OUT_OF_MEMORY, failure_text

GIB = 2**30
SECONDS_TO_END = 10.0
# tensors of so many bytes are returned to the system when they are freed
MMAP_THRESHOLD = 128 * 2**10
M_MMAP_THRESHOLD = -3
PR_SET_PDEATHSIG = 1
CGROUP = Path("/sys/fs/cgroup")


class Memory(NamedTuple):
    peak_bytes: int
    """Most that the run held at once, beyond what was there before: weights, inputs, libraries."""
    process_bytes: int | None
    """Most that the process held at all."""


@dataclass(frozen=True)
class ProcessMeter:
    """Measures a case in a fresh process.

    limit: bytes that the process may take beyond what it has at its start; None sets no limit.
    threads: of torch, in that process.
    """

    limit: int | None
    threads: int

    def __call__(self, case: Case, size: int, mode: Mode, setting: Setting) -> Memory | str:
        """What was measured, or why nothing was."""
        return in_process(_measure, case, size, mode, setting, limit=self.limit, threads=self.threads)


def in_process(function: Callable[..., Any], *arguments: Any, limit: int | None = None, threads: int = 1) -> Any | str:
    """The result of a module's function in a fresh process, or in one line why there is none."""
    # forks of a process that has imported everything and run nothing start fast and share nothing with this one
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, function, arguments, limit, threads), daemon=True)
    process.start()
    # only theirs is left, so that its death ends the pipe
    theirs.close()
    try:
        result = ours.recv()
        # to the end, so that it tidies up after itself
        process.join(SECONDS_TO_END)
        return result
    except (EOFError, ConnectionResetError):
        process.join()
        return _ended(process.exitcode)
    finally:
        process.kill()
        process.join()
        ours.close()


def _ended(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return OUT_OF_MEMORY
    return f"the process ended unexpectedly (exit code {code})"


def _work(
    connection: "Connection[Any, Any]", function: Callable[..., Any], arguments: Any, limit: int | None, threads: int
) -> None:
    # Ctrl-C reaches every process of a terminal: the one that started us decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    torch.set_num_threads(threads)
    if limit is not None:
        _limit_memory(limit)
    try:
        result = function(*arguments)
    except CASE_ERRORS as error:
        result = failure_text(error)
    connection.send(result)


def _measure(case: Case, size: int, mode: Mode, setting: Setting) -> Memory:
    run = warm_up = prepare(case, size, mode, setting).run
    small = case.warm_up_size(size)
    if small != size and not setting.compiled:
        warm_up = prepare(case, small, mode, setting).run
    if torch.device(setting.device).type == "cuda":
        warm_up()
        return Memory(cuda_peak_bytes(run, setting.device), None)
    return measure_peak(run, warm_up)


def measure_peak(run: Callable[[], object], warm_up: Callable[[], object]) -> Memory:
    """Peak of this process while ``run`` runs, beyond what it holds; to be called once, early in a process."""
    _return_freed_at_once()
    if _reset_peak():
        warm_up()
        _reset_peak()
    before = _peak_bytes()
    run()
    return Memory(_peak_bytes() - before, _peak_bytes())


# the system


def can_measure() -> bool:
    """Whether this system tells a process's peak."""
    return os.name == "posix"


def available_memory() -> int | None:
    """Bytes that processes can still get; None where the system does not say."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    found = [int(line.split()[1]) * 1024 for line in info.read_text().splitlines() if line.startswith("MemAvailable:")]
    left = _left_in_group()
    return min(found if left is None else [*found, left], default=None)


def _left_in_group() -> int | None:
    """Bytes up to the limit of this process's control group; None if there is none."""
    most, current, stat = (CGROUP / f"memory.{name}" for name in ("max", "current", "stat"))
    if not most.exists() or not (limit := most.read_text().strip()).isdigit():
        return None
    taken = int(current.read_text()) if current.exists() else 0
    for line in stat.read_text().splitlines() if stat.exists() else ():
        if line.startswith("inactive_file "):
            # files that were read and that the kernel forgets as soon as memory is needed
            taken -= int(line.split()[1])
    return max(int(limit) - max(taken, 0), 0)


def _status(key: str) -> int | None:
    """Bytes that the kernel reports under this key; None if it does not."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None


def _peak_bytes() -> int:
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _reset_peak() -> bool:
    """Make the peak what the process holds now; False where the system cannot."""
    gc.collect()
    if sys.platform != "linux":
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        # what glibc has freed and kept would hide as much growth
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _return_freed_at_once() -> None:
    """The peak is then what is held at once, not what glibc keeps of it for later."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)


def _die_with_parent() -> None:
    """A measurement that is killed leaves no process behind that goes on computing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_memory(limit: int) -> None:
    if sys.platform == "win32":
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = (_status("VmData") or 0) + limit
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))
