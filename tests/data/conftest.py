"""Small sets of images on disk."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture(scope="session")
def picture() -> Callable[..., bytes]:
    """The bytes of an image of one colour."""

    def make(red: int = 0, *, size: tuple[int, int] = (9, 7), kind: str = "JPEG") -> bytes:
        file = io.BytesIO()
        Image.new("RGB", size, (red, 100, 200)).save(file, kind)
        return file.getvalue()

    return make


@pytest.fixture
def postscript(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The bytes of an EPS file, which Pillow draws by Ghostscript; the test fails if that is started."""
    # Pillow loads its plugins when it first meets an unknown file
    Image.init()
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started"))
    return b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 7\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.fixture
def folder(tmp_path: Path, picture: Callable[..., bytes]) -> Path:
    """train and val, each with 3 images of ant and of bee."""
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            directory = tmp_path / "images" / split / name
            directory.mkdir(parents=True)
            for index in range(3):
                (directory / f"{index}.jpg").write_bytes(picture(20 * index))
    return tmp_path / "images"


@pytest.fixture(scope="session")
def pack() -> Callable[[Path, dict[str, bytes]], Path]:
    """Write a .tar file of the given members."""

    def write(path: Path, members: dict[str, bytes]) -> Path:
        with tarfile.open(path, "w") as tar:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return path

    return write
