"""What holds for every reader of image files."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image, ImageFile

from softline.data.coco.source import CocoSource
from softline.data.images import open_source
from softline.data.images.interface import EXTENSIONS, FORMATS
from softline.data.images.single import read_image
from softline.data.semantic.sources import open_semantic
from softline.data.sequences.pixels import open_grey_images, open_pathfinder
from softline.errors import UserError
from tests.explorer.images import write_bomb


class Reader(NamedTuple):
    file: Path
    """The file that is spoilt; of a .tar file, the member."""
    read: Callable[[], object]
    links: bool = True
    """Whether it refuses links: one file, or one that is named by a list, may be a link."""


def write_all(picture: Callable[..., bytes], *paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(kind="PNG"))


def folder(root: Path, picture: Callable[..., bytes]) -> Reader:
    write_all(picture, root / "val" / "ant" / "0.jpg")
    return Reader(root / "val" / "ant" / "0.jpg", lambda: open_source(str(root), "val").load(0))


def single(root: Path, picture: Callable[..., bytes]) -> Reader:
    write_all(picture, root / "0.jpg")
    return Reader(root / "0.jpg", lambda: read_image(str(root / "0.jpg"), "RGB"), links=False)


def coco(root: Path, picture: Callable[..., bytes]) -> Reader:
    write_all(picture, root / "images" / "0.jpg")
    entry = {"id": 1, "file_name": "0.jpg", "height": 7, "width": 9}
    content = {"images": [entry], "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
    (root / "objects.json").write_text(json.dumps(content))
    return Reader(root / "images" / "0.jpg", lambda: CocoSource(root / "images", root / "objects.json").load(0))


def semantic(root: Path, picture: Callable[..., bytes]) -> Reader:
    write_all(picture, root / "val" / "0.jpg")
    (root / "valannot").mkdir()
    Image.new("L", (9, 7)).save(root / "valannot" / "0.png")
    return Reader(root / "val" / "0.jpg", lambda: open_semantic("folder", root, "val", classes=2).load(0))


def mask(root: Path, picture: Callable[..., bytes]) -> Reader:
    return semantic(root, picture)._replace(file=root / "valannot" / "0.png")


def grey(root: Path, picture: Callable[..., bytes]) -> Reader:
    write_all(picture, root / "train" / "ant" / "0.jpg", root / "test" / "ant" / "0.jpg")
    return Reader(root / "test" / "ant" / "0.jpg", lambda: open_grey_images(root, "test").load(0))


def pathfinder(root: Path, picture: Callable[..., bytes]) -> Reader:
    images = [root / "imgs" / "0" / f"sample_{number}.png" for number in range(10)]
    write_all(picture, *images)
    (root / "metadata").mkdir()
    lines = [f"imgs/0 sample_{number}.png {number} 1 more\n" for number in range(10)]
    (root / "metadata" / "0.npy").write_text("".join(lines))
    return Reader(images[0], lambda: open_pathfinder(root, "train"), links=False)


READERS = [folder, single, coco, semantic, mask, grey, pathfinder]


@pytest.fixture(params=READERS, ids=lambda reader: reader.__name__)
def reader(request, tmp_path, picture) -> Reader:
    return request.param(tmp_path, picture)


def test_a_postscript_file_named_as_an_image_starts_no_program(reader, postscript):
    reader.file.write_bytes(postscript)
    with pytest.raises(UserError, match=rf"{reader.file} cannot be decoded \(not an image\)"):
        reader.read()


def test_a_pipe_among_the_images_is_named_and_does_not_block(reader):
    reader.file.unlink()
    os.mkfifo(reader.file)
    with pytest.raises(UserError, match=rf"{reader.file} must be a regular file, it is a named pipe"):
        reader.read()


def test_links_in_a_dataset_are_named_with_their_target(reader, tmp_path):
    reader.file.rename(tmp_path / "target")
    reader.file.symlink_to(tmp_path / "target")
    if not reader.links:
        reader.read()
        return
    with pytest.raises(UserError, match=rf"{reader.file} is a symbolic link to {tmp_path}/target: links inside"):
        reader.read()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("side", "reason"), [(50_000, "decompression bomb"), (9_500, "at most 89.5 million are read")])
def test_an_image_of_too_many_pixels_is_refused_by_its_header(reader, monkeypatch, side, reason):
    write_bomb(reader.file, side)
    prepare = ImageFile.ImageFile.load_prepare

    def reserve_memory(image: ImageFile.ImageFile) -> None:
        assert image.width < side
        prepare(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load_prepare", reserve_memory)
    with pytest.raises(UserError, match=rf"{reader.file} cannot be decoded \(.*{reason}"):
        reader.read()


@pytest.mark.filterwarnings("error")
def test_pillows_warning_of_many_pixels_is_an_error_with_the_name_of_the_file(reader):
    # as warnings are errors here
    write_bomb(reader.file, 9_500)
    with pytest.raises(UserError, match=rf"{reader.file} cannot be decoded \(.*exceeds limit of 89478485 pixels"):
        reader.read()


def test_a_file_too_large_for_an_image_is_not_read(reader):
    with reader.file.open("wb") as file:
        file.truncate(2**30 + 1)
    with pytest.raises(UserError, match=rf"{reader.file} cannot be decoded \(it has 1,073,741,825 bytes; at most"):
        reader.read()


@pytest.mark.parametrize("name", ["folder", "single"])
@pytest.mark.parametrize("error", [MemoryError(), RecursionError("deep"), OverflowError("large"), KeyError(3)])
def test_whatever_pillow_raises_is_about_the_file(tmp_path, picture, monkeypatch, name, error):
    def fail(_: object) -> None:
        raise error

    reader = {"folder": folder, "single": single}[name](tmp_path, picture)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    with pytest.raises(UserError, match=rf"{reader.file} cannot be decoded \("):
        reader.read()


def test_a_broken_orientation_is_about_the_file(tmp_path, picture, monkeypatch):
    def fail(_: object, **options: object) -> None:
        raise KeyError(274)

    reader = single(tmp_path, picture)
    monkeypatch.setattr("PIL.ImageOps.exif_transpose", fail)
    with pytest.raises(UserError, match=rf"{reader.file} cannot be used: 274"):
        reader.read()


def test_every_ending_belongs_to_a_format_that_is_decoded():
    Image.init()
    assert {Image.EXTENSION[ending] for ending in EXTENSIONS} <= set(FORMATS)
    assert set(FORMATS) <= set(Image.OPEN)
