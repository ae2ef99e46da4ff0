"""Attention of large images in evaluation, in bands of rows: one tensor of the image's size is made, the result.

Attention that sums over all tokens needs them twice: to add them up, and to read its sums. Keys and values are
projected where they are needed and not kept; the values are projected a second time for the local term.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softline.layers.bands import band_numbers, row_bands
from softline.layers.grid import GridSize
from softline.layers.tokenwise import runs_in_parts
from softline.ops.chunks import may_overwrite
from softline.ops.inputs import saturate

if TYPE_CHECKING:
    from softline.attention.multihead import MultiHeadAttention

# inputs of less than so many bands are computed whole
LEAST_BANDS = 2


def is_large(module: "MultiHeadAttention", x: Tensor) -> bool:
    """Whether tokens x are so many that their projections should be computed apart, and may be."""
    if not may_overwrite() or not isinstance(x, Tensor):
        return False
    if x.numel() < LEAST_BANDS * band_numbers(x.device):
        return False
    # adapters may have replaced the projection, and autocast chooses another dtype than that of x
    plain = type(module.qkv) is nn.Linear and not torch.is_autocast_enabled(x.device.type)
    return plain and runs_in_parts(module)


def wants_bands(module: "MultiHeadAttention", x: Tensor) -> bool:
    """Whether `attend_in_bands` can take the place of the module's forward pass for tokens x, and saves memory."""
    able = module.operator.sums is not None and not module.num_prefix_tokens and module.override is None
    # another module in place of the operator's own core may depend on all tokens
    return able and getattr(module.core, "in_parts", False) and is_large(module, x)


def project(module: "MultiHeadAttention", x: Tensor, part: int) -> Tensor:
    """Queries (0), keys (1, if they have their own projection) or values (-1) of tokens [B, n, C]: [B, H, n, D]."""
    weight = module.qkv.weight.split(module.dim)[part]
    bias = None if module.qkv.bias is None else module.qkv.bias.split(module.dim)[part]
    return _heads(module, saturate(F.linear(x, weight, bias), x.dtype))


def _heads(module: "MultiHeadAttention", tokens: Tensor) -> Tensor:
    """[B, n, C] -> [B, H, n, D]."""
    return tokens.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)


def attend_in_bands(module: "MultiHeadAttention", x: Tensor, grid_size: GridSize, context: Tensor) -> Tensor:
    """The module's output [B, N, C] for tokens x and the tokens of the local term, both [B, N, C].

    It differs from that of all tokens at once by the rounding of sums.
    """
    local: Any = module.local
    width, shared = grid_size[1], module.qkv.out_features == 2 * module.dim
    reach = 0 if local is None else local.reach
    bands = row_bands(grid_size[0], len(x) * width * module.dim, x.device, reach=reach)
    out = torch.empty_like(x)
    # queries that are keys are needed three times, to find landmarks, to add and to read, so they are kept in ``out``
    queries = _heads(module, out) if shared else None
    if queries is not None:
        for band in bands:
            queries[:, :, _tokens(band.rows, width)] = project(module, x[:, _tokens(band.rows, width)], 0)
    mean = x.mean(1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
    assert module.operator.sums is not None, "`wants_bands` has asked"
    sums = module.operator.sums(module.core, queries, project(module, mean, -1), grid_size)
    for band in bands:
        place = _tokens(band.rows, width)
        keys = project(module, x[:, place], 1) if queries is None else queries[:, :, place]
        sums.add(keys, project(module, x[:, place], -1))
    kernels = None if local is None else local.kernels(context)
    for band in bands:
        place = _tokens(band.rows, width)
        attended = sums.read(project(module, x[:, place], 0) if queries is None else queries[:, :, place], x.dtype)
        if local is not None:
            values = project(module, x[:, _tokens(band.around, width)], -1)
            near = local.convolve(values, (band.around.stop - band.around.start, width), kernels)
            attended = near[:, :, _tokens(band.inside, width)] + attended
        out[:, place] = module.mixed(attended)
    return out


def _tokens(rows: slice, width: int) -> slice:
    return slice(rows.start * width, rows.stop * width)
