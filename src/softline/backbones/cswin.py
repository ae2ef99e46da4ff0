"""InLine-CSwin backbones: Bridging the Divide (https://arxiv.org/abs/2412.06590) on CSWin (https://arxiv.org/abs/2107.00652).

Overlapping convolutions between stages, pre-norm blocks, mean pooling. Softmax blocks attend inside vertical strips of
the map with half of the heads and inside horizontal strips with the other half; InLine blocks attend on the whole map.
Both add LePE, a depthwise convolution of the values; InLine also adds its local residual, whose kernels are predicted
from the mean of the block's input before its norm.

Deviations from the release:
- Strips do not depend on ``img_size``, and neither do the parameters, except those of "focused" and "linformer"
  attention; maps of any size are padded to whole strips, and the padding is masked.
- InLine blocks attend on the whole map at any image size; the release works only if its split size equals the map.
- Attentions other than InLine and softmax have no LePE.
"""

import math
from collections.abc import Sequence
from typing import Any, Unpack

import torch
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from softline import ops
from softline.attention.multihead import MultiHeadAttention, Override, RowReader
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
    has_softmax,
    linear_of,
    release_config,
    softmax_options,
    without_stage_types,
)
from softline.backbones.registration import INLINE_RELEASE, create_backbone, inline_link
from softline.errors import UserError
from softline.layers.blocks import PreNormBlock
from softline.layers.embed import PatchEmbed
from softline.layers.grid import GridSize
from softline.layers.local import LocalResidual, LocalSum, ValueConv
from softline.layers.windows import Windows
from softline.weights.releases import register_release
from softline.weights.renaming import KeyRules

NORM_EPS = 1e-5
DEPTHS = (2, 4, 18, 1)
STAGE_TYPES = "IISS"
STRIPS = (1, 2, 7, None)


class StripAttention(nn.Module):
    """CSWin's softmax attention with LePE inside vertical (first half of the heads) and horizontal strips.

    strip: width of the strips; None attends on the whole map with all heads.
    symmetric: one projection serves as queries and keys (Table 8 of the SOFT paper).
    local_residual: add InLine's local residual on the whole map.
    """

    num_prefix_tokens = 0

    def __init__(
        self,
        dim: int,
        num_heads: int,
        strip: int | None,
        *,
        symmetric: bool = False,
        local_residual: bool = False,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        branches = 1 if strip is None else 2
        if dim % num_heads or num_heads % branches:
            raise UserError(
                f"dim ({dim}) must be divisible by num_heads ({num_heads}), and num_heads by the {branches} branches"
            )
        self.strip = strip
        self.num_heads = num_heads
        self.branch_heads = num_heads // branches
        self.override: Override | None = None  # see `softline.attention.MultiHeadAttention`
        self.symmetric = symmetric
        self.qkv = nn.Linear(dim, (2 if symmetric else 3) * dim, bias=qkv_bias)
        self.residual = LocalResidual(dim, num_heads) if local_residual else None
        self.local = nn.ModuleList(_lepe(self.branch_heads, dim // num_heads) for _ in range(branches))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, grid_size: GridSize, *, context: Tensor | None = None) -> Tensor:
        """[B, N, C] -> [B, N, C]; context: tokens [B, N, C] whose mean predicts the local residual, instead of x."""
        branches = self._branches(x, grid_size)
        if self.override is not None:
            out = self._overridden(self.override, branches, x, grid_size)
        else:
            parts = zip(branches, self.local, strict=True)
            out = torch.cat([self._attend(qkv, windows, local) for (qkv, windows), local in parts], dim=-1)
        if self.residual is not None:
            added = self.residual(x if context is None else context, self._values(branches), grid_size)
            out = out + added.transpose(1, 2).flatten(2)
        return self.proj(out)

    def weights(self, x: Tensor, grid_size: GridSize) -> Tensor:
        """Explicit weights [B, num_heads, N, N], 0 outside a token's strip; LePE is not part of them."""
        return self.rows(x, grid_size)(torch.arange(x.shape[1], device=x.device))

    def rows(self, x: Tensor, grid_size: GridSize) -> RowReader:
        """Return a function that computes single rows of `weights`: tokens [R] -> [B, num_heads, R, N]."""
        readers = [windows.rows(self._rows_inside(qkv, windows)) for qkv, windows in self._branches(x, grid_size)]
        return lambda tokens: torch.cat([read(tokens) for read in readers], dim=1)

    def _branches(self, x: Tensor, grid_size: GridSize) -> list[tuple[Tensor, Windows]]:
        """For each branch its queries, keys and values [B, N, 3 H D], and its strips."""
        height, width = grid_size
        windows = [grid_size] if self.strip is None else [(height, self.strip), (self.strip, width)]
        qkv = self.qkv(x).unflatten(-1, (2 if self.symmetric else 3, len(windows), -1))
        if self.symmetric:
            qkv = torch.cat([qkv[:, :, :1], qkv], dim=2)
        parts = qkv.unbind(3)  # for each branch [B, N, 3, H D]
        return [(part.flatten(2), Windows(grid_size, size)) for part, size in zip(parts, windows, strict=True)]

    def _attend(self, qkv: Tensor, windows: Windows, local: nn.Module) -> Tensor:
        """Queries, keys and values [B, N, 3 H D] of a branch -> [B, N, H D]."""
        q, k, v = self._heads(qkv, windows)
        key_mask = windows.key_mask(qkv.shape[0], qkv.device)
        out = ops.softmax_attention(q, k, v, key_mask=key_mask) + local(qkv, v, windows.window_size, key_mask)
        return windows.join(out.transpose(1, 2).flatten(2))

    def _overridden(
        self, override: Override, branches: list[tuple[Tensor, Windows]], x: Tensor, grid_size: GridSize
    ) -> Tensor:
        """Values attended by ``override`` on the whole map, with LePE inside the strips: [B, N, C]."""
        lepe = []
        for (qkv, windows), local in zip(branches, self.local, strict=True):
            key_mask = windows.key_mask(qkv.shape[0], qkv.device)
            inside = local(qkv, self._heads(qkv, windows)[2], windows.window_size, key_mask)
            lepe.append(windows.join(inside.transpose(1, 2).flatten(2)))
        attended = override(self, self._values(branches), x, grid_size, None)
        return attended.transpose(1, 2).flatten(2) + torch.cat(lepe, dim=-1)

    def _values(self, branches: list[tuple[Tensor, Windows]]) -> Tensor:
        """Values of all heads on the whole map [B, num_heads, N, D]."""
        values = [qkv.unflatten(-1, (3, self.branch_heads, -1))[:, :, 2] for qkv, _ in branches]  # [B, N, H, D] each
        return torch.cat(values, dim=2).transpose(1, 2)

    def _rows_inside(self, qkv: Tensor, windows: Windows) -> RowReader:
        """Return a function that computes rows inside the strips of a branch: places [R] -> [B windows, H, R, n]."""
        q, k, _ = self._heads(qkv, windows)
        key_mask = windows.key_mask(qkv.shape[0], qkv.device)
        return lambda places: ops.softmax_weights(q, k, key_mask=key_mask, rows=places)

    def _heads(self, qkv: Tensor, windows: Windows) -> tuple[Tensor, ...]:
        """Split a branch's queries, keys and values [B, N, 3 H D] into its strips: three times [B windows, H, n, D]."""
        heads = windows.split(qkv).unflatten(-1, (3, self.branch_heads, -1))  # [B windows, n, 3, H, D]
        return heads.permute(2, 0, 3, 1, 4).unbind(0)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, strip={self.strip}"


def cswin_backbone(
    *,
    embed_dim: int = 64,
    depths: Sequence[int] = DEPTHS,
    num_heads: Sequence[int] = (2, 4, 8, 16),
    strips: Sequence[int | None] | None = None,
    attention: AttentionChoice = "inline",
    stage_types: str | None = None,
    mlp_ratio: float = 4.0,
    attention_options: dict[str, Any] | None = None,
    img_size: int | GridSize = 224,
    in_chans: int = 3,
    drop_path_rate: float = 0.0,
    **head: Unpack[HeadOptions],
) -> Backbone:
    """A CSWin pyramid with any number of stages.

    embed_dim: channels of the first stage; they double from stage to stage.
    strips: strip width of softmax blocks per stage, by default 1, 2, 7, None; None attends on the whole map.
    attention, stage_types: attention of each block, see `softline.backbones.building.block_attentions`; "IISS" by
        default.
    attention_options: further options of the attention in blocks other than softmax; if all blocks are softmax, theirs
        (symmetric, local_residual, qkv_bias).
    """
    names = block_attentions(attention, stage_types, depths, STAGE_TYPES)
    check_softmax_only(names, "strips", strips)
    widths = strips or STRIPS if has_softmax(names) else [None] * len(depths)
    check_stages(len(depths), num_heads=num_heads, strips=widths)
    rates = drop_path_rates(drop_path_rate, depths)
    strides = [4 * 2**index for index in range(len(depths))]
    options = attention_options or {}
    own_options = softmax_options(names, options)
    # as many landmarks as the last stage has tokens
    cells = [strides[-1] // stride for stride in strides]
    grids = [grid_of(img_size, stride) for stride in strides]
    check_cap([linear_of(stage) for stage in names], grids, cells, options)

    def block(index: int, name: str, rate: float) -> nn.Module:
        dim, heads = embed_dim * 2**index, num_heads[index]
        if name == "softmax":
            attend: nn.Module = StripAttention(dim, heads, widths[index], **own_options)
            context = bool(own_options.get("local_residual"))
        else:
            offers = {"ratio": cells[index], "max_tokens": math.prod(grids[index]), "position_grid": grids[index]}
            attend = build_attention(name, dim, heads, offers=offers, **options)
            context = name == "inline"
        if name == "inline":
            attend = _with_lepe(attend)
        return PreNormBlock(dim, attend, mlp_ratio=mlp_ratio, drop_path=rate, norm_eps=NORM_EPS, pass_context=context)

    def stage(index: int) -> Stage:
        dim = embed_dim * 2**index
        blocks = [block(index, name, rate) for name, rate in zip(names[index], rates[index], strict=True)]
        embed = PatchEmbed(dim // 2, dim, **_MERGE) if index else PatchEmbed(in_chans, dim, **_STEM)
        return Stage(blocks, dim, reduction=strides[index], embed=embed)

    return Backbone(
        [stage(index) for index in range(len(depths))],
        norm=nn.LayerNorm(embed_dim * 2 ** (len(depths) - 1), eps=NORM_EPS),
        in_chans=in_chans,
        img_size=img_size,
        min_size=strides[-1],
        **head,
    )


def _lepe(num_heads: int, head_dim: int) -> ValueConv:
    return ValueConv(num_heads, head_dim, 3, shared="none")


def _with_lepe(attention: nn.Module) -> MultiHeadAttention:
    """Add LePE to the attention's local terms."""
    assert isinstance(attention, MultiHeadAttention), "InLine attention is a MultiHeadAttention"
    lepe = _lepe(attention.num_heads, attention.dim // attention.num_heads)
    attention.local = LocalSum([lepe] if attention.local is None else [lepe, attention.local])
    return attention


_STEM: dict[str, Any] = {"kernel_size": 7, "stride": 4, "padding": 2, "norm_layer": nn.LayerNorm}
_MERGE: dict[str, Any] = {"kernel_size": 3, "stride": 2, "padding": 1, "norm_layer": nn.LayerNorm}
_BASE: dict[str, Any] = {"embed_dim": 96, "depths": (3, 6, 29, 2), "num_heads": (4, 8, 16, 32)}

default_cfgs = generate_default_cfgs(
    {
        "inline_cswin_tiny": inline_cfg(url=inline_link("inline_cswin_tiny", "49fa2ecc543647c4b970")),
        "inline_cswin_small": inline_cfg(url=inline_link("inline_cswin_small", "59f4e65f776f4052b93c")),
        "inline_cswin_base": inline_cfg(url=inline_link("inline_cswin_base", "91e17121df284ae38521")),
        "inline_cswin_base_384": inline_cfg(input_size=(3, 384, 384), pool_size=(12, 12)),
    }
)


def _create(variant: str, pretrained: bool, args: dict[str, Any], kwargs: dict[str, Any]) -> Backbone:
    own = without_stage_types(args, kwargs)
    chosen = {**own, **kwargs}
    names = block_attentions(
        chosen.get("attention", "inline"), chosen.get("stage_types"), chosen.get("depths", DEPTHS), STAGE_TYPES
    )
    if not has_softmax(names):
        own = {key: value for key, value in own.items() if key != "strips"}
    return create_backbone(
        cswin_backbone, variant, pretrained, rules=RELEASE_KEYS, by_hand=INLINE_RELEASE, **{**own, **kwargs}
    )


@register_model
def inline_cswin_tiny(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """InLine-CSwin-T, 21 M parameters."""
    args: dict[str, Any] = {}
    return _create("inline_cswin_tiny", pretrained, args, kwargs)


@register_model
def inline_cswin_small(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """InLine-CSwin-S, 33 M parameters."""
    args: dict[str, Any] = {"depths": (3, 6, 29, 2)}
    return _create("inline_cswin_small", pretrained, args, kwargs)


@register_model
def inline_cswin_base(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """InLine-CSwin-B, 73 M parameters."""
    args: dict[str, Any] = {**_BASE}
    return _create("inline_cswin_base", pretrained, args, kwargs)


@register_model
def inline_cswin_base_384(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """InLine-CSwin-B with wider strips, for images of 384 x 384."""
    args: dict[str, Any] = {**_BASE, "strips": (1, 2, 12, None), "img_size": 384}
    return _create("inline_cswin_base_384", pretrained, args, kwargs)


def release_backbone(family: str, config: dict[str, Any]) -> Backbone:
    """Build the released network from the arguments of its constructor."""
    config = release_config(
        config,
        family,
        required=("img_size", "embed_dim", "depth", "split_size", "la_split_size", "num_heads", "attn_type"),
        optional={"mlp_ratio": 4.0, "num_classes": 1000, "in_chans": 3, "drop_path_rate": 0.0},
        fixed={**FIXED_ARGUMENTS, "patch_size": (4,), "hybrid_backbone": (None,), "use_chk": (False,)},
    )
    depths, img_size = config["depth"], config["img_size"]
    sides = [min(grid_of(img_size, 4 * 2**index)) for index in range(len(depths))]
    names = block_attentions("inline", config["attn_type"], depths, STAGE_TYPES)
    splits = [int(split) for split in config["la_split_size"].split("-")]
    check_stages(len(depths), la_split_size=splits, split_size=config["split_size"])
    for split, side, stage in zip(splits, sides, names, strict=True):
        if "inline" in stage and split != side:
            raise UserError(
                f"la_split_size must be the map size in InLine stages ({'-'.join(map(str, sides))} for images of "
                f"{img_size}; the release supports nothing else), got {config['la_split_size']!r}"
            )
    # the last stage, and a stage whose strips are as wide as the map, attend on the whole map
    strips = [
        None if split == side or index == len(depths) - 1 else split
        for index, (split, side) in enumerate(zip(config["split_size"], sides, strict=True))
    ]
    return cswin_backbone(
        embed_dim=config["embed_dim"],
        depths=depths,
        num_heads=config["num_heads"],
        strips=strips if has_softmax(names) else None,
        stage_types=config["attn_type"],
        mlp_ratio=config["mlp_ratio"],
        drop_path_rate=config["drop_path_rate"],
        img_size=img_size,
        num_classes=config["num_classes"],
        in_chans=config["in_chans"],
    )


# rules from the release's parameter names to ours, applied in order
RELEASE_KEYS: KeyRules = [
    (r"^stage1_conv_embed\.0\.", r"stages.0.embed.proj."),
    (r"^stage1_conv_embed\.2\.", r"stages.0.embed.norm."),
    (r"^merge(?P<index>\d)\.conv\.", r"stages.{index}.embed.proj."),
    (r"^merge(?P<index>\d)\.norm\.", r"stages.{index}.embed.norm."),
    (r"^stage(?P<stage>\d)\.(?P<block>\d+)\.", r"stages.{stage}.blocks.{block}."),
    (r"(?P<block>\.blocks\.\d+)\.(?P<layer>qkv|proj)\.", r"{block}.attn.{layer}."),
    (r"\.attns\.(?P<branch>\d)\.get_v\.", r".attn.local.{branch}.conv."),
    (r"\.attns\.0\.residual\.0\.", r".attn.local.1.hidden."),
    (r"\.attns\.0\.residual\.2\.", r".attn.local.1.kernel."),
]

register_release("inline_cswin", build=release_backbone, rules=RELEASE_KEYS, models=default_cfgs)
