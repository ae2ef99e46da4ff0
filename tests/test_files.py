import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from softline.errors import UserError
from softline.files import check_writable, make_directory, open_regular, read_bytes


def make_socket(path: Path) -> None:
    # an address of a socket has at most 108 bytes
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(before)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "a named pipe": os.mkfifo,
    "a socket": make_socket,
    "a directory": os.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_opened(tmp_path, kind):
    SPECIAL[kind](tmp_path / "x.jpg")
    with pytest.raises(UserError, match=rf"/x\.jpg must be a regular file, it is {kind}$"):
        open_regular(tmp_path / "x.jpg")


def test_a_file_that_becomes_a_pipe_before_it_is_opened_does_not_block(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "x.jpg")
    monkeypatch.setattr("softline.files.check_regular", lambda _: None)
    with pytest.raises(UserError, match="it is a named pipe"):
        open_regular(tmp_path / "x.jpg")


def test_a_file_may_be_named_by_a_link(tmp_path):
    (tmp_path / "x").write_bytes(b"content")
    (tmp_path / "link").symlink_to("x")
    assert read_bytes(tmp_path / "link") == b"content"
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("directory", "is a directory: name a file"),
        ("fifo", "is not a regular file: name a file"),
        ("none/x.json", "no such directory: .*none"),
        ("file/x.json", "no such directory: .*file"),
        ("/dev/null", "is not a regular file: name a file"),
        # a link, which leads to a regular file where the output is redirected to one
        ("/dev/stdout", "is not a regular file: name a file"),
        ("a\0b", "must not contain a null character"),
        ("x" * 250, "could not write .*File name too long"),
    ],
)
def test_what_cannot_be_written_is_known_beforehand(tmp_path, name, message):
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    before = sorted(tmp_path.iterdir())
    with pytest.raises((UserError, OSError), match=message):
        check_writable(tmp_path / name)
    check_writable(tmp_path / "new.json")
    check_writable(Path(tmp_path / "file"))
    assert sorted(tmp_path.iterdir()) == before


def test_a_directory_that_vanishes_while_it_is_made_is_made_again(tmp_path, monkeypatch):
    """pathlib reports a directory that another process removes at that moment as existing."""
    path, tried = tmp_path / "run", []
    original = Path.mkdir

    def vanish(self, *args, **options):
        tried.append(self)
        if len(tried) == 1:
            raise FileExistsError(17, "File exists", str(self))
        original(self, *args, **options)

    monkeypatch.setattr(Path, "mkdir", vanish)
    assert make_directory(path) == [path]
    assert path.is_dir()
    path.rmdir()
    path.write_text("a file")
    with pytest.raises(OSError, match="could not create the directory"):
        make_directory(path)
