"""Attention of large images in evaluation, in bands of rows: one tensor of the image's size is made, the result.

Attention that sums over all tokens needs them twice: to add them up, and to read its sums. Keys and values are
projected where they are needed and not kept; the values are projected a second time for the local term, unless they
are few.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softline.layers.bands import Band, band_numbers, return_bands, row_bands
from softline.layers.grid import GridSize
from softline.layers.tokenwise import runs_in_parts
from softline.ops.chunks import may_overwrite, token_chunks
from softline.ops.inputs import saturate
from softline.process import return_memory

if TYPE_CHECKING:
    from softline.attention.multihead import MultiHeadAttention

# inputs of less than so many bands are computed whole
LEAST_BANDS = 4
# values of up to so many bands (96 MB on a CPU) are kept: projecting those of all stages twice takes 3 to 6 % of a
# model's time, but larger ones are narrow, so that projecting them takes 1 %
KEPT_BANDS = 12
# queries attended at once by attention that makes all keys and values: matrix products with fewer rows are slow
QUERIES = 1024


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
    able = module.operator.sums is not None and not module.num_prefix_tokens
    return able and _in_parts(module) and is_large(module, x)


def wants_queries(module: "MultiHeadAttention", x: Tensor) -> bool:
    """Whether `attend_each_query` can take the place of the module's forward pass for tokens x, and saves memory."""
    able = module.operator.reader is not None and module.local is None
    return able and _in_parts(module) and is_large(module, x)


def _in_parts(module: "MultiHeadAttention") -> bool:
    # another module in place of the operator's own core may depend on all tokens
    return module.override is None and getattr(module.core, "in_parts", False)


def project(module: "MultiHeadAttention", x: Tensor, part: int) -> Tensor:
    """Queries (0), keys (-2, which may be the queries) or values (-1) of tokens [B, n, C]: [B, H, n, D]."""
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
    width = grid_size[1]
    reach = 0 if local is None else local.reach
    bands = row_bands(grid_size[0], len(x) * width * module.dim, x.device, reach=reach)
    out = torch.empty_like(x)
    # queries that are keys are needed three times, to find landmarks, to add and to read, so they are kept in ``out``
    queries = _heads(module, out) if module.qkv.out_features == 2 * module.dim else None
    if queries is not None:
        for band in bands:
            queries[:, :, _tokens(band.rows, width)] = project(module, x[:, _tokens(band.rows, width)], 0)
    mean = x.mean(1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
    assert module.operator.sums is not None, "`wants_bands` has asked"
    sums = module.operator.sums(module.core, queries, project(module, mean, -1), grid_size)
    kept = local is not None and x.numel() <= KEPT_BANDS * band_numbers(x.device)
    whole = project(module, x, -1) if kept else None

    def values(place: slice) -> Tensor:
        return project(module, x[:, place], -1) if whole is None else whole[:, :, place]

    for band in bands:
        place = _tokens(band.rows, width)
        keys = project(module, x[:, place], -2) if queries is None else queries[:, :, place]
        sums.add(keys, values(place))
    kernels = None if local is None else local.kernels(context)
    for band in bands:
        place = _tokens(band.rows, width)
        attended = sums.read(project(module, x[:, place], 0) if queries is None else queries[:, :, place], x.dtype)
        if local is not None:
            attended = _local_term(module, values(_tokens(band.around, width)), band, width, kernels) + attended
        out[:, place] = module.mixed(attended)
        # not kept while the next band is computed
        del attended
    return_bands(x.numel(), x.device)
    return out


def attend_each_query(module: "MultiHeadAttention", x: Tensor) -> Tensor:
    """The module's output [B, N, C] for tokens x [B, N, C]: keys and values are made whole, queries a few at a time."""
    assert module.operator.reader is not None, "`wants_queries` has asked"
    # the projection before that of the values is that of the keys, which may be the queries
    read = module.operator.reader(module.core, project(module, x, -2), project(module, x, -1))
    out = torch.empty_like(x)
    # what is kept is faulted in again sooner than one part is computed
    for part in token_chunks(x.shape[1], QUERIES):
        return_memory()
        out[:, part] = module.mixed(read(project(module, x[:, part], 0)))
    return_memory()
    return out


def _local_term(module: "MultiHeadAttention", values: Tensor, band: Band, width: int, kernels: Any) -> Tensor:
    """The local term of a band of tokens [B, H, n, D]; values: of the tokens of `Band.around`."""
    local: Any = module.local
    near: Tensor = local.convolve(values, (band.around.stop - band.around.start, width), kernels)
    return near[:, :, _tokens(band.inside, width)]


def _tokens(rows: slice, width: int) -> slice:
    return slice(rows.start * width, rows.stop * width)
