"""InLine-Swin backbones: Bridging the Divide (https://arxiv.org/abs/2412.06590) on Swin (https://arxiv.org/abs/2103.14030).

Patches of 4 x 4, patch merging between stages, pre-norm blocks, mean pooling. Softmax blocks attend inside Swin's
shifted windows with a relative position bias; InLine blocks attend inside windows that cover the whole map at the usual
image size, without a position bias.

Deviations from the release:
- Windows do not depend on ``img_size``, and neither do the parameters, except those of "focused" attention; maps of any
  size are padded to whole windows, and the padding is masked. A map that fits one window along one axis only is shifted
  along the other.
- As in the release, linear blocks with several windows shift them without masking opposite sides of the map from each
  other; softmax blocks mask them. The local residual crosses that seam in both.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from softline.attention.multihead import Override, RowReader
from softline.backbones.backbone import Backbone, HeadOptions, Stage, inline_cfg
from softline.backbones.building import (
    FIXED_ARGUMENTS,
    AttentionChoice,
    block_attentions,
    build_attention,
    check_cap,
    check_softmax_only,
    check_stages,
    drop_path_rates,
    grid_of,
    linear_of,
    release_config,
    softmax_options,
    without_stage_types,
)
from softline.backbones.registration import INLINE_RELEASE, create_backbone, inline_link
from softline.checks import check_integer
from softline.errors import UserError
from softline.layers.blocks import PreNormBlock
from softline.layers.embed import PatchEmbed
from softline.layers.grid import GridSize, as_pair, pad_to_whole
from softline.layers.local import LocalResidual
from softline.layers.windows import WindowedAttention
from softline.ops.inputs import hide, narrow, widen, without_autocast
from softline.weights.releases import register_release
from softline.weights.renaming import KeyRules

NORM_EPS = 1e-5
STAGE_TYPES = "IIIS"
WINDOW_SIZE = 56


class PatchMerging(nn.Module):
    """Swin's patch merging: concatenates 2 x 2 tokens, then LayerNorm and Linear.

    Maps [B, C, H, W] -> tokens [B, N, dim] and their grid.

    Maps of odd size are zero-padded at the bottom and the right.
    """

    def __init__(self, in_dim: int, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * in_dim, eps=NORM_EPS)
        self.reduction = nn.Linear(4 * in_dim, dim, bias=False)

    def forward(self, maps: Tensor) -> tuple[Tensor, GridSize]:
        patches = pad_to_whole(maps, 2).unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # [B, C, H/2, row, W/2, column]
        # Swin's order: first column top to bottom, then the second
        merged = patches.permute(0, 2, 4, 5, 3, 1).flatten(3)  # [B, H/2, W/2, 4 C]
        return self.reduction(self.norm(merged.flatten(1, 2))), (merged.shape[1], merged.shape[2])


class PositionBiasAttention(nn.Module):
    """Softmax attention inside windows with a learned bias per head and per offset between two tokens.

    window_size: side of the largest window; smaller windows use a part of the offsets.
    symmetric: one projection serves as queries and keys (Table 8 of the SOFT paper).
    local_residual: add InLine's local residual inside each window (Table 4 of the InLine paper).
    """

    num_prefix_tokens = 0

    def __init__(
        self,
        dim: int,
        num_heads: int,
        window_size: int,
        *,
        symmetric: bool = False,
        local_residual: bool = False,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise UserError(f"dim ({dim}) must be divisible by num_heads ({num_heads})")
        self.num_heads = num_heads
        self.window_size = window_size
        self.override: Override | None = None  # see `softline.attention.MultiHeadAttention`
        self.qkv = nn.Linear(dim, (2 if symmetric else 3) * dim, bias=qkv_bias)
        self.local = LocalResidual(dim, num_heads) if local_residual else None
        self.position_bias = nn.Parameter(torch.empty((2 * window_size - 1) ** 2, num_heads))
        nn.init.trunc_normal_(self.position_bias, std=0.02)
        self.proj = nn.Linear(dim, dim)

    def forward(
        self, x: Tensor, grid_size: GridSize, pair_mask: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        """Windows [B * windows, N, C] -> [B * windows, N, C].

        pair_mask: bool [windows, N, N], True = may attend.
        key_mask: bool [B * windows, N], True = real token, for the local residual.
        """
        q, k, v = self._project(x)
        if self.override is None:
            out = self._attend(q, k, v, grid_size, pair_mask)
        else:
            out = self.override(self, v, x, grid_size, pair_mask)
        if self.local is not None:
            out = out + self.local(x, hide(v, key_mask), grid_size, key_mask)
        return self.proj(out.transpose(1, 2).flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, grid_size: GridSize, pair_mask: Tensor | None) -> Tensor:
        """Attended values [B * windows, H, N, D]."""
        bias = self.bias(grid_size)[None]  # [1, H, N, N]
        if pair_mask is not None:
            bias = torch.where(pair_mask[:, None], bias, -torch.inf)  # [windows, H, N, N]
        # windows share an axis with the heads, so that the bias is not repeated for every sample: [B, windows H, N, D]
        q, k, v = (part.unflatten(0, (-1, bias.shape[0])).flatten(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.flatten(0, 1)[None].to(q.dtype))
        return out.unflatten(1, (-1, self.num_heads)).flatten(0, 1)  # [B windows, H, N, D]

    def weights(self, x: Tensor, grid_size: GridSize, pair_mask: Tensor | None = None) -> Tensor:
        """Explicit weights [B * windows, H, N, N]."""
        return self.rows(x, grid_size, pair_mask)(torch.arange(x.shape[1], device=x.device))

    def rows(self, x: Tensor, grid_size: GridSize, pair_mask: Tensor | None = None) -> RowReader:
        """Return a function that computes rows of `weights`: places in a window [R] -> [B * windows, H, R, N]."""
        q, k, _ = self._project(x)
        bias = self.bias(grid_size)

        def read(places: Tensor) -> Tensor:
            mask = None if pair_mask is None else pair_mask.index_select(1, places)
            return _biased_weights(q.index_select(2, places), k, bias.index_select(1, places), mask)

        return read

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B * windows, H, N, D]."""
        parts = self.qkv(x).unflatten(-1, (-1, self.num_heads, x.shape[-1] // self.num_heads))
        q, *k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k[0] if k else q, v

    def bias(self, grid_size: GridSize) -> Tensor:
        """Bias of all token pairs in a window [H, N, N]."""
        rows, columns = (self._offsets(side) for side in grid_size)
        index = rows[:, None, :, None] * (2 * self.window_size - 1) + columns[None, :, None, :]
        return self.position_bias[index.flatten(2).flatten(0, 1)].permute(2, 0, 1)

    def _offsets(self, side: int) -> Tensor:
        """Offsets of all pairs along an axis [side, side], relative to the most negative offset in the table."""
        place = torch.arange(side, device=self.position_bias.device)
        return place[:, None] - place + self.window_size - 1

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, window_size={self.window_size}"


@without_autocast
def _biased_weights(q: Tensor, k: Tensor, bias: Tensor, pair_mask: Tensor | None) -> Tensor:
    """softmax(D^-0.5 q k^T + bias), in float32 for half-precision inputs: [B * windows, H, R, N].

    q: queries [B * windows, H, R, D]; k: keys [B * windows, H, N, D]; bias: [H, R, N]; pair_mask: [windows, R, N].
    """
    scores = q.shape[-1] ** -0.5 * widen(q) @ widen(k).mT + widen(bias)
    if pair_mask is not None:
        samples = scores.unflatten(0, (-1, pair_mask.shape[0]))  # [B, windows, H, R, N]
        scores = samples.masked_fill(~pair_mask[:, None], -torch.inf).flatten(0, 1)
    return narrow(scores.softmax(-1), q.dtype)


def swin_backbone(
    *,
    embed_dim: int = 96,
    depths: Sequence[int] = (2, 2, 6, 2),
    num_heads: Sequence[int] = (3, 6, 12, 24),
    window_size: int | None = None,
    softmax_windows: int | Sequence[int] | None = None,
    attention: AttentionChoice = "inline",
    stage_types: str | None = None,
    patch_size: int = 4,
    mlp_ratio: float = 4.0,
    attention_options: dict[str, Any] | None = None,
    img_size: int | GridSize = 224,
    in_chans: int = 3,
    drop_path_rate: float = 0.0,
    **head: Unpack[HeadOptions],
) -> Backbone:
    """A Swin pyramid with any number of stages.

    embed_dim: channels of the first stage; they double from stage to stage.
    window_size: window side in blocks other than softmax, by default 56.
    softmax_windows: window side in softmax blocks, or one per stage; defaults to max(7, window_size // 8).
    attention, stage_types: attention of each block, see `softline.backbones.building.block_attentions`; "IIIS" by
        default.
    patch_size: side of a patch in pixels.
    attention_options: further options of the attention in blocks other than softmax; if all blocks are softmax, theirs
        (symmetric, local_residual, qkv_bias).
    """
    check_integer("patch_size", patch_size, 1)
    check_stages(len(depths), num_heads=num_heads)
    names = block_attentions(attention, stage_types, depths, STAGE_TYPES)
    check_softmax_only(names, "softmax_windows", softmax_windows)
    if window_size is not None and all(linear_of(stage) == "softmax" for stage in names):
        raise UserError(f"window_size={window_size} has no effect: all blocks are softmax, use softmax_windows")
    window_size = WINDOW_SIZE if window_size is None else window_size
    check_integer("window_size", window_size, 1)
    rates = drop_path_rates(drop_path_rate, depths)
    strides = [patch_size * 2**index for index in range(len(depths))]
    options = attention_options or {}
    own_options = softmax_options(names, options)
    # as many landmarks as the last stage has tokens
    cells = [min(strides[-1] // stride, window_size) for stride in strides]
    grids = [grid_of(img_size, stride) for stride in strides]
    windows = [(min(rows, window_size), min(columns, window_size)) for rows, columns in grids]
    check_cap([linear_of(stage) for stage in names], windows, cells, options)
    small_windows = _softmax_window(window_size) if softmax_windows is None else softmax_windows
    small = [small_windows] * len(depths) if isinstance(small_windows, int) else list(small_windows)
    check_stages(len(depths), softmax_windows=small)

    def attend(index: int, block: int) -> nn.Module:
        dim, heads, shifted = embed_dim * 2**index, num_heads[index], block % 2 == 1
        if names[index][block] == "softmax":
            biased = PositionBiasAttention(dim, heads, small[index], **own_options)
            return WindowedAttention(biased, small[index], shifted=shifted, mask="pairs")
        offers = {"ratio": cells[index], "max_tokens": window_size**2, "position_grid": windows[index]}
        inner = build_attention(names[index][block], dim, heads, offers=offers, **options)
        return WindowedAttention(inner, window_size, shifted=shifted)

    def stage(index: int) -> Stage:
        dim = embed_dim * 2**index
        blocks = [
            PreNormBlock(dim, attend(index, block), mlp_ratio=mlp_ratio, drop_path=rate, norm_eps=NORM_EPS)
            for block, rate in enumerate(rates[index])
        ]
        embed = PatchMerging(dim // 2, dim) if index else _patches(in_chans, dim, patch_size)
        return Stage(blocks, dim, reduction=strides[index], embed=embed)

    return Backbone(
        [stage(index) for index in range(len(depths))],
        norm=nn.LayerNorm(embed_dim * 2 ** (len(depths) - 1), eps=NORM_EPS),
        in_chans=in_chans,
        img_size=img_size,
        min_size=strides[-1],
        **head,
    )


def _softmax_window(window_size: int) -> int:
    """The window side of softmax blocks beside others with windows of this side, as released."""
    return max(7, window_size // 8)


def _patches(in_chans: int, dim: int, size: int) -> PatchEmbed:
    return PatchEmbed(in_chans, dim, kernel_size=size, stride=size, norm_layer=nn.LayerNorm)


_BASE: dict[str, Any] = {
    "embed_dim": 128,
    "depths": (2, 2, 18, 2),
    "num_heads": (4, 8, 16, 32),
    "stage_types": "IIM2S",
}

default_cfgs = generate_default_cfgs(
    {
        "inline_swin_tiny": inline_cfg(url=inline_link("inline_swin_tiny", "32810869fcc34410966b")),
        "inline_swin_small": inline_cfg(url=inline_link("inline_swin_small", "e9657fd247c04c7cb1a1")),
        "inline_swin_base": inline_cfg(url=inline_link("inline_swin_base", "bf23564bb64c420aafe1")),
        # evaluated on the whole image
        "inline_swin_base_384": inline_cfg(input_size=(3, 384, 384), pool_size=(12, 12), crop_pct=1.0),
    }
)


def _create(variant: str, pretrained: bool, args: dict[str, Any], kwargs: dict[str, Any]) -> Backbone:
    own = without_stage_types(args, kwargs)
    attention = kwargs.get("attention", "inline")
    if "window_size" in own and {*([attention] if isinstance(attention, str) else attention)} == {"softmax"}:
        # the windows of the model's softmax blocks
        own["softmax_windows"] = _softmax_window(own.pop("window_size"))
    return create_backbone(
        swin_backbone, variant, pretrained, rules=RELEASE_KEYS, by_hand=INLINE_RELEASE, **{**own, **kwargs}
    )


@register_model
def inline_swin_tiny(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """InLine-Swin-T, 29 M parameters."""
    args: dict[str, Any] = {}
    return _create("inline_swin_tiny", pretrained, args, kwargs)


@register_model
def inline_swin_small(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """InLine-Swin-S, 50 M parameters."""
    args: dict[str, Any] = {"depths": (2, 2, 18, 2), "stage_types": "IISS"}
    return _create("inline_swin_small", pretrained, args, kwargs)


@register_model
def inline_swin_base(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """InLine-Swin-B, 88 M parameters."""
    args: dict[str, Any] = {**_BASE}
    return _create("inline_swin_base", pretrained, args, kwargs)


@register_model
def inline_swin_base_384(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """InLine-Swin-B with larger windows, for images of 384 x 384."""
    args: dict[str, Any] = {**_BASE, "window_size": 96, "img_size": 384}
    return _create("inline_swin_base_384", pretrained, args, kwargs)


def release_backbone(family: str, config: dict[str, Any]) -> Backbone:
    """Build the released network from the arguments of its constructor."""
    args = release_config(
        config,
        family,
        required=("img_size", "embed_dim", "depths", "num_heads", "window_size", "attn_type"),
        optional={"patch_size": 4, "mlp_ratio": 4.0, "num_classes": 1000, "in_chans": 3, "drop_path_rate": 0.0},
        fixed={**FIXED_ARGUMENTS, "ape": (False,), "patch_norm": (True,), "use_checkpoint": (False,)},
    )
    kinds, window = args.pop("attn_type"), args.pop("window_size")
    sides = [min(grid_of(args["img_size"], args["patch_size"] * 2**index)) for index in range(len(args["depths"]))]
    # the release's position-bias tables are never larger than the map
    small = [min(side, _softmax_window(window)) for side in sides]
    args["img_size"] = as_pair("img_size", args["img_size"])
    blocks = [name for stage in block_attentions("inline", kinds, args["depths"], STAGE_TYPES) for name in stage]
    return swin_backbone(
        **args,
        stage_types=kinds,
        window_size=window if "inline" in blocks else None,
        softmax_windows=small if "softmax" in blocks else None,
    )


# rules from the release's parameter names to ours, applied in order; masks and indices are computed here
RELEASE_KEYS: KeyRules = [
    (r"\.(attn_mask|relative_position_index)$", None),
    (r"^patch_embed\.", r"stages.0.embed."),
    # patch merging is the end of a stage in the release and the start of the next stage here
    *((rf"^layers\.{index}\.downsample\.", rf"stages.{index + 1}.embed.") for index in range(9)),
    (r"^layers\.(?P<index>\d+)\.", r"stages.{index}."),
    (r"\.attn\.", r".attn.attention."),
    (r"\.residual\.0\.", r".local.hidden."),
    (r"\.residual\.2\.", r".local.kernel."),
    (r"\.relative_position_bias_table$", r".position_bias"),
]

register_release("inline_swin", build=release_backbone, rules=RELEASE_KEYS, models=default_cfgs)
