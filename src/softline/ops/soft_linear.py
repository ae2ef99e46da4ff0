"""SOFT's linear form P^T (M (P v)), a few tokens at a time and without keeping P for the backward pass.

P = kernel(landmarks, q) [m, N] has more columns than the queries have numbers, so keeping it for every layer would
dominate training memory. Here the backward pass computes it again: O(N D) is kept, not O(N m).

With U = M S, S = P v, and an incoming gradient g [N, Dv]:
    dU = P g,  dM = dU S^T,  dS = M^T dU,  dv = P^T dS,
    W = P * (U g^T + dS v^T),                                 the gradient of the exponents of P
    dq_j = scale * sum_i W_ij (l_i - q_j),  dl_i = scale * sum_j W_ij (q_j - l_i).
"""

from typing import Any

import torch
from torch import Tensor

from softline.ops.chunks import multiply_by, token_chunks
from softline.ops.gaussian import exp_of, hide_pairs, left_factor, right_factor
from softline.ops.inputs import count_tokens, narrow, prepare

# so many numbers of P are computed once and held, 32 MB in float32; a larger P is computed twice, in blocks of which
# each stays in the cache of a CPU
WHOLE_NUMBERS = 2**23
CPU_BLOCK_NUMBERS = 2**19


def soft_linear(
    q: Tensor,
    landmarks: Tensor,
    v: Tensor,
    inverse: Tensor,
    scale: float,
    key_mask: Tensor | None,
    landmark_mask: Tensor | None,
) -> Tensor:
    """P^T inverse P v [B, H, N, Dv] in the dtype of v.

    q: [B, H, N, D], v: [B, H, N, Dv], in any floating-point type; masked rows may hold anything.
    landmarks: [B, H, m, D], inverse: [B, H, m, m], in float32 or wider; masked landmarks are 0.
    """
    out: Tensor = _SoftLinear.apply(q, landmarks, v, inverse, scale, key_mask, landmark_mask)[0]
    return out


class _SoftLinear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor,
        landmarks: Tensor,
        v: Tensor,
        inverse: Tensor,
        scale: float,
        key_mask: Tensor | None,
        landmark_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        kernel = _Kernel(q, landmarks, scale, key_mask, landmark_mask)
        summary = inverse.new_zeros(*inverse.shape[:-1], v.shape[-1])  # [B, H, m, Dv]
        for chunk in kernel.chunks:
            summary = summary + kernel.block(chunk) @ kernel.tokens(v, chunk)
        mixed = inverse @ summary
        out = _Tokens(v)
        for chunk in reversed(kernel.chunks):
            out.put(chunk, kernel.block(chunk).mT @ mixed)
        return out.whole(), summary

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, landmarks, v, inverse, ctx.scale, key_mask, landmark_mask = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, landmarks, v, inverse, output[1], key_mask, landmark_mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, landmarks, v, inverse, summary, key_mask, landmark_mask = ctx.saved_tensors
        kernel = _Kernel(q, landmarks, ctx.scale, key_mask, landmark_mask)
        d_mixed, again = torch.zeros_like(summary), torch.zeros_like(summary)
        for chunk in kernel.chunks:
            d_mixed = d_mixed + kernel.block(chunk) @ kernel.tokens(grad, chunk)
            if torch.is_grad_enabled():
                # a gradient of this gradient is wanted, which the kept summary would cut off
                again = again + kernel.block(chunk) @ kernel.tokens(v, chunk)
        summary = again if torch.is_grad_enabled() else summary
        d_summary = inverse.mT @ d_mixed
        both = torch.cat([inverse @ summary, d_summary], dim=-1)  # [B, H, m, 2 Dv]
        d_q, d_v = _Tokens(q), _Tokens(v)
        pulled = torch.zeros_like(kernel.left)  # [B, H, m, D + 2]
        for chunk in reversed(kernel.chunks):
            P = kernel.block(chunk)
            d_v.put(chunk, P.mT @ d_summary)
            sides = torch.cat([kernel.tokens(grad, chunk), kernel.tokens(v, chunk)], dim=-1)
            W = multiply_by(both @ sides.mT, P)
            right = kernel.right(chunk)
            pulled = pulled + W @ right
            d_q.put(chunk, multiply_by(_difference(W.mT @ kernel.centred_one, right[..., :-1]), ctx.scale))
        d_landmarks = multiply_by(_difference(pulled[..., :-1], kernel.centred_one), ctx.scale)
        return d_q.whole(), d_landmarks, d_v.whole(), d_mixed @ summary.mT, None, None, None


def _difference(sums: Tensor, x_one: Tensor) -> Tensor:
    """sum_j W_ij (y_j - x_i) from [sum_j W_ij y_j, sum_j W_ij] and [x_i, 1]: [..., D + 1] twice -> [..., D]."""
    return torch.addcmul(sums[..., :-1], x_one[..., :-1], sums[..., -1:], value=-1)


class _Kernel:
    """P [B, H, m, N] in blocks of tokens; a masked token is a zero column, a masked landmark a zero row."""

    def __init__(
        self, q: Tensor, landmarks: Tensor, scale: float, key_mask: Tensor | None, landmark_mask: Tensor | None
    ) -> None:
        self.q, self.scale, self.key_mask, self.landmark_mask = q, scale, key_mask, landmark_mask
        count = count_tokens(landmarks.shape[-2], landmark_mask, landmarks.dtype)
        # as in `gaussian_kernel`: distances ignore a common shift
        self.centre = (landmarks.sum(-2, keepdim=True) / count).detach()
        self.left = left_factor(landmarks, self.centre, scale)
        self.centred_one = right_factor(landmarks, self.centre, scale)[..., :-1]  # [B, H, m, D + 1]
        self.chunks = token_chunks(q.shape[2], _block_size(q.shape[2], self.left[..., 0].numel(), q.device))
        self.last: tuple[slice, Tensor] | None = None

    def block(self, chunk: slice) -> Tensor:
        """[B, H, m, n]; the last one is at hand when it is asked for again, so that a single one is computed once."""
        if self.last is None or self.last[0] is not chunk:
            P = exp_of(self.left @ self.right(chunk).mT)
            self.last = chunk, hide_pairs(P, self.landmark_mask, self.mask(chunk))
        return self.last[1]

    def right(self, chunk: slice) -> Tensor:
        """Centred queries and what `right_factor` adds to them [B, H, n, D + 2]."""
        return right_factor(self.tokens(self.q, chunk), self.centre, self.scale)

    def tokens(self, x: Tensor, chunk: slice) -> Tensor:
        """Rows of x [B, H, N, D] in the precision of the kernel, masked ones 0."""
        return prepare(x[:, :, chunk], self.mask(chunk))

    def mask(self, chunk: slice) -> Tensor | None:
        return None if self.key_mask is None else self.key_mask[:, chunk]


def _block_size(tokens: int, landmarks: int, device: torch.device) -> int:
    """Tokens of a block; ``landmarks`` counts those of all samples and heads."""
    if tokens * landmarks <= WHOLE_NUMBERS:
        return max(tokens, 1)
    numbers = CPU_BLOCK_NUMBERS if device.type == "cpu" else WHOLE_NUMBERS
    return max(numbers // landmarks, 1)


class _Tokens:
    """A tensor like x [B, H, N, D] that is filled in chunks; [B, N, H, D] in memory, as projections read it."""

    def __init__(self, x: Tensor) -> None:
        self.like = x
        self.memory: Tensor | None = None

    def put(self, chunk: slice, rows: Tensor) -> None:
        rows = narrow(rows, self.like.dtype)
        if rows.shape[2] == self.like.shape[2]:
            self.memory = rows
            return
        if self.memory is None:
            batch, heads, tokens, width = self.like.shape
            self.memory = self.like.new_empty(batch, tokens, heads, width).transpose(1, 2)
        self.memory[:, :, chunk] = rows

    def whole(self) -> Tensor:
        assert self.memory is not None, "every chunk was put"
        return self.memory
