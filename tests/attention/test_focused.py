import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softline import create_attention, ops


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.core.parameters():
            parameter.normal_()
    return module.double()


def test_the_learned_scale_divides_queries_and_keys():
    module, tokens = randomised(create_attention("focused", 32, 2)), torch.randn(2, 35, 32).double()
    scale = torch.nn.functional.softplus(module.core.scale)
    q, k, _ = (p.unflatten(-1, (2, 16)).transpose(1, 2) for p in module.qkv(tokens).split(32, dim=-1))
    torch.testing.assert_close(module.weights(tokens, (7, 5)), ops.focused_weights(q / scale, k / scale))


def flatten_attention(module: nn.Module, x: Tensor, grid_size: tuple[int, int]) -> Tensor:
    """FLatten's module as its paper and code state it, on all channels at once: [B, N, 32] -> [B, N, 32]."""
    q, k, v = module.qkv(x).split(32, dim=-1)
    k = k + module.core.position.resized(grid_size)
    scale = F.softplus(module.core.scale).flatten()

    def focus(x: Tensor) -> Tensor:
        x = (F.relu(x) + 1e-6) / scale
        return x**3 / (x**3).norm(dim=-1, keepdim=True) * x.norm(dim=-1, keepdim=True)

    q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in (focus(q), focus(k), v))
    similarity = q @ k.mT
    out = similarity / similarity.sum(-1, keepdim=True) @ v
    # the heads are samples of the convolution
    local = module.local.conv(v.mT.unflatten(-1, grid_size).flatten(0, 1)).flatten(2).mT.unflatten(0, (-1, 2))
    return module.proj((out + local).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("grid_size", [(7, 5), (4, 6)])
def test_the_module_is_that_of_the_paper_with_its_position_encoding(grid_size):
    module = randomised(create_attention("focused", 32, 2, position_grid=(7, 5)))
    x = torch.randn(2, grid_size[0] * grid_size[1], 32).double()
    assert module.core.position.weight.shape == (1, 35, 32)
    assert module.local.conv.weight.shape == (16, 1, 5, 5)
    # the 1e-6 under the power is scaled elsewhere
    torch.testing.assert_close(module(x, grid_size), flatten_attention(module, x, grid_size), rtol=1e-5, atol=1e-5)


def test_a_masked_key_has_no_position():
    module = randomised(create_attention("focused", 32, 2, position_grid=(7, 5), value_conv=None))
    x, mask = torch.randn(2, 35, 32).double(), torch.rand(2, 35) > 0.4
    weights = module.weights(x, (7, 5), mask)
    every = module.weights(x, (7, 5))
    expected = (every * mask[:, None, None]) / (every * mask[:, None, None]).sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected * mask[:, None, :, None])


def test_the_grid_of_the_positions_is_checked():
    for wrong in (0, 3.5, (7, 0)):
        with pytest.raises(ValueError, match="position_grid must be"):
            create_attention("focused", 32, 2, position_grid=wrong)


def test_deit_gets_places_for_its_tokens():
    """A position encoding of 197 keys, a scale for each channel, and 5 x 5 kernels with bias for 64 channels."""
    model = timm.create_model("inline_deit_tiny", attention="focused", num_heads=3)
    size = sum(p.numel() for p in model.parameters())
    assert model(torch.randn(1, 3, 64, 96)).shape == (1, 1000)  # resized for another image
    assert size == 5_717_416 + 12 * (197 * 192 + 192 + 64 * 26) == 6_193_576


@pytest.mark.parametrize("position_grid", [None, (7, 5)])
def test_half_precision_saturates_where_the_learned_scale_enlarges_queries_and_keys(position_grid):
    module = create_attention("focused", 32, 2, position_grid=position_grid).half()
    with torch.no_grad():
        module.core.scale.fill_(-8)  # divides by softplus(-8) = 0.0003
    out = module(torch.full((1, 35, 32), 2e4, dtype=torch.float16), (7, 5))
    assert out.isfinite().all()
