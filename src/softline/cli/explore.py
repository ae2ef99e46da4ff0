"""``softline explore``: a page in the browser that shows what two models look at."""

import argparse
import importlib.util
import signal
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from softline.cli.arguments import Commands
from softline.errors import UserError

RUNS = "runs"


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "explore",
        help="see in the browser what two models look at, side by side",
        description="Serve a page on this machine: choose or upload an image and two models, click a point, and see "
        "the heat maps of both, for every layer and head, with their cost at every image size. Nothing leaves the "
        "machine. Ctrl-C ends it.",
    )
    parser.add_argument(
        "checkpoints",
        nargs="*",
        metavar="CHECKPOINT",
        help="files of `softline train`, directories that timm saved, or directories below which every best.pt is "
        f"taken (default: {RUNS}, if there is one); untrained models are offered beside them",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    parser.add_argument("--port", type=int, metavar="N", help="port to listen on (default: 7860, or the next free one)")
    parser.add_argument("--open", action="store_true", help="open the page in the default browser")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    # found out first; gradio is imported when it has a folder of its own, or it makes another that stays
    if importlib.util.find_spec("gradio") is None:
        raise ModuleNotFoundError("No module named 'gradio'", name="gradio")

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
    """The directory of runs, if it has any that are done."""
    return [RUNS] if any(Path(RUNS).rglob("best.pt")) else []


@contextmanager
def ended_by_signal() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, instead of stopping the program where it stands."""
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
