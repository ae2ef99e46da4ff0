import pytest
import torch
from torch import Tensor

from softline import ops
from tests.support import qkv


def test_focused_attention_equals_its_equation():
    q, k, v = qkv()

    def focus(x: Tensor) -> Tensor:
        x = torch.relu(x).transpose(1, 2).flatten(2) + 1e-6
        sharp = x**3 / torch.linalg.vector_norm(x**3, dim=-1, keepdim=True)
        return (sharp * torch.linalg.vector_norm(x, dim=-1, keepdim=True)).unflatten(-1, (2, 8)).transpose(1, 2)

    similarity = focus(q) @ focus(k).mT
    expected = similarity / similarity.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(ops.focused_attention(q, k, v), expected)
    with pytest.raises(ValueError, match=r"power must be at least 1, got 0\.5"):
        ops.focused_attention(q, k, v, power=0.5)
