"""Settings of the whole process that decide how fast large images are, and how fast anything is on a busy machine.

The commands of softline make both settings when they start. A library must not change the process that imports it, so
in Python they are calls:

    import softline

    softline.process.wait_asleep()  # before torch is imported
    softline.process.keep_memory()

"""

import ctypes
import os
import sys

from softline.errors import UserError

# parameters of glibc's mallopt
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
NEVER, LARGEST_INT = -1, 2**31 - 1

WAIT_POLICY = "OMP_WAIT_POLICY"
# variables by which a user has decided already
WAITING = (WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
ALLOCATING = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")

chosen: dict[str, str] = {}
"""Environment variables that were set here, and not by the user."""


def keep_memory() -> bool:
    """Let the C library keep the memory of freed tensors for the next ones.

    Linux's glibc returns every block above 32 MB to the system as soon as it is freed, and each page of the next large
    tensor is then faulted in and filled with zeros, which takes a fifth of the time of an image of 2048 x 2048 pixels.
    Afterwards the process stays as large as it has been once, and its peak is up to a quarter higher, because the
    blocks that are kept do not always fit.

    Returns False, and changes nothing, where the C library is another one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    # each returns 1 if the C library accepts it
    return bool(mallopt(M_TRIM_THRESHOLD, NEVER) and mallopt(M_MMAP_THRESHOLD, LARGEST_INT))


def wait_asleep() -> None:
    """Let the threads of OpenMP, by which torch shares work, sleep while they wait for each other.

    By default they spin. If another program takes a core away from one thread, the others occupy theirs without doing
    anything, and what they wait for takes ten times as long and more. It has to be called before torch is imported; the
    same is done by the environment variable ``OMP_WAIT_POLICY=passive``.
    """
    if "torch" in sys.modules:
        raise UserError(
            f"wait_asleep has to be called before torch is imported, which reads {WAIT_POLICY} only once; set "
            f"{WAIT_POLICY}=passive in the environment instead"
        )
    os.environ[WAIT_POLICY] = chosen[WAIT_POLICY] = "passive"


def settle(*, keep: bool) -> None:
    """Make the settings of a command, except those that the user has made by environment variables."""
    if not any(name in os.environ for name in WAITING) and "torch" not in sys.modules:
        wait_asleep()
    if keep and not any(name.startswith(ALLOCATING) for name in os.environ):
        keep_memory()
