"""Serve the page on this machine, and clean up afterwards."""

import errno
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from softline.errors import UserError
from softline.explorer.gate import Function, Gate
from softline.explorer.storage import Storage
from softline.explorer.uploads import MAX_BYTES
from softline.explorer.view import Explorer

if TYPE_CHECKING:
    import fastapi
    import gradio as gr
    import uvicorn

USUAL_PORT = 7860
PORTS_TRIED = 100
LOCAL = ("127.0.0.1", "localhost", "::1")
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
"""The same hosts as browsers write them."""
START_SECONDS = 60
END_SECONDS = 2
"""Time for requests that are in progress when the server ends."""
WAITING = 50
"""Largest number of events in the queue."""
SESSIONS = 200
"""Largest number of sessions that are remembered; the oldest are forgotten."""
CONNECTIONS = 400
"""Largest number of connections; a browser holds up to six."""


@contextmanager
def serve(explorer: Explorer, *, host: str = "127.0.0.1", port: int | None = None) -> Iterator[str]:
    """Serve the page while the context is active; yield its address.

    port: defaults to 7860, or the next port that is free.
    """
    with (
        listen(host, port) as listening,
        tempfile.TemporaryDirectory(prefix="softline-explore-") as folder,
        # gradio reads the folder for its files from the environment whenever it needs it
        _environment("GRADIO_TEMP_DIR", folder),
        # no part of gradio may send anything to others
        _environment("GRADIO_ANALYTICS_ENABLED", "False"),
    ):
        # gradio takes seconds to import, and reads the environment while it is imported
        from softline.explorer.page import build_page

        storage = Storage(Path(folder))
        blocks = build_page(explorer, storage)
        with storage.cleaning(lambda: _forget(blocks)), _running(blocks, storage, host, listening):
            yield address(host, listening.getsockname()[1])


def address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def listen(host: str, port: int | None) -> socket.socket:
    """Bind a socket; a given port is used or refused."""
    candidates = [port] if port is not None else range(USUAL_PORT, USUAL_PORT + PORTS_TRIED)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in candidates:
        listening = socket.socket(family, socket.SOCK_STREAM)
        # otherwise the port of a server that has ended stays in use for a minute
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, candidate))
            listening.listen()
        except OSError as error:
            listening.close()
            if isinstance(error, socket.gaierror) or error.errno != errno.EADDRINUSE:
                raise UserError(f"cannot listen on {host}, port {candidate}: {error.strerror}") from None
        else:
            return listening
    if port is not None:
        raise UserError(f"port {port} of {host} is taken: name another by --port, or none")
    raise UserError(f"ports {USUAL_PORT} to {USUAL_PORT + PORTS_TRIED - 1} of {host} are taken: name one by --port")


@contextmanager
def _running(blocks: "gr.Blocks", storage: Storage, host: str, listening: socket.socket) -> Iterator[None]:
    import uvicorn
    from gradio.routes import App
    from h11 import LocalProtocolError

    mounted = _mounted(blocks)

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # ends the connections that browsers keep open; gradio's public `Blocks.close` does it for launched pages
            # only, not for mounted ones
            for route in mounted.routes:
                if isinstance(inner := getattr(route, "app", None), App):
                    inner.stop_event.set()
            await super().shutdown(sockets)

    gate = Gate(
        mounted,
        storage,
        functions=_functions(blocks),
        sessions=blocks._queue.pending_messages_per_session,
        hosts=LOCAL_NAMES if host in LOCAL else None,
        broken=(LocalProtocolError,),
    )
    config = uvicorn.Config(
        gate,
        log_level="warning",
        timeout_graceful_shutdown=END_SECONDS,
        http="h11",
        ws="none",
        limit_concurrency=CONNECTIONS,
        # there is no proxy whose headers could be believed
        proxy_headers=False,
    )
    server = Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        _wait_for(server, thread)
        yield
    finally:
        blocks.close(verbose=False)
        server.should_exit = True
        thread.join()


def _wait_for(server: "uvicorn.Server", thread: threading.Thread) -> None:
    for _ in range(START_SECONDS * 100):
        if server.started:
            return
        thread.join(0.01)
        if not thread.is_alive():
            raise UserError("the server did not start; see its message above")
    raise UserError(f"the server did not start within {START_SECONDS} seconds")


def _mounted(blocks: "gr.Blocks") -> "fastapi.FastAPI":
    """The page as a web application, with everything else that gradio offers switched off."""
    import fastapi
    import gradio as gr

    from softline.explorer.page import script, stylesheet, theme

    blocks.queue(max_size=WAITING, api_open=False)
    blocks.state_session_capacity = SESSIONS
    return gr.mount_gradio_app(
        fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
        blocks,
        path="/",
        footer_links=[],
        run_history=False,
        root_path="",
        allowed_paths=[],
        max_file_size=MAX_BYTES,
        show_error=True,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=theme(),
        css=stylesheet(),
        head=script(),
    )


def _functions(blocks: "gr.Blocks") -> dict[int, Function]:
    """The functions of the page by their indices."""
    import gradio as gr

    return {
        index: Function(
            len(function.inputs),
            frozenset(place for place, given in enumerate(function.inputs) if isinstance(given, gr.UploadButton)),
        )
        for index, function in blocks.fns.items()
    }


def _forget(blocks: "gr.Blocks") -> None:
    """Remove what gradio remembers of files that are gone, and of sessions that it has forgotten otherwise."""
    for paths in blocks.temp_file_sets:
        # a copy, because events add to it in the meantime
        for path in tuple(paths):
            if not os.path.lexists(path):
                paths.discard(path)
    events, sessions = blocks._queue.pending_event_ids_session, blocks._queue.pending_messages_per_session
    for session in tuple(events):
        if session not in sessions:
            events.pop(session, None)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
