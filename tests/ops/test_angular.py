import math

import pytest
import torch
import torch.nn.functional as F

from softline import ops
from tests.support import qkv


def test_angular_attention_equals_its_equation():
    q, k, v = qkv()
    cosines = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
    similarity = 1 / 2 + cosines / math.pi
    expected = similarity / similarity.sum(-1, keepdim=True)
    torch.testing.assert_close(ops.angular_weights(q, k), expected)
    torch.testing.assert_close(ops.angular_attention(q, k, v), expected @ v)
    left, right = ops.angular_factors(q, k)
    torch.testing.assert_close(left @ right, expected)
    # what is left of the angular kernel is of third order in the cosines, and at most 1/2 - 1/pi
    rest = (1 - cosines.acos() / math.pi) - similarity
    torch.testing.assert_close(rest, (cosines.asin() - cosines) / math.pi)
    assert (rest.abs() <= cosines.abs() ** 3 * (1 / 2 - 1 / math.pi)).all()


@pytest.mark.parametrize("length", [1e-3, 1, 1e3])
def test_only_the_directions_of_queries_and_keys_count(length):
    """A key, its opposite and two keys at right angles to the query."""
    k = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, 0]])[None, None]
    q = torch.tensor([length, 0.0]).expand(1, 1, 4, 2)
    expected = torch.tensor([1 / 2 + 1 / math.pi, 1 / 2 - 1 / math.pi, 1 / 2, 1 / 2]) / 2
    torch.testing.assert_close(ops.angular_weights(q, length * k)[0, 0], expected.expand(4, 4))


def test_tokens_of_length_zero_have_gradients():
    q, k, v = qkv(9)
    q[:, :, 3], k[:, :, 5] = 0, 0
    q.requires_grad_(), k.requires_grad_()
    ops.angular_attention(q, k, v).sin().sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()
    assert k.grad is not None
    assert k.grad.isfinite().all()
