import pytest
import torch

from softline import ops
from tests.support import qkv


def test_tokens_take_columns_by_their_rank_among_the_real_ones():
    q, k, v = qkv()
    key_projection, value_projection = torch.randn(2, 6, 256, dtype=torch.float64) / 16
    projections = {"key_projection": key_projection, "value_projection": value_projection}
    mask = torch.rand(2, 35) > 0.4
    masked = ops.linformer_attention(q, k, v, **projections, key_mask=mask)
    for sample in range(2):
        real = mask[sample]
        short = [x[sample : sample + 1, :, real] for x in (q, k, v)]
        alone = ops.linformer_attention(*short, **projections)
        torch.testing.assert_close(masked[sample][:, real], alone[0], rtol=1e-9, atol=1e-11)


def test_linformer_equals_its_equation_up_to_its_maximum_and_refuses_more():
    q, k, v = qkv()
    E, P = torch.randn(4, 35, dtype=torch.float64), torch.randn(4, 35, dtype=torch.float64)
    expected = (q @ (E @ k).mT / 8**0.5).softmax(-1) @ (P @ v)
    projections = {"key_projection": E, "value_projection": P}
    torch.testing.assert_close(ops.linformer_attention(q, k, v, **projections), expected)
    short = ops.linformer_attention(q[:, :, :9], k[:, :, :9], v[:, :, :9], **projections)
    shorter = {"key_projection": E[:, :9], "value_projection": P[:, :9]}
    torch.testing.assert_close(short, ops.linformer_attention(q[:, :, :9], k[:, :, :9], v[:, :, :9], **shorter))
    with pytest.raises(ValueError, match="covers at most 9 tokens, got 35"):
        ops.linformer_attention(q, k, v, **shorter)
