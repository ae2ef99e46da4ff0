"""Seeded damage to the bytes of a file: what a broken disk, a stopped copy or a careless program does to it."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

TAR_BLOCK = 512
# keys of fields in ONNX files: the graph, whose fields follow, and numbers
GRAPH, VERSIONS = 0x3A, (0x08, 0x28)


@dataclass(frozen=True)
class Damaged:
    """A damaged file and what was done to it."""

    content: bytes
    what: str


def damage(content: bytes, random: Random, *, other: bytes = b"") -> Damaged:
    """Damage a file in one way, or in up to three.

    other: a second file, of which a part may take the place of a part of the first.
    """
    done = []
    for _ in range(random.choice([1, 1, 1, 1, 2, 3])):
        change = random.choice(CHANGES)
        content, what = change(content, random, other)
        done.append(what)
    return Damaged(content, ", then ".join(done))


def boundaries(content: bytes) -> list[int]:
    """Return where the parts of a file begin, by its format; of an unknown one, its lines."""
    if content[:4] == b"PK\x03\x04":
        starts = [match.start() for match in re.finditer(rb"PK(\x03\x04|\x01\x02|\x05\x06|\x06\x06|\x06\x07)", content)]
    elif content[257:262] == b"ustar":
        starts = list(range(0, len(content), TAR_BLOCK))
    elif content[:8] == b"\x89PNG\r\n\x1a\n":
        starts = _png_chunks(content)
    elif content[:2] == b"\xff\xd8":
        starts = [match.start() for match in re.finditer(rb"\xff[\xc0-\xfe]", content)]
    elif tensors := _safetensors(content):
        starts = tensors
    elif fields := _protobuf(content):
        starts = fields
    else:
        starts = [match.end() for match in re.finditer(rb"\n", content)]
    return sorted({start for start in starts if 0 <= start <= len(content)} | {0, len(content)})


def _png_chunks(content: bytes) -> list[int]:
    starts, place = [], 8
    while place + 8 <= len(content):
        starts.append(place)
        place += 12 + int.from_bytes(content[place : place + 4], "big")
    return starts


def _safetensors(content: bytes) -> list[int]:
    """Return where the header and the tensors of a safetensors file begin; nothing for another file."""
    size = int.from_bytes(content[:8], "little")
    if content[8:9] != b"{" or size > len(content) - 8:
        return []
    try:
        header = json.loads(content[8 : 8 + size])
    except ValueError:
        return []
    begins = [entry["data_offsets"][0] for entry in header.values() if "data_offsets" in entry]
    return [8, 8 + size, *(8 + size + begin for begin in begins)]


def _protobuf(content: bytes) -> list[int]:
    """Return where the fields of an ONNX file and of its graph begin; nothing for another file."""
    if content[:1] != b"\x08":
        return []
    starts: list[int] = []
    place, end = 0, len(content)
    while place < end:
        starts.append(place)
        key, place = _number(content, place)
        value, place = _number(content, place)
        if key not in (GRAPH, *VERSIONS):
            # the field is a text or an inner message, of which `value` is the length
            place += value
        if place > end or key & 7 not in (0, 2):
            return []
    return starts


def _number(content: bytes, place: int) -> tuple[int, int]:
    """Read a number of protobuf; return it and the place behind it."""
    number = shift = 0
    while place < len(content):
        byte = content[place]
        number, shift, place = number | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            break
    return number, place


def _place(content: bytes, random: Random) -> int:
    """Choose a place: anywhere, at the beginning of a part, or near one."""
    anywhere = random.randint(0, len(content))
    if random.random() < 0.5:
        return anywhere
    near = random.choice(boundaries(content)) + random.choice([0, 0, 0, -1, 1, 4, 8])
    return min(max(near, 0), len(content))


def _block(content: bytes, random: Random) -> tuple[int, int]:
    """Choose the beginning and the end of a block that is not empty unless the file is."""
    begin = min(_place(content, random), max(len(content) - 1, 0))
    end = _place(content, random) if random.random() < 0.3 else begin + random.choice([1, 2, 8, 64, 512, 4096])
    begin, end = sorted((begin, min(end, len(content))))
    return begin, max(end, min(begin + 1, len(content)))


def _flip(content: bytes, random: Random, other: bytes) -> tuple[bytes, str]:
    changed = bytearray(content)
    count = random.choice([1, 1, 1, 2, 4, 16, 64])
    for _ in range(count if content else 0):
        place = min(_place(content, random), len(content) - 1)
        changed[place] ^= 1 << random.randrange(8)
    return bytes(changed), f"{count} bits flipped"


def _truncate(content: bytes, random: Random, other: bytes) -> tuple[bytes, str]:
    place = _place(content, random)
    return content[:place], f"truncated to {place} of {len(content)} bytes"


def _insert(content: bytes, random: Random, other: bytes) -> tuple[bytes, str]:
    place, rubbish = _place(content, random), random.randbytes(random.choice([1, 4, 100, 3000]))
    return content[:place] + rubbish + content[place:], f"{len(rubbish)} bytes inserted at {place}"


def _delete(content: bytes, random: Random, other: bytes) -> tuple[bytes, str]:
    begin, end = _block(content, random)
    return content[:begin] + content[end:], f"bytes {begin} to {end} deleted"


def _duplicate(content: bytes, random: Random, other: bytes) -> tuple[bytes, str]:
    begin, end = _block(content, random)
    return content[:end] + content[begin:], f"bytes {begin} to {end} duplicated"


def _zero(content: bytes, random: Random, other: bytes) -> tuple[bytes, str]:
    begin, end = _block(content, random)
    return content[:begin] + bytes(end - begin) + content[end:], f"bytes {begin} to {end} zeroed"


def _swap(content: bytes, random: Random, other: bytes) -> tuple[bytes, str]:
    a, b, c = sorted(_place(content, random) for _ in range(3))
    return content[:a] + content[b:c] + content[a:b] + content[c:], f"bytes {a} to {b} swapped with those up to {c}"


def _append(content: bytes, random: Random, other: bytes) -> tuple[bytes, str]:
    rubbish = random.choice([random.randbytes(50), bytes(1024), content[-600:], content])
    return content + rubbish, f"{len(rubbish)} bytes appended"


def _splice(content: bytes, random: Random, other: bytes) -> tuple[bytes, str]:
    other = other or content[::-1]
    mine, theirs = _place(content, random), _place(other, random)
    return content[:mine] + other[theirs:], f"continued at {mine} by byte {theirs} and the following of another file"


CHANGES: tuple[Callable[[bytes, Random, bytes], tuple[bytes, str]], ...] = (
    _flip,
    _flip,
    _truncate,
    _truncate,
    _insert,
    _delete,
    _duplicate,
    _zero,
    _swap,
    _append,
    _splice,
)
