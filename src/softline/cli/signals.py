"""Ctrl-C and SIGTERM: a command ends quietly, cleans up, and its exit code tells the signal.

Both raise KeyboardInterrupt, whose argument is the number of the signal, as in the library's own functions that a
signal stops. Inside an import nothing is raised, since C code that is being set up turns exceptions into others or
aborts; as long as there is nothing to clean up, the process ends at once.
"""

import _thread
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from softline.cli.startup import end_now, exit_code
from softline.locks import is_holding

SIGNALS = (signal.SIGINT, signal.SIGTERM)
IMPORTING = "<frozen importlib._bootstrap>"
# after an exception was lost where Python cannot raise it
SECONDS_TO_REPEAT = 0.05


def signal_of(error: KeyboardInterrupt) -> signal.Signals:
    """Return the signal that raised the error; Python's own handler, which is that of Ctrl-C, does not tell it."""
    return signal.Signals(error.args[0]) if error.args else signal.SIGINT


def interruption_of(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interruption itself, or the one that a library turned into the error while it cleaned up."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def interrupting() -> Iterator[None]:
    """Let both signals raise KeyboardInterrupt; signals that are ignored, or handled by somebody else, stay so."""
    if not _in_main_thread():
        yield
        return
    owner = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            # a forked process: whoever started it decides, and ends it by SIGTERM
            if number == signal.SIGTERM:
                os._exit(exit_code(number))
            return
        if _is_importing(frame) and not is_holding():
            end_now(number)
        raise KeyboardInterrupt(number)

    defaults = (signal.SIG_DFL, signal.default_int_handler, end_now)
    wanted = [number for number in SIGNALS if signal.getsignal(number) in defaults]
    before: dict[int, Any] = {number: signal.signal(number, interrupt) for number in wanted}
    hook, sys.unraisablehook = sys.unraisablehook, _repeat_lost_signals(sys.unraisablehook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            return True
        frame = frame.f_back
    return False


def _repeat_lost_signals(otherwise: Any) -> Any:
    """Return a hook for exceptions that Python cannot raise, as in finalizers: a signal comes again a moment later."""

    def hook(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            otherwise(unraisable)
            return
        number = signal_of(unraisable.exc_value)
        timer = threading.Timer(SECONDS_TO_REPEAT, _thread.interrupt_main, [number])
        timer.daemon = True
        timer.start()

    return hook


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
