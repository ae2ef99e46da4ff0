"""Files that a visitor might upload."""

import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image


def write_photo(path: Path, size: tuple[int, int] = (48, 40), *, seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def write_text(path: Path) -> Path:
    path.write_text("no image at all\n" * 50)
    return path


def write_truncated(path: Path) -> Path:
    write_photo(path)
    path.write_bytes(path.read_bytes()[:200])
    return path


def write_bomb(path: Path, side: int = 60000) -> Path:
    """A PNG of some bytes whose header claims side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return path
