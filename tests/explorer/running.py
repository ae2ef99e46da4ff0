"""`softline explore` in a process of its own, as users run it."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import softline

COMMAND = [sys.executable, "-m", "softline.cli", "explore"]
# after statements that change limits
CHANGED = "import sys; from softline.cli import main; sys.exit(main(['explore', *sys.argv[1:]]))"
# a busy machine imports slowly
START_SECONDS = 120
END_SECONDS = 30


@dataclass(frozen=True)
class Running:
    address: str
    folder: Path
    """Of the server's files."""
    process: subprocess.Popen[bytes]
    log: Path
    """What it has printed."""

    def end(self, number: int = signal.SIGTERM) -> int:
        """The exit code."""
        self.process.send_signal(number)
        return self.process.wait(END_SECONDS)


@contextmanager
def explore(root: Path, *arguments: str, first: str = "") -> Iterator[Running]:
    """
    root: an empty directory, where it runs and puts its files.
    first: Python statements that are executed before.
    """
    command = [sys.executable, "-c", f"{first}; {CHANGED}"] if first else COMMAND
    (root / "temporary").mkdir()
    log = root / "log.txt"
    # it runs elsewhere, where a relative path finds nothing
    paths = [str(Path(softline.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TMPDIR": str(root / "temporary"),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen([*command, *arguments], cwd=root, env=environment, stdout=output, stderr=output)
    try:
        address = _wait_for_address(process, log)
        (folder,) = (root / "temporary").glob("softline-explore-*")
        yield Running(address, folder, process, log)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(END_SECONDS)


def _wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(10 * START_SECONDS):
        if found := re.search(r"open in a browser: (\S+)\n", log.read_text()):
            return found[1]
        assert process.poll() is None, f"it ended before the page was there: {log.read_text()}"
        time.sleep(0.1)
    raise AssertionError(f"no page within {START_SECONDS} seconds: {log.read_text()}")


def free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])
