import pytest
import torch
import torch.nn.functional as F
from torch import nn

from softline.layers.bands import CPU_BAND_NUMBERS, ImageRows, band_numbers, for_each_band, row_bands, shrunk_bands
from softline.layers.embed import ConvEmbed, PatchEmbed

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("rows", "row_numbers", "reach"), [(1, 10, 0), (100, 2**18, 0), (100, 2**18, 3), (7, 2**30, 4)]
)
def test_bands_cover_every_row_once_and_know_what_is_around_them(rows, row_numbers, reach):
    bands = row_bands(rows, row_numbers, CPU, reach=reach)
    assert [row for band in bands for row in range(rows)[band.rows]] == list(range(rows))
    for band in bands:
        assert range(rows)[band.around][band.inside] == range(rows)[band.rows]
        assert band.around.start == max(band.first - reach, 0)
        assert band.around.stop == min(band.last + reach, rows)


def test_a_band_has_as_many_numbers_as_the_cache_allows():
    (first, *_) = row_bands(10**6, 1000, CPU)
    assert band_numbers(CPU) * 0.99 < (first.last - first.first) * 1000 <= band_numbers(CPU)
    with shrunk_bands(2**18 / CPU_BAND_NUMBERS):
        assert band_numbers(CPU) == row_bands(10**9, 1, CPU)[0].last == 2**18


class Counted(nn.Module):
    """A convolution that records the rows it is given."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.rows = []

    def step(self, maps):
        self.rows.append(maps.shape[2])
        return self.conv(maps)

    def forward(self, maps):
        return for_each_band(self, self.step, maps, stride=2, row_numbers=4 * maps.shape[3] // 2, reach=1)


@pytest.mark.parametrize("height", [64, 63, 61])
def test_local_steps_give_the_same_in_bands(height):
    module = Counted().double().eval()
    maps = torch.randn(2, 3, height, 40).double()
    with torch.no_grad():
        expected = module(maps)
        assert module.rows == [height]
        with shrunk_bands(1000 / CPU_BAND_NUMBERS):
            assert torch.allclose(module(maps), expected, rtol=1e-13, atol=1e-13)
    assert max(module.rows[1:]) < height / 2


@pytest.mark.parametrize("reason", ["gradients", "training", "hook"])
def test_all_rows_are_passed_at_once_where_somebody_could_tell(reason):
    module = Counted().train(reason == "training")
    if reason == "hook":
        module.conv.register_forward_hook(lambda *_: None)
    with torch.set_grad_enabled(reason == "gradients"), shrunk_bands(1000 / CPU_BAND_NUMBERS):
        module(torch.randn(1, 3, 64, 40))
    assert module.rows == [64]


@pytest.mark.parametrize("height", [128, 101, 130])
@pytest.mark.parametrize(
    "embed",
    [
        lambda: ConvEmbed(3, [8, 8, 16], [2, 1, 2]),
        lambda: ConvEmbed(3, [8, 8, 16], [2, 1, 2], overlap=False),
        lambda: ConvEmbed(3, [16], [2]),
        lambda: PatchEmbed(3, 16, kernel_size=4, stride=4, norm_layer=nn.LayerNorm),
        lambda: PatchEmbed(3, 16, kernel_size=7, stride=4, padding=2, norm_layer=nn.LayerNorm),
        lambda: PatchEmbed(3, 16, kernel_size=3, stride=2, padding=1),
    ],
    ids=["stem", "patches", "merge", "pvt", "cswin stem", "cswin merge"],
)
def test_embeddings_give_the_same_in_bands(embed, height):
    embed = embed().double().eval()
    for part in embed.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    images = torch.randn(2, 3, height, 77).double()
    with torch.no_grad():
        expected, grid_size = embed(images)
        with shrunk_bands(2**12 / CPU_BAND_NUMBERS):
            tokens, grid_in_bands = embed(images)
    assert grid_in_bands == grid_size
    assert torch.allclose(tokens, expected, rtol=1e-12, atol=1e-12)
    # the border of a band is not the border of the image
    assert not torch.allclose(F.pad(images, (0, 0, 1, 0))[:, :, :-1], images)


@pytest.mark.parametrize(
    "embed", [ConvEmbed(3, [8, 8, 6], [2, 1, 2]), PatchEmbed(3, 6, kernel_size=7, stride=4, padding=3)]
)
def test_images_are_embedded_from_their_rows_and_never_read_whole(embed):
    images, counts = torch.randn(2, 3, 75, 40), []

    def read(first, last):
        assert 0 <= first < last <= 75
        counts.append(last - first)
        return images[:, :, first:last]

    embed = embed.eval()
    with torch.no_grad(), shrunk_bands(2**11 / CPU_BAND_NUMBERS):
        expected, grid_size = embed(images)
        found, found_size = embed(ImageRows((2, 3, 75, 40), CPU, read))
    assert torch.equal(found, expected)
    assert found_size == grid_size
    assert len(counts) > 1
    assert max(counts) < 75


def test_rows_of_images_are_padded_and_stacked():
    images = torch.randn(2, 3, 75, 40)
    rows = ImageRows.stacked([ImageRows.of(image[None]) for image in images])
    assert rows.shape == images.shape
    assert torch.equal(rows.whole(), images)
    padded, expected = rows.padded(32), F.pad(images, (0, 24, 0, 21))
    assert padded.shape == expected.shape
    for first, last in ((0, 96), (60, 80), (80, 96)):
        assert torch.equal(padded.read(first, last), expected[:, :, first:last])
    assert rows.padded(5) is rows
