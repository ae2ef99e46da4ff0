"""A gate in front of gradio's server, which passes only the requests that the page needs.

Gradio serves more addresses than one page uses (other files, proxies, editors, recordings), and downloads whatever
address a request names. The gate refuses a request for anything else before gradio sees it. It also refuses requests
that name anything but a file of the page's own folder, requests of other websites, and uploads that are larger than one
image may be or for which the folder has no room.

Gradio builds the addresses in the page from headers that a proxy would set (X-Forwarded-Host and others), whoever sends
them. There is no proxy here: only the headers and query parameters that the page needs are passed on.
"""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qsl

from softline.explorer.storage import FullError, Storage
from softline.explorer.uploads import MAX_BYTES

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Headers: TypeAlias = Mapping[bytes, bytes]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)

API = "/gradio_api"
FILE = f"{API}/file="
JOIN = f"{API}/queue/join"
DATA = f"{API}/queue/data"
UPLOAD = f"{API}/upload"
NAME = r"\w{1,64}"
"""The name of a session, an event or the like, as browsers choose it."""
# methods and paths of the page's own requests
NEEDED = re.compile(
    r"(GET|HEAD) (/|/(assets|static|svelte)/.{1,200}|/(theme\.css|config|favicon\.ico|manifest\.json|robots\.txt))"
    rf"|(GET|HEAD) {API}/(file=.+|info|queue/data|heartbeat/{NAME}|startup-events|app_id|theme\.css)"
    rf"|POST {API}/(queue/join|upload|cancel|reset)/?",
    re.ASCII,
)
HOST = re.compile(r"([A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(:\d{1,5})?", re.ASCII)
BOUNDARY = re.compile(rb"multipart/form-data; *boundary=\"?([\w'()+,./:=?-]{1,70})\"?")
PASSED_HEADERS = frozenset(
    b"accept accept-encoding accept-language connection content-length content-type host if-modified-since "
    b"if-none-match if-range origin range user-agent".split()
)
"""Headers that gradio sees."""
SINGLE_HEADERS = frozenset(b"content-length content-type host origin sec-fetch-mode sec-fetch-site".split())
"""Headers that decide whether a request passes; twice they could mean different things to the gate and to gradio."""
MAX_EVENT_BYTES = 10**6
MAX_EVENT_DEPTH = 32
# an image, and the form that the browser wraps around it
MAX_UPLOAD_BYTES = MAX_BYTES + 2**16
# the form begins so in every browser
FILE_FIELD = b'\r\nContent-Disposition: form-data; name="files"; filename='
_OPTIONAL_TEXT = (str, type(None))
# what browsers tell of an uploaded file
UPLOAD_KEYS: Mapping[str, tuple[type, ...]] = {
    "path": (str,),
    "meta": (dict,),
    "orig_name": _OPTIONAL_TEXT,
    "url": _OPTIONAL_TEXT,
    "mime_type": _OPTIONAL_TEXT,
    "size": (int, type(None)),
}
BODY_SECONDS = 30
"""How long the next part of a request's body may take."""
# browsers then load nothing from other servers
POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; connect-src 'self'; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)


class Refusal(NamedTuple):
    """The answer to a request that does not pass."""

    reason: str
    status: int = 403


TOO_LARGE = Refusal(f"the upload exceeds the maximum allowed size of {MAX_BYTES / 2**20:.0f} MB", 413)
TOO_LONG = Refusal("the event is too long", 413)
TOO_MANY = Refusal("one image can be uploaded at a time", 413)
NO_FILE = Refusal("an upload is a form with one file", 400)
# nobody reads it
LEFT = Refusal("the visitor has left", 400)
TOO_SLOW = Refusal(f"nothing arrived for {BODY_SECONDS} seconds", 408)


class Function(NamedTuple):
    """A function that events call."""

    inputs: int
    """The number of values that it takes."""
    files: frozenset[int] = frozenset()
    """The places of those that are uploaded files."""


class Gate:
    """An ASGI application that wraps another.

    storage: the only folder whose files are read or served, with its quota.
    functions: the functions that events may call, by index.
    sessions: names of the sessions that have sent events.
    broken: what the server raises when it is to answer a request whose rest was no HTTP.
    hosts: host names that requests may use, which protects against websites whose name resolves to this machine; None
        allows all.
    """

    def __init__(
        self,
        app: App,
        storage: Storage,
        *,
        functions: Mapping[int, Function],
        sessions: Container[str],
        hosts: Sequence[str] | None = None,
        broken: tuple[type[Exception], ...] = (),
    ) -> None:
        self.app, self.storage, self.functions, self.sessions, self.hosts = app, storage, functions, sessions, hosts
        self.broken = broken

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        except self.broken as error:
            # its rest was no HTTP, which the server has answered already
            log.info("a malformed request was given up: %s", error)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await _refuse(scope, send, refusal)
            return
        path, send = scope["path"].rstrip("/"), _with_policy(send)
        if path == UPLOAD:
            await self._upload(scope, receive, send)
        elif scope["method"] == "POST":
            await self._post(scope, receive, send)
        else:
            await self.app(_passed(scope), receive, send)

    def _refusal(self, scope: Message) -> Refusal | None:
        if scope["type"] != "http":
            return Refusal("only http is supported")
        path: str = scope["path"]
        if not NEEDED.fullmatch(f"{scope['method']} {path}"):
            return Refusal("not part of this page")
        if path.startswith(FILE) and not self.storage.owns(path.removeprefix(FILE)):
            return Refusal("not a file of this page")
        if path == DATA and _session(scope) not in self.sessions:
            return Refusal("not a session", 404)
        names = [name for name, _ in scope["headers"] if name in SINGLE_HEADERS]
        if len(set(names)) < len(names):
            return Refusal("a header is repeated", 400)
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if not HOST.fullmatch(host):
            return Refusal("no host name", 400)
        if self.hosts is not None and re.sub(r":\d+$", "", host) not in self.hosts:
            return Refusal("unknown host name")
        if _is_foreign(headers, host) and not _is_followed_link(scope, headers):
            return Refusal("sent by another website")
        return None

    async def _post(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass a request with a short body of JSON, if it is as the page sends it."""
        body = await read_body(receive)
        refusal = body if isinstance(body, Refusal) else self._bad_body(scope["path"].rstrip("/"), body)
        if refusal is None:
            assert isinstance(body, bytes), "a body that is no refusal"
            await self.app(_passed(scope), _replay(body, receive), send)
        else:
            await _refuse(scope, send, refusal)

    async def _upload(self, scope: Message, receive: Receive, send: Send) -> None:
        """Pass an upload in the form that browsers send for one file, while there is room for it."""
        headers = dict(scope["headers"])
        refusal = _bad_length(headers)
        boundary = BOUNDARY.fullmatch(headers.get(b"content-type", b""))
        if refusal is None and boundary is None:
            refusal = NO_FILE
        if refusal is not None:
            await _refuse(scope, send, refusal)
            return
        assert boundary is not None, "refused otherwise"
        length = int(headers[b"content-length"])
        try:
            # looks at all files of the folder
            await asyncio.to_thread(self.storage.take, length)
        except FullError as error:
            await _refuse(scope, send, Refusal(str(error), 507))
            return
        try:
            counted = _Counted(receive, length, b"--" + boundary[1])
            await self.app(_passed(scope), counted, counted.unless_refused(send))
        finally:
            self.storage.give_back(length)
        if counted.refusal is not None:
            await _refuse(scope, send, counted.refusal)

    def _bad_body(self, path: str, body: bytes) -> Refusal | None:
        try:
            event = json.loads(body)
        except (ValueError, RecursionError):
            return Refusal("not an event")
        if not isinstance(event, dict):
            return Refusal("not an event")
        if path != JOIN:
            return None
        function, data = event.get("fn_index"), event.get("data")
        # True is no index, although it equals 1
        if type(function) is not int or function not in self.functions:
            return Refusal("not a function of this page")
        if not _is_name(event.get("session_hash")):
            return Refusal("not a session")
        if not isinstance(data, list) or len(data) != self.functions[function].inputs:
            return Refusal("not the values of this function")
        if not all(_is_upload(data[place]) for place in self.functions[function].files):
            return Refusal("not an upload")
        for named, depth in _paths(event):
            if depth > MAX_EVENT_DEPTH:
                return Refusal("the event is nested too deeply")
            if named is not NO_PATH and not (isinstance(named, str) and self.storage.owns(named)):
                return Refusal("not a file of this page")
        return None


NO_PATH = object()


def _paths(value: Any) -> Iterator[tuple[Any, int]]:
    """For each object or list in an event, at any depth: the value of its key "path" or `NO_PATH`, and its depth."""
    open_values = [(value, 1)]
    while open_values:
        one, depth = open_values.pop()
        if isinstance(one, dict):
            yield one.get("path", NO_PATH), depth
            open_values += ((inner, depth + 1) for inner in one.values())
        elif isinstance(one, list):
            yield NO_PATH, depth
            open_values += ((inner, depth + 1) for inner in one)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(NAME, value, re.ASCII) is not None


def _is_upload(value: Any) -> bool:
    """Whether a value is an uploaded file as browsers describe it, or None."""
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and all(isinstance(value.get(key), kinds) for key, kinds in UPLOAD_KEYS.items())
        and isinstance(value.get("is_stream", False), bool)
        and value["meta"].get("_type") == "gradio.FileData"
    )


def _session(scope: Message) -> str | None:
    """The session of a request for the messages of its events."""
    try:
        query = parse_qsl(scope.get("query_string", b"").decode("ascii"), max_num_fields=4)
    except ValueError:
        return None
    sessions = [value for name, value in query if name == "session_hash"]
    return sessions[0] if len(sessions) == 1 and _is_name(sessions[0]) else None


def _passed(scope: Message) -> Message:
    """The request as gradio sees it: without the headers and query parameters that the page does not need."""
    headers = [(name, value) for name, value in scope["headers"] if name in PASSED_HEADERS]
    query = f"session_hash={_session(scope)}".encode() if scope["path"] == DATA else b""
    return {**scope, "headers": headers, "query_string": query}


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


def _bad_length(headers: Headers) -> Refusal | None:
    """Why the length that an upload declares is refused, if it is."""
    length = headers.get(b"content-length", b"")
    # with a transfer encoding the declared length does not count
    if b"transfer-encoding" in headers or not re.fullmatch(rb"[0-9]+", length):
        return Refusal("an upload must declare its length", 411)
    # Python refuses to read numbers with thousands of digits
    return TOO_LARGE if len(length) > 18 or int(length) > MAX_UPLOAD_BYTES else None


class _Counted:
    """The body of an upload, which ends where it is refused: longer than declared, without a file, or with several.

    delimiter: the line between the parts of the form; one file has two of them.
    """

    def __init__(self, receive: Receive, length: int, delimiter: bytes) -> None:
        self.receive, self.length, self.delimiter = receive, length, delimiter
        self.count = self.delimiters = 0
        self.begin, self.end = delimiter + FILE_FIELD, b""
        self.refusal: Refusal | None = None

    async def __call__(self) -> Message:
        message = await _next_part(self.receive)
        if isinstance(message, Refusal):
            self.refusal = message
        elif message["type"] == "http.disconnect":
            self.refusal = LEFT
        else:
            body = message.get("body", b"")
            self.count += len(body)
            begins, self.begin = body.startswith(self.begin[: len(body)]), self.begin[len(body) :]
            # a delimiter may begin in the part before
            body = self.end + body
            self.delimiters += body.count(self.delimiter)
            self.end = body[max(len(body) - len(self.delimiter) + 1, 0) :]
            if self.count > self.length:
                self.refusal = TOO_LARGE
            elif not begins:
                self.refusal = NO_FILE
            elif self.delimiters > 2:
                self.refusal = TOO_MANY
        if self.refusal is not None:
            return {"type": "http.request", "body": b"", "more_body": False}
        assert not isinstance(message, Refusal), "it would be the refusal"
        return message

    def unless_refused(self, send: Send) -> Send:
        async def guarded(message: Message) -> None:
            if self.refusal is None:
                await send(message)

        return guarded


async def _next_part(receive: Receive) -> Message | Refusal:
    try:
        return await asyncio.wait_for(receive(), BODY_SECONDS)
    except TimeoutError:
        return TOO_SLOW


async def read_body(receive: Receive) -> bytes | Refusal:
    """Read the whole body of a request, unless it is longer than an event may be."""
    body, more = bytearray(), True
    while more:
        message = await _next_part(receive)
        if isinstance(message, Refusal):
            return message
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_EVENT_BYTES:
            return TOO_LONG
    return bytes(body)


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


async def _refuse(scope: Message, send: Send, refusal: Refusal) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    body = json.dumps({"error": refusal.reason}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
