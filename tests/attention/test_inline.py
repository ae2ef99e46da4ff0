import pytest
import torch

from softline import create_attention
from tests.support import value_and_gradients

MAPS = {
    "identity": lambda t: t,
    "relu": torch.relu,
    "exp": lambda t: torch.exp(0.2 * t),
    "leaky_relu": lambda t: torch.where(t > 0, t, 0.01 * t),
}


def test_feature_maps_change_the_weights():
    tokens = torch.randn(2, 35, 32)
    for feature_map, phi in MAPS.items():
        module = create_attention("inline", 32, 2, feature_map=feature_map)
        q, k, _ = (p.unflatten(-1, (2, 16)).transpose(1, 2) for p in module.qkv(tokens).split(32, dim=-1))
        scores = phi(q) @ phi(k).mT / 4 / 35
        expected = scores - scores.mean(-1, keepdim=True) + 1 / 35
        torch.testing.assert_close(module.weights(tokens, (7, 5)), expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(
        ValueError, match="feature_map must be one of affine_relu, exp, identity, leaky_relu, relu; got 'elu'"
    ):
        create_attention("inline", 32, 2, feature_map="elu")


@pytest.mark.parametrize("feature_map", MAPS)
def test_softmax_takes_the_same_feature_maps(feature_map):
    """Table 1 of the paper."""
    module, tokens = create_attention("softmax", 32, 2, feature_map=feature_map), torch.randn(2, 35, 32)
    q, k, v = (p.unflatten(-1, (2, 16)).transpose(1, 2) for p in module.qkv(tokens).split(32, dim=-1))
    q, k = MAPS[feature_map](q), MAPS[feature_map](k)
    expected = (q @ k.mT / 4).softmax(-1)
    torch.testing.assert_close(module.weights(tokens, (7, 5)), expected, rtol=1e-4, atol=1e-6)
    out = module.proj((expected @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(tokens, (7, 5)), out, rtol=1e-4, atol=1e-6)


def test_relu_before_softmax_confuses_queries():
    """Queries without a positive channel have the same features, hence the same weights."""
    module = create_attention("softmax", 32, 2, feature_map="relu")
    with torch.no_grad():
        module.qkv.weight[:32], module.qkv.bias[:32] = -module.qkv.weight[:32].abs(), 0
    weights = module.weights(torch.rand(1, 35, 32), (7, 5))
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 35))


@pytest.mark.parametrize("name", ["inline", "linear", "softmax"])
def test_relu_of_a_learned_map_has_a_matrix_and_a_vector_for_each_head(name):
    options = {"local_residual": False} if name == "inline" else {}
    learned = create_attention(name, 32, 2, feature_map="affine_relu", **options).double()
    relu = create_attention(name, 32, 2, feature_map="relu", **options).double()
    missing, unexpected = relu.load_state_dict(learned.state_dict(), strict=False)
    assert (missing, len(unexpected)) == ([], 2)
    x = torch.randn(2, 35, 32).double()
    torch.testing.assert_close(learned(x, (7, 5)), relu(x, (7, 5)))
    A, b = (next(p for key, p in learned.named_parameters() if key.endswith(f"affine.{w}")) for w in ("weight", "bias"))
    assert (A.shape, b.shape) == ((2, 16, 16), (2, 1, 16))
    with torch.no_grad():
        for parameter in (A, b):
            parameter.normal_()

    def by_hand(x, A, b):
        q, k, v = (p.unflatten(-1, (2, 16)).transpose(1, 2) for p in relu.qkv(x).split(32, dim=-1))
        q, k = (torch.einsum("hij, bhnj -> bhni", A, part).add(b).relu() for part in (q, k))
        scores = q @ k.mT
        if name == "inline":
            scores = scores / 4 / 35
            weights = scores - scores.mean(-1, keepdim=True) + 1 / 35
        else:
            weights = (scores / 4).softmax(-1) if name == "softmax" else scores / scores.sum(-1, keepdim=True)
        return relu.proj((weights @ v).transpose(1, 2).flatten(2))

    def by_module(x, A, b):
        names = [key for key, _ in learned.named_parameters() if ".affine." in key]
        return torch.func.functional_call(learned, dict(zip(names, (A, b), strict=True)), (x, (7, 5)))

    for actual, expected in zip(*(value_and_gradients(f, x, A, b) for f in (by_module, by_hand)), strict=True):
        torch.testing.assert_close(actual, expected)
