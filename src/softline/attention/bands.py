"""Attention of large images in evaluation, in bands of rows: one tensor of the image's size is made, the result.

Attention that sums over all tokens needs them twice: to add them up, and to read its sums. Keys and values are
projected where they are needed and not kept; the values are projected a second time for the local term.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softline.layers.bands import row_bands
from softline.layers.grid import GridSize
from softline.layers.tokenwise import runs_in_parts
from softline.ops.chunks import may_overwrite
from softline.ops.inputs import saturate

if TYPE_CHECKING:
    from softline.attention.multihead import MultiHeadAttention

# smaller inputs are computed whole: 64 MB in float32; other devices run fastest with few and large kernels
CPU_LEAST_NUMBERS = 2**24
OTHER_LEAST_NUMBERS = 2**28


def wants_bands(module: "MultiHeadAttention", x: Tensor) -> bool:
    """Whether `attend_in_bands` can take the place of the module's forward pass for tokens x, and saves memory."""
    if not may_overwrite() or module.operator.sums is None or not isinstance(x, Tensor):
        return False
    least = CPU_LEAST_NUMBERS if x.device.type == "cpu" else OTHER_LEAST_NUMBERS
    if x.numel() < least or module.num_prefix_tokens or module.override is not None:
        return False
    # adapters may have replaced the projection, and autocast another dtype than that of x
    plain = type(module.qkv) is nn.Linear and not torch.is_autocast_enabled(x.device.type)
    return plain and runs_in_parts(module)


def attend_in_bands(module: "MultiHeadAttention", x: Tensor, grid_size: GridSize, context: Tensor) -> Tensor:
    """The module's output [B, N, C] for tokens x and the tokens of the local term, both [B, N, C].

    It differs from that of all tokens at once by the rounding of sums.
    """
    bands = _Bands(module, x, grid_size)
    # queries that are keys are needed three times: to find landmarks, to add, and to read
    queries = bands.queries() if bands.shared else None
    centre = bands.project(x.mean(1, keepdim=True, dtype=bands.wide).to(x.dtype), part=-1)
    assert module.operator.sums is not None, "`wants_bands` has asked"
    sums = module.operator.sums(module.core, queries, centre, grid_size)
    for rows in bands.rows:
        tokens = x[:, bands.tokens(rows.rows)]
        keys = bands.take(rows.rows) if bands.shared else bands.project(tokens, part=1)
        sums.add(keys, bands.project(tokens, part=-1))
    local: Any = module.local
    kernels = None if local is None else local.kernels(context)
    for rows in bands.rows:
        place = bands.tokens(rows.rows)
        q = bands.take(rows.rows) if bands.shared else bands.project(x[:, place], part=0)
        attended = sums.read(q, x.dtype)
        if local is not None:
            values = bands.project(x[:, bands.tokens(rows.around)], part=-1)
            height = rows.around.stop - rows.around.start
            near = local.convolve(values, (height, grid_size[1]), kernels)
            attended = near[:, :, bands.tokens(rows.inside)] + attended
        bands.out[:, place] = module.mixed(attended)
    return bands.out


class _Bands:
    """Rows of tokens, their projections, and the place of the result, which first holds shared queries."""

    def __init__(self, module: "MultiHeadAttention", x: Tensor, grid_size: GridSize) -> None:
        self.x, self.width, self.num_heads = x, grid_size[1], module.num_heads
        self.wide = torch.promote_types(x.dtype, torch.float32)
        self.shared = module.qkv.out_features == 2 * module.dim
        self.weights = module.qkv.weight.split(module.dim)
        self.biases = [None] * 3 if module.qkv.bias is None else module.qkv.bias.split(module.dim)
        local: Any = module.local
        reach = 0 if local is None else local.reach
        self.rows = row_bands(grid_size[0], 2 * len(x) * self.width * module.dim, x.device, reach=reach)
        self.out = torch.empty_like(x)

    def queries(self) -> Tensor:
        """Write the queries to ``out``, and return them [B, H, N, D]."""
        for rows in self.rows:
            place = self.tokens(rows.rows)
            self.out[:, place] = self._linear(self.x[:, place], 0)
        return self._heads(self.out)

    def take(self, rows: slice) -> Tensor:
        """Queries of some rows [B, H, n, D], which ``out`` holds."""
        return self._heads(self.out[:, self.tokens(rows)])

    def project(self, tokens: Tensor, part: int) -> Tensor:
        """Queries (0), keys (1) or values (-1) of tokens [B, n, C]: [B, H, n, D]."""
        return self._heads(self._linear(tokens, part))

    def tokens(self, rows: slice) -> slice:
        return slice(rows.start * self.width, rows.stop * self.width)

    def _linear(self, tokens: Tensor, part: int) -> Tensor:
        return saturate(F.linear(tokens, self.weights[part], self.biases[part]), tokens.dtype)

    def _heads(self, tokens: Tensor) -> Tensor:
        return tokens.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
