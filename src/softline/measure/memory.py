"""Peak memory of one run, measured in a process of its own.

The process first runs the case at a small size, if it accepts one, to load code and to fill the caches of libraries.
Then it returns all freed memory, resets the kernel's record of the peak, runs the case and reads the record. On systems
that cannot reset the record, the first run is measured, caches included.
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
from softline.measure.processes import starting_processes
from softline.process import M_MMAP_THRESHOLD, set_allocator, trim

SECONDS_TO_END = 10.0
# glibc returns blocks of at least this many bytes to the system when they are freed
MMAP_THRESHOLD = 128 * 2**10
# what Linux's prctl sets
PR_SET_PDEATHSIG, PR_SET_THP_DISABLE = 1, 41


class Memory(NamedTuple):
    peak_bytes: int
    """Peak of the run, beyond what was allocated before it: weights, inputs, libraries."""
    process_bytes: int | None
    """Peak of the whole process."""


@dataclass(frozen=True)
class ProcessMeter:
    """Measures a case in a new process.

    limit: bytes that the process may allocate beyond what it has at its start; None sets no limit.
    threads: number of torch's threads in that process.
    """

    limit: int | None
    threads: int

    def __call__(self, case: Case, size: int, mode: Mode, setting: Setting) -> Memory | str:
        """Return the memory of the case, or why it could not be measured."""
        return in_process(_measure, case, size, mode, setting, limit=self.limit, threads=self.threads)


def in_process(function: Callable[..., Any], *arguments: Any, limit: int | None = None, threads: int = 1) -> Any | str:
    """Call a module-level function in a new process; return its result, or one line that says why there is none."""
    # forks of a server that has imported everything and run nothing start fast, and share no state with this process
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, function, arguments, limit, threads), daemon=True)
    with starting_processes():
        process.start()
    # only the process holds their end now, so that its death closes the pipe
    theirs.close()
    try:
        result = ours.recv()
        # let it clean up after itself
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
    # Ctrl-C reaches every process of a terminal; the parent decides what happens
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
    """Return the peak of this process during ``run``, beyond what it holds before; call it once, early in a process."""
    _return_freed_at_once()
    if _reset_peak():
        warm_up()
        _reset_peak()
    before = _peak_bytes()
    run()
    return Memory(_peak_bytes() - before, _peak_bytes())


# the system


def can_measure() -> bool:
    """Return whether this system records the peak memory of a process."""
    return os.name == "posix"


def _status(key: str) -> int | None:
    """Return the bytes that the kernel reports under this key; None if it does not."""
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
    """Reset the recorded peak to what the process holds now; return False where the system cannot."""
    gc.collect()
    if sys.platform != "linux":
        return False
    # memory that glibc has freed but kept would hide as much growth
    trim()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _return_freed_at_once() -> None:
    """Make glibc return freed memory at once, so that the peak does not contain what it keeps for later."""
    set_allocator(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
    if sys.platform == "linux":
        # a huge page would count as a whole for the few kilobytes at the end of a tensor
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)


def _die_with_parent() -> None:
    """End this process when its parent ends, so that a killed measurement leaves nothing running."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_memory(limit: int) -> None:
    if sys.platform == "win32":
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = (_status("VmData") or 0) + limit
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))
