import asyncio
import json

import pytest

from softline.explorer.gate import JOIN, MAX_UPLOAD_BYTES, UPLOAD, Gate


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "map.jpeg").write_bytes(b"map")
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    return folder


def ask(
    folder, path, *, method="GET", body=b"", host="127.0.0.1:7860", kind="http", hosts=("127.0.0.1",), headers=None
):
    """The status, and what passed: (path, body) of the request that the application behind the gate sees."""
    passed, sent = [], []

    async def app(scope, receive, send):
        given = await receive()
        passed.append((scope["path"], given.get("body")))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    headers = {"host": host, "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.encode(), value.encode()) for name, value in headers.items() if value is not None]
    scope = {"type": kind, "method": method, "path": path, "headers": encoded}
    asyncio.run(Gate(app, folder, functions=(0, 1), hosts=hosts)(scope, receive, send))
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
    message, passed = ask(folder, path, method=method)
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
        "http://a.b/c",
        "\0",
    ):
        assert ask(folder, f"/gradio_api/file={path}")[0]["status"] == 403, path


def test_an_event_with_an_upload_of_the_folder_passes_unchanged(folder):
    body = json.dumps({"data": [{"path": str(folder / "map.jpeg"), "url": None}], "fn_index": 1}).encode()
    message, passed = ask(folder, JOIN, method="POST", body=body)
    assert (message["status"], passed) == (200, [(JOIN, body)])


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret", "https://example.org/a.png", None, 5, ["/etc/passwd"]])
def test_an_event_with_any_other_path_does_not(folder, path):
    body = json.dumps({"data": [1, {"value": [{"path": path}]}], "event_data": {}, "fn_index": 0}).encode()
    message, passed = ask(folder, JOIN, method="POST", body=body)
    assert (message["status"], passed) == (403, [])


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 10**5, b"1" * (10**6 + 1)])
def test_what_is_no_event_does_not_pass(folder, body):
    assert ask(folder, JOIN, method="POST", body=body)[0]["status"] == 403


def test_a_page_elsewhere_that_gives_its_name_to_this_machine_is_refused(folder):
    assert ask(folder, "/", host="evil.example:7860")[0]["status"] == 403
    assert ask(folder, "/", host="evil.example:7860", hosts=None)[0]["status"] == 200
    assert ask(folder, "/", host="[::1]:7860", hosts=("[::1]",))[0]["status"] == 200


@pytest.mark.parametrize("function", [2, -1, 10**400, None, "0", [0], 0.5])
def test_an_event_that_calls_no_function_of_the_page_is_refused(folder, function):
    body = json.dumps({"data": [], "fn_index": function}).encode()
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
        headers = {"origin": origin, "sec-fetch-site": "same-origin"}
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
        ({"content-length": "-1"}, 403),
        ({"content-length": None}, 403),
        ({"transfer-encoding": "chunked"}, 403),
    ],
)
def test_an_upload_names_its_length_which_is_that_of_an_image(folder, headers, status):
    message, passed = ask(folder, UPLOAD, method="POST", headers=headers)
    assert (message["status"], len(passed)) == (status, status == 200)


def test_an_upload_that_is_longer_than_it_says_ends(folder):
    body = bytes(MAX_UPLOAD_BYTES + 1)
    _, passed = ask(folder, UPLOAD, method="POST", body=body, headers={"content-length": "5"})
    assert passed == [(UPLOAD, None)]


def test_websockets_are_closed(folder):
    assert ask(folder, "/", kind="websocket")[0]["type"] == "websocket.close"
