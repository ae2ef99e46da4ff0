"""Nystrom attention: Nystromformer (https://arxiv.org/abs/2102.03902), landmarks by 2-D average pooling."""

from typing import Any

from torch import Tensor, nn

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Operator
from softline.attention.registry import ATTENTIONS
from softline.checks import check_integer
from softline.layers.grid import GridSize
from softline.layers.landmarks import MaxLandmarks, create_landmarks
from softline.layers.local import ValueConv


class NystromCore(nn.Module):
    """The landmarks of queries and keys."""

    def __init__(self, landmarks: nn.Module, iterations: int, num_prefix_tokens: int) -> None:
        super().__init__()
        check_integer("iterations", iterations, 1)
        self.landmarks = landmarks
        self.iterations = iterations
        self.num_prefix_tokens = num_prefix_tokens

    def forward(self, q: Tensor, k: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> dict[str, Any]:
        prefix = self.num_prefix_tokens
        spatial_mask = None if key_mask is None else key_mask[:, prefix:]
        q_landmarks, landmark_mask = self.landmarks(q[:, :, prefix:], grid_size, spatial_mask)
        k_landmarks, _ = self.landmarks(k[:, :, prefix:], grid_size, spatial_mask)
        landmarks = {"q_landmarks": q_landmarks, "k_landmarks": k_landmarks, "landmark_mask": landmark_mask}
        return {"q": q, "k": k, **landmarks, "iterations": self.iterations}

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}"


@ATTENTIONS.register("nystrom")
def nystrom(
    dim: int,
    num_heads: int,
    *,
    num_prefix_tokens: int = 0,
    ratio: int | GridSize = 1,
    max_landmarks: MaxLandmarks = 7,
    iterations: int = 6,
    value_conv: int | GridSize | None = 3,
    qkv_bias: bool = True,
) -> MultiHeadAttention:
    """Nystrom approximation of softmax attention.

    ratio, max_landmarks: the landmark grid, see `softline.layers.landmarks.create_landmarks`.
    iterations: iterations of the pseudo-inverse.
    value_conv: kernel size of the depthwise convolution of the values that is added; None adds none.
    """
    head_dim = dim // num_heads
    local = None
    if value_conv is not None:
        local = ValueConv(num_heads, head_dim, value_conv, num_prefix_tokens=num_prefix_tokens)
    landmarks = create_landmarks("avgpool", head_dim, ratio=ratio, max_landmarks=max_landmarks)
    return MultiHeadAttention(
        dim,
        num_heads,
        Operator("nystrom", ops.nystrom_attention, ops.nystrom_weights, ops.nystrom_factors),
        NystromCore(landmarks, iterations, num_prefix_tokens),
        num_prefix_tokens=num_prefix_tokens,
        qkv_bias=qkv_bias,
        local=local,
    )
