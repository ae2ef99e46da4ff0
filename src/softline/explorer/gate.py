"""A gate in front of gradio's server, which passes only the requests that the page needs.

Gradio serves more addresses than one page uses (other files, proxies, editors, recordings), and downloads whatever
address a request names. The gate refuses a request for anything else before gradio sees it. It also refuses requests
that name a file outside the page's own folder, requests of other websites, and uploads that are larger than one image
may be.
"""

import json
import os
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from softline.explorer.uploads import MAX_BYTES

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Headers: TypeAlias = Mapping[bytes, bytes]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

API = "/gradio_api"
FILE = f"{API}/file="
JOIN = f"{API}/queue/join"
UPLOAD = f"{API}/upload"
# methods and paths of the page's own requests
NEEDED = re.compile(
    r"(GET|HEAD) (/|/(assets|static|svelte)/.+|/(theme\.css|config|favicon\.ico|manifest\.json|robots\.txt))"
    rf"|(GET|HEAD) {API}/(file=.+|info|queue/data|heartbeat/\w+|upload_progress|startup-events|app_id|theme\.css)"
    rf"|POST {API}/(queue/join|upload|cancel|reset)/?"
)
MAX_EVENT_BYTES = 10**6
# an image, and the form that the browser wraps around it
MAX_UPLOAD_BYTES = MAX_BYTES + 2**16
TOO_LARGE = f"the upload exceeds the maximum allowed size of {MAX_BYTES / 2**20:.0f} MB"
# browsers then load nothing from other servers
POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self'; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)


class Gate:
    """An ASGI application that wraps another.

    folder: the only folder whose files are read or served.
    functions: indices of the functions that events may call.
    hosts: host names that requests may use, which protects against websites whose name resolves to this machine; None
        allows all.
    """

    def __init__(
        self, app: App, folder: Path, *, functions: Collection[int], hosts: Sequence[str] | None = None
    ) -> None:
        self.app, self.folder, self.functions, self.hosts = app, folder.resolve(), functions, hosts

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refusal, path = self._refusal(scope), scope["path"].rstrip("/")
        if refusal is None and path == JOIN:
            body = await read_body(receive)
            refusal = "event too large" if body is None else self._bad_event(body)
            receive = _replay(body or b"", receive)
        elif refusal is None and path == UPLOAD:
            refusal = _bad_length(dict(scope["headers"]))
            receive = _counted(receive)
        if refusal is not None:
            await _refuse(scope, send, refusal)
            return
        await self.app(scope, receive, _with_policy(send))

    def _refusal(self, scope: Message) -> str | None:
        if scope["type"] != "http":
            return "only http is supported"
        path: str = scope["path"]
        if not NEEDED.fullmatch(f"{scope['method']} {path}"):
            return "not part of this page"
        if path.startswith(FILE) and not self.owns(path.removeprefix(FILE)):
            return "not a file of this page"
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self.hosts is not None and re.sub(r":\d+$", "", host) not in self.hosts:
            return "unknown host name"
        if _is_foreign(headers, host) and not _is_followed_link(scope, headers):
            return "sent by another website"
        return None

    def owns(self, path: str) -> bool:
        """Whether a path lies in the page's folder after links are followed."""
        if "\0" in path:
            return False
        return Path(os.path.realpath(path)).is_relative_to(self.folder)

    def _bad_event(self, body: bytes) -> str | None:
        try:
            event = json.loads(body)
        except (ValueError, RecursionError):
            return "not an event"
        function = event.get("fn_index") if isinstance(event, dict) else None
        if not isinstance(function, int) or function not in self.functions:
            return "not a function of this page"
        for path in _paths(event):
            if not isinstance(path, str) or not self.owns(path):
                return "not a file of this page"
        return None


def _paths(value: Any) -> Iterator[Any]:
    """The values of all keys "path" in an event, at any depth."""
    open_values = [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, dict):
            if "path" in one:
                yield one["path"]
            open_values += one.values()
        elif isinstance(one, list):
            open_values += one


def _is_foreign(headers: Headers, host: str) -> bool:
    """Whether the browser says that another website sends the request."""
    origin = headers.get(b"origin")
    own = (f"http://{host}", f"https://{host}")
    return headers.get(b"sec-fetch-site") == b"cross-site" or (
        origin is not None and origin.decode("latin-1") not in own
    )


def _is_followed_link(scope: Message, headers: Headers) -> bool:
    """Whether the visitor follows a link to the page, which only shows it."""
    return (
        (scope["method"], scope["path"]) == ("GET", "/")
        and headers.get(b"sec-fetch-mode") == b"navigate"
        and b"origin" not in headers
    )


def _bad_length(headers: Headers) -> str | None:
    """Why the length that an upload declares is refused, if it is."""
    length = headers.get(b"content-length", b"")
    # with a transfer encoding the declared length does not count
    if b"transfer-encoding" in headers or not re.fullmatch(rb"[0-9]+", length):
        return "an upload must declare its length"
    # Python refuses to read numbers with thousands of digits
    return TOO_LARGE if len(length) > 18 or int(length) > MAX_UPLOAD_BYTES else None


def _counted(receive: Receive) -> Receive:
    """End an upload, as if the visitor had left, when it exceeds the largest length."""
    count = 0

    async def limited() -> Message:
        nonlocal count
        message = await receive()
        count += len(message.get("body", b""))
        return message if count <= MAX_UPLOAD_BYTES else {"type": "http.disconnect"}

    return limited


async def read_body(receive: Receive) -> bytes | None:
    """Read the whole body of a request; None if it is longer than an event may be."""
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
    status = 413 if reason == TOO_LARGE else 403
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
