import pytest
import torch
import torch.nn.functional as F

from softline import ops
from tests.support import qkv


@pytest.mark.parametrize("feature_map", list(ops.FEATURE_MAPS))
def test_linear_attention_equals_its_equation(feature_map):
    q, k, v = qkv()
    phi = {
        "elu": lambda x: F.elu(x) + 1,
        "relu": torch.relu,
        "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
        "identity": lambda x: x,
        "exp": torch.exp,
    }[feature_map]
    similarity = phi(q) @ phi(k).mT
    expected = similarity / similarity.sum(-1, keepdim=True)
    torch.testing.assert_close(ops.linear_weights(q, k, feature_map=feature_map), expected)
    torch.testing.assert_close(ops.linear_attention(q, k, v, feature_map=feature_map), expected @ v)


@pytest.mark.parametrize("scale", [1, 30, 1000])
def test_exponential_features_neither_overflow_nor_vanish(scale):
    q, k, v = qkv()
    q, k = scale * q, scale * k
    # phi(q) . phi(k) = sum over channels of exp(q + k)
    exact = torch.logsumexp(q[:, :, :, None] + k[:, :, None], -1).softmax(-1) @ v
    out = ops.linear_attention(q.float(), k.float(), v.float(), feature_map="exp")
    torch.testing.assert_close(out, exact.float(), rtol=1e-4, atol=1e-5 * scale)


def test_a_query_without_features_attends_to_nothing():
    q, k, v = qkv()
    q[:, :, 3] = -1
    assert (ops.linear_attention(q, k, v, feature_map="relu")[:, :, 3] == 0).all()


def test_unknown_feature_map_lists_the_known_ones():
    with pytest.raises(ValueError, match="one of elu, exp, identity, leaky_relu, relu; got 'gelu'; did you mean 'elu'"):
        ops.linear_attention(*qkv(), feature_map="gelu")
