"""SOFT's linear form P^T (M (P v)), recomputing P in the backward pass.

P = kernel(landmarks, q) [m, N] has more elements than the queries, so that saving it in every layer would dominate
training memory. Recomputing it reduces what is saved from O(N m) to O(N D).

With U = M S, S = P v, and an incoming gradient g [N, Dv]:
    dU = P g,  dM = dU S^T,  dS = M^T dU,  dv = P^T dS,
    W = P * (U g^T + dS v^T),                                 the gradient of the exponents of P
    dq_j = scale * sum_i W_ij (l_i - q_j),  dl_i = scale * sum_j W_ij (q_j - l_i).
"""

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from softline.ops.chunks import is_traced, multiply_by, token_chunks
from softline.ops.gaussian import hide_pairs, left_factor, power_of_two, right_factor
from softline.ops.inputs import prepare, saturate

# P is computed in blocks: several samples, or some tokens of one. On a CPU a block has 16 MB, which its last cache
# holds; other devices run fastest with few and large blocks. The blocks of a sample are kept for their second use,
# unless they have more numbers together than the limit (32 MB)
CPU_BLOCK_NUMBERS = 2**22
KEPT_NUMBERS = 2**23


def soft_linear(
    q: Tensor,
    landmarks: Tensor,
    v: Tensor,
    inverse: Tensor,
    centre: Tensor,
    scale: float,
    key_mask: Tensor | None,
) -> Tensor:
    """P^T inverse P v [B, H, N, Dv] in the dtype of v.

    q: [B, H, N, D], v: [B, H, N, Dv], in any floating-point type; masked rows may hold any values.
    landmarks: [B, H, m, D], inverse: [B, H, m, m], in float32 or wider; rows and columns of the inverse that belong to
        masked landmarks are 0.
    centre: the point [B, H, 1, D] from which distances are computed, see `gaussian_kernel`.
    """
    # torch takes longer to enter a function with a gradient than small inputs take to compute
    run = _SoftLinear.apply if torch.is_grad_enabled() else _SoftLinear.forward
    out: Tensor = run(q, landmarks, v, inverse, centre, scale, key_mask)[0]
    return out


class SoftSums:
    """The linear form for queries and values that come in parts: all of them are added before any are read.

    landmarks, inverse, centre, scale: see `soft_linear`.
    """

    def __init__(self, landmarks: Tensor, inverse: Tensor, centre: Tensor, scale: float) -> None:
        self.landmarks, self.inverse, self.centre, self.scale = landmarks, inverse, centre, scale
        self.summary: Tensor | None = None

    def add(self, q: Tensor, v: Tensor) -> None:
        """Add P v of queries [B, H, n, D] and their values [B, H, n, Dv]."""
        for samples, kernel in self._kernels(q):
            product = kernel.times(v)
            if self.summary is None:
                self.summary = product.new_zeros(len(q), *product.shape[1:])
            self.summary[samples] += product

    def read(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        """P^T inverse P v [B, H, n, Dv] of these queries, in the dtype of the values."""
        assert self.summary is not None, "everything has been added"
        out = _Tokens(q.new_empty((), dtype=dtype).expand(*q.shape[:3], self.summary.shape[-1]))
        for samples, kernel in self._kernels(q):
            mixed = self.inverse[samples] @ self.summary[samples]
            for chunk in kernel.chunks:
                out.put(samples, chunk, saturate(kernel.block(chunk).mT @ mixed, dtype))
        return out.whole()

    def _kernels(self, q: Tensor) -> Iterator[tuple[slice, "_Kernel"]]:
        for samples in _sample_groups(q, self.landmarks):
            yield samples, _Kernel(q, self.landmarks, self.centre, self.scale, None, samples)


class _SoftLinear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor,
        landmarks: Tensor,
        v: Tensor,
        inverse: Tensor,
        centre: Tensor,
        scale: float,
        key_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output, and P v for the backward pass."""
        out, summaries = _Tokens(v), []
        for samples in _sample_groups(q, landmarks):
            kernel = _Kernel(q, landmarks, centre, scale, key_mask, samples)
            summary = kernel.times(v)  # [B, H, m, Dv]
            mixed = inverse[samples] @ summary
            for chunk in reversed(kernel.chunks):
                out.put(samples, chunk, saturate(kernel.block(chunk).mT @ mixed, v.dtype))
            summaries.append(summary)
        return out.whole(), _join(summaries)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, landmarks, v, inverse, centre, ctx.scale, key_mask = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, landmarks, v, inverse, centre, output[1], key_mask)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, landmarks, v, inverse, centre, summary, key_mask = ctx.saved_tensors
        d_q, d_v, small = _Tokens(q), _Tokens(v), []
        for samples in _sample_groups(q, landmarks):
            kernel = _Kernel(q, landmarks, centre, ctx.scale, key_mask, samples)
            # a saved summary would cut off second derivatives, so it is recomputed if they are wanted
            kept = kernel.times(v) if torch.is_grad_enabled() else summary[samples]
            small.append(_differentiate(kernel, grad, v, inverse[samples], kept, d_q, d_v))
        d_landmarks, d_inverse = (_join(list(parts)) for parts in zip(*small, strict=True))
        return d_q.whole(), d_landmarks, d_v.whole(), d_inverse, None, None, None


def _differentiate(
    kernel: "_Kernel", grad: Tensor, v: Tensor, inverse: Tensor, summary: Tensor, d_q: "_Tokens", d_v: "_Tokens"
) -> tuple[Tensor, Tensor]:
    """Write the gradients of a kernel's queries and values to d_q and d_v; return those of landmarks and inverse."""
    d_mixed = kernel.times(grad)
    d_summary = inverse.mT @ d_mixed
    both = torch.cat([inverse @ summary, d_summary], dim=-1)  # [B, H, m, 2 Dv]
    pulled = torch.zeros_like(kernel.left)  # [B, H, m, D + 2]
    centred_one = right_factor(kernel.landmarks, kernel.centre, kernel.scale)[..., :-1]  # [B, H, m, D + 1]
    for chunk in reversed(kernel.chunks):
        P, right = kernel.block(chunk), kernel.right(chunk)
        d_v.put(kernel.samples, chunk, P.mT @ d_summary)
        sides = torch.cat([kernel.tokens(grad, chunk), kernel.tokens(v, chunk)], dim=-1)
        W = multiply_by(both @ sides.mT, P)
        pulled = pulled + W @ right
        moved = _difference(W.mT @ centred_one, right[..., :-1])
        d_q.put(kernel.samples, chunk, multiply_by(moved, kernel.scale))
    d_landmarks = multiply_by(_difference(pulled[..., :-1], centred_one), kernel.scale)
    return d_landmarks, d_mixed @ summary.mT


def _difference(sums: Tensor, x_one: Tensor) -> Tensor:
    """sum_j W_ij (y_j - x_i) from [sum_j W_ij y_j, sum_j W_ij] and [x_i, 1]: [..., D + 1] twice -> [..., D]."""
    return torch.addcmul(sums[..., :-1], x_one[..., :-1], sums[..., -1:], value=-1)


class _Kernel:
    """P [B, H, m, N] of some samples, in blocks of tokens; masked tokens are zero columns."""

    def __init__(
        self,
        q: Tensor,
        landmarks: Tensor,
        centre: Tensor,
        scale: float,
        key_mask: Tensor | None,
        samples: slice,
    ) -> None:
        self.q, self.scale, self.samples = q, scale, samples
        self.key_mask = None if key_mask is None else key_mask[samples]
        self.landmarks, self.centre = landmarks[samples], centre[samples]
        self.left = left_factor(self.landmarks, self.centre, scale)
        column = self.left[..., 0].numel()
        self.chunks = _blocks(q.shape[2], column, q.device)
        self.keeps_all = len(self.chunks) == 1 or q.shape[2] * column <= KEPT_NUMBERS
        self.kept: dict[int, Tensor] = {}

    def times(self, x: Tensor) -> Tensor:
        """P x [B, H, m, D] for these samples; x [B, H, N, D] holds all samples."""
        return reduce(torch.add, (self.block(chunk) @ self.tokens(x, chunk) for chunk in self.chunks))

    def block(self, chunk: slice) -> Tensor:
        """P of one block [B, H, m, n]; all blocks are kept, or only the last one if they are large."""
        if chunk.start not in self.kept:
            if not self.keeps_all:
                self.kept.clear()
            P = power_of_two(self.left @ self.right(chunk).mT)
            self.kept[chunk.start] = hide_pairs(P, None, self.mask(chunk))
        return self.kept[chunk.start]

    def right(self, chunk: slice) -> Tensor:
        """`right_factor` of the queries [B, H, n, D + 2]."""
        return right_factor(self.tokens(self.q, chunk), self.centre, self.scale)

    def tokens(self, x: Tensor, chunk: slice) -> Tensor:
        """Rows of x [B, H, N, D] in the kernel's precision, zero where masked."""
        return prepare(x[self.samples, :, chunk], self.mask(chunk))

    def mask(self, chunk: slice) -> Tensor | None:
        return None if self.key_mask is None else self.key_mask[:, chunk]


def _sample_groups(q: Tensor, landmarks: Tensor) -> list[slice]:
    """Slices of samples to process together: as many as fit a block. Samples do not affect each other."""
    batch, heads, tokens = q.shape[:3]
    return _blocks(batch, heads * tokens * landmarks.shape[2], q.device)


def _blocks(count: int, numbers: int, device: torch.device) -> list[slice]:
    """Cut ``count`` samples or tokens, each of which has so many numbers of P, into slices that fit a block."""
    if is_traced():
        return [slice(None)]
    block = CPU_BLOCK_NUMBERS if device.type == "cpu" else KEPT_NUMBERS
    if count * numbers <= block:
        return [slice(None)]
    return token_chunks(count, max(block // numbers, 1))


class _Tokens:
    """A tensor like x [B, H, N, D] that is filled in parts, laid out as [B, N, H, D] in memory for the projections."""

    def __init__(self, x: Tensor) -> None:
        self.like = x
        self.memory: Tensor | None = None

    def put(self, samples: slice, chunk: slice, rows: Tensor) -> None:
        # no saturation: an overflowing gradient must stay visible
        rows = rows.to(self.like.dtype)
        if samples == slice(None) and chunk == slice(None):
            self.memory = rows
            return
        if self.memory is None:
            batch, heads, tokens, width = self.like.shape
            # allocated from rows, which are batched under torch.func.vmap if any operand is
            self.memory = rows.new_empty(batch, tokens, heads, width).transpose(1, 2)
        self.memory[samples, :, chunk] = rows

    def whole(self) -> Tensor:
        assert self.memory is not None, "every part has been written"
        return self.memory


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
