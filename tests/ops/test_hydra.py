import pytest
import torch
import torch.nn.functional as F

from softline import ops
from tests.support import qkv


def test_hydra_equals_its_equation():
    q, k, v = qkv()
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    state = (F.normalize(flat_k, dim=-1) * flat_v).sum(1, keepdim=True)
    expected = (F.normalize(flat_q, dim=-1) * state).unflatten(-1, (2, 8)).transpose(1, 2)
    torch.testing.assert_close(ops.hydra_attention(q, k, v), expected)
    assert ops.hydra_weights(q, k).shape == (2, 16, 35, 35)
    with pytest.raises(ValueError, match="v must have the shape of q"):
        ops.hydra_attention(q, k, v[..., :4])
