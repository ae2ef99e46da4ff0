import copy

import pytest
import timm
import torch
from torch import nn

import softline  # noqa: F401  registers the backbones
from softline.heads.features import STRIDES, StageMaps
from tests.support import assert_within_budget


def micro(name="softpp_micro"):
    torch.manual_seed(0)
    return timm.create_model(name, features_only=True)


@pytest.mark.parametrize("name", ["softpp_micro", "inline_micro", "resnet18"])
def test_maps_have_the_strides_of_a_pyramid(name):
    body = timm.create_model(name, features_only=True, out_indices=(-4, -3, -2, -1))
    maps = StageMaps(body)
    shapes = [stage.shape for stage in maps(torch.rand(2, 3, 64, 96))]
    assert shapes == [(2, c, 64 // s, 96 // s) for c, s in zip(maps.channels, STRIDES, strict=True)]


def test_other_strides_are_refused():
    body = timm.create_model("resnet18", features_only=True)
    with pytest.raises(ValueError, match=r"strides \(4, 8, 16, 32\), got \(2, 4, 8, 16, 32\)"):
        StageMaps(body)


def test_each_stage_is_normalised_over_its_channels():
    body = micro()
    for stage in StageMaps(body)(torch.rand(2, 3, 64, 96)):
        torch.testing.assert_close(stage.mean(1), torch.zeros_like(stage[:, 0]), atol=1e-5, rtol=0)
        torch.testing.assert_close(stage.var(1, correction=0), torch.ones_like(stage[:, 0]), atol=1e-2, rtol=0)


def test_norms_can_be_left_to_the_head():
    body = micro().eval()
    images = torch.rand(1, 3, 64, 64)
    maps = StageMaps(body, norm=False)
    assert not any(isinstance(module, nn.LayerNorm) for module in maps.norms)
    for stage, plain in zip(maps(images), body(images), strict=True):
        assert torch.equal(stage, plain)


def test_stages_are_chosen_with_their_norms():
    maps = StageMaps(micro(), stages=(1, 3))
    found = maps(torch.rand(1, 3, 64, 96))
    assert [stage.shape[2:] for stage in found] == [(8, 12), (2, 3)]
    sum(stage.square().sum() for stage in found).backward()
    assert all(parameter.grad is not None for parameter in maps.norms.parameters())


@pytest.mark.parametrize("stages", [(), (1, 0), (1, 1), (3, 4), (-1,)])
def test_impossible_stages_are_refused(stages):
    with pytest.raises(ValueError, match="stages must be some of 0, 1, 2, 3 in order"):
        StageMaps(micro(), stages=stages)


@pytest.mark.parametrize("name", ["softpp_micro", "inline_micro"])
def test_padding_does_not_change_an_images_maps(name):
    maps = StageMaps(micro(name)).eval()
    exact_maps = copy.deepcopy(maps).double()
    # the first and the third make one batch
    sizes = [(50, 70), (128, 96), (64, 90), (33, 128)]
    batch = torch.zeros(4, 3, 128, 128)
    for image, (height, width) in zip(batch, sizes, strict=True):
        image[:, :height, :width] = torch.rand(3, height, width)
    with torch.no_grad():
        together = maps(batch, sizes)
        for row, (height, width) in enumerate(sizes):
            image = batch[row : row + 1, :, : -(-height // 32) * 32, : -(-width // 32) * 32]
            for stage, alone, exact in zip(together, maps(image), exact_maps(image.double()), strict=True):
                h, w = alone.shape[2:]
                assert_within_budget([stage[row : row + 1, :, :h, :w]], [alone], [exact])
                assert stage[row, :, h:].abs().sum() == stage[row, :, :, w:].abs().sum() == 0


def test_without_sizes_padding_does_change_them():
    maps = StageMaps(micro()).eval()
    image = torch.rand(1, 3, 64, 64)
    padded = torch.zeros(1, 3, 128, 128)
    padded[:, :, :64, :64] = image
    error = (maps(padded)[-1][:, :, :2, :2] - maps(image)[-1]).abs().max()
    assert error > 0.1


def test_gradients_reach_every_image_of_a_padded_batch():
    maps = StageMaps(micro())
    images = torch.rand(2, 3, 96, 128, requires_grad=True)
    sum(stage.square().sum() for stage in maps(images, [(96, 128), (40, 60)])).backward()
    assert images.grad[0].abs().sum() > 0
    assert images.grad[1, :, :64, :64].abs().sum() > 0
    assert images.grad[1, :, 64:].abs().sum() == images.grad[1, :, :, 64:].abs().sum() == 0


@pytest.mark.parametrize(
    ("shape", "sizes", "message"),
    [
        ((2, 3, 64, 64), [(64, 64)], r"sizes must have one entry per image \(2\), got 1"),
        ((1, 3, 60, 64), [(60, 64)], "padded to multiples of 32, got 60 x 64"),
        ((1, 3, 64, 64), [(65, 64)], "within the images' 64 x 64, got 65 x 64"),
        ((1, 3, 64, 64), [(0, 64)], "within the images' 64 x 64, got 0 x 64"),
    ],
)
def test_impossible_sizes_are_refused(shape, sizes, message):
    with pytest.raises(ValueError, match=message):
        StageMaps(micro())(torch.rand(shape), sizes)
