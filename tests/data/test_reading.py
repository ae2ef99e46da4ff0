import os
import re
from pathlib import Path

import pytest

from softline.data.reading import FilesBelow, misplaced, read_json, walk
from softline.errors import UserError


def jpgs(top: Path, root: Path | None = None) -> list[tuple[str, ...]]:
    found = walk(top, wanted=lambda name: name.endswith(".jpg"), root=root)
    return [(*folder.parts, name) for folder in found for name in folder.files]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("train/b/2.jpg", "train/b/1.jpg", "train/a/deep/1.jpg", "train/a/1.jpg", "train/a/notes.txt"):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(b"x")
    return tmp_path / "set"


def test_folders_are_walked_by_name(tree):
    (tree / "train" / "a" / ".hidden").write_text("")
    assert jpgs(tree / "train") == [("a", "1.jpg"), ("a", "deep", "1.jpg"), ("b", "1.jpg"), ("b", "2.jpg")]
    assert [folder.others for folder in walk(tree, wanted=lambda name: name.endswith(".jpg"))] == [0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("place", "target"),
    [
        ("train/a/again", "."),
        ("train/a/again", ".."),
        ("train/a/again", "../../.."),
        ("train/c", "a"),
        ("train/c", "/usr"),
        ("train/c", "nowhere"),
        ("train/c", "c"),
        ("train/a/2.jpg", "1.jpg"),
        ("train/a/2.jpg", "/etc/hostname"),
        ("train/a/2.jpg", "nowhere"),
        ("train/a/2.jpg", "2.jpg"),
    ],
)
def test_links_below_the_named_folder_are_refused(tree, place, target):
    (tree / place).symlink_to(target)
    for top in (tree, tree / "train"):
        with pytest.raises(UserError, match=rf"{tree / place} is a symbolic link to {target}: links inside a dataset"):
            jpgs(top, tree)


def test_a_link_to_a_file_that_is_not_wanted_is_one_of_the_others(tree):
    (tree / "train" / "a" / "readme.md").symlink_to("notes.txt")
    assert len(jpgs(tree / "train")) == 4


def test_the_named_folder_may_be_a_link_but_not_to_what_contains_it(tree, tmp_path):
    expected = jpgs(tree / "train")
    (tmp_path / "link").symlink_to(tree)
    assert jpgs(tmp_path / "link" / "train", tmp_path / "link") == expected
    (tree / "train").rename(tmp_path / "elsewhere")
    (tree / "train").symlink_to(tmp_path / "elsewhere")
    assert jpgs(tree / "train", tree) == expected
    for target in (tree, tmp_path, "/"):
        (tree / "train").unlink()
        (tree / "train").symlink_to(target)
        with pytest.raises(UserError, match=rf"set/train is a symbolic link to {target}, which contains it"):
            jpgs(tree / "train", tree)


def test_special_files_with_a_wanted_name_are_refused(tree):
    os.mkfifo(tree / "train" / "a" / "pipe")
    assert len(jpgs(tree)) == 4
    os.mkfifo(tree / "train" / "a" / "0.jpg")
    with pytest.raises(UserError, match=r"train/a/0\.jpg must be a regular file, it is a named pipe"):
        jpgs(tree)


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable to root")
def test_a_folder_that_cannot_be_read_is_not_passed_over(tree):
    (tree / "train" / "b").chmod(0)
    with pytest.raises(PermissionError, match="train/b"):
        jpgs(tree)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"a": "\xff"}', "is not JSON"),
        (b"1" * 10_000, "is not JSON"),
        (b"", "is not JSON"),
        (b"{}{}", "is not JSON"),
    ],
)
def test_what_is_not_json_is_named(tmp_path, content, problem):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(UserError, match=rf"x\.json.*{problem}"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("name", ["a.jpg", "a/b.jpg", "a..b/c.jpg", "...jpg", "a\\b.jpg", "ä.jpg", "a:b.jpg"])
def test_names_below_a_folder_are_allowed(name):
    assert misplaced(name) is None


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("/etc/passwd", "absolute"),
        ("\\\\server\\share", "absolute"),
        ("C:\\x.jpg", "absolute"),
        ("../x.jpg", r"'\.\.'"),
        ("a/../../x.jpg", r"'\.\.'"),
        ("a\\..\\x.jpg", r"'\.\.'"),
        ("a/..", r"'\.\.'"),
        ("a\0.jpg", "null"),
        ("\ud800.jpg", "Unicode"),
        ("", "not empty"),
        (".", "name a file"),
        (None, "text"),
        (7, "text"),
    ],
)
def test_names_that_leave_their_folder_are_not(name, problem):
    reason = misplaced(name)
    assert reason is not None
    assert re.search(problem, reason)


def test_listed_files_are_regular_and_pass_through_no_link(tree):
    files = FilesBelow(tree / "train", "file_name")
    assert files.check("./a//deep/1.jpg") == tree / "train" / "a" / "deep" / "1.jpg"
    (tree / "train" / "a" / "link.jpg").symlink_to("1.jpg")
    (tree / "train" / "c").symlink_to("a")
    for name, link in (("a/link.jpg", "a/link.jpg"), ("c/1.jpg", "c"), ("c/deep/1.jpg", "c")):
        with pytest.raises(UserError, match=rf"train/{link} is a symbolic link to "):
            files.check(name)
    with pytest.raises(UserError, match=r"file_name must be a file below .*: it must not contain '\.\.', got"):
        files.check("../x")
    with pytest.raises(UserError, match="train/a must be a regular file, it is a directory"):
        files.check("a")
    with pytest.raises(FileNotFoundError):
        files.check("a/absent.jpg")
