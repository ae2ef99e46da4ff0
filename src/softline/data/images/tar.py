"""The members of an uncompressed .tar file.

A file that was cut off, damaged or continued after its end would silently have fewer images if it were read with
Python's tarfile, which stops at the first header that it cannot read. Here every byte between the first header and the
end marker belongs to a member, and only zeros follow the marker. A name may occur once; links, sparse files and parts
of archives on several volumes are refused.
"""

import tarfile
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple, NoReturn

from softline.data.reading import misplaced
from softline.errors import UserError
from softline.files import open_regular

# the names in a folder, in an incremental archive of GNU tar
FOLDER_LIST = b"D"
BLOCK = tarfile.BLOCKSIZE
MAX_DEPTH = 3
"""Number of archives that may be inside each other: a dataset, a split and a class."""
MAX_NAME = 4096
MAX_EXTENSION = 2**20
"""Largest header that extends the next one, in bytes."""
END = bytes(2 * BLOCK)

KINDS = {
    tarfile.LNKTYPE: "a hard link to {}",
    tarfile.SYMTYPE: "a symbolic link to {}",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a named pipe",
}
EXTENDED = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
GLOBAL = (tarfile.XGLTYPE,)
LONG = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
CONTINUED = b"M"
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")


class Entry(NamedTuple):
    """An image of a dataset or a split."""

    parts: tuple[str, ...]
    """Folders, or archives without their ending .tar, and the file name."""
    offset: int = 0
    """Start of its bytes in the file that contains them."""
    size: int = -1
    """Number of bytes; -1 reads to the end of the file."""


def read_tar(path: str, wanted: Callable[[str], bool]) -> tuple[list[Entry], int]:
    """List the files with a wanted name, also those in .tar files inside the .tar file, and count the others."""
    with open_regular(path) as file:
        archive = _Archive(file, path, wanted)
        entries = list(archive.entries(0, file.seek(0, 2), (), 1))
    return entries, archive.others


def check_end(path: str) -> None:
    """Check that a .tar file ends in its end marker, without reading its members."""
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(max(size - len(END), 0))
        if file.read() != END:
            raise UserError(f"{path} must be a complete .tar file: it has no end marker and is truncated")


class _Archive:
    """A file on disk that holds archives.

    name: what errors call it.
    """

    def __init__(self, file: BinaryIO, name: str, wanted: Callable[[str], bool]) -> None:
        self._file, self._name, self._wanted = file, name, wanted
        self._seen = set[tuple[str, ...]]()
        self.others = 0

    def entries(self, start: int, end: int, folder: tuple[str, ...], depth: int) -> Iterator[Entry]:
        """Yield the files of the archive in the bytes ``start`` to ``end``, whose names begin with ``folder``."""
        count, headers = 0, _Headers(self, folder, end)
        place = start
        while (header := headers.read(place, count)) is not None:
            count += 1
            data = header.offset_data
            place = data + -(-_data_size(header) // BLOCK) * BLOCK
            name = header.name.rstrip("/").rpartition("/")[2]
            if place > end:
                self.refuse(folder, f"{_quote(header.name)} claims {header.size:,} bytes, more than are left")
            if header.isdir() or header.type == FOLDER_LIST or name.startswith("."):
                continue
            if name.endswith(COMPRESSED):
                self.refuse(folder, f"{_quote(header.name)} is compressed")
            if not name.endswith(".tar") and not self._wanted(name):
                self.others += 1
                continue
            parts = self._check(header, folder)
            if not name.endswith(".tar"):
                yield Entry(parts, data, header.size)
                continue
            if depth == MAX_DEPTH:
                self.refuse(folder, f"{_quote(header.name)} is inside {depth} others, at most {depth - 1} may be")
            inside = (*parts[:-1], name.removesuffix(".tar"))
            yield from self.entries(data, data + header.size, inside, depth + 1)

    def _check(self, header: tarfile.TarInfo, folder: tuple[str, ...]) -> tuple[str, ...]:
        """Check that a member is a regular file with a name of its own, and return the parts of its name."""
        if kind := KINDS.get(header.type):
            rule = "only regular files are read; create the archive with --dereference and --hard-dereference"
            self.refuse(folder, f"{_quote(header.name)} is {kind.format(_quote(header.linkname))}: {rule}")
        if problem := misplaced(header.name):
            self.refuse(folder, f"the name {_quote(header.name)} is not allowed: {problem}")
        parts = (*folder, *(part for part in header.name.split("/") if part not in ("", ".")))
        if parts in self._seen:
            self.refuse(folder, f"{_quote(header.name)} is in it twice")
        self._seen.add(parts)
        return parts

    def block(self, place: int, size: int, end: int) -> bytes:
        self._file.seek(place)
        # a damaged header may claim more than the archive has
        return self._file.read(max(min(size, end - place), 0))

    def refuse(self, folder: tuple[str, ...], reason: str) -> NoReturn:
        name = "/".join((self._name, *folder)) + (".tar" if folder else "")
        raise UserError(f"{name} must be an uncompressed, complete .tar file: {reason}")


class _Headers:
    """The headers of one archive.

    end: end of the archive in the file on disk.
    """

    def __init__(self, archive: _Archive, folder: tuple[str, ...], end: int) -> None:
        self._archive, self._folder, self._end = archive, folder, end

    def read(self, place: int, count: int) -> tarfile.TarInfo | None:
        """Return the header of the member at ``place``, with extensions applied; None after the end marker.

        count: number of members before it.
        """
        extended: dict[str, str] = {}
        while (header := self._parse(place, count, bool(extended))) is not None:
            place += BLOCK
            if header.type not in EXTENDED + GLOBAL + LONG:
                return self._apply(header, extended, place)
            content = self._extension(header, place)
            place += -(-header.size // BLOCK) * BLOCK
            if header.type in LONG:
                key = "path" if header.type == tarfile.GNUTYPE_LONGNAME else "linkpath"
                extended[key] = content.partition(b"\0")[0].decode("utf-8", "surrogateescape")
            elif header.type in EXTENDED:
                extended |= self._records(content)
            elif unsupported := {"path", "size", "linkpath"} & self._records(content).keys():
                self._refuse(f"a global header sets the {min(unsupported)} of all members")
        return None

    def _parse(self, place: int, count: int, extended: bool) -> tarfile.TarInfo | None:
        block = self._archive.block(place, BLOCK, self._end)
        where = f"after {count:,} members"
        if len(block) < BLOCK:
            self._refuse(f"it ends {where} without the end marker: it is truncated" if count else "it is truncated")
        if not block.strip(b"\0"):
            if extended:
                self._refuse(f"it ends {where} with a header that belongs to no member")
            self._check_rest(place, where)
            return None
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            self._refuse(f"the header {where} is damaged ({error})" if count else f"its first header is none ({error})")
        if block[257:265] == tarfile.GNU_MAGIC:
            # in this format, times lie where ustar has the beginning of a name
            header.name = block[:100].split(b"\0", 1)[0].decode("utf-8", "surrogateescape").rstrip("/")
        if header.size < 0:
            self._refuse(f"{_quote(header.name)} claims {header.size:,} bytes")
        return header

    def _check_rest(self, place: int, where: str) -> None:
        """Check that the end marker and zeros only lie between ``place`` and the end."""
        if self._archive.block(place, len(END), self._end) != END:
            self._refuse(f"it ends {where} with one zero block instead of the two of the end marker")
        while content := self._archive.block(place, 2**20, self._end):
            if content.strip(b"\0"):
                self._refuse(f"something follows the end marker, which is {where}")
            place += len(content)

    def _extension(self, header: tarfile.TarInfo, place: int) -> bytes:
        if header.size > MAX_EXTENSION:
            self._refuse(f"a header has {header.size:,} bytes, at most {MAX_EXTENSION:,} are allowed")
        content = self._archive.block(place, header.size, self._end)
        if len(content) < header.size:
            self._refuse("it ends inside a header: it is truncated")
        return content

    def _records(self, content: bytes) -> dict[str, str]:
        """The records ``LENGTH KEY=VALUE`` of a pax header."""
        records, place = {}, 0
        while place < len(content):
            length, _, _ = content[place : place + 20].partition(b" ")
            size = int(length) if length.isdigit() else 0
            key, equals, value = content[place + len(length) + 1 : place + size].partition(b"=")
            if not equals or not value.endswith(b"\n") or place + size > len(content):
                self._refuse(f"a header has a damaged record: {_quote(content[place : place + 40].decode('latin1'))}")
            records[key.decode("utf-8", "surrogateescape")] = value[:-1].decode("utf-8", "surrogateescape")
            place += size
        return records

    def _apply(self, header: tarfile.TarInfo, extended: dict[str, str], place: int) -> tarfile.TarInfo:
        header.offset_data = place
        header.name = extended.get("path", header.name)
        header.linkname = extended.get("linkpath", header.linkname)
        if "size" in extended:
            size = extended["size"]
            if not (size.isascii() and size.isdecimal()) or len(size) > 20:
                self._refuse(f"{_quote(header.name)} claims {_quote(size)} bytes")
            header.size = int(size)
        if header.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse.") for key in extended):
            self._refuse(f"{_quote(header.name)} is a sparse file: create the archive without --sparse")
        if header.type == CONTINUED:
            self._refuse(f"{_quote(header.name)} continues a file of another volume")
        if len(header.name) > MAX_NAME:
            self._refuse(f"a name has {len(header.name):,} characters, at most {MAX_NAME:,}: {_quote(header.name)}")
        return header

    def _refuse(self, reason: str) -> NoReturn:
        self._archive.refuse(self._folder, reason)


def _data_size(header: tarfile.TarInfo) -> int:
    """Number of bytes that follow the header: links, devices and folders have none, whatever they claim."""
    return 0 if header.type in KINDS or header.isdir() else header.size


def _quote(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}...")
