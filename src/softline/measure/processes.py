"""Starting processes that leave Ctrl-C to the one that starts them."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def starting_processes() -> Iterator[None]:
    """Let processes that are started in this block not see Ctrl-C, not even before they can ignore it.

    A terminal sends it to all of them. While they import their modules, it would end in a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        # one that was held back arrives now
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
