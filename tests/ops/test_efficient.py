import torch

from softline import ops
from tests.support import qkv


def test_efficient_attention_equals_its_equation():
    q, k, v = qkv()
    torch.testing.assert_close(ops.efficient_attention(q, k, v), q.softmax(-1) @ (k.softmax(-2).mT @ v))
