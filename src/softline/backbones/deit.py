"""InLine on DeiT: Bridging the Divide (https://arxiv.org/abs/2412.06590).

A plain vision transformer: patches, a class token, a learned position embedding, pre-norm blocks on one grid, and a
classifier on the class token; InLine attention in every block, heads of 32 channels. With ``attention="softpp"`` it is
the plain (non-pyramidal) variant of SOFT++ (https://arxiv.org/abs/2207.03341, Table 11a).

Each block is a stage of its own, so that ``features_only`` can return the output of any block, as in timm's vision
transformers.

Deviations from the paper and its release:
- Images need not be square or divisible into patches: they are zero-padded at the bottom and the right to whole
  patches, and the position embedding is resized (bicubic); the release takes one square size only.
"""

from typing import Any, Unpack

from timm.models import generate_default_cfgs, register_model
from torch import nn

from softline.backbones.backbone import Backbone, HeadOptions, Stage, inline_cfg
from softline.backbones.building import (
    FIXED_ARGUMENTS,
    AttentionChoice,
    build_attention,
    check_cap,
    drop_path_rates,
    grid_of,
    least_image,
    options_of,
    per_stage,
    release_config,
)
from softline.backbones.registration import INLINE_RELEASE, create_backbone, inline_link
from softline.layers.blocks import PreNormBlock
from softline.layers.embed import PatchEmbed, PositionEmbed
from softline.layers.grid import GridSize
from softline.weights.releases import register_release
from softline.weights.renaming import KeyRules

# the 14 x 14 grid of a 224-pixel image gets the 7 x 7 landmarks that SOFT has in each stage
LANDMARK_RATIO = 2


def deit_backbone(
    *,
    patch_size: int = 16,
    embed_dim: int,
    depth: int = 12,
    num_heads: int,
    mlp_ratio: float = 4.0,
    attention: AttentionChoice = "inline",
    attention_options: dict[str, Any] | None = None,
    img_size: int | GridSize = 224,
    in_chans: int = 3,
    drop_path_rate: float = 0.0,
    **head: Unpack[HeadOptions],
) -> Backbone:
    """A plain vision transformer.

    attention: one name for all blocks, or one per block.
    attention_options: further options of the attention; if blocks differ, of those other than softmax.
    """
    names = per_stage(attention, depth)
    options = attention_options or {}
    grid_size = grid_of(img_size, patch_size)
    check_cap(names, [grid_size] * depth, [LANDMARK_RATIO] * depth, options)
    offers = {"ratio": LANDMARK_RATIO, "max_tokens": 1 + grid_size[0] * grid_size[1], "position_grid": grid_size}

    def stage(index: int, rate: float) -> Stage:
        attend = build_attention(
            names[index],
            embed_dim,
            num_heads,
            num_prefix_tokens=1,
            offers=offers,
            **options_of(names[index], names, options),
        )
        first: dict[str, Any] = {}
        if index == 0:
            first["embed"] = PatchEmbed(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)
            first["cls_token"] = True
            first["position"] = PositionEmbed(embed_dim, grid_size, num_prefix_tokens=1, mode="bicubic")
        block = PreNormBlock(embed_dim, attend, mlp_ratio=mlp_ratio, drop_path=rate)
        return Stage([block], embed_dim, reduction=patch_size, num_prefix_tokens=1, **first)

    return Backbone(
        [stage(index, rate) for index, (rate,) in enumerate(drop_path_rates(drop_path_rate, [1] * depth))],
        norm=nn.LayerNorm(embed_dim, eps=1e-6),
        in_chans=in_chans,
        img_size=img_size,
        min_size=least_image(names, [LANDMARK_RATIO] * depth, [patch_size] * depth, attention_options),
        **head,
    )


default_cfgs = generate_default_cfgs(
    {
        name: inline_cfg(url=inline_link(name, file), input_size=(3, size, size), pool_size=None)
        for name, size, file in (
            ("inline_deit_tiny", 224, "1d6b8191ad6d4114b291"),
            ("inline_deit_small", 288, "2f3898b07e9247f3beb3"),
            ("inline_deit_base", 448, "10bdd726d4b0435eb34e"),
        )
    }
)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> Backbone:
    return create_backbone(
        deit_backbone,
        variant,
        pretrained,
        rules=RELEASE_KEYS,
        by_hand=INLINE_RELEASE,
        # the last three blocks, as for timm's vision transformers
        out_indices=3,
        **kwargs,
    )


@register_model
def inline_deit_tiny(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """InLine-DeiT-T, 6.5 M parameters."""
    args: dict[str, Any] = {"embed_dim": 192, "num_heads": 6}
    return _create("inline_deit_tiny", pretrained, **{**args, **kwargs})


@register_model
def inline_deit_small(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """InLine-DeiT-S, 16.7 M parameters, for images of 288 pixels."""
    args: dict[str, Any] = {"embed_dim": 320, "num_heads": 10, "img_size": 288}
    return _create("inline_deit_small", pretrained, **{**args, **kwargs})


@register_model
def inline_deit_base(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """InLine-DeiT-B, 23.8 M parameters, for images of 448 pixels."""
    args: dict[str, Any] = {"embed_dim": 384, "num_heads": 12, "img_size": 448}
    return _create("inline_deit_base", pretrained, **{**args, **kwargs})


def release_backbone(family: str, config: dict[str, Any]) -> Backbone:
    """Build the released network; embed_dim and num_heads are required because they differ between its models."""
    args = release_config(
        config,
        family,
        required=("embed_dim", "num_heads"),
        optional={
            "patch_size": 16,
            "depth": 12,
            "mlp_ratio": 4.0,
            "img_size": 224,
            "num_classes": 1000,
            "in_chans": 3,
            "drop_path_rate": 0.0,
        },
        fixed={**FIXED_ARGUMENTS, "representation_size": (None,), "distilled": (False,), "weight_init": ("",)},
    )
    return deit_backbone(**args)


# rules from the release's parameter names to ours, applied in order
RELEASE_KEYS: KeyRules = [
    (r"^patch_embed\.", r"stages.0.embed."),
    (r"^pos_embed$", r"stages.0.position.weight"),
    (r"^cls_token$", r"stages.0.cls_token"),
    (r"^blocks\.(?P<block>\d+)\.", r"stages.{block}.blocks.0."),
    (r"\.attn\.residual\.0\.", r".attn.local.hidden."),
    (r"\.attn\.residual\.2\.", r".attn.local.kernel."),
]

register_release("inline_deit", build=release_backbone, rules=RELEASE_KEYS, models=default_cfgs)
