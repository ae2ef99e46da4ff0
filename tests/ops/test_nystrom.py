import torch

from softline import ops
from tests.support import qkv


def test_nystrom_is_exact_when_every_token_is_a_landmark():
    q, k, v = (0.3 * x for x in qkv(tokens=9))
    out = ops.nystrom_attention(q, k, v, q_landmarks=q, k_landmarks=k, iterations=40)
    torch.testing.assert_close(out, ops.softmax_attention(q, k, v), rtol=1e-6, atol=1e-7)
