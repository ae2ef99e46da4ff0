"""Attentions of softline that are called as the attention modules of other libraries are."""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn

from softline.attention import MultiHeadAttention
from softline.backbones.swin import PositionBiasAttention
from softline.errors import UserError
from softline.layers.grid import GridSize
from softline.replacing.parts import Parts, joined

# a window that crosses a corner of the map holds tokens from four sides of it
REGIONS = 4


class Grid:
    """The grids of patches of the images that a model has been given, by their number of patches.

    Each thread has its own, so that several can run one model. Activations that are recomputed in the backward pass, by
    whichever thread, take the latest grid with their number of patches: two shapes with equally many patches cannot
    both be recomputed in one backward pass.

    fixed: the only grid; None learns them from a patch embedding.
    """

    def __init__(self, fixed: GridSize | None = None) -> None:
        self.fixed = fixed
        self.latest: GridSize | None = None
        self.sizes: dict[tuple[int | None, int], GridSize] = {}
        """By thread, or None for any, and number of patches."""

    def note(self, module: nn.Module, arguments: Any, maps: Tensor) -> None:
        """Read the grid off the maps [B, C, H, W] of a patch embedding; a forward hook of its convolution."""
        self.latest = size = (maps.shape[-2], maps.shape[-1])
        if not torch.compiler.is_compiling():
            for thread in (None, threading.get_ident()):
                self.sizes[thread, size[0] * size[1]] = size

    def size(self, patches: int) -> GridSize | None:
        """Return the grid that has this many patches; None if none is known."""
        if self.fixed is not None:
            return self.fixed
        if torch.compiler.is_compiling():
            # a graph holds the patch embedding and all that follows it, and sizes may be symbols
            return self.latest
        return self.sizes.get((threading.get_ident(), patches)) or self.sizes.get((None, patches))


class Rotation:
    """The position embedding that a block has last been given, for graphs, which cannot hold a `RotatedGrid`."""

    def __init__(self) -> None:
        self.embedding: Tensor | None = None


class RotatedGrid(tuple[int, int]):
    """A grid together with the position embedding by which queries and keys are rotated.

    So what one call was given stays with it, whatever other threads and later calls are given.
    """

    rope: Tensor

    def __new__(cls, size: GridSize, rope: Tensor) -> "RotatedGrid":
        grid = super().__new__(cls, size)
        grid.rope = rope
        return grid


class HostedCore(nn.Module):
    """Normalises and rotates queries and keys as their model does, before the attention's own core sees them.

    has_keys: False if keys are queries.
    """

    def __init__(
        self, core: nn.Module, parts: Parts, num_prefix_tokens: int, rotation: Rotation, *, has_keys: bool
    ) -> None:
        super().__init__()
        self.core = core
        # no attribute of its own: torch.export refuses modules to which a tensor is assigned
        self.rotation = rotation
        self.q_norm = parts.q_norm
        # DDP waits for the gradient of every parameter
        self.k_norm = parts.k_norm if has_keys else None
        self.num_prefix_tokens = num_prefix_tokens
        self.rotates, self.rotate_half = parts.rotates, parts.rotate_half

    def forward(self, q: Tensor, k: Tensor, grid_size: GridSize, key_mask: Tensor | None) -> Any:
        if torch.compiler.is_compiling():
            rope = self.rotation.embedding
        else:
            rope = grid_size.rope if isinstance(grid_size, RotatedGrid) else None
        queries = self._placed(q, self.q_norm, rope)
        # attentions with one projection for both have one tensor for both
        keys = queries if k is q else self._placed(k, self.k_norm, rope)
        return self.core(queries, keys, grid_size, key_mask)

    def _placed(self, x: Tensor, norm: nn.Module | None, rope: Tensor | None) -> Tensor:
        prefix = self.num_prefix_tokens
        if norm is not None:
            x = norm(x)
        if rope is None:
            return x
        rotated = apply_rot_embed_cat(x[:, :, prefix:], rope, half=self.rotate_half)
        return torch.cat([x[:, :, :prefix], rotated], dim=2).to(x.dtype)


class HostedAttention(nn.Module):
    """An attention of softline in the place of another library's module, with its projections.

    name: of the attention.
    parts: of the module that it replaces.
    """

    def __init__(self, attention: MultiHeadAttention | PositionBiasAttention, name: str, parts: Parts) -> None:
        super().__init__()
        self.attention = attention
        self.name = name
        self.dropout = parts.dropout
        self.proj_drop = parts.proj_drop

    def parts(self) -> Parts:
        """Return what yet another attention could take over."""
        attention = self.attention
        if attention.qkv.out_features != 3 * attention.qkv.in_features:
            raise UserError(f"{self.name} attention has one projection for queries and keys")
        weight, bias = joined(attention.qkv)
        return Parts(attention.num_heads, weight, bias, attention.proj, self.dropout, self.proj_drop)

    def extra_repr(self) -> str:
        return self.name

    def _run(self, x: Tensor, grid_size: GridSize, **masks: Any) -> Tensor:
        return self._drop(self.attention(x, grid_size, **masks))

    def _drop(self, out: Tensor) -> Tensor:
        return out if self.proj_drop is None else self.proj_drop(out)

    def _refuse(self, given: Mapping[str, Any]) -> None:
        for option, value in given.items():
            if value is not None and value is not False:
                raise UserError(f"{self.name} attention in a model of another library takes no {option}")


class HostedTokens(HostedAttention):
    """In timm's vision transformers, which have tokens before those of the grid.

    grid: follows the images that the model is given, so that the attention has to be run by its model.
    """

    def __init__(self, attention: MultiHeadAttention, name: str, parts: Parts, grid: Grid) -> None:
        super().__init__(attention, name, parts)
        self.grid = grid
        self.rotation = Rotation()
        if parts.rotates or parts.q_norm is not None or parts.k_norm is not None:
            has_keys = attention.qkv.out_features == 3 * attention.qkv.in_features
            attention.core = HostedCore(
                attention.core, parts, attention.num_prefix_tokens, self.rotation, has_keys=has_keys
            )

    def forward(self, x: Tensor, *, rope: Tensor | None = None, **others: Any) -> Tensor:
        # masks and biases
        self._refuse(others)
        grid_size = self._grid_size(x)
        if torch.compiler.is_compiling():
            self.rotation.embedding = rope
        elif rope is not None:
            grid_size = RotatedGrid(grid_size, rope)
        return self._run(x, grid_size)

    def parts(self) -> Parts:
        parts, core = super().parts(), self.attention.core
        if not isinstance(core, HostedCore):
            return parts
        taken = {key: getattr(core, key) for key in ("q_norm", "k_norm", "rotates", "rotate_half")}
        return parts._replace(**taken)

    def _grid_size(self, x: Tensor) -> GridSize:
        patches = x.shape[1] - self.attention.num_prefix_tokens
        size = self.grid.size(patches)
        if size is None:
            raise UserError(
                f"{self.name} attention needs the grid of the image, and none with {patches} patches is known: run the "
                "model, not a part of it; if its patch embedding has been changed, replace the attention again"
            )
        return size


class HostedMultihead(HostedTokens):
    """In torchvision's vision transformer, which calls `torch.nn.MultiheadAttention`."""

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = True, **others: Any
    ) -> tuple[Tensor, None]:
        self._refuse({**others, "need_weights": need_weights})
        if key is not query or value is not query:
            raise UserError(f"{self.name} attention is self-attention: queries, keys and values come from one tensor")
        return self._run(query, self._grid_size(query)), None


class HostedTransformers(HostedTokens):
    """In the ViT of transformers."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, None]:
        self._refuse({"attention_mask": attention_mask, "output_attentions": others.get("output_attentions")})
        return self._run(hidden_states, self._grid_size(hidden_states)), None


class HostedMap(HostedAttention):
    """In timm's PVTv2."""

    def forward(self, x: Tensor, feat_size: GridSize) -> Tensor:
        return self._run(x, (feat_size[0], feat_size[1]))


class HostedWindows(HostedAttention):
    """In the windows of timm's Swin."""

    def __init__(self, attention: MultiHeadAttention | PositionBiasAttention, name: str, parts: Parts) -> None:
        super().__init__(attention, name, parts)
        assert parts.window_size is not None, "Swin has windows"
        self.window_size: GridSize = parts.window_size

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Windows [B * windows, N, C] -> [B * windows, N, C].

        mask: [windows, N, N], 0 for pairs from the same side of the map, negative for the others.
        """
        if isinstance(self.attention, PositionBiasAttention):
            return self._run(x, self.window_size, pair_mask=None if mask is None else mask == 0)
        if mask is None:
            return self._run(x, self.window_size)
        region = _regions(mask).repeat(len(x) // len(mask), 1)  # [B * windows, N]
        # a result is zero where its mask is
        parts = [self.attention(x, self.window_size, region == index) for index in range(REGIONS)]
        return self._drop(sum(parts[1:], parts[0]))

    def parts(self) -> Parts:
        bias = self.attention.position_bias if isinstance(self.attention, PositionBiasAttention) else None
        return super().parts()._replace(window_size=self.window_size, position_bias=bias)

    def set_window_size(self, window_size: GridSize) -> None:
        """Follow the model to another size of its windows; timm calls it."""
        if tuple(window_size) != self.window_size and isinstance(self.attention, PositionBiasAttention):
            raise UserError(
                f"{self.name} attention has a bias for windows of {self.window_size}, got {tuple(window_size)}: "
                "change the windows before the attention"
            )
        self.window_size = (window_size[0], window_size[1])


def _regions(mask: Tensor) -> Tensor:
    """Number the regions of each window, 0 to 3, from which pairs are masked: [windows, N, N] -> [windows, N]."""
    first = (mask == 0).int().argmax(-1)  # the first token of the same region
    starts = first == torch.arange(mask.shape[-1], device=mask.device)
    return (starts.cumsum(-1) - 1).gather(-1, first)
