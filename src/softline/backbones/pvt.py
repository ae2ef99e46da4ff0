"""InLine on PVT: Bridging the Divide (https://arxiv.org/abs/2412.06590), Pyramid Vision Transformer
(https://arxiv.org/abs/2102.12122).

Four stages, each starting with non-overlapping patches and a learned position embedding; pre-norm blocks with InLine
attention, no class token, no final norm, and a classifier on the mean token. Stages with ``attention="softmax"`` use
PVT's spatial reduction of keys and values.

Deviations from the paper and its release:
- The paper gives its Large 50.2 M parameters; InLine in all four stages, as released, has 51.2 M.
- Images need not be square or divisible by the strides: maps are zero-padded at the bottom and the right to whole
  patches and, for spatial reduction, to whole cells, and position embeddings are resized (bilinear).
- The release has an option to reduce keys and values of InLine stages too (``la_sr_ratios``), which fails unless all
  ratios are 1; it is not offered here.
- ``inline_micro`` is softline's own model.
"""

import math
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
    build_attention,
    check_cap,
    check_settings,
    check_stages,
    drop_path_rates,
    grid_of,
    least_image,
    options_of,
    per_stage,
    release_config,
    unused_settings,
)
from softline.backbones.registration import INLINE_RELEASE, create_backbone, inline_link
from softline.checks import check_integer, check_option
from softline.errors import UserError
from softline.layers.blocks import PreNormBlock
from softline.layers.embed import PatchEmbed, PositionEmbed
from softline.layers.grid import GridSize, check_grid, pad_to_whole
from softline.ops.inputs import check_mask, hide, hide_rows, hide_scores, saturate, take_rows, widen
from softline.weights.releases import register_release
from softline.weights.renaming import KeyRules

STRIDES = (4, 8, 16, 32)
EMBED_DIMS = (64, 128, 320, 512)
NUM_HEADS = (2, 4, 10, 16)
MLP_RATIOS = (8, 8, 4, 4)
SR_RATIOS = (8, 4, 2, 1)
# the attention's option that a setting of the backbone sets
SETTINGS = {"sr_ratios": "ratio"}


class SpatialReductionAttention(nn.Module):
    """PVT's softmax attention from all tokens to M cells of ``ratio`` x ``ratio`` tokens each.

    A strided convolution and LayerNorm reduce each cell to one token; incomplete cells at the border are zero-padded.
    One projection holds the weights for the tokens' queries and for the cells' keys and values.
    """

    def __init__(self, dim: int, num_heads: int, *, ratio: int, qkv_bias: bool = True) -> None:
        super().__init__()
        check_integer("ratio", ratio, 1)
        if dim % num_heads:
            raise UserError(f"dim ({dim}) must be divisible by num_heads ({num_heads})")
        self.dim = dim
        self.num_heads = num_heads
        self.ratio = ratio
        self.override: Override | None = None  # see `softline.attention.MultiHeadAttention`
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.sr = nn.Conv2d(dim, dim, ratio, stride=ratio)
        self.norm = nn.LayerNorm(dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        q, k, v, cell_mask = self._project(x, grid_size, key_mask)
        if self.override is not None:
            # the value of a token is that of its cell
            values = hide(v.index_select(2, self._cells(grid_size, v.device)), key_mask)
            return self._finish(self.override(self, values, x, grid_size, key_mask), key_mask)
        visible = None
        if cell_mask is not None:
            # a sample without any real token attends to its padding, so that no row is empty
            visible = (cell_mask | ~cell_mask.any(-1, keepdim=True))[:, None, None, :]
        return self._finish(F.scaled_dot_product_attention(q, k, v, attn_mask=visible), key_mask)

    def weights(self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> Tensor:
        """Weights [B, heads, N, N]; the weight of a cell is divided equally among its real tokens."""
        return self.rows(x, grid_size, key_mask)(torch.arange(x.shape[1], device=x.device))

    def rows(self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> RowReader:
        """Return a function that computes single rows of `weights`."""
        q, k, _, cell_mask = self._project(x, grid_size, key_mask)
        members = self._members(grid_size, key_mask, widen(q))
        share = members / members.sum(2, keepdim=True).clamp(min=1)  # [B, 1, N, M]

        def read(tokens: Tensor) -> Tensor:
            queries = take_rows(widen(q), tokens)
            scores = self.dim**-0.5 * self.num_heads**0.5 * queries @ widen(k).mT  # [B, H, R, M]
            weights = hide_scores(scores, cell_mask).softmax(-1) @ share.mT
            return hide_rows(weights, key_mask, tokens).to(q.dtype)

        return read

    def mix(self, weights: Tensor, x: Tensor, grid_size: GridSize, key_mask: Tensor | None = None) -> Tensor:
        """Return the output [B, N, C] for given weights [B, heads, N, N]."""
        _, _, v, _ = self._project(x, grid_size, key_mask)
        of_cells = widen(weights) @ self._members(grid_size, key_mask, widen(weights))
        return self._finish((of_cells @ widen(v)).to(v.dtype), key_mask)

    def _project(
        self, x: Tensor, grid_size: GridSize, key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries [B, H, N, D], the cells' keys and values [B, H, M, D], and which cells hold a real token [B, M]."""
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise UserError(f"x must have shape [B, N, {self.dim}], got {tuple(x.shape)}")
        check_grid(x.shape[1], grid_size, 0)
        check_mask("key_mask", key_mask, x.shape[0], x.shape[1], x.device)
        cell_mask = None
        if key_mask is not None:
            x = x.masked_fill(~key_mask[..., None], 0)
            real = pad_to_whole(key_mask.unflatten(-1, grid_size)[:, None].float(), self.ratio)
            cell_mask = F.max_pool2d(real, self.ratio).flatten(1) > 0
        maps = pad_to_whole(x.mT.unflatten(-1, grid_size), self.ratio)
        cells = self.norm(self.sr(maps).flatten(2).mT)  # [B, M, C]
        parts = [self.dim, 2 * self.dim]
        weights = self.qkv.weight.split(parts)
        biases = (None, None) if self.qkv.bias is None else self.qkv.bias.split(parts)
        q = F.linear(x, weights[0], biases[0]).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        kv = F.linear(cells, weights[1], biases[1]).unflatten(-1, (2, self.num_heads, -1))
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        return q, hide(k, cell_mask), hide(v, cell_mask), cell_mask

    def _finish(self, attended: Tensor, key_mask: Tensor | None) -> Tensor:
        out = self.proj(attended.transpose(1, 2).flatten(2))
        out = saturate(out, out.dtype)
        return out if key_mask is None else out.masked_fill(~key_mask[..., None], 0)

    def _members(self, grid_size: GridSize, key_mask: Tensor | None, like: Tensor) -> Tensor:
        """1 where a real token lies in a cell: [B or 1, 1, N, M]."""
        cells = -(-grid_size[0] // self.ratio) * -(-grid_size[1] // self.ratio)
        cell = self._cells(grid_size, like.device)
        members = (cell[:, None] == torch.arange(cells, device=like.device)).to(like.dtype)[None, None]
        return hide(members, key_mask)

    def _cells(self, grid_size: GridSize, device: torch.device) -> Tensor:
        """The cell of each token [N]."""
        rows, columns = (torch.arange(side, device=device) // self.ratio for side in grid_size)
        return (rows[:, None] * -(-grid_size[1] // self.ratio) + columns).flatten()

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, ratio={self.ratio}"


def pvt_backbone(
    *,
    embed_dims: Sequence[int] = EMBED_DIMS,
    num_heads: Sequence[int] = NUM_HEADS,
    mlp_ratios: Sequence[float] = MLP_RATIOS,
    depths: Sequence[int],
    attention: AttentionChoice = "inline",
    sr_ratios: Sequence[int] | None = None,
    attention_options: dict[str, Any] | None = None,
    img_size: int | GridSize = 224,
    in_chans: int = 3,
    drop_path_rate: float = 0.0,
    **head: Unpack[HeadOptions],
) -> Backbone:
    """A pyramid of four stages.

    attention: one name for all stages, or one per stage.
    sr_ratios: spatial reduction of softmax stages, and cell size of attentions with landmarks, by default 8, 4, 2, 1;
        refused if no stage has either.
    attention_options: further options of the attention; if stages differ, of those other than softmax.
    """
    names = per_stage(attention, 4)
    options = attention_options or {}
    if "softmax" not in names:
        check_settings(SETTINGS, names, {"sr_ratios": sr_ratios}, options)
    ratios = SR_RATIOS if sr_ratios is None else sr_ratios
    check_stages(4, embed_dims=embed_dims, num_heads=num_heads, mlp_ratios=mlp_ratios, depths=depths, sr_ratios=ratios)
    check_cap(names, [grid_of(img_size, stride) for stride in STRIDES], ratios, options)
    rates = drop_path_rates(drop_path_rate, depths)

    def attend(index: int) -> nn.Module:
        name, dim, ratio = names[index], embed_dims[index], ratios[index]
        own = options_of(name, names, options)
        if name == "softmax" and ratio > 1:
            for option in own:
                check_option("an option of softmax attention with spatial reduction", option, ["qkv_bias"])
            return SpatialReductionAttention(dim, num_heads[index], ratio=ratio, **own)
        grid_size = grid_of(img_size, STRIDES[index])
        offers = {"ratio": ratio, "max_tokens": math.prod(grid_size), "position_grid": grid_size}
        return build_attention(name, dim, num_heads[index], offers=offers, **own)

    def stage(index: int) -> Stage:
        dim, stride = embed_dims[index], 2 if index else 4
        return Stage(
            [PreNormBlock(dim, attend(index), mlp_ratio=mlp_ratios[index], drop_path=rate) for rate in rates[index]],
            dim,
            reduction=STRIDES[index],
            embed=PatchEmbed(
                embed_dims[index - 1] if index else in_chans,
                dim,
                kernel_size=stride,
                stride=stride,
                norm_layer=nn.LayerNorm,
            ),
            position=PositionEmbed(dim, grid_of(img_size, STRIDES[index])),
        )

    return Backbone(
        [stage(index) for index in range(4)],
        norm=nn.Identity(),
        in_chans=in_chans,
        img_size=img_size,
        min_size=least_image(names, ratios, STRIDES, attention_options),
        **head,
    )


default_cfgs = generate_default_cfgs(
    {
        "inline_pvt_tiny": inline_cfg(url=inline_link("inline_pvt_tiny", "90ac52b1555b401eb5e6")),
        "inline_pvt_small": inline_cfg(url=inline_link("inline_pvt_small", "1ab953b2479d433080a3")),
        "inline_pvt_medium": inline_cfg(url=inline_link("inline_pvt_medium", "a72aec31e6084bc0a280")),
        "inline_pvt_large": inline_cfg(url=inline_link("inline_pvt_large", "efd91318ba964f01b288")),
        "inline_micro": inline_cfg(input_size=(3, 32, 32), pool_size=(1, 1)),
    }
)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> Backbone:
    return create_backbone(pvt_backbone, variant, pretrained, rules=RELEASE_KEYS, by_hand=INLINE_RELEASE, **kwargs)


@register_model
def inline_pvt_tiny(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """InLine-PVT-T, 12.0 M parameters."""
    args: dict[str, Any] = {"depths": (2, 2, 2, 2)}
    return _create("inline_pvt_tiny", pretrained, **{**args, **kwargs})


@register_model
def inline_pvt_small(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """InLine-PVT-S, 21.6 M parameters."""
    args: dict[str, Any] = {"depths": (3, 4, 6, 3)}
    return _create("inline_pvt_small", pretrained, **{**args, **kwargs})


@register_model
def inline_pvt_medium(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """InLine-PVT-M, 37.6 M parameters."""
    args: dict[str, Any] = {"depths": (3, 4, 18, 3)}
    return _create("inline_pvt_medium", pretrained, **{**args, **kwargs})


@register_model
def inline_pvt_large(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """InLine-PVT-L, 51.2 M parameters."""
    args: dict[str, Any] = {"depths": (3, 8, 27, 3)}
    return _create("inline_pvt_large", pretrained, **{**args, **kwargs})


@register_model
def inline_micro(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """A small InLine pyramid for small images."""
    args: dict[str, Any] = {
        "embed_dims": (32, 64, 96, 128),
        "num_heads": (1, 2, 3, 4),
        "mlp_ratios": (4, 4, 4, 4),
        "depths": (1, 1, 2, 1),
        "img_size": 32,
    }
    attentions = per_stage(kwargs.get("attention", "inline"), 4)
    if "softmax" in attentions or not unused_settings(SETTINGS, attentions):
        args["sr_ratios"] = (1, 1, 1, 1)
    return _create("inline_micro", pretrained, **{**args, **kwargs})


def release_backbone(family: str, config: dict[str, Any]) -> Backbone:
    """Build the released network; depths are required because they differ between its models."""
    args = release_config(
        config,
        family,
        required=("depths",),
        optional={
            "embed_dims": EMBED_DIMS,
            "num_heads": NUM_HEADS,
            "mlp_ratios": MLP_RATIOS,
            "attn_type": "IIII",
            "sr_ratios": SR_RATIOS,
            "img_size": 224,
            "num_classes": 1000,
            "in_chans": 3,
            "drop_path_rate": 0.0,
        },
        # the release fails if keys and values of InLine stages are reduced
        fixed={**FIXED_ARGUMENTS, "patch_size": (4,), "num_stages": (4,), "la_sr_ratios": ("1111",)},
    )
    kinds, reductions = args.pop("attn_type"), args.pop("sr_ratios")
    if len(kinds) != 4 or set(kinds) - set(RELEASE_ATTENTIONS):
        raise UserError(f"attn_type must be I (InLine) or S (softmax) for each of the four stages, got {kinds!r}")
    return pvt_backbone(
        **args,
        attention=[RELEASE_ATTENTIONS[kind] for kind in kinds],
        sr_ratios=reductions if "S" in kinds else None,
    )


RELEASE_ATTENTIONS = {"I": "inline", "S": "softmax"}
# rules from the release's parameter names to ours, applied in order; q and kv are joined afterwards
RELEASE_KEYS: KeyRules = [
    (r"^patch_embed(?P<stage>\d)\.", r"stages.{stage}.embed."),
    (r"^pos_embed(?P<stage>\d)$", r"stages.{stage}.position.weight"),
    (r"^block(?P<stage>\d)\.(?P<block>\d+)\.", r"stages.{stage}.blocks.{block}."),
    (r"\.attn\.residual\.0\.", r".attn.local.hidden."),
    (r"\.attn\.residual\.2\.", r".attn.local.kernel."),
]

register_release(
    "inline_pvt",
    build=release_backbone,
    rules=RELEASE_KEYS,
    models=[name for name in default_cfgs if not name.endswith("_micro")],
)
