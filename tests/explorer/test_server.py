"""Real requests to a running server."""

import functools
import json
import signal
import socket
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("gradio")
import httpx

from softline.explorer.catalog import OWN
from softline.explorer.page import MEAN
from softline.explorer.server import listen
from tests.explorer.images import write_bomb, write_photo, write_text, write_truncated
from tests.explorer.running import explore, free_port

MICRO = "softpp_micro (untrained)"
ASKED = [MICRO, OWN, 0, MEAN]
SHOW = ["cat", None, 64, None, *ASKED, *ASKED]
API = "gradio_api"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with explore(tmp_path_factory.mktemp("server"), "--port", free_port()) as server:
        yield server
        assert server.end(signal.SIGTERM) == 0
    # whatever was asked of it
    assert server.log.read_text().endswith("\n\nended\n")
    assert "Traceback" not in server.log.read_text()


@pytest.fixture(scope="module")
def client(server):
    # requests to this machine go through no proxy
    with httpx.Client(base_url=server.address, timeout=60, trust_env=False) as client:
        yield client


def event_of(client, function):
    """The number of the first event that calls a function of the page."""
    events = client.get("config").json()["dependencies"]
    return next(event["id"] for event in events if event["api_name"] == function)


def send(client, function, data, *, event_data=None):
    """The answer to the request, and the messages that come for it."""
    session = uuid.uuid4().hex
    body = {"data": data, "fn_index": event_of(client, function), "session_hash": session, "event_data": event_data}
    joined = client.post(f"{API}/queue/join", json=body)
    messages = []
    if joined.status_code == 200:
        with client.stream("GET", f"{API}/queue/data", params={"session_hash": session}) as stream:
            for line in stream.iter_lines():
                if line.startswith("data:"):
                    messages.append(json.loads(line.removeprefix("data:")))
                    if messages[-1]["msg"] in ("process_completed", "close_stream"):
                        break
    return joined, messages


def result(messages):
    (done,) = [message for message in messages if message["msg"] == "process_completed"]
    assert done["success"], done
    return done["output"]["data"]


def warnings_of(messages):
    return [message["log"] for message in messages if message["msg"] == "log"]


def upload(client, path):
    """What the browser then knows of the file."""
    with path.open("rb") as file:
        answer = client.post(f"{API}/upload", files={"files": (path.name, file)})
    return answer, {"path": answer.json()[0], "orig_name": path.name, "meta": {"_type": "gradio.FileData"}}


def send_raw(client, text):
    """The answer to a request that is sent as it stands."""
    with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
        raw.sendall(text.format(host=f"{client.base_url.host}:{client.base_url.port}").encode("latin-1"))
        return b"".join(iter(lambda: raw.recv(65536), b""))


def assert_works(client):
    shown = result(send(client, "show", SHOW)[1])
    picture = client.get(shown[4]["url"])
    assert (picture.status_code, picture.headers["content-type"]) == (200, "image/jpeg")


def test_the_page_is_served_and_shows_maps(client):
    answer = client.get("/")
    assert answer.status_code == 200
    assert "softline explorer" in answer.text
    assert "fonts.googleapis" not in answer.text
    assert_works(client)


def test_no_function_is_open_to_programs(client):
    assert client.get(f"{API}/info").json() == {"named_endpoints": {}, "unnamed_endpoints": {}}
    for path in (f"{API}/call/show", f"{API}/run/show", f"{API}/api/show"):
        assert client.post(path, json={"data": SHOW}).status_code == 403


@pytest.mark.parametrize(
    "path",
    [
        "file=/etc/passwd",
        "file=%2Fetc%2Fpasswd",
        "file=%252Fetc%252Fpasswd",
        "file=../../../../../../etc/passwd",
        "file=..%2f..%2f..%2f..%2f..%2f..%2fetc/passwd",
        "file={folder}/../../../../../etc/passwd",
        "file={folder}%2f..%2f..%2f..%2f..%2fetc/passwd",
        "file=file:///etc/passwd",
        "file=http://127.0.0.1:1/",
        "file/etc/passwd",
        "proxy=http://127.0.0.1:1/",
        "file={folder}",
        "file={folder}/",
    ],
)
def test_no_other_file_is_served(server, client, path):
    path = path.format(folder=server.folder)
    # as it stands: a client would tidy it up
    answer = send_raw(client, f"GET /{API}/{path} HTTP/1.1\r\nHost: {{host}}\r\nConnection: close\r\n\r\n")
    assert answer.startswith((b"HTTP/1.1 403", b"HTTP/1.1 404"))
    assert b"root:" not in answer


@pytest.mark.parametrize("path", ["/etc/passwd", "../../etc/passwd", "http://127.0.0.1:1/a.png"])
def test_a_forged_upload_is_refused(client, path):
    joined, _ = send(client, "receive", [{"path": path, "meta": {"_type": "gradio.FileData"}}])
    assert joined.status_code == 403
    assert_works(client)


def test_a_forged_model_is_a_message(client):
    for model in ("/etc/passwd", "resnet50", "hf-hub:someone/model"):
        shown = result(send(client, "show_side", [*SHOW[:4], model, OWN, 0, MEAN])[1])
        assert 'role="alert"' in shown[4]
        assert shown[3] is None
    assert_works(client)


def test_a_click_is_answered(client):
    data = {"index": [100, 200], "value": None}
    clicked = result(send(client, "click", SHOW, event_data=data)[1])
    before = result(send(client, "show", SHOW)[1])
    assert clicked[5]["url"] != before[4]["url"]


def test_an_upload_is_shown(client, tmp_path):
    answer, file = upload(client, write_photo(tmp_path / "photo.png"))
    assert answer.status_code == 200
    _, photos = result(send(client, "receive", [file])[1])
    assert photos["value"] == "yours: photo.png"


@pytest.mark.parametrize("write", [write_text, write_truncated, write_bomb])
def test_a_bad_upload_is_answered_with_a_message(client, tmp_path, write):
    path = tmp_path / "photo.png"
    write(path)
    path = path.rename(tmp_path / "photo.jpg")
    _, file = upload(client, path)
    _, messages = send(client, "receive", [file])
    result(messages)
    (text,) = warnings_of(messages)
    assert text.startswith("photo.jpg cannot be read as an image")
    assert_works(client)


def test_a_file_that_is_too_large_is_not_stored(client, tmp_path):
    path = tmp_path / "large.jpg"
    with path.open("wb") as file:
        file.truncate(25 * 2**20)
    with path.open("rb") as file:
        answer = client.post(f"{API}/upload", files={"files": ("large.jpg", file)})
    assert answer.status_code == 413
    assert "maximum allowed size" in answer.text
    assert_works(client)


def test_files_that_are_too_large_together_are_not_stored(server, client):
    before = set(server.folder.rglob("*"))
    many = [("files", (f"{index}.png", bytes(3 * 2**20))) for index in range(8)]
    assert client.post(f"{API}/upload", files=many).status_code == 413
    assert set(server.folder.rglob("*")) == before
    assert_works(client)


def test_an_upload_of_unknown_length_is_not_stored(server, client):
    before = set(server.folder.rglob("*"))
    request = client.build_request("POST", f"{API}/upload", files={"files": ("a.png", b"a")})
    pieces = iter([request.read()])
    kind = {"Content-Type": request.headers["content-type"]}
    assert client.post(f"{API}/upload", content=pieces, headers=kind).status_code == 411
    assert set(server.folder.rglob("*")) == before


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}])
def test_another_website_stores_no_file(server, client, headers):
    before = set(server.folder.rglob("*"))
    assert client.post(f"{API}/upload", files={"files": ("a.png", b"a")}, headers=headers).status_code == 403
    assert set(server.folder.rglob("*")) == before
    own = {"Origin": server.address.rstrip("/"), "Sec-Fetch-Site": "same-origin"}
    assert client.post(f"{API}/upload", files={"files": ("a.png", b"a")}, headers=own).status_code == 200


def test_forged_numbers_leave_no_traceback(server, client):
    huge = 10**400
    shown = result(send(client, "show_side", ["cat", None, -huge, None, MICRO, OWN, huge, huge])[1])
    assert shown[3] is not None
    _, messages = send(client, "click", SHOW, event_data={"index": [huge, 1], "value": None})
    result(messages)
    (text,) = warnings_of(messages)
    assert "is outside of the picture" in text
    body = {"data": SHOW, "fn_index": 999, "session_hash": uuid.uuid4().hex}
    assert client.post(f"{API}/queue/join", json=body).status_code == 403
    assert "Traceback" not in server.log.read_text()


def test_a_page_of_another_name_is_refused(client):
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 403


@pytest.mark.parametrize(
    "header",
    [
        "X-Forwarded-Host: evil.example",
        "X-Forwarded-Proto: https",
        "X-Forwarded-Prefix: /evil.example",
        "X-Forwarded-For: 203.0.113.5",
        "Forwarded: host=evil.example;proto=https",
        "X-Gradio-Server: http://evil.example",
    ],
)
def test_headers_of_a_proxy_that_is_not_there_change_nothing(client, header):
    name, value = header.split(": ")
    config = client.get("config", headers={name: value})
    assert config.json()["root"] == client.get("config").json()["root"] == str(client.base_url).rstrip("/")
    page = client.get("/", headers={name: value}).text
    assert "evil.example" not in config.text + page
    assert f"https://{client.base_url.host}" not in config.text + page
    assert "203.0.113.5" not in config.text + page


@pytest.mark.parametrize(
    "request_text",
    [
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.0\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {host}\r\nHost: evil.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nOrigin: null\r\n\r\n",
        "GET /assets/" + "a" * 3000 + " HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n",
        "GET /assets/%00%ff HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n",
        "GET /gradio_api/queue/data?session_hash=unknown HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n",
        "POST /gradio_api/queue/join HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        "POST /gradio_api/queue/join HTTP/1.1\r\nHost: {host}\r\nContent-Length: -1\r\n\r\n",
        "\0\xff\r\n\r\n",
    ],
)
def test_malformed_requests_are_refused_and_leave_no_traceback(server, client, request_text):
    assert send_raw(client, request_text).startswith(b"HTTP/1.1 4")
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    "change",
    [
        {"data": []},
        {"data": "x"},
        {"data": [None] * 99},
        {"data": [{}]},
        {"session_hash": None},
        {"session_hash": "a" * 1000},
        {"trigger_id": "x"},
        {"fn_index": 0.5},
        {"data": functools.reduce(lambda inner, _: [inner], range(200), [])},
    ],
)
def test_malformed_events_are_refused_and_leave_no_traceback(server, client, change):
    event = {"data": [None], "fn_index": event_of(client, "receive"), "session_hash": uuid.uuid4().hex}
    answer = client.post(f"{API}/queue/join", json=event | change)
    assert 400 <= answer.status_code < 500
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("name", ["", "inside"])
def test_a_directory_is_not_taken_for_an_upload(server, client, name):
    (server.folder / "inside").mkdir(exist_ok=True)
    joined, _ = send(client, "receive", [{"path": f"{server.folder}/{name}", "meta": {"_type": "gradio.FileData"}}])
    assert joined.status_code == 403


def test_a_form_without_a_file_is_refused(server, client):
    answer = client.post(f"{API}/upload", files={"files": (None, b"a")})
    assert answer.status_code == 400
    assert client.post(f"{API}/upload", files=[("files", ("a", b"a"))] * 2).status_code == 413
    assert "Traceback" not in server.log.read_text()


def test_a_visitor_who_leaves_during_an_upload_leaves_no_traceback(server, client):
    head = f"POST /{API}/upload HTTP/1.1\r\nHost: {client.base_url.host}:{client.base_url.port}\r\n"
    head += "Content-Type: multipart/form-data; boundary=edge\r\nContent-Length: 1000\r\n\r\n--edge\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
        raw.sendall(head.encode())
    assert_works(client)
    assert "Traceback" not in server.log.read_text()


def test_a_damaged_checkpoint_among_others_is_a_message(tmp_path, checkpoint):
    (tmp_path / "runs" / "bad").mkdir(parents=True)
    (tmp_path / "runs" / "bad" / "best.pt").write_text("no checkpoint")
    with explore(tmp_path, str(tmp_path / "runs"), str(checkpoint), "--port", free_port()) as server:
        with httpx.Client(base_url=server.address, timeout=60, trust_env=False) as client:
            bad, good = [str(tmp_path / "runs" / "bad"), OWN, 0, MEAN], [str(checkpoint.parent), OWN, 0, MEAN]
            shown = result(send(client, "show", ["cat", None, 32, None, *bad, *good])[1])
            assert shown[4] is None
            assert "best.pt" in shown[5]
            assert 'role="alert"' in shown[5]
            assert shown[10] is not None
            assert_works(client)
        assert server.log.read_text().startswith("2 checkpoints")
        assert "Traceback" not in server.log.read_text()


SMALL = (
    "from softline.explorer.storage import Storage; "
    "Storage.__init__.__kwdefaults__.update(max_bytes=3 * 2**20, max_files=8); "
)
EAGER = "Storage.cleaning.__wrapped__.__kwdefaults__.update(seconds=0.05); Storage.clean.__defaults__ = (0.0,)"


def files_in(folder):
    return [path for path in folder.rglob("*") if not path.is_dir()]


def test_uploads_of_all_visitors_stay_within_the_quota(tmp_path):
    start = threading.Barrier(6)

    def post(place):
        with httpx.Client(base_url=server.address, timeout=60, trust_env=False) as client:
            start.wait()
            return client.post(f"{API}/upload", files={"files": (f"{place}.png", bytes([place]) * 2**20)})

    with explore(tmp_path, "--port", free_port(), first=SMALL.rstrip("; ")) as server:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(post, range(6)))
        codes = [answer.status_code for answer in answers]
        large = files_in(server.folder)
        assert set(codes) == {200, 507}
        assert codes.count(200) == len(large) <= 2
        refused = next(answer for answer in answers if answer.status_code == 507)
        assert "no room for more files" in refused.json()["error"]
        # small ones have room, until there are too many
        with httpx.Client(base_url=server.address, timeout=60, trust_env=False) as client:
            codes = [client.post(f"{API}/upload", files={"files": (str(n), bytes([n]))}).status_code for n in range(12)]
        assert codes == [200] * (8 - len(large)) + [507] * (4 + len(large))
        assert len(files_in(server.folder)) == 8


def test_the_clean_up_goes_on_whatever_lies_in_the_folder(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    with explore(tmp_path, "--port", free_port(), first=SMALL + EAGER) as server:
        (server.folder / "empty" / "inner").mkdir(parents=True)
        (server.folder / "link").symlink_to(precious)
        (server.folder / "loop").symlink_to(server.folder)
        with httpx.Client(base_url=server.address, timeout=60, trust_env=False) as client:
            for name in "ab":
                assert client.post(f"{API}/upload", files={"files": (name, b"content")}).status_code == 200
                for _ in range(600):
                    if not any(server.folder.iterdir()):
                        break
                    time.sleep(0.05)
                assert list(server.folder.iterdir()) == []
    assert precious.read_text() == "precious"


def test_a_named_port_that_is_taken_is_a_message_and_another_is_found_without_one():
    with listen("127.0.0.1", int(free_port())) as first:
        port = first.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 is taken"):
            listen("127.0.0.1", port)
    with listen("127.0.0.1", None) as one, listen("127.0.0.1", None) as other:
        assert one.getsockname()[1] < other.getsockname()[1]


def test_a_host_that_is_not_this_machine_is_a_message():
    with pytest.raises(ValueError, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1", None)
    with pytest.raises(ValueError, match="cannot listen on no such host"):
        listen("no such host", None)
