import pytest
import timm
import torch

import softline  # noqa: F401
from softline.layers.bands import CPU_BAND_NUMBERS, shrunk_bands
from softline.layers.embed import ConvEmbed, PositionEmbed


def test_tokens_have_their_channels_last_in_memory():
    tokens, grid_size = ConvEmbed(3, [8], [2])(torch.randn(2, 3, 8, 6))
    assert grid_size == (4, 3)
    assert tokens.is_contiguous()


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_positions_of_a_large_grid_are_added_in_bands_and_in_place(prefix, dtype):
    position = PositionEmbed(6, (7, 5), num_prefix_tokens=prefix).to(dtype)
    tokens, grid_size = torch.randn(2, prefix + 33 * 19, 6, dtype=dtype), (33, 19)
    with torch.no_grad(), shrunk_bands(400 / CPU_BAND_NUMBERS):
        expected = position(tokens, grid_size)
        fresh = tokens.clone()
        found = position(fresh, grid_size, fresh=True)
    assert found.data_ptr() == fresh.data_ptr()
    assert torch.allclose(found, expected, rtol=0, atol=8 * torch.finfo(dtype).eps * float(expected.abs().max()))


def test_positions_that_widen_the_tokens_or_are_antialiased_are_added_whole():
    tokens = torch.randn(1, 33 * 19, 6)
    with torch.no_grad(), shrunk_bands(400 / CPU_BAND_NUMBERS):
        for position, given in (
            (PositionEmbed(6, (7, 5)), tokens.bfloat16()),
            (PositionEmbed(6, (7, 5), mode="bicubic"), tokens),
        ):
            expected = position(given, (33, 19))
            assert torch.equal(position(given.clone(), (33, 19), fresh=True), expected)


@pytest.mark.parametrize("hooked", [False, True])
def test_positions_do_not_change_what_a_hook_has_seen(hooked):
    stage = timm.create_model("softpp_micro").eval().stages[0]
    kept: list[torch.Tensor] = []
    if hooked:
        stage.embed.register_forward_hook(lambda module, given, found: kept.append(found[0]))
    images = torch.randn(1, 3, 96, 64)
    with torch.no_grad():
        embedded, _ = stage.embed(images)
        kept.clear()
        expected, _ = stage(images, None)
        with shrunk_bands(400 / CPU_BAND_NUMBERS):
            found, _ = stage(images, None)
    assert torch.allclose(found, expected, atol=1e-5)
    assert all(torch.allclose(each, embedded, atol=1e-5) for each in kept)
