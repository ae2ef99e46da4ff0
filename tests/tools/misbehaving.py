"""Commands that do what softline's must not do; run by test_campaign.py."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def _crash() -> int:
    raise ValueError("a fault")


def _be_killed() -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def _hang() -> int:
    time.sleep(1000)
    return 0


def _grow() -> int:
    kept = []
    while True:
        kept.append(b"x" * 2**26)


def _connect() -> int:
    with socket.socket() as connection:
        connection.connect(("127.0.0.1", 9))
    return 0


def _catch() -> int:
    """Hide the error of a program that could not be started."""
    with contextlib.suppress(OSError):
        subprocess.run(["true"], check=True)
    return 0


def _leave_process() -> int:
    if os.fork() == 0:
        time.sleep(1000)
    return 0


def _leave_file() -> int:
    Path("left").mkdir()
    return _refuse()


def _refuse() -> int:
    sys.stderr.write("error: no\n")
    return 2


WAYS = {
    "fine": lambda: 0,
    "refuse": _refuse,
    "silent": lambda: 2,
    "code": lambda: 7,
    "crash": _crash,
    "killed": _be_killed,
    "hang": _hang,
    "grow": _grow,
    "system": lambda: os.system("true"),
    "catch": _catch,
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "connect": _connect,
    "resolve": lambda: len(socket.getaddrinfo("localhost", 9)),
    "process": _leave_process,
    "file": _leave_file,
}


def main(arguments: Sequence[str]) -> int:
    return WAYS[arguments[0]]()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
