"""Settings of the whole process that decide how fast large images are, and how fast anything is on a busy machine.

The commands of softline make these settings when they start. A library must not change the process that imports it, so
in Python they are calls:

    import softline

    softline.process.spin_briefly()  # before torch is imported
    softline.process.use_huge_pages()  # before torch is imported
    softline.process.keep_memory()

"""

import ctypes
import os
import sys
import time
from pathlib import Path
from threading import Thread

from softline.errors import UserError

# parameters of glibc's mallopt
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
NEVER, LARGEST_INT = -1, 2**31 - 1
# how many blocks the system may map one by one, as glibc has it
MAPPED_BLOCKS = 65536
INFERENCE_BLOCK = 2**25
"""Bytes of the largest tensors of a band, see `softline.layers.bands`."""
# how many times the memory that is left a process may have before it returns what it keeps, and how often it looks;
# memory is faulted in at a few GB per second
MOST_OF_AVAILABLE = 6
SECONDS_BETWEEN_LOOKS = 0.1
STATM, MEMINFO, CGROUP = Path("/proc/self/statm"), Path("/proc/meminfo"), Path("/sys/fs/cgroup")

SPIN_COUNT = "GOMP_SPINCOUNT"
# GNU's own number is 300,000; measured in docs/benchmarks.md
SPINS, SPINS_IF_BUSY = 3000, 300
# the fourth number in it is that of the threads that run at the moment; samples of it, and the time that they take
LOAD = Path("/proc/loadavg")
LOAD_SAMPLES, LOAD_SECONDS = 10, 0.02
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
# which processes may have huge pages: always, those that ask for them (madvise), or never
PAGES_OFFERED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# variables by which a user has decided already
WAITING = (SPIN_COUNT, "OMP_WAIT_POLICY")
ALLOCATING = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")

# the bound of `keep_memory`; 0 before it is called
_largest_kept = 0

chosen: dict[str, str] = {}
"""Environment variables that were set here, and not by the user."""


def keep_memory(*, largest: int = LARGEST_INT) -> bool:
    """Let the C library keep the memory of freed tensors for the next ones.

    Linux's glibc returns every block above 32 MB to the system as soon as it is freed, and each page of the next large
    tensor is then faulted in and filled with zeros, which can take a third of the time. Afterwards the process stays as
    large as it has been once, and its peak is higher, because the blocks that are kept do not always fit: by a quarter
    in inference, by up to a factor of two in training. A thread therefore looks ten times a second how much memory is
    left, and returns what is kept as soon as the process has more than six times as much.

    largest: bytes of the largest block that is kept; by default all are. In evaluation large images are computed in
        bands whose tensors have up to `INFERENCE_BLOCK` bytes: if those are kept and the few larger ones are returned,
        inference is as fast and needs least memory. After each such computation `return_memory` then returns what was
        kept. A training step with this bound needs least memory too, and a sixth more time than without, with
        `use_huge_pages`.

    Returns False, and changes nothing, where the C library is another one.
    """
    global _largest_kept
    # no threshold is higher, so that larger blocks are kept only if no block is mapped on its own
    mapped = 0 if largest == LARGEST_INT else MAPPED_BLOCKS
    settings = {M_TRIM_THRESHOLD: NEVER, M_MMAP_THRESHOLD: largest, M_MMAP_MAX: mapped}
    done = all(set_allocator(parameter, value) for parameter, value in settings.items())
    if done and not _largest_kept:
        Thread(target=_return_when_scarce, name="return memory", daemon=True).start()
    _largest_kept = largest if done else 0
    return done


def return_memory() -> bool:
    """Return to the system what `keep_memory` with a bound has kept and nothing needs now; return whether it was asked.

    Blocks of one size are kept for the next ones of that size. Where other sizes follow they do not fit, and the
    process would become larger by as much as is kept.
    """
    return 0 < _largest_kept < LARGEST_INT and trim()


def _return_when_scarce() -> None:
    """Return what `keep_memory` has kept whenever little memory is left, until the process ends.

    Blocks that are kept do not always fit the next ones, so a process may grow, also within one step of a training,
    until no memory is left.
    """
    while True:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        if _is_scarce(available_memory()):
            trim()


def _is_scarce(available: int | None) -> bool:
    """Return whether this process has more than six times the memory that is left.

    available: bytes that processes can still allocate, None where the system does not say.
    """
    if available is None:
        return False
    resident = int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident > MOST_OF_AVAILABLE * available


def available_memory() -> int | None:
    """Return the bytes that processes can still allocate; None where the system does not say."""
    if not MEMINFO.exists():
        return None
    found = [
        int(line.split()[1]) * 1024 for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:")
    ]
    left = _left_in_group()
    return min(found if left is None else [*found, left], default=None)


def _left_in_group() -> int | None:
    """Return the bytes left until the limit of this process's control group; None without a limit."""
    most, current, stat = (CGROUP / f"memory.{name}" for name in ("max", "current", "stat"))
    if not most.exists() or not (limit := most.read_text().strip()).isdigit():
        return None
    taken = int(current.read_text()) if current.exists() else 0
    for line in stat.read_text().splitlines() if stat.exists() else ():
        if line.startswith("inactive_file "):
            # cached files, which the kernel drops as soon as memory is needed
            taken -= int(line.split()[1])
    return max(int(limit) - max(taken, 0), 0)


def trim() -> bool:
    """Return all freed memory to the system; return whether the C library can."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if malloc_trim is None:
        return False
    malloc_trim(0)
    return True


def set_allocator(parameter: int, value: int) -> bool:
    """Set a parameter of glibc's allocator; return whether the C library is glibc and accepts it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and bool(mallopt(parameter, value))


def use_huge_pages() -> bool:
    """Let torch ask Linux for huge pages for large tensors.

    A page of 2 MB is faulted in in one step instead of 512, and the processor finds it faster. Tensors whose memory
    begins at such a page also fit better into what `keep_memory` keeps.

    It has to be called before torch is imported; the environment variable ``THP_MEM_ALLOC_ENABLE`` does the same.
    Returns False, and changes nothing, where the system does not offer huge pages or the variable says otherwise.
    """
    if HUGE_PAGES not in os.environ and _offers_huge_pages():
        _set_before_torch(HUGE_PAGES, "1")
    return os.environ.get(HUGE_PAGES) == "1"


def _offers_huge_pages() -> bool:
    # the choice in force is in brackets: always [madvise] never
    return PAGES_OFFERED.exists() and "[never]" not in PAGES_OFFERED.read_text()


def spin_briefly() -> None:
    """Let torch's threads spin only briefly while they wait for each other, and then sleep.

    The threads of GNU's OpenMP, which torch has on Linux, spin for milliseconds. If another program takes a core away
    from one of them, the others occupy theirs without doing anything, and what they wait for takes many times as long.
    A thread that sleeps leaves its core to others, but takes longer to go on. So they spin for microseconds, and even
    less if the machine is busy already, that is if other programs run on more than half of its cores.

    It has to be called before torch is imported; the environment variable ``GOMP_SPINCOUNT`` does the same.
    """
    _set_before_torch(SPIN_COUNT, str(SPINS_IF_BUSY if _is_busy() else SPINS))


def _set_before_torch(name: str, value: str) -> None:
    """Set an environment variable that torch reads once."""
    if "torch" in sys.modules:
        raise UserError(
            f"this setting has to be made before torch is imported, which reads {name} only once; "
            f"set {name}={value} in the environment instead"
        )
    os.environ[name] = chosen[name] = value


def _is_busy() -> bool:
    """Return whether other programs occupy more than half of the cores now; where Linux's numbers are missing, False.

    The load average would not do: it counts a command that ended a few seconds ago.
    """
    if not LOAD.exists():
        return False
    running = 0
    for _ in range(LOAD_SAMPLES):
        running += int(LOAD.read_text().split()[3].partition("/")[0])
        time.sleep(LOAD_SECONDS / LOAD_SAMPLES)
    # this thread runs too
    return running / LOAD_SAMPLES - 1 > (os.cpu_count() or 1) / 2


def settle(*, largest: int | None) -> None:
    """Make the settings of a command, except those that the user has made by environment variables.

    largest: see `keep_memory`; without a bound torch also asks for huge pages. None leaves the memory as it is.
    """
    early = "torch" not in sys.modules
    if early and not any(name in os.environ for name in WAITING):
        spin_briefly()
    if largest is None or any(name.startswith(ALLOCATING) for name in os.environ):
        return
    if early and largest == LARGEST_INT:
        use_huge_pages()
    keep_memory(largest=largest)
