"""Malformed requests to a running `softline explore`.

Each worker process has one server for all its cases. A case sends a batch of requests: methods and paths that the page
does not use, paths that leave the upload folder in all spellings, contradictory headers and lengths, bytes that are no
HTTP, events with wrong values, damaged and misnamed uploads, foreign sessions, connections that are dropped or flooded.
After each batch

- the server answers a correct request correctly and in time,
- no request was answered by an error of the server (500 and above) other than "full",
- no answer contains the content of a file outside the upload folder, or a host name that only a header named,
- the log of the server has no traceback,
- the server has no more memory, open files and threads than after its start, within bounds, and nothing but the folder
  of its own uploads among its temporary files.
"""

import atexit
import contextlib
import functools
import json
import os
import random
import re
import socket
import struct
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.explorer.images import write_bomb, write_photo, write_text
from tests.explorer.running import Running, explore, free_port
from tools.campaign.damage import damage
from tools.campaign.interface import Outcome, Verdict, case_random, worst

REQUESTS = 25
"""In a case."""
TIME_LIMIT = 30.0
"""Seconds for the answer to a complete request, and for one event."""
STREAM_SECONDS = 0.3
"""How long an answer that never ends is read."""
QUEUE_FULL, FOLDER_FULL = 503, 507
"""Errors of a server that works as documented."""
# what a server that has answered many requests may have more than one that has answered a few
MORE_BYTES = 2**30
MORE_DESCRIPTORS = 100
MORE_THREADS = 60
FOREIGN = "foreign.example"
API = "/gradio_api"


@dataclass(frozen=True)
class Request:
    """Bytes to send.

    answered: whether it is complete, so that an answer must come.
    dropped: close the connection without reading.
    """

    what: str
    content: bytes
    answered: bool = True
    dropped: bool = False


@dataclass(frozen=True)
class Server:
    """A running server and what is known of it."""

    running: Running
    secret: Path
    token: str
    """What the secret file contains."""
    functions: tuple[int, ...]
    before: dict[str, int]
    """What it used when it had answered one visitor."""

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.running.address)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    @property
    def host(self) -> str:
        return "{}:{}".format(*self.address)


class ExplorerKind:
    """Kind "explorer"."""

    name = "explorer"
    unit = "requests"
    target = 2000
    share = 1.0

    def prepare(self, work: Path) -> None:
        """Each worker process starts its own server when it needs it."""

    def run(self, seed: int, work: Path) -> Outcome:
        numbers = case_random(self.name, seed)
        if server().running.process.poll() is not None:
            # the case that ended it has been reported
            server.cache_clear()
        return try_requests(server(), draw(numbers, server(), REQUESTS))


KIND = ExplorerKind()


@functools.cache
def server() -> Server:
    """Start the server of this process, which ends with it."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="softline-campaign-explorer-")))
    return stack.enter_context(start(root))


@contextlib.contextmanager
def start(root: Path) -> Iterator[Server]:
    """Run a server in ``root``, an empty directory, next to a file that it must not serve."""
    token, secret = uuid.uuid4().hex, root / "secret.txt"
    secret.write_text(token)
    (root / "server").mkdir()
    with explore(root / "server", "--port", free_port()) as running:
        with visitor(running.address) as client:
            functions = tuple(event["id"] for event in client.get("config").json()["dependencies"])
            works(client)
        yield Server(running, secret, token, functions, usage(running.process.pid))


# judging


def try_requests(server: Server, requests: Sequence[Request]) -> Outcome:
    """Send the requests, and find out whether the server has remained what it was."""
    verdicts: list[Verdict] = []
    details: list[str] = []

    def fail(verdict: Verdict, reason: str) -> None:
        verdicts.append(verdict)
        details.append(f"{verdict}: {reason}")

    logged = server.running.log.stat().st_size
    for request in requests:
        answer = exchange(server, request)
        if (fault := bad_answer(server, request, answer)) is not None:
            fail(fault[0], f"{request.what}: {fault[1]}\n  sent {request.content[:500]!r}\n  got {answer[:500]!r}")
    for verdict, reason in bad_state(server, logged):
        fail(verdict, reason)
    what = "; ".join(request.what for request in requests)
    return Outcome(worst(verdicts), what[:500], "\n".join(details), tried=len(requests))


def exchange(server: Server, request: Request) -> bytes:
    """Send a request and return the answer, as far as it comes."""
    with contextlib.suppress(OSError), socket.create_connection(server.address, timeout=TIME_LIMIT) as connection:
        # a server may refuse a long request before it has arrived
        with contextlib.suppress(OSError):
            connection.sendall(request.content)
        if request.dropped:
            # closed by a reset
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return b""
        return _read(connection, TIME_LIMIT if request.answered else STREAM_SECONDS)
    return b""


def _read(connection: socket.socket, seconds: float) -> bytes:
    """Read until the end, until nothing more comes for a while, or until the time is over without any answer."""
    answer = b""
    connection.settimeout(seconds)
    with contextlib.suppress(OSError):
        while part := connection.recv(2**16):
            answer += part
            if len(answer) > 2**22:
                break
            connection.settimeout(STREAM_SECONDS)
    return answer


def bad_answer(server: Server, request: Request, answer: bytes) -> tuple[Verdict, str] | None:
    """Return what is wrong with an answer, if anything is."""
    if server.token.encode() in answer or b"root:x:0:" in answer:
        return Verdict.WRONG, "the answer contains a file of the machine"
    if FOREIGN.encode() in answer:
        return Verdict.WRONG, "the answer contains a foreign host"
    if request.dropped:
        return None
    status = re.match(rb"HTTP/1\.[01] (\d{3}) ", answer)
    if status is None:
        return (Verdict.HANG, f"no answer within {TIME_LIMIT:.0f} s") if request.answered else None
    if int(status[1]) >= 500 and int(status[1]) not in (QUEUE_FULL, FOLDER_FULL):
        return Verdict.TRACEBACK, f"the answer is an error of the server, {status[1].decode()}"
    return None


def bad_state(server: Server, logged: int) -> list[tuple[Verdict, str]]:
    """Return what is wrong with the server after a batch; ``logged`` is the length of its log before it."""
    if server.running.process.poll() is not None:
        return [(Verdict.TRACEBACK, f"the server has ended:\n{server.running.log.read_text()[-5000:]}")]
    faults = []
    try:
        with visitor(server.running.address) as client:
            works(client)
    except Exception as error:
        # whatever the client raises, an assertion or an error of httpx
        faults.append((Verdict.HANG, f"a correct request is not answered: {type(error).__name__}: {error}"))
    with server.running.log.open("rb") as file:
        file.seek(logged)
        text = file.read().decode(errors="replace")
    if "Traceback" in text:
        faults.append((Verdict.TRACEBACK, f"the server logged\n{text[-5000:]}"))
    allowed = {"bytes": MORE_BYTES, "descriptors": MORE_DESCRIPTORS, "threads": MORE_THREADS}
    for name, number in usage(server.running.process.pid).items():
        if number > server.before[name] + allowed[name]:
            faults.append((Verdict.HANG, f"the server has {number} {name}, after its start {server.before[name]}"))
    root = server.running.folder.parents[1]
    expected = {root / "temporary", root / "log.txt", server.running.folder}
    others = {path for path in (*root.iterdir(), *server.running.folder.parent.iterdir()) if path not in expected}
    # torch makes an empty folder for compiled code
    others = {path for path in others if not path.name.startswith("torchinductor_") or any(path.iterdir())}
    if others:
        faults.append((Verdict.WRONG, f"the server left {sorted(map(str, others))}"))
    return faults


def usage(pid: int) -> dict[str, int]:
    """Return the resident memory, open files and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    numbers = {name: int(value) for name, value in re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE)}
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    return {"bytes": numbers["VmRSS"] * 1024, "descriptors": descriptors, "threads": numbers["Threads"]}


# visitors whose browser is as it should be


def visitor(address: str) -> Any:
    import httpx

    # requests to this machine go through no proxy
    return httpx.Client(base_url=address, timeout=TIME_LIMIT, trust_env=False)


def works(client: Any) -> None:
    """Check that the page is served and shows maps."""
    from tests.explorer import test_server

    answer = client.get("/")
    assert answer.status_code == 200
    assert "softline explorer" in answer.text
    shows_maps: Callable[[Any], None] = test_server.assert_works
    shows_maps(client)


# requests


def head(method: str, target: str | bytes, server: Server, *headers: str | bytes, host: str | None = None) -> bytes:
    """Return the head of a request that asks the server to close the connection."""
    target = target.encode("utf-8", "surrogateescape") if isinstance(target, str) else target
    given = [f"Host: {server.host if host is None else host}", "Connection: close", *headers]
    lines = [line.encode("utf-8", "replace") if isinstance(line, str) else line for line in given]
    return b"\r\n".join([method.encode() + b" " + target + b" HTTP/1.1", *lines, b"", b""])


def post(path: str, body: bytes, server: Server, *headers: str) -> bytes:
    return head("POST", path, server, f"Content-Length: {len(body)}", *headers) + body


def wrong_address(numbers: random.Random, server: Server) -> Request:
    methods = (
        "GET",
        "HEAD",
        "POST",
        "PUT",
        "DELETE",
        "PATCH",
        "OPTIONS",
        "TRACE",
        "CONNECT",
        "get",
        "G\tT",
        "X" * 5000,
    )
    method, path = numbers.choice(methods), numbers.choice(PATHS)
    if numbers.random() < 0.3:
        path = path.replace("/", numbers.choice(("//", "/./", "/%2f", "\\", "/;/", "/x/../")))
    if numbers.random() < 0.2:
        path += numbers.choice(("?" + "a=b&" * 3000, "#part", "?session_hash=" + "x" * 500, "%00", "%", "%zz", "\x7f"))
    return Request(f"{method[:10]} {path[:60]}", head(method, path, server), answered=False)


def foreign_file(numbers: random.Random, server: Server) -> Request:
    """Ask for the secret file, or a file of the system, in a spelling that might pass."""
    target = numbers.choice((str(server.secret), "/etc/passwd", "/proc/self/environ", str(server.secret.parent)))
    up = "../" * numbers.randint(1, 12)
    path = numbers.choice((target, up + target.lstrip("/"), f"{server.running.folder}/{up}{target.lstrip('/')}"))
    spell: Callable[[str], str] = numbers.choice(
        (
            lambda path: path,
            lambda path: path.replace("/", "%2f"),
            lambda path: path.replace(".", "%2e"),
            lambda path: path.replace("/", "%252f"),
            lambda path: path.replace("/", "%c0%af"),
            lambda path: path.replace("/", "\\"),
            lambda path: path + "%00.jpeg",
            lambda path: "file://" + path,
            lambda path: f"http://{server.host}{API}/file={path}",
            lambda path: path.replace("../", "..;/"),
        )
    )
    door = numbers.choice((f"{API}/file=", f"{API}/file/", "/file=", f"{API}/proxy=", "/static/", "/assets/", "/"))
    return Request(f"GET {door}{path[:60]}", head("GET", door + spell(path), server))


def wrong_headers(numbers: random.Random, server: Server) -> Request:
    headers = numbers.sample(HEADERS, numbers.randint(1, 4))
    host = numbers.choice((None, None, None, FOREIGN, "", f"{server.host}@{FOREIGN}", f"localhost.{FOREIGN}", "a b"))
    return Request(
        f"headers {', '.join(repr(header[:40]) for header in headers)}, host {host!r}",
        head("GET", numbers.choice(("/", "/config", f"{API}/info")), server, *headers, host=host),
        answered=False,
    )


def wrong_length(numbers: random.Random, server: Server) -> Request:
    """A body whose length is not what the headers say."""
    body = numbers.randbytes(numbers.choice((0, 1, 100, 70000)))
    length = numbers.choice(
        ("0", "1", "5", "-1", "+3", "0x10", "9" * 30, "1e3", " ", "10, 20", str(10**9), "100\r\nContent-Length: 1")
    )
    coding = numbers.choice(((), (), ("Transfer-Encoding: chunked",), ("Transfer-Encoding: gzip, chunked",)))
    if coding and numbers.random() < 0.5:
        body = numbers.choice(
            (b"5\r\nabc", b"ffffffffffffffffff\r\n", b"-1\r\n\r\n", b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n")
        )
    path = numbers.choice((f"{API}/queue/join", f"{API}/upload", f"{API}/cancel", "/"))
    content = head("POST", path, server, f"Content-Length: {length}", *coding) + body
    return Request(f"POST {path}, length {length[:30]!r}, {coding}", content, answered=False)


def no_http(numbers: random.Random, server: Server) -> Request:
    content = numbers.choice(
        (
            numbers.randbytes(numbers.randint(1, 3000)),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + numbers.randbytes(200),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + numbers.randbytes(50),
            b"GET /\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET " + b"/" * 10**6 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20000 + b"\r\n",
            head("GET", "/", server, "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
            head("GET", "/config", server).replace(b"Connection: close\r\n", b"") * 5,
            head("GET", "/ HTTP/1.1\r\nX: y", server),
        )
    )
    return Request(f"bytes {content[:30]!r}", content, answered=False)


def wrong_event(numbers: random.Random, server: Server) -> Request:
    """An event with values that the page does not send."""
    from tests.explorer.test_server import SHOW

    values = list(SHOW)
    for _ in range(numbers.randint(1, 4)):
        values[numbers.randrange(len(values))] = wrong_value(numbers, server)
    event: dict[str, Any] = {
        "data": numbers.choice((values, values[: numbers.randint(0, 12)], wrong_value(numbers, server))),
        "fn_index": numbers.choice((*server.functions, *server.functions, -1, 10**30, None, "0", 1.5, True)),
        "session_hash": numbers.choice((uuid_of(numbers), uuid_of(numbers), "", "../x", None, 7, "x" * 1000)),
        "event_data": numbers.choice(
            (None, None, {"index": wrong_value(numbers, server)}, wrong_value(numbers, server))
        ),
    }
    for key in numbers.sample(sorted(event), numbers.choice((0, 0, 0, 1))):
        del event[key]
    if numbers.random() < 0.2:
        event[numbers.choice(("trigger_id", "batched", "event_id", "simple_format", "request"))] = wrong_value(
            numbers, server
        )
    body = json.dumps(event).encode("utf-8", "surrogatepass")
    if numbers.random() < 0.1:
        body = damage(body, numbers).content
    kind = numbers.choice(("application/json", "application/json", "text/plain", "multipart/form-data", ""))
    what = f"event {body[:80]!r}"
    return Request(what, post(f"{API}/queue/join", body, server, f"Content-Type: {kind}"))


def wrong_value(numbers: random.Random, server: Server) -> Any:
    deep: Any = 0
    for _ in range(numbers.choice((20, 5000))):
        deep = [deep] if numbers.random() < 0.5 else {"path": deep}
    with contextlib.suppress(RecursionError):
        json.dumps(deep)
        return numbers.choice([*_values(numbers, server), deep])
    return numbers.choice(_values(numbers, server))


def _values(numbers: random.Random, server: Server) -> list[Any]:
    file = {"meta": {"_type": "gradio.FileData"}, "orig_name": "photo.png"}
    places = (str(server.secret), str(server.running.folder), "/etc", "/dev/zero", "", ".", "http://127.0.0.1:1/a.png")
    return [
        *(None, True, -1, 0, 10**400, 1e308, float("nan"), float("inf"), "", "a" * 10**5, "\0", "\ud800", "\u202e"),
        *(
            "softpp_micro (untrained)",
            "hf-hub:someone/model",
            "/etc/passwd",
            "mean of all",
            "<script>alert(1)</script>",
        ),
        *([], [[]], {}, [1, 2], ["cat"], {"__type__": "update", "value": 1}, {"index": [10**400, 0]}),
        {**file, "path": numbers.choice(places)},
        {**file, "path": str(server.running.folder / numbers.choice(("", "x" * 300, "missing/a.png")))},
        {**file, "path": None, "url": f"http://{FOREIGN}/a.png"},
    ]


def uuid_of(numbers: random.Random) -> str:
    return uuid.UUID(int=numbers.getrandbits(128)).hex


def wrong_session(numbers: random.Random, server: Server) -> Request:
    """Messages, heartbeats and cancellations of sessions that do not exist."""
    session = numbers.choice((uuid_of(numbers), "x", "..%2f..", "%00", "a" * 3000, "'", "", "%f0%9f%98%80"))
    path = numbers.choice(("queue/data?session_hash=", "heartbeat/", "upload_progress?upload_id=", "queue/data?x="))
    if numbers.random() < 0.3:
        body = json.dumps({"session_hash": session, "fn_index": 0, "event_id": session}).encode()
        action = numbers.choice(("cancel", "reset", "queue/join", "upload"))
        return Request(
            f"POST {action} of session {session[:20]}", post(f"{API}/{action}", body, server), answered=False
        )
    return Request(f"GET {path}{session[:20]}", head("GET", f"{API}/{path}{session}", server), answered=False)


def wrong_upload(numbers: random.Random, server: Server) -> Request:
    """An upload of something that is no sound image, or under a name that is no file name."""
    name = numbers.choice(
        (
            "a.png",
            "../../secret.txt",
            "/etc/passwd",
            "a\0.png",
            "." * 300,
            "con.jpg",
            "a.eps",
            "%2e%2e/a.png",
            "",
            "ä☃.png",
        )
    )
    content = upload_content(numbers)
    boundary = numbers.choice((b"x" * 10, b"-" * 60, b"a b", b"x" * 200))
    field = numbers.choice((b"files", b"files", b"file", b"files[]", b""))
    part = b'--%s\r\nContent-Disposition: form-data; name="%s"; filename="%s"\r\nContent-Type: %s\r\n\r\n%s\r\n' % (
        boundary,
        field,
        name.encode(),
        numbers.choice((b"image/png", b"image/x-eps", b"text/html", b"")),
        content,
    )
    body = part * numbers.choice((1, 1, 1, 3)) + numbers.choice(
        (b"--%s--\r\n" % boundary, b"--%s--\r\n" % boundary, b"")
    )
    kind = f"Content-Type: multipart/form-data; boundary={boundary.decode()}"
    return Request(
        f"upload {name[:20]!r}, {len(content)} bytes", post(f"{API}/upload", body, server, kind), answered=False
    )


def upload_content(numbers: random.Random) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / numbers.choice(("photo.png", "photo.jpg", "photo.webp", "photo.bmp", "photo.gif"))
        draw = numbers.randrange(5)
        if draw == 0:
            return write_bomb(path).read_bytes()
        if draw == 1:
            return write_text(path).read_bytes()
        if draw == 2:
            return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(/tmp/x) (w) file\nshowpage\n"
        sound = write_photo(path).read_bytes()
        return damage(sound, numbers).content if draw == 3 else sound


def received_upload(numbers: random.Random, server: Server) -> Request:
    """Upload something as a browser does, and return the event that makes the page read it."""
    with visitor(server.running.address) as client:
        files = {"files": ("photo.png", upload_content(numbers))}
        answer = client.post(f"{API}/upload", files=files)
        path = answer.json()[0] if answer.status_code == 200 else str(server.running.folder / "missing.png")
    data = [{"path": path, "orig_name": "photo.png", "meta": {"_type": "gradio.FileData"}}]
    event = {"data": data, "fn_index": numbers.choice(server.functions), "session_hash": uuid_of(numbers)}
    return Request("event with an upload", post(f"{API}/queue/join", json.dumps(event).encode(), server))


def dropped(numbers: random.Random, server: Server) -> Request:
    """A request that ends in the middle, with its connection."""
    request = numbers.choice((wrong_upload, wrong_event, wrong_address))(numbers, server)
    end = numbers.randint(1, len(request.content))
    return Request(f"dropped after {end} bytes: {request.what}", request.content[:end], answered=False, dropped=True)


def flood(numbers: random.Random, server: Server) -> Request:
    """Open many connections at once, which say nothing or not enough, before another request."""
    connections = []
    for _ in range(numbers.choice((10, 100))):
        with contextlib.suppress(OSError):
            connections.append(socket.create_connection(server.address, timeout=TIME_LIMIT))
            connections[-1].sendall(numbers.choice((b"", b"GET / HTTP/1.1\r\n", head("GET", "/config", server))))
    time.sleep(0.05)
    for connection in connections:
        connection.close()
    return Request(f"after {len(connections)} connections", head("GET", "/theme.css", server))


def draw(numbers: random.Random, server: Server, count: int) -> list[Request]:
    return [numbers.choice(REQUEST_KINDS)(numbers, server) for _ in range(count)]


REQUEST_KINDS: tuple[Callable[[random.Random, Server], Request], ...] = (
    wrong_address,
    foreign_file,
    foreign_file,
    wrong_headers,
    wrong_length,
    no_http,
    wrong_event,
    wrong_event,
    wrong_event,
    wrong_session,
    wrong_upload,
    wrong_upload,
    received_upload,
    dropped,
    flood,
)
PATHS = (
    *(
        "/",
        "/config",
        "/theme.css",
        "/favicon.ico",
        "/robots.txt",
        "/manifest.json",
        "/docs",
        "/openapi.json",
        "/login",
    ),
    *(
        "/monitoring",
        "/metrics",
        "/token",
        "/app_id",
        "/assets/",
        "/assets/../config",
        "/static/x",
        "/svelte/x.js",
        "*",
    ),
    *(f"{API}/{name}" for name in ("info", "queue/join", "queue/data", "queue/status", "upload", "cancel", "reset")),
    *(f"{API}/{name}" for name in ("run/show", "call/show", "api/show", "component_server", "vibe-edit", "deep_link")),
    *(f"{API}/{name}" for name in ("stream/a/b/c/d", "process_recording", "proxy=http://127.0.0.1:1/", "heartbeat/x")),
)
HEADERS = (
    f"X-Forwarded-Host: {FOREIGN}",
    f"X-Forwarded-Server: {FOREIGN}",
    "X-Forwarded-Proto: javascript",
    "X-Forwarded-Prefix: //" + FOREIGN,
    f"X-Original-URL: http://{FOREIGN}/",
    f"Forwarded: host={FOREIGN};proto=https",
    f"X-Gradio-Server: http://{FOREIGN}",
    f"Origin: http://{FOREIGN}",
    f"Referer: http://{FOREIGN}/",
    "X-Forwarded-For: 1.2.3.4",
    "Range: bytes=0-",
    "Range: bytes=" + "0-1," * 3000,
    "Range: bytes=-99999999999999999999",
    "If-Modified-Since: yesterday",
    "Accept-Encoding: " + "gzip," * 500,
    "Cookie: " + "a=b;" * 2000,
    "Authorization: Basic ////",
    "X-Long: " + "x" * 70000,
    "No colon",
    ": empty",
    "X-Null: a\0b",
    " folded: header",
    "Expect: 100-continue",
    "Content-Type: application/x-www-form-urlencoded; charset=utf-7",
    "Accept-Language: " + "\xff" * 100,
)
