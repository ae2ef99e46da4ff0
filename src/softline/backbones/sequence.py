"""The small encoder with which SOFT's Table 12 compares attentions on the Long Range Arena.

Papers: Long Range Arena, https://arxiv.org/abs/2011.04006; the encoder and its settings are those of Nystromformer,
https://arxiv.org/abs/2102.03902. A sequence is a grid of one row, so that every attention of softline works on it.

Deviations: features are summed over the real tokens and divided by the number of positions, regardless of how far a
batch is padded. For sequences padded to all positions this equals the release's mean; with less padding the result is
the same. Under autocast attention and its projections run in float32; the release runs the projections in half
precision.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

from softline.attention import create_attention
from softline.checks import check_integer, check_range
from softline.errors import UserError
from softline.ops.inputs import widen, without_autocast

# length of a landmark window; shorter sequences are padded
LEAST_TOKENS = 4

_SOFT = {"sampling": "avgpool", "ratio": (1, 4), "max_landmarks": (1, 64), "value_conv": None}
SEQUENCE_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"dropout": 0.1},
    # means of 4 tokens as in the paper, but at most 64 landmarks
    "soft": _SOFT,
    "softpp": _SOFT,
    "inline": {"local_kernel": (1, 3)},
    "nystrom": {"max_landmarks": (1, 64), "value_conv": (1, 35)},
    "focused": {"value_conv": (1, 5)},
    "angular": {"value_conv": (1, 9)},
    "enhanced": {"value_conv": (1, 3)},
    # Table 12's baselines are Linformer-256, Performer-256 and Reformer-2
    "linformer": {"rank": 256},
    "performer": {"num_features": 256},
    "reformer": {"rounds": 2},
}
"""Options of each attention on sequences; the others keep their defaults."""


class SequenceBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with dropout; attention in float32 under autocast."""

    def __init__(self, dim: int, attention: nn.Module, *, mlp_dim: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attention
        self.dropout = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, mlp_dim, drop=dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: tokens [B, N, C]; mask: bool [B, N], True = real token."""
        x = x + self.dropout(self._attend(self.norm1(x), mask))
        return x + self.mlp(self.norm2(x))

    @without_autocast
    def _attend(self, x: Tensor, mask: Tensor) -> Tensor:
        attended: Tensor = self.attn(x.to(self.norm1.weight.dtype), (1, x.shape[1]), mask)
        return attended


class SequenceEncoder(nn.Module):
    """Encode token ids [B, N], 0 for padding, as one vector per sequence [B, dim].

    vocabulary: number of token ids.
    positions: number of learned positions; no sequence may be longer.
    attention: name of an attention in `softline.attention`.
    attention_options: options of the attention that override `SEQUENCE_OPTIONS`; ``{"max_landmarks": "ratio"}`` gives
        SOFT as many landmarks as in the paper, one per 4 tokens, at a cost that is no longer linear.
    """

    def __init__(
        self,
        vocabulary: int,
        positions: int,
        *,
        attention: str = "softpp",
        attention_options: Mapping[str, Any] | None = None,
        dim: int = 64,
        depth: int = 2,
        num_heads: int = 2,
        mlp_dim: int = 128,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        sizes = {"vocabulary": vocabulary, "positions": positions, "depth": depth, "mlp_dim": mlp_dim}
        for name, value in sizes.items():
            check_integer(name, value, 1)
        check_range("dropout", dropout, 0, 1, open_high=True)
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(positions, dim)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)
        self.dropout = nn.Dropout(dropout)
        options = sequence_options(attention, positions, attention_options)
        self.blocks = nn.ModuleList(
            SequenceBlock(dim, create_attention(attention, dim, num_heads, **options), mlp_dim=mlp_dim, dropout=dropout)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        positions, length = self.positions.num_embeddings, tokens.shape[1]
        if length > positions:
            raise UserError(f"a sequence must have at most {positions} tokens (positions), got {length}")
        x = self.dropout(self.tokens(tokens) + self.positions.weight[:length])
        missing = max(LEAST_TOKENS - length, 0)
        x, mask = F.pad(x, (0, 0, 0, missing)), F.pad(tokens != 0, (0, missing))
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x).masked_fill(~mask[..., None], 0)
        return (widen(x).sum(1) / positions).to(self.norm.weight.dtype)


def sequence_options(attention: str, positions: int, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Options of an attention for sequences of at most ``positions`` tokens."""
    length = {"max_tokens": max(positions, LEAST_TOKENS)} if attention == "linformer" else {}
    chosen = {**SEQUENCE_OPTIONS.get(attention, {}), **length, **(options or {})}
    if not chosen.get("local_residual", True) and "local_kernel" not in (options or {}):
        chosen.pop("local_kernel", None)
    return chosen


class SequenceClassifier(nn.Module):
    """Classify sequences [B, parts, N] through a hidden layer: logits [B, num_classes].

    encoder: module ``tokens [B, N] -> [B, dim]``.
    parts: sequences per sample; for two, x and y, the features are x, y, x * y and x - y.
    """

    def __init__(self, encoder: SequenceEncoder, num_classes: int, *, parts: int = 1, hidden_dim: int = 128) -> None:
        super().__init__()
        check_integer("num_classes", num_classes, 1)
        check_integer("hidden_dim", hidden_dim, 1)
        if parts not in (1, 2):
            raise UserError(f"a sample must be 1 sequence, or 2 to compare, got {parts}")
        self.encoder = encoder
        self.parts = parts
        dim = encoder.norm.normalized_shape[0]
        self.head = nn.Sequential(
            nn.Linear(dim if parts == 1 else 4 * dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, num_classes)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.ndim != 3 or tokens.shape[1] != self.parts:
            raise UserError(f"tokens must be [B, {self.parts}, N], got {tuple(tokens.shape)}")
        features = self.encoder(tokens.flatten(0, 1)).unflatten(0, tokens.shape[:2])  # [B, parts, dim]
        if self.parts == 2:
            x, y = features.unbind(1)
            features = torch.stack([x, y, x * y, x - y], 1)
        logits: Tensor = self.head(features.flatten(1))
        return logits
