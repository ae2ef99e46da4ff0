"""What stands before gradio's server: only what the page needs passes.

Gradio answers more addresses than one page uses (other people's files, proxies, editors, recordings), and fetches what
a request names by an address. Here a request for anything else ends before gradio sees it, and so does one that names a
file outside the page's own folder.
"""

import json
import os
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

API = "/gradio_api"
FILE = f"{API}/file="
JOIN = f"{API}/queue/join"
# method and path of what the page asks for
NEEDED = re.compile(
    r"(GET|HEAD) (/|/(assets|static|svelte)/.+|/(theme\.css|config|favicon\.ico|manifest\.json|robots\.txt))"
    rf"|(GET|HEAD) {API}/(file=.+|info|queue/data|heartbeat/\w+|upload_progress|startup-events|app_id|theme\.css)"
    rf"|POST {API}/(queue/join|upload|cancel|reset)/?"
)
MAX_EVENT_BYTES = 10**6
# the browser itself refuses to load anything from elsewhere
POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self'; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)


class Gate:
    """An ASGI application around another.

    folder: the only one whose files are read or served.
    hosts: names by which the server may be called, against pages of others that give their name to this machine; None
        allows all.
    """

    def __init__(self, app: App, folder: Path, *, hosts: Sequence[str] | None = None) -> None:
        self.app, self.folder, self.hosts = app, folder.resolve(), hosts

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        body = None
        if refusal is None and scope["path"].rstrip("/") == JOIN:
            body = await read_body(receive)
            refusal = "event too large" if body is None else self._foreign_file(body)
        if refusal is not None:
            await _refuse(scope, send, refusal)
            return
        await self.app(scope, receive if body is None else _replay(body, receive), _with_policy(send))

    def _refusal(self, scope: Message) -> str | None:
        if scope["type"] != "http":
            return "only http is spoken here"
        path: str = scope["path"]
        if not NEEDED.fullmatch(f"{scope['method']} {path}"):
            return "not part of this page"
        if path.startswith(FILE) and not self.owns(path.removeprefix(FILE)):
            return "not a file of this page"
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        if self.hosts is not None and re.sub(r":\d+$", "", host) not in self.hosts:
            return "called by an unknown name"
        return None

    def owns(self, path: str) -> bool:
        """Whether a path, links followed, lies in the page's folder."""
        if "\0" in path:
            return False
        return Path(os.path.realpath(path)).is_relative_to(self.folder)

    def _foreign_file(self, body: bytes) -> str | None:
        try:
            event = json.loads(body)
        except (ValueError, RecursionError):
            return "not an event"
        for path in _paths(event):
            if not isinstance(path, str) or not self.owns(path):
                return "not a file of this page"
        return None


def _paths(value: Any) -> Iterator[Any]:
    """Whatever an event calls a path, at any depth."""
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, dict):
            if "path" in one:
                yield one["path"]
            open_values += one.values()
        elif isinstance(one, list):
            open_values += one


async def read_body(receive: Receive) -> bytes | None:
    """The whole body of a request; None if it is longer than an event."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_EVENT_BYTES:
            return None
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _with_policy(send: Send) -> Send:
    async def guarded(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), (b"content-security-policy", POLICY.encode())]
        await send(message)

    return guarded


async def _refuse(scope: Message, send: Send, reason: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    body = json.dumps({"error": reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})
