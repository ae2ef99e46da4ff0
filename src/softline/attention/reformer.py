"""Reformer attention by locality-sensitive hashing (https://arxiv.org/abs/2001.04451)."""

from typing import Any

import torch
from torch import Tensor, nn

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator
from softline.attention.registry import ATTENTIONS
from softline.checks import check_integer
from softline.layers.grid import GridSize


class ReformerCore(nn.Module):
    """The random rotations that hash the queries, stored in the state dict."""

    rotations: Tensor

    def __init__(self, head_dim: int, bucket_size: int, num_buckets: int, rounds: int, seed: int | None) -> None:
        super().__init__()
        check_integer("bucket_size", bucket_size, 1)
        self.bucket_size = bucket_size
        self.seed = seed
        rotations = ops.reformer_rotations(head_dim, num_buckets=num_buckets, rounds=rounds, seed=seed)
        self.register_buffer("rotations", rotations.to(torch.get_default_device()))

    def redraw(self, seed: int | None = None) -> None:
        """Draw new rotations; ``seed=None`` draws from torch's global generator."""
        rounds, head_dim, half = self.rotations.shape
        self.rotations.copy_(ops.reformer_rotations(head_dim, num_buckets=2 * half, rounds=rounds, seed=seed))

    def reset_parameters(self) -> None:
        self.redraw(self.seed)

    def forward(self, q: Tensor, k: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> dict[str, Any]:
        return {"q": q, "rotations": self.rotations, "bucket_size": self.bucket_size}

    def extra_repr(self) -> str:
        return f"bucket_size={self.bucket_size}"


@ATTENTIONS.register("reformer")
def reformer(
    dim: int,
    num_heads: int,
    *,
    num_prefix_tokens: int = 0,
    bucket_size: int = 64,
    num_buckets: int = 32,
    rounds: int = 4,
    seed: int | None = None,
    qkv_bias: bool = True,
) -> MultiHeadAttention:
    """LSH attention, in which the queries are also the keys.

    bucket_size: tokens in a chunk of the sorted sequence; any number of tokens is padded to a multiple of it.
    num_buckets: number of hash buckets in a round.
    rounds: number of hashing rounds.
    seed: seed of the rotations; None draws from torch's global generator. ``module.core.redraw()`` draws new ones.
    """
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("reformer", ops.reformer_attention, ops.reformer_weights),
        ReformerCore(dim // num_heads, bucket_size, num_buckets, rounds, seed),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
        shared_qk=True,
    )
