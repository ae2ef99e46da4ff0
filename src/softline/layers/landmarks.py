"""Landmark tokens of a grid: SOFT's four samplings (https://arxiv.org/abs/2207.03341, Table 10).

The grid is cut into cells of ``ratio`` x ``ratio`` tokens. With ``max_landmarks="ratio"`` every complete cell gives one
landmark, as in the paper, and the number of landmarks grows with the image. With a cap the landmark grid has at most
that many rows and columns, so that attention through landmarks costs O(N) at any resolution: if there are more cells,
they are averaged in bins, and incomplete cells at the border are included. At 224 pixels both give the paper's 7 x 7.

With a mask, the grid of a sample is the smallest one from the top left corner that contains its real tokens: an image
padded at the bottom and the right has the same landmarks as without padding. A sample smaller than a cell is refused
on its own; in a batch with larger ones it has one landmark with a cap and none without.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softline.checks import check_option
from softline.errors import UserError
from softline.layers.bands import for_each_band
from softline.layers.grid import GridSize, always, as_pair, pad_to_whole, spatial_map, spatial_tokens
from softline.ops.chunks import is_traced, of_any_size
from softline.ops.inputs import hide, narrow, saturate, widen, without_autocast

Sampling = Literal["conv", "avgpool", "random", "biased"]
MaxLandmarks = int | GridSize | Literal["ratio"] | None
Landmarks = tuple[Tensor, Tensor | None]
Count = TypeVar("Count", int, Tensor)


def create_landmarks(
    sampling: Sampling,
    head_dim: int,
    *,
    ratio: int | GridSize = 1,
    max_landmarks: MaxLandmarks = 7,
    scale: float = 1.0,
) -> nn.Module:
    """Build a module ``(q [B, H, height*width, D], grid_size, key_mask) -> landmarks [B, H, m, D], landmark_mask``.

    sampling: "conv": convolution with kernel = stride = ratio, shared by the heads, LayerNorm and GELU; "avgpool": mean
        of each cell; "random": as many random tokens, drawn anew at each training step and fixed in evaluation;
        "biased": as many of the first tokens.
    ratio: side of a cell in tokens, or (rows, columns).
    max_landmarks: maximum rows and columns of the landmark grid, an int for both; "ratio" is the paper's fixed ratio,
        and so is None, which timm does not pass on to its models.
    scale: "conv" convolves scale * q, and its landmarks are divided by scale; the others do not depend on it.

    The landmark mask is bool [B, m], or None without a key mask.
    """
    check_option("sampling", sampling, get_args(Sampling))
    plan = LandmarkPlan(ratio, max_landmarks)
    if sampling == "conv":
        return ConvLandmarks(head_dim, plan, scale)
    if sampling == "avgpool":
        return PooledLandmarks(plan)
    return TokenLandmarks(plan, random=sampling == "random")


def landmark_cap(max_landmarks: MaxLandmarks) -> GridSize | None:
    """The maximum rows and columns of the landmark grid; None if the ratio alone decides."""
    if isinstance(max_landmarks, str):
        if max_landmarks != "ratio":
            raise UserError(f'max_landmarks must be a number, (rows, columns) or "ratio", got {max_landmarks!r}')
        return None
    return None if max_landmarks is None else as_pair("max_landmarks", max_landmarks)


class LandmarkPlan:
    """The cells and bins of a grid, and means over them."""

    def __init__(self, ratio: int | GridSize, max_landmarks: MaxLandmarks) -> None:
        self.ratio = as_pair("ratio", ratio)
        self.cap = landmark_cap(max_landmarks)

    def __repr__(self) -> str:
        return f"ratio={self.ratio}, max_landmarks={self.cap or 'ratio'}"

    def check(self, grid_size: GridSize) -> None:
        if self.ratio[0] > grid_size[0] or self.ratio[1] > grid_size[1]:
            raise UserError(
                f"ratio {self.ratio[0]}x{self.ratio[1]} must not be larger than the grid "
                f"({grid_size[0]}x{grid_size[1]} tokens)"
            )

    def cells(self, tokens: Count, axis: int) -> Count:
        """Number of cells along an axis of ``tokens`` tokens: an int, or one per sample."""
        # not -(-tokens // ratio): ONNX rounds quotients of integers towards 0
        beyond = 0 if self.cap is None else self.ratio[axis] - 1
        return (tokens + beyond) // self.ratio[axis]

    def landmarks(self, tokens: int, axis: int) -> int:
        """Number of landmarks along an axis of ``tokens`` tokens."""
        cells = self.cells(tokens, axis)
        return cells if self.cap is None else min(cells, self.cap[axis])

    def landmarks_of(self, extents: Tensor, axis: int) -> Tensor:
        """`landmarks` per sample: token counts [B] -> [B]."""
        cells = self.cells(extents, axis)
        return cells if self.cap is None else cells.clamp(max=self.cap[axis])

    def cells_each(self, grid_size: GridSize, key_mask: Tensor | None, device: torch.device) -> Tensor | None:
        """Mean number of cells per landmark: [1], or [B] with a mask; None if it is known to be 1."""
        if self.cap is None:
            return None
        if key_mask is None and not is_traced():
            cells, landmarks = (math.prod(map(count, grid_size, (0, 1))) for count in (self.cells, self.landmarks))
            return None if cells == landmarks else torch.full((1,), cells / landmarks, device=device)
        if key_mask is None:
            extents = tuple(torch.full((1,), tokens, device=device) for tokens in grid_size)
        else:
            extents = _extents(key_mask.unflatten(-1, grid_size))
        all_cells, all_landmarks = (
            count(extents[0], 0) * count(extents[1], 1) for count in (self.cells, self.landmarks_of)
        )
        # a sample without real tokens has no cells
        return (all_cells / all_landmarks.clamp(min=1)).clamp(min=1)

    def whole_cells(self, maps: Tensor) -> Tensor:
        """Maps [..., height, width], zero-padded to complete cells if there is a cap."""
        if self.cap is None:
            return maps  # a convolution or pooling with stride = kernel drops incomplete cells
        return pad_to_whole(maps, self.ratio)

    def has_whole_cells(self, grid_size: GridSize) -> bool:
        """Whether no cell is incomplete; in a graph for many sizes, whether none is for any of them."""
        return self.cap is None or all(
            always(tokens % side == 0) for tokens, side in zip(grid_size, self.ratio, strict=True)
        )

    def over_cells(self, module: nn.Module, reduce: Callable[[Tensor], Tensor], maps: Tensor) -> Tensor:
        """Reduce each cell of maps [B, C, height, width] to one place [B, C, rows, columns].

        reduce: a step of ``module``, a convolution or pooling with stride = kernel = ratio.
        """
        if self.cap is None:
            maps = maps[:, :, : maps.shape[2] // self.ratio[0] * self.ratio[0]]
        row_numbers = maps.shape[1] * maps.shape[3] * self.ratio[0]
        return for_each_band(
            module, lambda part: reduce(self.whole_cells(part)), maps, stride=self.ratio[0], row_numbers=row_numbers
        )

    def bins(self, tokens: int, extents: Tensor | None, axis: int, device: torch.device) -> Tensor:
        """Which cells lie in a landmark's bin: [1, landmarks, cells], or [B, landmarks, cells] with extents [B]."""
        cell = torch.arange(self.cells(tokens, axis), device=device)
        # all that the cap allows, of which `means` masks those that a smaller grid does not have: if their number
        # depended on the image, every later shape would be a formula
        count = self.cap[axis] if self.cap is not None and of_any_size(tokens) else self.landmarks(tokens, axis)
        bins = torch.arange(count, device=device)[:, None]
        if extents is None:
            extents = torch.full((1,), tokens, device=device)
        cells = self.cells(extents, axis)[:, None]  # [B, 1]
        bin_of = cell * self.landmarks_of(extents, axis)[:, None] // cells.clamp(min=1)  # [B, cells]
        return (bin_of[:, None] == bins) & (cell < cells)[:, None]

    def _one_cell_each(self, grid_size: GridSize) -> bool:
        """Whether every landmark has one cell; in a graph for many sizes, whether it has for all of them."""
        return self.cap is None or all(
            always(self.cells(tokens, axis) <= most)
            for axis, (tokens, most) in enumerate(zip(grid_size, self.cap, strict=True))
        )

    @without_autocast
    def means(self, sums: Tensor, counts: Tensor | None, grid_size: GridSize, real: Tensor | None) -> Landmarks:
        """Means over the bins [B, C, landmark rows, landmark columns], in float32, from sums and counts of the cells.

        sums: [B, C, rows, columns]; counts: [B or 1, rows, columns], None if each cell counts as one. Both
            may have been divided by the same number.
        real: real tokens [B, height, width], None if all are.
        """
        sums = widen(sums)
        if real is None and self._one_cell_each(grid_size):
            return sums if counts is None else sums / counts[:, None], None
        counts = sums.new_ones(1, *sums.shape[-2:]) if counts is None else counts.to(sums.dtype)
        extents = (None, None) if real is None else _extents(real)
        rows, columns = (self.bins(grid_size[axis], extents[axis], axis, sums.device).to(sums.dtype) for axis in (0, 1))
        counts = rows @ counts @ columns.mT  # [B or 1, landmark rows, landmark columns]
        # channels last, so that the two products multiply a few large matrices and not many small ones
        sums = rows @ sums.permute(0, 2, 3, 1).flatten(2)  # [B, landmark rows, columns * C]
        sums = columns[:, None] @ sums.unflatten(-1, (columns.shape[-1], -1))  # [B, landmark rows, landmark columns, C]
        means = sums.permute(0, 3, 1, 2) / counts.masked_fill(counts == 0, 1)[:, None]
        if real is None and not any(of_any_size(side) for side in grid_size):
            return means, None
        return means, (counts.flatten(1) > 0).expand(means.shape[0], -1)


class ConvLandmarks(nn.Module):
    """Convolution over each cell, mean over the cells of a bin, LayerNorm, GELU."""

    def __init__(self, head_dim: int, plan: LandmarkPlan, scale: float = 1.0) -> None:
        super().__init__()
        self.plan = plan
        self.scale = scale
        self.conv = nn.Conv2d(head_dim, head_dim, plan.ratio, stride=plan.ratio, bias=False)
        self.norm = nn.LayerNorm(head_dim)

    def forward(self, q: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> Landmarks:
        self.plan.check(grid_size)
        heads = q.shape[1]
        # heads are groups with the same weights, so they need not be moved to the batch axis
        weight = (self.scale * self.conv.weight).repeat(heads, 1, 1, 1)
        reduce = partial(F.conv2d, weight=weight, stride=self.plan.ratio, groups=heads)
        # [B, H D, rows, columns]
        cells = self.plan.over_cells(self, reduce, spatial_map(hide(q, key_mask), grid_size))
        # an infinite cell would be NaN in the means of the other bins
        cells = saturate(cells, cells.dtype)
        real = filled = None
        if key_mask is not None:
            real = key_mask.unflatten(-1, grid_size)
            filled = F.max_pool2d(self.plan.whole_cells(real[:, None].float()), self.plan.ratio)[:, 0]
            cells = cells * filled[:, None]
        means, mask = self.plan.means(cells, filled, grid_size, real)
        landmarks = spatial_tokens(means, q.shape[1]).to(self.norm.weight.dtype)
        # flattened, because torch traces LayerNorm's gradient with wrong strides otherwise
        flat = F.gelu(self.norm(landmarks.flatten(0, 2)))
        return narrow(flat.unflatten(0, landmarks.shape[:3]) / self.scale, q.dtype), mask

    def extra_repr(self) -> str:
        return repr(self.plan)


class PooledLandmarks(nn.Module):
    """Mean of the real tokens of each bin."""

    def __init__(self, plan: LandmarkPlan) -> None:
        super().__init__()
        self.plan = plan

    def forward(self, q: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> Landmarks:
        self.plan.check(grid_size)
        # means over the whole area of each cell, masked tokens and padding included as zeros
        cells = self._pool(spatial_map(widen(hide(q, key_mask)), grid_size))
        real = filled = None
        if key_mask is not None:
            real = key_mask.unflatten(-1, grid_size)
            filled = self._pool(real[:, None].to(cells.dtype))[:, 0]
        elif not self.plan.has_whole_cells(grid_size):
            filled = self._pool(cells.new_ones(1, 1, *grid_size))[:, 0]
        means, mask = self.plan.means(cells, filled, grid_size, real)
        return spatial_tokens(means, q.shape[1]).to(q.dtype), mask

    def _pool(self, maps: Tensor) -> Tensor:
        if self.plan.ratio == (1, 1):
            return maps
        return self.plan.over_cells(self, partial(F.avg_pool2d, kernel_size=self.plan.ratio), maps)

    def extra_repr(self) -> str:
        return repr(self.plan)


class TokenLandmarks(nn.Module):
    """A subset of the tokens: random ones, or the first ones."""

    def __init__(self, plan: LandmarkPlan, *, random: bool) -> None:
        super().__init__()
        self.plan = plan
        self.random = random

    def forward(self, q: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> Landmarks:
        self.plan.check(grid_size)
        most = self.plan.landmarks(grid_size[0], 0) * self.plan.landmarks(grid_size[1], 1)
        turn = self._turn(grid_size, q.device).expand(q.shape[0], -1)  # [B, N]
        if key_mask is None:
            return _select(q, turn.argsort(stable=True, dim=-1)[:, :most]), None
        turn = turn.masked_fill(~key_mask, torch.iinfo(turn.dtype).max)
        rows, columns = _extents(key_mask.unflatten(-1, grid_size))
        count = self.plan.landmarks_of(rows, 0) * self.plan.landmarks_of(columns, 1)
        mask = torch.arange(most, device=q.device) < torch.minimum(count, key_mask.sum(-1))[:, None]
        return hide(_select(q, turn.argsort(stable=True, dim=-1)[:, :most]), mask), mask

    def _turn(self, grid_size: GridSize, device: torch.device) -> Tensor:
        """Order in which tokens are chosen, lowest first [N]."""
        place = torch.arange(grid_size[0] * grid_size[1], device=device)
        if not self.random:
            return place
        # a hash of the position instead of a permutation: a cropped grid keeps the order of its tokens
        bits = (place // grid_size[1] * 73856093) ^ (place % grid_size[1] * 19349663)
        if self.training:
            bits = bits ^ torch.randint(2**31, (1,), device=device)
        for _ in range(3):
            bits = ((bits ^ (bits >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
        return bits

    def extra_repr(self) -> str:
        return f"{self.plan!r}, {'random' if self.random else 'biased'}"


@contextmanager
def lift_cap(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let the landmark modules inside ``modules`` take one landmark for each complete cell, whatever their cap."""
    samplers = (ConvLandmarks, PooledLandmarks, TokenLandmarks)
    plans = [part.plan for module in modules for part in module.modules() if isinstance(part, samplers)]
    if not plans:
        raise UserError("there are no landmarks in these modules")
    caps = [plan.cap for plan in plans]
    for plan in plans:
        plan.cap = None
    try:
        yield
    finally:
        for plan, cap in zip(plans, caps, strict=True):
            plan.cap = cap


def _extents(real: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns [B] of the smallest grid from the top left corner that contains all real tokens [B, H, W]."""
    height, width = real.shape[1:]
    rows = real.any(2) * torch.arange(1, height + 1, device=real.device)
    columns = real.any(1) * torch.arange(1, width + 1, device=real.device)
    return rows.amax(-1), columns.amax(-1)


def _select(tokens: Tensor, places: Tensor) -> Tensor:
    """Tokens [B, H, N, D] at places [B, m] -> [B, H, m, D]."""
    index = places[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[-1])
    return tokens.gather(2, index)
