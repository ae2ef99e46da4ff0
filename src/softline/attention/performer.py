"""Performer attention, FAVOR+: Rethinking Attention with Performers (https://arxiv.org/abs/2009.14794)."""

from typing import Any

import torch
from torch import Tensor, nn

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator
from softline.attention.registry import ATTENTIONS
from softline.layers.grid import GridSize


class PerformerCore(nn.Module):
    """The random features, stored in the state dict."""

    features: Tensor

    def __init__(self, head_dim: int, num_features: int, seed: int | None) -> None:
        super().__init__()
        self.seed = seed
        features = ops.performer_features(num_features, head_dim, seed=seed)
        self.register_buffer("features", features.to(torch.get_default_device()))

    def redraw(self, seed: int | None = None) -> None:
        """Draw new random features; ``seed=None`` draws from torch's global generator."""
        self.features.copy_(ops.performer_features(*self.features.shape, seed=seed))

    def reset_parameters(self) -> None:
        self.redraw(self.seed)

    def forward(self, q: Tensor, k: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> dict[str, Any]:
        return {"q": q, "k": k, "features": self.features}


@ATTENTIONS.register("performer")
def performer(
    dim: int,
    num_heads: int,
    *,
    num_prefix_tokens: int = 0,
    num_features: int = 64,
    seed: int | None = None,
    qkv_bias: bool = True,
) -> MultiHeadAttention:
    """FAVOR+ attention.

    num_features: number of random features that estimate the softmax kernel.
    seed: seed of the random features; None draws from torch's global generator. ``module.core.redraw()`` draws new
        ones.
    """
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("performer", ops.performer_attention, ops.performer_weights, ops.performer_factors),
        PerformerCore(dim // num_heads, num_features, seed),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
    )
