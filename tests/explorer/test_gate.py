import asyncio
import json

import pytest

from softline.explorer import gate as module
from softline.explorer.gate import JOIN, MAX_UPLOAD_BYTES, UPLOAD, Function, Gate
from softline.explorer.storage import Storage

FORM = {"content-type": "multipart/form-data; boundary=edge"}
SESSION = "abc123"
FUNCTIONS = {0: Function(2), 1: Function(2, frozenset({1}))}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "map.jpeg").write_bytes(b"map")
    (folder / "inside").mkdir()
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    return folder


def ask(folder, path, *, body=b"", hosts=("127.0.0.1",), **more):
    """The answer of the gate, and what passed: (path, body) of the request that the application behind it sees."""
    answer, passed = talk(folder, path, [body], hosts=hosts, **more)
    return answer, [(scope["path"], b"".join(parts)) for scope, parts in passed]


def talk(folder, path, parts, *, method="GET", host="127.0.0.1:7860", kind="http", hosts=None, headers=(), **more):
    """The first message of the answer, and the request that the application sees: its scope and parts of the body."""
    passed, sent = [], []
    storage = more.pop("storage", None) or Storage(folder)
    waiting = list(parts)

    async def app(scope, receive, send):
        taken = [await receive()]
        while taken[-1].get("more_body"):
            taken.append(await receive())
        passed.append((scope, [message.get("body", b"") for message in taken]))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        if not waiting:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting) or more.get("stalls", False)}

    async def send(message):
        sent.append(message)

    given = {"host": host, "content-length": str(sum(map(len, parts))), **dict(headers)}
    encoded = [(name.encode(), value.encode()) for name, value in given.items() if value is not None]
    encoded += more.get("repeated", [])
    query = more.get("query", "").encode()
    scope = {"type": kind, "method": method, "path": path, "headers": encoded, "query_string": query}
    asyncio.run(Gate(app, storage, functions=FUNCTIONS, sessions={SESSION}, hosts=hosts)(scope, receive, send))
    return sent[0], passed


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/assets/index.js"),
        ("GET", "/theme.css"),
        ("GET", "/gradio_api/queue/data"),
        ("GET", "/gradio_api/heartbeat/abc123"),
        ("POST", "/gradio_api/upload"),
    ],
)
def test_what_the_page_needs_passes_under_a_policy_that_forbids_other_servers(folder, method, path):
    message, passed = ask(folder, path, method=method, headers=FORM, query=f"session_hash={SESSION}")
    assert (message["status"], passed) == (200, [(path, b"")])
    assert b"default-src 'self'" in dict(message["headers"])[b"content-security-policy"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/gradio_api/proxy=http://example.org/"),
        ("GET", "/gradio_api/openapi.json"),
        ("GET", "/gradio_api/file/etc/passwd"),
        ("GET", "/monitoring"),
        ("GET", "/gradio_api/queue/join"),
        ("POST", "/gradio_api/vibe-edit"),
        ("POST", "/gradio_api/component_server"),
        ("POST", "/gradio_api/run/show"),
        ("POST", "/gradio_api/call/show"),
        ("DELETE", "/"),
        ("GET", "//etc/passwd"),
        ("GET", "/gradio_api/upload_progress"),
        ("GET", "/gradio_api/heartbeat/" + "a" * 65),
        ("GET", "/assets/" + "a" * 201),
    ],
)
def test_nothing_else_passes(folder, method, path):
    message, passed = ask(folder, path, method=method)
    assert (message["status"], passed) == (403, [])


def test_only_files_of_the_folder_are_served(folder):
    for path in ("map.jpeg", "missing"):
        assert ask(folder, f"/gradio_api/file={folder}/{path}")[1]
    for path in (
        "/etc/passwd",
        "../secret",
        f"{folder}/../secret",
        f"{folder}/link",
        f"{folder}x",
        f"{folder}",
        f"{folder}/",
        f"{folder}/inside",
        f"{folder}/" + "x" * 300,
        "http://a.b/c",
        "\0",
    ):
        assert ask(folder, f"/gradio_api/file={path}")[0]["status"] == 403, path


def test_an_event_with_an_upload_of_the_folder_passes_unchanged(folder):
    file = {"path": str(folder / "map.jpeg"), "url": None, "size": 3, "meta": {"_type": "gradio.FileData"}}
    for given in (file, None):
        body = json.dumps({"data": ["a", given], "fn_index": 1, "session_hash": SESSION}).encode()
        message, passed = ask(folder, JOIN, method="POST", body=body)
        assert (message["status"], passed) == (200, [(JOIN, body)])


@pytest.mark.parametrize(
    "change",
    [
        {"meta": None},
        {"meta": {}},
        {"meta": 5},
        {"path": None},
        {"size": "x"},
        {"orig_name": ["a"]},
        {"is_stream": None},
    ],
)
def test_an_event_whose_upload_is_described_otherwise_does_not(folder, change):
    file = {"path": str(folder / "map.jpeg"), "meta": {"_type": "gradio.FileData"}, **change}
    for given in (file, [file], "map.jpeg", 5):
        body = json.dumps({"data": ["a", given], "fn_index": 1, "session_hash": SESSION}).encode()
        assert ask(folder, JOIN, method="POST", body=body)[0]["status"] == 403


@pytest.mark.parametrize("data", [None, {}, "ab", [], [1], [1, 2, 3]])
def test_an_event_has_as_many_values_as_its_function(folder, data):
    body = json.dumps({"data": data, "fn_index": 0, "session_hash": SESSION}).encode()
    assert ask(folder, JOIN, method="POST", body=body)[0]["status"] == 403


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../secret", "https://example.org/a.png", None, 5, ["/etc/passwd"], "{folder}", "{folder}/inside"],
)
def test_an_event_with_any_other_path_does_not(folder, path):
    path = path.format(folder=folder) if isinstance(path, str) else path
    event = {"data": [1, {"value": [{"path": path}]}], "event_data": {}, "fn_index": 0, "session_hash": SESSION}
    message, passed = ask(folder, JOIN, method="POST", body=json.dumps(event).encode())
    assert (message["status"], passed) == (403, [])


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 403), (b"{", 403), (b"[" * 10**5, 403), (b"5", 403), (b"\xff\xfe", 403), (b"1" * (10**6 + 1), 413)],
)
@pytest.mark.parametrize("path", [JOIN, "/gradio_api/cancel", "/gradio_api/reset"])
def test_what_is_no_event_does_not_pass(folder, path, body, status):
    assert ask(folder, path, method="POST", body=body)[0]["status"] == status


@pytest.mark.parametrize("session", [None, "", 5, ["a"], "a b", "a" * 65, "../x", "ä"])
def test_an_event_belongs_to_a_session(folder, session):
    body = json.dumps({"data": [1, 2], "fn_index": 0, "session_hash": session}).encode()
    assert ask(folder, JOIN, method="POST", body=body)[0]["status"] == 403


@pytest.mark.parametrize(
    "query", ["", "session_hash=", "session_hash=unknown", f"session_hash={SESSION}&session_hash=b", "%ff", "a&" * 99]
)
def test_messages_are_those_of_a_session_that_has_sent_an_event(folder, query):
    message, passed = ask(folder, "/gradio_api/queue/data", query=query)
    assert (message["status"], passed) == (404, [])


def test_an_event_that_is_nested_deeply_does_not_pass(folder):
    nested: list = []
    for _ in range(100):
        nested = [nested]
    body = json.dumps({"data": [1, nested], "fn_index": 0, "session_hash": SESSION}).encode()
    assert ask(folder, JOIN, method="POST", body=body)[0]["status"] == 403


def test_a_page_elsewhere_that_gives_its_name_to_this_machine_is_refused(folder):
    assert ask(folder, "/", host="evil.example:7860")[0]["status"] == 403
    assert ask(folder, "/", host="evil.example:7860", hosts=None)[0]["status"] == 200
    assert ask(folder, "/", host="[::1]:7860", hosts=("[::1]",))[0]["status"] == 200


@pytest.mark.parametrize("function", [2, -1, 10**400, None, "0", [0], 0.5, True])
def test_an_event_that_calls_no_function_of_the_page_is_refused(folder, function):
    body = json.dumps({"data": [1, 2], "fn_index": function, "session_hash": SESSION}).encode()
    assert ask(folder, JOIN, method="POST", body=body)[0]["status"] == 403
    assert ask(folder, JOIN, method="POST", body=b"[0]")[0]["status"] == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://127.0.0.1:8000"},
        {"origin": "http://127.0.0.1"},
        {"origin": "null"},
        {"origin": ""},
        {"sec-fetch-site": "cross-site"},
        {"origin": "http://127.0.0.1:7860", "sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},
    ],
)
def test_what_another_website_sends_is_refused(folder, headers):
    assert ask(folder, UPLOAD, method="POST", headers=headers)[0]["status"] == 403
    assert ask(folder, "/config", headers=headers)[0]["status"] == 403


def test_what_the_page_itself_sends_passes(folder):
    for origin in ("http://127.0.0.1:7860", "https://127.0.0.1:7860"):
        headers = {"origin": origin, "sec-fetch-site": "same-origin", **FORM}
        assert ask(folder, UPLOAD, method="POST", headers=headers)[0]["status"] == 200


def test_a_link_on_another_website_can_be_followed_but_not_fetched(folder):
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert ask(folder, "/", headers=link)[0]["status"] == 200
    assert ask(folder, "/", headers={**link, "sec-fetch-mode": "no-cors"})[0]["status"] == 403
    assert ask(folder, "/", headers={**link, "origin": "https://evil.example"})[0]["status"] == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-length": str(MAX_UPLOAD_BYTES)}, 200),
        ({"content-length": str(MAX_UPLOAD_BYTES + 1)}, 413),
        ({"content-length": "9" * 5000}, 413),
        ({"content-length": "-1"}, 411),
        ({"content-length": None}, 411),
        ({"transfer-encoding": "chunked"}, 411),
        ({"content-type": "text/plain"}, 400),
        ({"content-type": "multipart/form-data"}, 400),
        ({"content-type": "multipart/form-data; boundary=" + "x" * 71}, 400),
    ],
)
def test_an_upload_names_its_length_which_is_that_of_an_image(folder, headers, status):
    message, passed = ask(folder, UPLOAD, method="POST", headers=FORM | headers)
    assert (message["status"], len(passed)) == (status, status == 200)


def form(*files):
    parts = [b'--edge\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n' + file for file in files]
    return b"\r\n".join([*parts, b"--edge--\r\n"])


def test_an_upload_that_is_longer_than_it_says_is_refused_and_not_passed_on(folder):
    message, passed = ask(folder, UPLOAD, method="POST", body=form(b"x" * 100), headers={"content-length": "5", **FORM})
    assert message["status"] == 413
    assert passed == [(UPLOAD, b"")]


@pytest.mark.parametrize("size", [1, 3, 7, 10**6])
def test_one_file_is_uploaded_at_a_time_however_the_body_is_cut(folder, size):
    def send(body):
        parts = [body[place : place + size] for place in range(0, len(body), size)]
        return talk(folder, UPLOAD, parts, method="POST", headers=FORM)[0]["status"]

    assert send(form(b"one")) == 200
    assert send(form(b"one", b"two")) == 413


@pytest.mark.parametrize(
    "body",
    [
        b'--edge\r\nContent-Disposition: form-data; name="files"\r\n\r\nabc\r\n--edge--\r\n',
        b'--edge\r\nContent-Disposition: form-data; name="other"; filename="a"\r\n\r\nabc\r\n--edge--\r\n',
        b"\r\n" + form(b"one"),
        b"-",
        bytes(500),
    ],
)
def test_an_upload_is_a_form_with_a_file(folder, body):
    for size in (1, 500):
        parts = [body[place : place + size] for place in range(0, len(body), size)]
        message, _ = talk(folder, UPLOAD, parts, method="POST", headers=FORM)
        assert (message["status"], body) == (200 if body == b"-" else 400, body)


def test_a_body_that_stops_is_refused(folder, monkeypatch):
    monkeypatch.setattr(module, "BODY_SECONDS", 0.05)
    for path, headers in ((UPLOAD, FORM), (JOIN, {})):
        message, _ = talk(folder, path, [b"-"], method="POST", headers={**headers, "content-length": "9"}, stalls=True)
        assert message["status"] == 408


def test_an_upload_without_room_is_refused_and_room_is_given_back(folder):
    """The folder holds a map and a link, which are too new to be removed; uploads that are under way count too."""
    body = form(b"x" * 100)
    room = Storage(folder, max_bytes=1000, max_files=3)
    with room.reserve(len(body)):
        message, passed = talk(folder, UPLOAD, [body], method="POST", headers=FORM, storage=room)
        assert (message["status"], passed) == (507, [])
    for _ in range(5):
        assert talk(folder, UPLOAD, [body], method="POST", headers=FORM, storage=room)[0]["status"] == 200


@pytest.mark.parametrize("name", ["host", "origin", "content-length", "sec-fetch-site", "content-type"])
def test_a_repeated_header_is_refused(folder, name):
    repeated = [(name.encode(), b"1"), (name.encode(), b"2")]
    message, passed = talk(folder, "/", [b""], repeated=repeated)
    assert (message["status"], passed) == (400, [])


def test_headers_and_parameters_that_the_page_does_not_need_are_not_passed_on(folder):
    forged = ("x-forwarded-host", "x-forwarded-proto", "x-forwarded-for", "x-forwarded-prefix", "forwarded")
    headers = dict.fromkeys([*forged, "x-gradio-server", "cookie", "authorization", "x-anything"], "evil.example")
    _, ((scope, _),) = talk(folder, "/", [b""], headers={**headers, "accept": "text/html"}, query="deep_link=../x")
    assert {name for name, _ in scope["headers"]} == {b"host", b"content-length", b"accept"}
    assert scope["query_string"] == b""
    query = f"x=1&session_hash={SESSION}"
    _, ((scope, _),) = talk(folder, "/gradio_api/queue/data", [b""], query=query)
    assert scope["query_string"] == f"session_hash={SESSION}".encode()


@pytest.mark.parametrize("host", ["", "a b", 'a"><script>', "evil/..", "a:b", "[::1", "a:7860:1"])
def test_a_host_that_is_none_is_refused_whatever_the_server_listens_on(folder, host):
    message, passed = talk(folder, "/", [b""], host=host)
    assert (message["status"], passed) == (400, [])


def test_websockets_are_closed(folder):
    assert ask(folder, "/", kind="websocket")[0]["type"] == "websocket.close"


def test_a_request_whose_rest_is_no_http_is_given_up(folder, caplog):
    """The server has answered it already, and refuses a second answer."""

    class BrokenError(Exception):
        pass

    async def send(message):
        raise BrokenError("Can't send data when our state is ERROR")

    scope = {"type": "http", "method": "DELETE", "path": "/", "headers": [], "query_string": b""}
    gate = Gate(None, Storage(folder), functions={}, sessions=set(), broken=(BrokenError,))
    with caplog.at_level("INFO"):
        asyncio.run(gate(scope, None, send))
    assert "a malformed request was given up" in caplog.text
