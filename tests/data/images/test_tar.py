import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from softline.data.images.tar import check_end, read_tar
from softline.errors import UserError

BLOCK = 512
NAMES = ("a/0.jpg", "a/1.jpg", "b/0.jpg")
Edit = Callable[[tarfile.TarInfo], None]


def is_wanted(name: str) -> bool:
    return name.endswith(".jpg")


def parts(path: Path) -> list[tuple[str, ...]]:
    return [entry.parts for entry in read_tar(str(path), is_wanted)[0]]


def member(name: str, data: bytes = b"x" * 700, edit: Edit = lambda _: None, form: int = tarfile.PAX_FORMAT) -> bytes:
    """The blocks of a member."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    edit(info)
    return info.tobuf(form) + data + bytes(-len(data) % BLOCK)


def archive(*members: bytes, end: bytes = bytes(2 * BLOCK)) -> bytes:
    return b"".join(members) + end


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def to_file(content: bytes) -> Path:
        (tmp_path / "set.tar").write_bytes(content)
        return tmp_path / "set.tar"

    return to_file


def refused(path: Path, reason: str) -> None:
    with pytest.raises(UserError, match=rf"must be an uncompressed, complete \.tar file: {reason}"):
        read_tar(str(path), is_wanted)


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["a/0.jpg", "b/" + "long" * 20 + "/" + "name" * 20 + ".jpg", "ä/ö.jpg"])
def test_every_format_of_tarfile_is_read_as_by_tarfile(tmp_path, form, name):
    path = tmp_path / "set.tar"
    with tarfile.open(path, "w", format=form) as tar:
        for number, each in enumerate((name, "c/1.jpg")):
            info = tarfile.TarInfo(each)
            info.size = 600 + number
            tar.addfile(info, io.BytesIO(bytes([number]) * info.size))
        tar.addfile(tarfile.TarInfo("notes.txt"))
    entries, others = read_tar(str(path), is_wanted)
    with tarfile.open(path) as tar:
        expected = [(tuple(each.name.split("/")), each.offset_data, each.size) for each in tar.getmembers()[:2]]
    assert ([tuple(entry) for entry in entries], others) == (expected, 1)


def test_a_file_that_ends_anywhere_too_early_is_refused(write):
    whole = archive(*map(member, NAMES))
    assert len(parts(write(whole))) == 3
    size = len(member(NAMES[0]))
    for length in range(1, len(whole), 256):
        with pytest.raises(UserError, match=r"set\.tar must be an uncompressed, complete \.tar file: "):
            read_tar(str(write(whole[:length])), is_wanted)
    for count in (1, 2, 3):
        refused(write(whole[: count * size]), f"it ends after {count} members without the end marker: it is truncated")
    refused(write(whole[:-BLOCK]), "it ends after 3 members with one zero block instead of the two")
    refused(write(whole[: size + BLOCK]), "'a/1.jpg' claims 700 bytes, more than are left")


def test_the_same_holds_for_an_archive_inside(write):
    inner = archive(*map(member, ("0.jpg", "1.jpg")))
    assert parts(write(archive(member("a.tar", inner)))) == [("a", "0.jpg"), ("a", "1.jpg")]
    path = write(archive(member("a.tar", inner[: len(member("0.jpg"))]), member("b.tar", inner)))
    with pytest.raises(UserError, match=r"set\.tar/a\.tar must be .*: it ends after 1 members without the end marker"):
        read_tar(str(path), is_wanted)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_damaged_header_does_not_end_the_archive(write, place):
    content = bytearray(archive(*map(member, NAMES)))
    content[place * len(member(NAMES[0])) + 3] ^= 1
    refused(write(bytes(content)), f"the header after {place} members is damaged" if place else "its first header is")


def test_nothing_may_follow_the_end_marker(write):
    whole = archive(*map(member, NAMES))
    assert len(parts(write(whole + bytes(20 * BLOCK)))) == 3
    refused(write(whole + whole), "something follows the end marker, which is after 3 members")
    refused(write(whole + bytes(2**20) + b"x"), "something follows the end marker")


LINKS = {
    "a symbolic link to '0.jpg'": tarfile.SYMTYPE,
    "a hard link to '0.jpg'": tarfile.LNKTYPE,
    "a named pipe": tarfile.FIFOTYPE,
    "a device": tarfile.CHRTYPE,
}


@pytest.mark.parametrize("kind", LINKS)
def test_only_regular_files_are_images(write, kind):
    def edit(info: tarfile.TarInfo) -> None:
        info.type, info.linkname = LINKS[kind], "0.jpg"

    refused(write(archive(member("a/0.jpg"), member("a/1.jpg", b"", edit))), f"'a/1.jpg' is {kind}: only regular")
    # what is not an image does not matter
    assert len(parts(write(archive(member("a/0.jpg"), member("a/notes", b"", edit))))) == 1


@pytest.mark.parametrize(
    ("name", "problem"),
    [("/a/0.jpg", "absolute"), ("../a/0.jpg", r"'\.\.'"), ("a/../../0.jpg", r"'\.\.'"), ("/x/a.tar", "absolute")],
)
def test_names_that_leave_the_archive_are_refused(write, name, problem):
    refused(write(archive(member(name))), f"the name {re.escape(repr(name))} is not allowed: .*{problem}")


def test_a_name_occurs_once(write):
    refused(write(archive(member("a/0.jpg"), member("./a/0.jpg"))), r"'\./a/0\.jpg' is in it twice")
    inner = archive(member("0.jpg"))
    with pytest.raises(UserError, match=r"'0\.jpg' is in it twice"):
        read_tar(str(write(archive(member("a/0.jpg"), member("a.tar", inner)))), is_wanted)


def test_archives_nest_as_deep_as_a_dataset_a_split_and_a_class(write):
    content = archive(member("0.jpg"))
    for name in ("ant.tar", "train.tar"):
        content = archive(member(name, content))
    assert parts(write(content)) == [("train", "ant", "0.jpg")]
    for _ in range(500):
        content = archive(member("x.tar", content))
    with pytest.raises(UserError, match=r"x/x\.tar must be .*: 'x\.tar' is inside 3 others, at most 2 may be"):
        read_tar(str(write(content)), is_wanted)


def test_a_name_of_thousands_of_folders_is_refused(write):
    refused(write(archive(member("a/" * 5000 + "0.jpg"))), r"a name has 10,005 characters, at most 4,096")


def test_compressed_archives_inside_are_not_passed_over(write):
    refused(write(archive(member("a/0.jpg"), member("b.tar.gz"))), "'b.tar.gz' is compressed")


def test_sparse_files_are_refused(write):
    def old(info: tarfile.TarInfo) -> None:
        info.type = tarfile.GNUTYPE_SPARSE

    def new(info: tarfile.TarInfo) -> None:
        info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}

    for edit in (old, new):
        refused(write(archive(member("a/0.jpg", edit=edit))), "'a/0.jpg' is a sparse file")


def sized(size: int | str) -> Edit:
    def edit(info: tarfile.TarInfo) -> None:
        if isinstance(size, str):
            info.pax_headers = {"size": size}
        else:
            info.size = size

    return edit


@pytest.mark.parametrize("size", ["-1", "-512", "1e3", "9" * 5000, "", "\u0661"])
def test_sizes_that_are_no_numbers_are_refused(write, size):
    content = archive(member("a/0.jpg", edit=sized(size)), member("a/1.jpg"))
    refused(write(content), r"'a/0\.jpg' claims .* bytes")


def test_sizes_beyond_the_file_are_refused(write):
    for size in (2**40, 2**62, "9" * 19):
        refused(
            write(archive(member("a/0.jpg", b"", sized(size), tarfile.PAX_FORMAT))), r"'a/0\.jpg' claims [\d,]+ byt"
        )
    # GNU's numbers may be negative, and would lead back to the same header for ever
    refused(write(archive(member("a/0.jpg", b"", sized(-1024), tarfile.GNU_FORMAT))), r"'a/0\.jpg' claims -1,024 bytes")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
@pytest.mark.parametrize(
    ("size", "problem"),
    [(2**40, "a header has 1,099,511,627,776 bytes, at most 1,048,576"), (5000, "it ends inside a header")],
)
def test_headers_of_other_headers_have_a_limit(write, kind, size, problem):
    def edit(info: tarfile.TarInfo) -> None:
        info.type, info.size = kind, size

    refused(write(archive(member("x", b"", edit, tarfile.GNU_FORMAT))), problem)


@pytest.mark.parametrize("length", [b"0", b"8", b"x", b"99", b"9" * 30])
def test_damaged_records_of_a_header_are_refused(write, length):
    def edit(info: tarfile.TarInfo) -> None:
        info.type = tarfile.XHDTYPE

    record = member("x", length + b" path=x\n", edit)
    refused(write(archive(record, member("a/0.jpg"))), "a header has a damaged record")


def test_headers_for_all_members_may_hold_remarks_only(write):
    def edit(info: tarfile.TarInfo) -> None:
        info.type = tarfile.XGLTYPE

    assert parts(write(archive(member("x", b"13 comment=1\n", edit), member("a/0.jpg")))) == [("a", "0.jpg")]
    content = archive(member("x", b"16 path=b/0.jpg\n", edit), member("a/0.jpg"))
    refused(write(content), "a global header sets the path of all members")


def test_the_end_marker_can_be_checked_alone(write):
    whole = archive(*map(member, NAMES))
    check_end(str(write(whole)))
    for length in (0, 100, len(whole) - BLOCK, len(whole) - 2 * BLOCK):
        with pytest.raises(UserError, match=r"set\.tar must be a complete \.tar file: it has no end marker"):
            check_end(str(write(whole[:length])))


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs tar")
def test_incremental_archives_of_gnu_tar_have_all_images(tmp_path):
    """Their headers have times where others have the beginning of a name."""
    for name in ("a/1.png", "a/2.png", "b/3.png"):
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name).write_bytes(b"image")
    version = subprocess.run(["tar", "--version"], capture_output=True, text=True, check=True).stdout
    if "GNU" not in version:
        pytest.skip("needs GNU tar")
    subprocess.run(["tar", "-g", "list", "-cf", "x.tar", "train"], cwd=tmp_path, check=True)
    entries, _ = read_tar(str(tmp_path / "x.tar"), lambda name: name.endswith(".png"))
    assert sorted("/".join(entry.parts) for entry in entries) == ["train/a/1.png", "train/a/2.png", "train/b/3.png"]
