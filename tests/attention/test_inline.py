import pytest
import torch

from softline import create_attention


def test_feature_maps_change_the_weights():
    maps = {"identity": lambda t: t, "relu": torch.relu, "exp": lambda t: torch.exp(0.2 * t)}
    maps["leaky_relu"] = lambda t: torch.where(t > 0, t, 0.01 * t)
    tokens = torch.randn(2, 35, 32)
    for feature_map, phi in maps.items():
        module = create_attention("inline", 32, 2, feature_map=feature_map)
        q, k, _ = (p.unflatten(-1, (2, 16)).transpose(1, 2) for p in module.qkv(tokens).split(32, dim=-1))
        scores = phi(q) @ phi(k).mT / 4 / 35
        expected = scores - scores.mean(-1, keepdim=True) + 1 / 35
        torch.testing.assert_close(module.weights(tokens, (7, 5)), expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="feature_map must be one of exp, identity, leaky_relu, relu; got 'elu'"):
        create_attention("inline", 32, 2, feature_map="elu")
