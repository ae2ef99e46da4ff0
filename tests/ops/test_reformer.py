import pytest
import torch
import torch.nn.functional as F

from softline import ops
from tests.support import qkv


def test_reformer_with_one_chunk_is_softmax_over_the_other_tokens():
    q, _, v = qkv()
    rotations = ops.reformer_rotations(8, num_buckets=4, rounds=3, seed=0)
    scores = q @ F.normalize(q, dim=-1).mT / 8**0.5
    others = scores.masked_fill(torch.eye(35, dtype=torch.bool), float("-inf")).softmax(-1)
    torch.testing.assert_close(ops.reformer_attention(q, v, rotations=rotations, bucket_size=64), others @ v)


def test_reformer_tokens_see_their_own_chunk_and_the_one_before():
    q = qkv(tokens=40)[0]
    rotations = ops.reformer_rotations(8, num_buckets=8, rounds=1, seed=0)
    weights = ops.reformer_weights(q, rotations=rotations, bucket_size=8)
    rotated = q @ rotations[0].double()
    bucket = torch.cat([rotated, -rotated], -1).argmax(-1)
    for sample in range(2):
        for head in range(2):
            order = sorted(range(40), key=lambda i: (bucket[sample, head, i].item(), i))
            for place, token in enumerate(order):
                chunk = place // 8
                seen = {t for t in order[max(0, chunk - 1) * 8 : chunk * 8 + 8] if t != token}
                assert set(weights[sample, head, token].nonzero().flatten().tolist()) == seen


def test_a_single_token_sees_itself_in_reformer():
    q, _, v = qkv(tokens=1)
    rotations = ops.reformer_rotations(8, num_buckets=4, rounds=2, seed=0)
    torch.testing.assert_close(ops.reformer_attention(q, v, rotations=rotations), v)


def test_reformer_options_are_checked():
    q, _, v = qkv()
    with pytest.raises(ValueError, match="num_buckets must be even, got 5"):
        ops.reformer_rotations(8, num_buckets=5)
    with pytest.raises(ValueError, match=r"rotations must have shape .* with D = 8, got \(4, 6, 16\)"):
        ops.reformer_attention(q, v, rotations=ops.reformer_rotations(6))
