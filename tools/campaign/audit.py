"""What a command must not do: start programs or use the network. Python's audit hooks report and prevent both.

``python -m tools.campaign.audit RECORD MODULE ARGUMENT...`` runs a module under the hook.
"""

import os
import runpy
import sys
from collections.abc import Collection
from pathlib import Path
from types import FrameType

# `os.fork` is no execution: processes that load data are forks, and another program needs one of these as well
PROGRAMS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile"})
NETWORK = frozenset({"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request"})
# modules that ask the system for libraries, the commit and the processor by programs with fixed arguments
ALLOWED = frozenset({"ctypes.util", "softline.measure.environment", "platform"})


def watch(record: Path) -> None:
    """Append every start of a program and every use of the network to `record`, and prevent it. Cannot be undone."""
    descriptor = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def hook(event: str, details: tuple[object, ...]) -> None:
        if event not in PROGRAMS and event not in NETWORK:
            return
        # local sockets, which have a path as their address, connect the processes of one command
        if event == "socket.connect" and not isinstance(details[1], tuple):
            return
        if event == "subprocess.Popen" and _called_by(ALLOWED):
            return
        # the fourth argument of a program is its environment
        os.write(descriptor, f"{event} {details[:3]!r}\n".encode(errors="replace"))
        raise PermissionError(f"the campaign forbids {event}")

    sys.addaudithook(hook)


def _called_by(modules: Collection[str]) -> bool:
    """Return whether a function of these modules is being executed."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") in modules:
            return True
        frame = frame.f_back
    return False


def main() -> None:
    record, module, *arguments = sys.argv[1:]
    watch(Path(record))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
