"""``softline explore``: a page in the browser that shows what two models attend to."""

import argparse
import importlib.util
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from softline.cli.arguments import Parser
from softline.errors import UserError

RUNS = "runs"


def add_arguments(parser: Parser) -> None:
    parser.describe(
        """Serve a page on this machine: choose or upload an image and two models, click on a point, and see the heat
        maps of both models, for every layer and head, with their cost at every image size. Nothing leaves the machine.
        Ctrl-C ends it.""",
        epilog="""\
            examples:
              softline explore --open
              softline explore runs/softpp/best.pt runs/inline/best.pt
            """,
    )
    parser.add_argument(
        "checkpoints",
        nargs="*",
        metavar="CHECKPOINT",
        help="files of `softline train`, directories that timm saved, or directories that are searched for best.pt "
        f"files (default: {RUNS}, if it exists); untrained models can be chosen as well",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    parser.add_argument("--port", type=int, metavar="N", help="port to listen on (default: 7860, or the next free one)")
    parser.add_argument("--open", action="store_true", help="open the page in the default browser")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    # gradio itself must be imported later, when its folder for files is set: it would create another one
    if importlib.util.find_spec("gradio") is None:
        raise ModuleNotFoundError("No module named 'gradio'", name="gradio")

    import webbrowser

    from softline.explorer.catalog import find_choices
    from softline.explorer.server import LOCAL, serve
    from softline.explorer.view import Explorer

    if options.port is not None and not 0 < options.port < 2**16:
        raise UserError(f"--port must be from 1 to {2**16 - 1}, got {options.port}")
    choices = find_choices(options.checkpoints or default_checkpoints())
    found = sum(choice.trained for choice in choices.values())
    print(f"{found} checkpoint{'s' * (found != 1)} and {len(choices) - found} untrained models", flush=True)
    with ended_by_signal() as ended, serve(Explorer(choices), host=options.host, port=options.port) as address:
        if options.host not in LOCAL:
            print("warning: anyone who can reach this machine over the network can use the page", flush=True)
        print(f"open in a browser: {address}\nCtrl-C ends it", flush=True)
        if options.open:
            webbrowser.open(address)
        ended.wait()
    print("\nended", flush=True)


def default_checkpoints() -> list[str]:
    """Return the directory of runs, if it contains a finished one."""
    return [RUNS] if any(Path(RUNS).rglob("best.pt")) else []


@contextmanager
def ended_by_signal() -> Iterator[threading.Event]:
    """Provide an event that Ctrl-C and SIGTERM set, instead of interrupting the program."""
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
