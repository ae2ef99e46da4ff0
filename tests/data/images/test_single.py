"""Images as programs hold them: every form gives the same picture, and anything else is refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from softline.data.images.single import list_images, to_image
from softline.errors import UserError


@pytest.fixture(scope="module")
def pixels():
    return np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


FORMS = {
    "image": Image.fromarray,
    "array": lambda pixels: pixels,
    "floats": lambda pixels: (pixels / 255).astype(np.float32),
    "half precision": lambda pixels: (pixels / 255).astype(np.float16),
    "strided": lambda pixels: np.repeat(pixels, 2, axis=1)[:, ::2],
    "tensor": lambda pixels: torch.from_numpy(pixels).movedim(-1, 0),
    "float tensor": lambda pixels: (torch.from_numpy(pixels).movedim(-1, 0) / 255).requires_grad_(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_every_form_is_the_same_picture(pixels, form, mode, tmp_path):
    Image.fromarray(pixels).save(tmp_path / "file.png")
    expected = to_image(tmp_path / "file.png", mode)
    assert (expected.mode, expected.size) == (mode, (7, 5))
    assert to_image(FORMS[form](pixels), mode).tobytes() == expected.tobytes()


def test_grey_images_have_two_dimensions_or_one_channel(pixels):
    grey = pixels[..., 0]
    expected = Image.fromarray(grey).convert("RGB")
    tensor = torch.from_numpy(grey)
    for given in (grey, grey[..., None], tensor, tensor[None], tensor[None] / 255):
        assert to_image(given, "RGB").tobytes() == expected.tobytes()


def test_the_orientation_of_an_opened_image_is_that_of_its_file(pixels, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as opened:
        assert opened.size == (7, 5)
        turned = to_image(opened, "RGB")
    assert turned.size == (5, 7)
    assert turned.tobytes() == to_image(str(tmp_path / "turned.png"), "RGB").tobytes()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((4, 4, 4), np.uint8), r"must be \[H, W\], \[H, W, 1\] or \[H, W, 3\] as array, got \[4, 4, 4\]"),
        (np.zeros((3, 4, 5), np.uint8), r"as array, got \[3, 4, 5\]"),
        (np.zeros(4, np.uint8), r"as array, got \[4\]"),
        (np.zeros((0, 4), np.uint8), r"as array, got \[0, 4\]"),
        (torch.zeros(4, 5, 3), r"must be \[H, W\], \[1, H, W\] or \[3, H, W\] as tensor, got \[4, 5, 3\]"),
        (torch.zeros(2, 3, 4, 4), r"as tensor, got \[2, 3, 4, 4\]"),
        (np.full((4, 4), 255.0), "values from 0 to 1 if they are floating-point numbers, got 255"),
        (torch.full((3, 4, 4), -0.5), "values from 0 to 1 if they are floating-point numbers, got -0.5"),
        (np.full((4, 4), np.nan), "got nan"),
        (np.zeros((4, 4), np.int64), "of type uint8, or floating-point numbers; they are int64"),
        (torch.zeros(4, 4, dtype=torch.bool), "they are bool"),
        (Image.new("I;16", (4, 4)), "8 bits for each colour are needed, its mode is I;16"),
        (7, "must be a path, a Pillow image, an array or a tensor, got int"),
        ("nowhere.png", "no such image: nowhere.png"),
    ],
)
def test_anything_else_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        to_image(given, "RGB")


def test_lists_and_batches_are_several_images():
    array, tensor = np.zeros((2, 4, 4, 3)), torch.zeros(2, 3, 4, 4)
    assert [each.shape for each in list_images(array)] == [(4, 4, 3)] * 2
    assert [tuple(each.shape) for each in list_images(tensor)] == [(3, 4, 4)] * 2
    assert list_images(("a.png", array)) == ["a.png", array]
    assert list_images([]) == []
    for one in (array[0], tensor[0], "a.png", Image.new("L", (1, 1))):
        assert list_images(one) is None
