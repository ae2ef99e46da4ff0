import os

import numpy as np
import pytest
from PIL import Image

from softline.data.images import interface
from softline.explorer import uploads
from softline.explorer.uploads import RefusedImageError, read_upload
from tests.explorer.images import write_bomb, write_photo, write_text, write_truncated


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "bmp", "gif", "tiff"])
def test_every_listed_format_is_read_as_rgb(tmp_path, suffix):
    image = read_upload(write_photo(tmp_path / f"photo.{suffix}"), name="photo")
    assert (image.mode, image.size) == ("RGB", (48, 40))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (write_text, "yours.jpg cannot be read as an image: it is none of JPEG, PNG"),
        (write_truncated, "yours.jpg cannot be read as an image: .*truncated"),
        (write_bomb, "it claims more than the 50 million pixels"),
        (lambda path: write_bomb(path, 8000), "yours.jpg has 8,000 x 8,000 pixels; at most 50 million are read"),
        (lambda path: path.write_bytes(b"") or path, "it is none of"),
    ],
)
def test_what_is_no_image_is_refused_by_the_visitors_name(tmp_path, write, message):
    path = tmp_path / "stored.png"
    write(path)
    with pytest.raises(RefusedImageError, match=message):
        read_upload(path, name="yours.jpg")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: None])
def test_what_is_no_file_is_refused_by_the_visitors_name(tmp_path, make):
    make(tmp_path / "stored.png")
    with pytest.raises(RefusedImageError, match=r"^yours\.jpg is not a file$"):
        read_upload(tmp_path / "stored.png", name="yours.jpg")


def test_the_formats_are_those_of_every_reader():
    assert uploads.FORMATS is interface.FORMATS


def test_a_large_file_is_refused_before_it_is_opened(tmp_path):
    path = tmp_path / "large.jpg"
    with path.open("wb") as file:
        file.truncate(25 * 2**20)
    with pytest.raises(RefusedImageError, match=r"large\.jpg has 25 MB; at most 20 MB can be uploaded"):
        read_upload(path, name="large.jpg")


def test_pixels_are_counted_before_they_are_decoded(tmp_path, monkeypatch):
    path = write_photo(tmp_path / "photo.png")
    monkeypatch.setattr(uploads, "MAX_PIXELS", 48 * 40 - 1)
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("decoded"))
    with pytest.raises(RefusedImageError, match="48 x 40 pixels"):
        read_upload(path, name="photo.png")


def test_an_image_smaller_than_a_patch_is_refused(tmp_path):
    with pytest.raises(RefusedImageError, match="has 40 x 15 pixels, less than a patch: at least 16 x 16"):
        read_upload(write_photo(tmp_path / "small.png", (40, 15)), name="small.png")


def test_sixteen_bits_are_refused_rather_than_cut_off(tmp_path):
    Image.fromarray(np.zeros((20, 20), np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(RefusedImageError, match="8 bits for each colour"):
        read_upload(tmp_path / "deep.png", name="deep.png")


def test_a_turn_that_a_camera_stored_is_applied(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (48, 40), "red").save(tmp_path / "turned.jpg", exif=exif)
    assert read_upload(tmp_path / "turned.jpg", name="turned").size == (40, 48)


def test_what_is_transparent_becomes_white(tmp_path):
    Image.new("RGBA", (20, 20), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert read_upload(tmp_path / "clear.png", name="clear").getpixel((5, 5)) == (255, 255, 255)


def test_a_large_image_is_reduced(tmp_path):
    Image.new("RGB", (4096, 1024), "red").save(tmp_path / "wide.jpg")
    assert read_upload(tmp_path / "wide.jpg", name="wide").size == (2048, 512)
