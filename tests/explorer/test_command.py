import signal

import pytest

pytest.importorskip("gradio")
import httpx

from softline.cli import explore as command
from softline.cli import main
from softline.explorer.catalog import FRESH
from softline.explorer.server import listen
from tests.explorer.running import explore, free_port


@pytest.mark.parametrize("port", ["0", "-1", "70000"])
def test_a_port_that_cannot_be_is_refused(port, capsys):
    assert main(["explore", f"--port={port}"]) == 2
    assert f"--port must be from 1 to 65535, got {port}" in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused(capsys):
    with listen("127.0.0.1", int(free_port())) as taken:
        port = taken.getsockname()[1]
        assert main(["explore", f"--port={port}"]) == 2
    assert f"port {port} of 127.0.0.1 is taken" in capsys.readouterr().err


def test_a_checkpoint_that_is_missing_is_named_before_anything_starts(tmp_path, capsys):
    assert main(["explore", str(tmp_path / "missing.pt")]) == 2
    assert f"no such checkpoint or directory: {tmp_path / 'missing.pt'}" in capsys.readouterr().err


def test_the_directory_of_runs_is_taken_if_it_has_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command.default_checkpoints() == []
    (tmp_path / "runs" / "one").mkdir(parents=True)
    assert command.default_checkpoints() == []
    (tmp_path / "runs" / "one" / "best.pt").touch()
    assert command.default_checkpoints() == ["runs"]


def test_it_ends_cleanly_while_a_browser_is_connected_and_leaves_nothing(tmp_path, checkpoint):
    with explore(tmp_path, str(checkpoint), "--host", "0.0.0.0", "--port", free_port()) as server:
        assert server.folder.stat().st_mode & 0o077 == 0, "others may look into it"
        address = server.address.replace("0.0.0.0", "127.0.0.1")
        with httpx.stream("GET", f"{address}gradio_api/heartbeat/abc", trust_env=False) as connected:
            assert connected.status_code == 200
            assert server.end(signal.SIGINT) == 0
    assert list((tmp_path / "temporary").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"temporary", "log.txt"}
    assert server.log.read_text().splitlines() == [
        f"1 checkpoint and {len(FRESH)} untrained models",
        "warning: anyone who can reach this machine over the network can use the page",
        f"open in a browser: {server.address}",
        "Ctrl-C ends it",
        "",
        "ended",
    ]
    with pytest.raises(httpx.ConnectError):
        httpx.get(address, trust_env=False)
