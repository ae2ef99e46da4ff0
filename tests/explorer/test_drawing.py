import torch
from PIL import Image

from softline.explorer.drawing import SIDE, draw_map, draw_photograph
from softline.plotting.colors import COOL, WARM


def at(picture, row, column, grid):
    """The pixel in the middle of a patch."""
    return picture.getpixel((int((column + 0.5) * SIDE / grid), int((row + 0.5) * SIDE / grid)))


def distance(color, other):
    return sum((a - b) ** 2 for a, b in zip(color, other, strict=True))


def test_more_than_average_is_orange_less_is_blue_and_average_is_the_image_in_grey():
    contrast = torch.zeros(4, 4)
    contrast[0, 3], contrast[3, 0] = 1, -1
    picture = draw_map(torch.rand(3, 8, 8), contrast, (1, 1))
    assert distance(at(picture, 0, 3, 4), WARM) < distance(at(picture, 0, 3, 4), COOL)
    assert distance(at(picture, 3, 0, 4), COOL) < distance(at(picture, 3, 0, 4), WARM)
    grey = at(picture, 3, 3, 4)
    assert max(grey) - min(grey) <= 1


def test_the_querys_patch_is_framed_and_its_own_weight_left_to_see():
    plain, marked = (draw_map(torch.rand(1, 8, 8) * 0, torch.zeros(4, 4), cell) for cell in ((3, 3), (1, 1)))
    edge = SIDE // 4
    assert marked.getpixel((edge - 2, edge + 20)) == (255, 255, 255)
    assert at(marked, 1, 1, 4) == at(plain, 1, 1, 4)


def test_patches_at_the_edges_can_be_framed():
    for cell in ((0, 0), (6, 4), (0, 4), (6, 0)):
        assert draw_map(torch.rand(3, 28, 20), torch.rand(7, 5), cell).size == (SIDE, SIDE)


def test_the_click_is_ringed():
    picture = draw_photograph(Image.new("RGB", (64, 64), "green"), (0.25, 0.75))
    x, y = SIDE // 4, 3 * SIDE // 4
    assert (255, 255, 255) in [picture.getpixel((x + radius, y)) for radius in range(8, 16)]
    assert picture.getpixel((x, y)) == picture.getpixel((5, 5)) == (0, 128, 0)
