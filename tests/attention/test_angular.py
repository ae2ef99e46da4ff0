import pytest
import timm
import torch
import torch.nn.functional as F

from softline import create_attention, ops


@pytest.mark.parametrize("prefix", [0, 1])
def test_one_kernel_per_head_is_added_on_the_grid(prefix):
    module = create_attention("angular", 32, 2, num_prefix_tokens=prefix).double()
    tokens = torch.randn(2, prefix + 35, 32).double()
    q, k, v = (p.unflatten(-1, (2, 16)).transpose(1, 2) for p in module.qkv(tokens).split(32, dim=-1))
    attended = ops.angular_attention(q, k, v)
    maps = v[:, :, prefix:].mT.unflatten(-1, (7, 5))  # [B, H, D, 7, 5]
    for head in range(2):
        kernel = module.local.conv.weight[head].expand(16, 1, 3, 3)
        attended[:, head, prefix:] += F.conv2d(maps[:, head], kernel, padding=1, groups=16).flatten(2).mT
    torch.testing.assert_close(module(tokens, (7, 5)), module.proj(attended.transpose(1, 2).flatten(2)))
    assert create_attention("angular", 32, 2, value_conv=None).local is None


def test_deit_has_the_reported_size():
    model = timm.create_model("inline_deit_tiny", attention="angular", num_heads=3)
    assert sum(p.numel() for p in model.parameters()) == 5_717_416 + 12 * 3 * 9
