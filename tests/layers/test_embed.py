import torch

from softline.layers.embed import ConvEmbed


def test_a_norm_folded_into_its_convolution_changes_nothing():
    """Evaluation without gradients folds; with gradients, or in training, it does not."""
    embed = ConvEmbed(3, [8, 12], [2, 2]).double()
    images = torch.randn(4, 3, 17, 12, dtype=torch.float64)
    for norm in embed.layers[1::3]:
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
    embed(images)  # moves the running statistics away from 0 and 1
    embed.eval()
    plain, grid_size = embed(images)
    with torch.no_grad():
        folded, _ = embed(images)
    assert grid_size == (5, 3)
    assert plain.requires_grad
    torch.testing.assert_close(folded, plain.detach())
    with torch.no_grad():
        torch.testing.assert_close(embed.train()(images)[0].mean((0, 1)), embed(images)[0].mean((0, 1)))


def test_tokens_have_their_channels_last_in_memory():
    tokens, _ = ConvEmbed(3, [8], [2])(torch.randn(2, 3, 8, 8))
    assert tokens.is_contiguous()
