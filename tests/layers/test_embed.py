import torch

from softline.layers.embed import ConvEmbed


def test_tokens_have_their_channels_last_in_memory():
    tokens, grid_size = ConvEmbed(3, [8], [2])(torch.randn(2, 3, 8, 6))
    assert grid_size == (4, 3)
    assert tokens.is_contiguous()
