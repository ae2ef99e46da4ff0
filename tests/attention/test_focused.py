import torch

from softline import create_attention, ops


def test_the_learned_scale_divides_queries_and_keys():
    module, tokens = create_attention("focused", 32, 2).double(), torch.randn(2, 35, 32).double()
    with torch.no_grad():
        module.core.scale.normal_()
    scale = torch.nn.functional.softplus(module.core.scale)
    q, k, _ = (p.unflatten(-1, (2, 16)).transpose(1, 2) for p in module.qkv(tokens).split(32, dim=-1))
    torch.testing.assert_close(module.weights(tokens, (7, 5)), ops.focused_weights(q / scale, k / scale))
