import logging
import os
import threading
import time

import pytest

from softline.explorer import storage as module
from softline.explorer.storage import FullError, Storage

HOUR = 3600


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    return folder


def write(path, size=1, *, age=0.0):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(bytes(size))
    make_old(path, age)
    return path


def make_old(path, age):
    """The time of a file's last change of status cannot be set: the clock of the storage is set instead."""
    os.utime(path, (time.time() - age,) * 2, follow_symlinks=False)


@pytest.fixture
def by_change(monkeypatch):
    """Count the age of a file from its last change alone, which tests can set."""
    walk = module._walk

    def changed(folder):
        for file in walk(folder):
            yield module.Stored(file.path, file.size, os.lstat(file.path).st_mtime)

    monkeypatch.setattr(module, "_walk", changed)


@pytest.mark.usefixtures("by_change")
def test_old_files_are_removed_and_new_ones_kept(folder):
    old, new = write(folder / "a" / "old", age=HOUR), write(folder / "b" / "new")
    Storage(folder).clean()
    assert (old.exists(), new.exists()) == (False, True)


def test_a_file_that_was_moved_here_is_new(folder):
    moved = write(folder / "moved", age=HOUR)
    Storage(folder).clean()
    assert moved.exists()


@pytest.mark.usefixtures("by_change")
def test_empty_directories_are_removed_once_they_are_old(folder):
    (folder / "old" / "inner").mkdir(parents=True)
    (folder / "new").mkdir()
    make_old(folder / "old" / "inner", HOUR)
    Storage(folder).clean()
    assert sorted(path.name for path in folder.rglob("*")) == ["new", "old"]


@pytest.mark.usefixtures("by_change")
def test_links_are_removed_and_never_followed(folder, tmp_path):
    outside = write(tmp_path / "outside" / "precious", age=HOUR)
    (folder / "file").symlink_to(outside)
    (folder / "directory").symlink_to(outside.parent)
    (folder / "loop").symlink_to(folder)
    for link in ("file", "directory", "loop"):
        make_old(folder / link, HOUR)
    Storage(folder).clean()
    assert list(folder.iterdir()) == []
    assert outside.exists()


@pytest.mark.usefixtures("by_change")
def test_what_cannot_be_removed_is_logged_and_the_rest_is_removed(folder, monkeypatch, caplog):
    stuck, gone, other = (write(folder / name, age=HOUR) for name in ("stuck", "gone", "other"))
    unlink = os.unlink

    def fail(path):
        if path == str(gone):
            unlink(path)
        if path == str(stuck):
            raise PermissionError(1, "Operation not permitted")
        unlink(path)

    monkeypatch.setattr(module.os, "unlink", fail)
    Storage(folder).clean()
    assert (stuck.exists(), gone.exists(), other.exists()) == (True, False, False)
    assert [record.getMessage() for record in caplog.records] == [f"cannot remove {stuck}: Operation not permitted"]


def test_the_cleaning_goes_on_whatever_happens(folder, caplog, monkeypatch):
    runs, enough = [], threading.Event()

    def fail(storage):
        runs.append("clean")
        raise RuntimeError("of any kind")

    monkeypatch.setattr(Storage, "clean", fail)
    caplog.set_level(logging.ERROR)
    with Storage(folder).cleaning(lambda: enough.set() if len(runs) > 2 else None, seconds=0.01):
        assert enough.wait(10)
    assert "is tried again" in caplog.text
    ended = len(runs)
    time.sleep(0.05)
    assert len(runs) == ended


def test_a_folder_that_has_gone_is_no_error(folder):
    folder.rmdir()
    Storage(folder).clean()


def test_only_files_of_the_folder_are_its_own(folder, tmp_path):
    write(folder / "inside" / "file")
    (folder / "out").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    storage = Storage(folder)
    assert storage.owns(f"{folder}/inside/file")
    assert storage.owns(f"{folder}/missing")
    assert storage.owns(f"{folder}/inside/file/missing")
    for path in ("", "/", "inside", "inside/../..", "out", "out/missing", "pipe", "x" * 300, "\0", "a/" * 5000):
        assert not storage.owns(f"{folder}/{path}"), path[:20]


@pytest.mark.usefixtures("by_change")
def test_the_oldest_files_make_room(folder):
    files = [write(folder / str(age), 10, age=age) for age in (100, 300, 200)]
    storage = Storage(folder, max_bytes=40, max_files=100)
    with storage.reserve(20):
        assert [file.exists() for file in files] == [True, False, True]
    for _ in range(3):
        with storage.reserve(20):
            pass
    assert [file.exists() for file in files] == [True, False, True]


@pytest.mark.usefixtures("by_change")
def test_files_are_counted_as_well_as_bytes(folder):
    files = [write(folder / str(age), age=age) for age in (300, 200)]
    with Storage(folder, max_bytes=10**6, max_files=2).reserve(1):
        assert [file.exists() for file in files] == [False, True]


def test_files_that_were_just_written_are_kept_and_the_next_one_is_refused(folder):
    file = write(folder / "new", 10)
    with pytest.raises(FullError, match="no room for more files"), Storage(folder, max_bytes=15).reserve(10):
        pass
    assert file.exists()


def test_what_is_under_way_counts(folder):
    storage = Storage(folder, max_bytes=100)
    with storage.reserve(60), pytest.raises(FullError), storage.reserve(60):
        pass
    with storage.reserve(100):
        pass
    storage = Storage(folder, max_files=1)
    with storage.reserve(1), pytest.raises(FullError), storage.reserve(1):
        pass


def test_threads_share_the_quota(folder):
    storage, refused = Storage(folder, max_bytes=10**6, max_files=5), []
    start = threading.Barrier(8)

    def store(place):
        start.wait()
        try:
            with storage.reserve(1):
                write(folder / str(place))
        except FullError:
            refused.append(place)

    threads = [threading.Thread(target=store, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(folder.iterdir())) <= 5
    assert len(refused) == 8 - len(list(folder.iterdir()))
