import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from softline.errors import UserError
from softline.locks import LOCK, hold_directory, hold_file, is_holding

HOLD = """
import os, sys, time
from pathlib import Path
from softline.locks import hold_directory
with hold_directory(Path(sys.argv[1])):
    {forked}(Path(sys.argv[1]) / "held").touch()
    time.sleep(600)
"""
# what stays of it is like a process that loads data and outlives a killed training for a while
FORK = "os.fork() or "


def start_holder(directory, forked=""):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD.format(forked=forked), str(directory)], start_new_session=True
    )
    begin = time.monotonic()
    while not (directory / "held").exists():
        assert process.poll() is None
        assert time.monotonic() - begin < 60
        time.sleep(0.01)
    return process


def test_another_process_is_named(tmp_path):
    holder = start_holder(tmp_path / "run")
    try:
        pattern = rf"run is in use by process {holder.pid} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC$"
        with pytest.raises(UserError, match=pattern), hold_directory(tmp_path / "run"):
            pass
    finally:
        holder.kill()
        holder.wait()


@pytest.mark.parametrize("forked", ["", FORK], ids=["alone", "with a forked process"])
def test_a_killed_holder_holds_nothing(tmp_path, forked):
    holder = start_holder(tmp_path / "run", forked)
    try:
        holder.kill()
        holder.wait()
        assert (tmp_path / "run" / LOCK).exists()
        with hold_directory(tmp_path / "run"):
            pass
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["held"]
    finally:
        if forked:
            os.killpg(holder.pid, signal.SIGKILL)


def test_another_thread_is_kept_out_and_the_same_one_is_not(tmp_path):
    caught: list[BaseException] = []

    def hold():
        try:
            with hold_directory(tmp_path / "run"):
                pass
        except UserError as error:
            caught.append(error)

    with hold_directory(tmp_path / "run"), hold_directory(tmp_path / "run" / ".." / "run"):
        thread = threading.Thread(target=hold)
        thread.start()
        thread.join()
        assert is_holding()
    assert not is_holding()
    assert f"in use by process {os.getpid()}" in str(caught[0])
    hold()
    assert len(caught) == 1


def test_directories_are_removed_if_nothing_was_written(tmp_path):
    with hold_directory(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK).exists()
    assert list(tmp_path.iterdir()) == []
    with hold_directory(tmp_path / "a" / "b"):
        (tmp_path / "a" / "kept").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["kept"]


def test_a_directory_that_was_there_stays(tmp_path):
    (tmp_path / "a").mkdir()
    with hold_directory(tmp_path / "a"):
        pass
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


HAMMER = """
import sys, os
from pathlib import Path
from softline.errors import UserError
from softline.locks import hold_directory
root, taken = Path(sys.argv[1]), 0
while taken < 100:
    try:
        with hold_directory(root / "a" / "run"):
            taken += 1
            # fails if another process is here too
            os.mkdir(root / "inside")
            os.rmdir(root / "inside")
    except UserError as error:
        assert "in use by" in str(error)
"""


def test_one_at_a_time_though_all_create_and_remove_the_directory(tmp_path):
    processes = [
        subprocess.Popen([sys.executable, "-c", HAMMER, str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate(timeout=120)[1] for process in processes] == [""] * 3
    # a directory stays if one process made it and another one saw it, but no lock
    assert [path for path in tmp_path.rglob("*") if path.name not in ("a", "run")] == []


def test_files_are_held_apart_from_each_other(tmp_path):
    with hold_file(tmp_path / "a.json"), hold_file(tmp_path / "b.json"):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".a.json.lock", ".b.json.lock"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    told: list[str] = []
    with hold_directory(tmp_path / "run", notify=told.append):
        (tmp_path / "run" / "written").touch()
    assert told == [f"{tmp_path}/run: this file system has no locks, so make sure that no other command writes there"]


def test_a_lock_file_that_is_a_link_overwrites_nothing(tmp_path):
    (tmp_path / "precious").write_text("text")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="could not write"), hold_directory(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "text"
