"""Linformer attention: Self-Attention with Linear Complexity (https://arxiv.org/abs/2006.04768)."""

from typing import Any

import torch
from torch import Tensor, nn

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator
from softline.attention.registry import ATTENTIONS
from softline.checks import check_integer
from softline.layers.grid import GridSize


class LinformerCore(nn.Module):
    """Learned projections of keys and values along the tokens [rank, max_tokens], shared by the heads."""

    def __init__(self, rank: int, max_tokens: int) -> None:
        super().__init__()
        check_integer("rank", rank, 1)
        check_integer("max_tokens", max_tokens, 1)
        self.key_projection = nn.Parameter(torch.empty(rank, max_tokens))
        self.value_projection = nn.Parameter(torch.empty(rank, max_tokens))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for projection in (self.key_projection, self.value_projection):
            # a sum over max_tokens tokens keeps the scale of a single one
            nn.init.normal_(projection, std=projection.shape[1] ** -0.5)

    def forward(self, q: Tensor, k: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> dict[str, Any]:
        projections = {"key_projection": self.key_projection, "value_projection": self.value_projection}
        return {"q": q, "k": k, **projections}

    def extra_repr(self) -> str:
        return "rank={}, max_tokens={}".format(*self.key_projection.shape)


@ATTENTIONS.register("linformer")
def linformer(
    dim: int,
    num_heads: int,
    *,
    num_prefix_tokens: int = 0,
    rank: int = 64,
    max_tokens: int = 16384,
    qkv_bias: bool = True,
) -> MultiHeadAttention:
    """Attention to learned linear combinations of the tokens.

    rank: number of combinations.
    max_tokens: maximum number of tokens, including prefix tokens; more raise an error. The projections have
        2 * rank * max_tokens parameters, so pass no more than needed.
    """
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("linformer", ops.linformer_attention, ops.linformer_weights, ops.linformer_factors),
        LinformerCore(rank, max_tokens),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
    )
