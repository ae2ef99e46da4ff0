"""Ctrl-C and SIGTERM in the first moments of a command: it ends at once, without a traceback.

This is the first thing that the command imports, so it imports only what Python has loaded already. It does nothing in
a program that merely imports `softline.cli`.
"""

import _signal  # type: ignore[import-not-found,unused-ignore]
import os
import sys

TEXTS = {int(_signal.SIGINT): "interrupted", int(_signal.SIGTERM): "terminated"}
"""What a command says when one of the signals has ended it."""


def exit_code(number: int) -> int:
    """Return the exit code of a command that a signal ended, which is the one that shells report."""
    return 128 + number


def end_now(number: int, _: object = None) -> None:
    """End without cleaning up, which is safe in the middle of an import, where an exception is not."""
    os.write(2, f"\n{TEXTS[number]}\n".encode())
    os._exit(exit_code(number))


def _is_command() -> bool:
    """Return whether this process is the command itself, started by its name or by ``python -m``."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    # Python calls a program "-m" while it imports the packages of the module
    module = name == "-m" and any(part.startswith("softline") for part in sys.orig_argv)
    return module or name in ("softline", "softline.exe")


if _is_command():
    for _number in TEXTS:
        if _signal.getsignal(_number) in (_signal.SIG_DFL, _signal.default_int_handler):
            _signal.signal(_number, end_now)
