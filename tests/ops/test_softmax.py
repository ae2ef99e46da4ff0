import torch

from softline import ops
from tests.support import qkv


def test_softmax_is_torch_softmax():
    q, k, v = qkv()
    torch.testing.assert_close(ops.softmax_weights(q, k), (q @ k.mT / 8**0.5).softmax(-1))
    torch.testing.assert_close(ops.softmax_attention(q, k, v, scale=0.3), (0.3 * q @ k.mT).softmax(-1) @ v)
