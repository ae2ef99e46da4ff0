"""SOFT and SOFT++ backbones: Softmax-free Linear Transformers (https://arxiv.org/abs/2207.03341).

Four stages, each starting with overlapping convolutions and a learned position embedding; post-norm blocks with SOFT
attention in stages 1 to 3, and a class token in stage 4.

Names: ``soft_*`` and ``softpp_*`` have the paper's sizes, ``soft_release_*`` and ``softpp_release_*`` those of the
released code, for its checkpoints; the micro models are softline's own.

Deviations from the paper and its release:
- Table 1's depths for Tiny give 15.4 M parameters instead of its 13 M; ``soft_tiny`` has the released depths, which
  give 13 M.
- Stage 4 consists of SOFT blocks in Small, Medium and Large, as Table 1 lists and its parameter counts require; the
  release uses softmax blocks there: ``stage4="softmax"``.
- Landmark grids are capped at 7 x 7; in ``*_release_*`` they have the release's fixed ratio,
  ``max_landmarks="ratio"``. At 224 pixels both give the same grid.
- How the paper takes 36, 64 or 81 landmarks (Table 9) from grids that these do not divide is not stated; ``landmarks``
  takes the largest cells of which there are enough, and averages them in bins.
- Every linear layer is initialised with a truncated normal of std 0.02; the release's SOFT++ omits this in three
  stages.
- The MLP ratio is 4 everywhere: the release sets ``mlp_ratios`` of 8 in stages 1 and 2, but its code ignores them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, get_args

from timm.models import generate_default_cfgs, register_model
from torch import nn

from softline.backbones.backbone import Backbone, HeadOptions, Stage, imagenet_cfg
from softline.backbones.building import (
    DEFAULT_CAP,
    FIXED_ARGUMENTS,
    AttentionChoice,
    build_attention,
    check_cap,
    check_settings,
    check_stages,
    drop_path_rates,
    grid_of,
    landmark_cells,
    least_image,
    options_of,
    per_stage,
    release_config,
    unused_settings,
)
from softline.backbones.registration import create_backbone
from softline.checks import check_option
from softline.errors import UserError
from softline.layers.blocks import PostNormBlock, PreNormBlock
from softline.layers.embed import ConvEmbed, PositionEmbed
from softline.layers.grid import GridSize
from softline.layers.landmarks import MaxLandmarks, Sampling
from softline.weights.releases import register_release
from softline.weights.renaming import KeyRules

Stage4 = Literal["softmax", "soft"]
STRIDES = (4, 8, 16, 32)
RATIOS = (8, 4, 2, 1)
VALUE_CONVS = (9, 5, 3, 3)
# settings of the backbone, and the attention's option that each of them sets
SETTINGS = {
    "ratios": "ratio",
    "value_convs": "value_conv",
    "sampling": "sampling",
    "max_landmarks": "max_landmarks",
    "landmarks": "max_landmarks",
}


def soft_backbone(
    *,
    embed_dims: Sequence[int] = (64, 128, 320, 512),
    num_heads: Sequence[int] = (2, 4, 10, 16),
    depths: Sequence[int] = (1, 2, 3, 2),
    ratios: Sequence[int] | None = None,
    value_convs: Sequence[int] | None = None,
    attention: AttentionChoice = "soft",
    stage4: Stage4 = "soft",
    overlap: bool = True,
    sampling: Sampling | None = None,
    max_landmarks: MaxLandmarks = None,
    landmarks: int | None = None,
    attention_options: dict[str, Any] | None = None,
    img_size: int | GridSize = 224,
    in_chans: int = 3,
    drop_path_rate: float = 0.0,
    **head: Unpack[HeadOptions],
) -> Backbone:
    """A SOFT pyramid.

    ratios: landmark cell size per stage, by default 8, 4, 2, 1.
    value_convs: kernel size of the value convolution per stage, by default 9, 5, 3, 3.
    attention: one name for all stages, or one per stage; with a single name ``stage4`` decides on stage 4.
    stage4: "softmax" for pre-norm softmax blocks as released, "soft" for the same blocks as in the other stages.
    overlap: False uses non-overlapping patch embeddings (Table 11b).
    sampling: how landmarks are sampled (Table 10), by default "conv".
    max_landmarks: maximum rows and columns of the landmark grid, by default 7; "ratio" for the paper's fixed ratio.
    landmarks: number of landmarks in every stage at ``img_size`` (Table 9), in place of ratios and max_landmarks.
    attention_options: further options of the attention; if stages differ, of those other than softmax.

    Settings that the chosen attention does not have are refused.
    """
    names = _stage_attentions(attention, stage4)
    given = {"ratios": ratios, "value_convs": value_convs, "sampling": sampling}
    options = attention_options or {}
    check_settings(SETTINGS, names, {**given, "max_landmarks": max_landmarks, "landmarks": landmarks}, options)
    grids = [grid_of(img_size, stride) for stride in STRIDES]
    kernels = VALUE_CONVS if value_convs is None else value_convs
    check_stages(4, embed_dims=embed_dims, num_heads=num_heads, depths=depths, value_convs=kernels)
    cells, cap = _landmark_grids(names, grids, ratios, max_landmarks, landmarks, options)
    rates = drop_path_rates(drop_path_rate, depths)

    def stage(index: int) -> Stage:
        dim, prefix = embed_dims[index], int(index == 3)
        grid_size = grids[index]
        offers = {
            "ratio": cells[index],
            "max_landmarks": cap,
            "sampling": sampling or "conv",
            "value_conv": kernels[index],
            "max_tokens": prefix + grid_size[0] * grid_size[1],
            "position_grid": grid_size,
        }
        own = options_of(names[index], names, options)

        def block(rate: float) -> nn.Module:
            attend = build_attention(
                names[index], dim, num_heads[index], num_prefix_tokens=prefix, offers=offers, **own
            )
            if index == 3 and stage4 == "softmax":
                return PreNormBlock(dim, attend, drop_path=rate)
            return PostNormBlock(dim, attend, dropout=rate)

        widths, strides = ([32, 32, dim], [2, 1, 2]) if index == 0 else ([dim], [2])
        return Stage(
            [block(rate) for rate in rates[index]],
            dim,
            reduction=STRIDES[index],
            embed=ConvEmbed(embed_dims[index - 1] if index else in_chans, widths, strides, overlap=overlap),
            cls_token=bool(prefix),
            num_prefix_tokens=prefix,
            position=PositionEmbed(dim, grid_size, num_prefix_tokens=prefix),
        )

    return Backbone(
        [stage(index) for index in range(4)],
        norm=nn.LayerNorm(embed_dims[3], eps=1e-6),
        in_chans=in_chans,
        img_size=img_size,
        min_size=least_image(names, cells, STRIDES, attention_options),
        **head,
    )


def _landmark_grids(
    names: Sequence[str],
    grids: Sequence[GridSize],
    ratios: Sequence[int] | None,
    max_landmarks: MaxLandmarks,
    landmarks: int | None,
    options: Mapping[str, Any],
) -> tuple[Sequence[int | GridSize], MaxLandmarks]:
    """The landmark cell size of each stage, and the cap; see `soft_backbone` for the settings."""
    cells: Sequence[int | GridSize] = RATIOS if ratios is None else ratios
    cap: MaxLandmarks = DEFAULT_CAP if max_landmarks is None else max_landmarks
    check_stages(4, ratios=cells)
    if landmarks is not None:
        others = {"ratios": ratios, "max_landmarks": max_landmarks, "ratio": options.get("ratio")}
        for setting, value in others.items():
            if value is not None:
                raise UserError(f"landmarks={landmarks} already determines {setting}; got {setting}={value!r} too")
        cells, cap = landmark_cells(landmarks, names, grids)
    check_cap(names, grids, cells, {"max_landmarks": cap, **options})
    return cells, cap


def _stage_attentions(attention: AttentionChoice, stage4: str) -> list[str]:
    """The attention of each stage; ``stage4`` decides on stage 4 if there is one name for all."""
    check_option("stage4", stage4, get_args(Stage4))
    names = per_stage(attention, 4)
    if isinstance(attention, str) and stage4 == "softmax":
        names[3] = "softmax"
    return names


def _cfg(**changes: Any) -> dict[str, Any]:
    return imagenet_cfg(crop_pct=0.9, first_conv="stages.0.embed.layers.0", license="mit", **changes)


# how the released code inverts: SOFT adds 0.01 to the diagonal, SOFT++ halves the Newton start and differentiates
# through the iterations
RELEASE_OPTIONS: dict[str, dict[str, Any]] = {
    "soft": {"start": "release", "ridge": 0.01},
    "softpp": {"start": "release", "gradient": "autograd"},
}
_SMALL = {"embed_dims": (96, 192, 384, 768), "num_heads": (3, 6, 12, 24)}
_LARGE = {"embed_dims": (128, 256, 512, 1024), "num_heads": (4, 8, 16, 32)}
_MICRO = {
    "embed_dims": (32, 64, 96, 128),
    "num_heads": (1, 2, 3, 4),
    "depths": (1, 1, 2, 1),
    # 16 landmarks for the 49 tokens that stage 1 has at 28 pixels: as many as there are tokens would save nothing
    "ratios": (2, 2, 1, 1),
    "value_convs": (5, 3, 3, 3),
    # convolved landmarks start far from the queries: with so few tokens the weights would sum to almost zero
    "sampling": "avgpool",
    "img_size": 32,
}

default_cfgs = generate_default_cfgs(
    {
        **{
            f"{family}_{size}": _cfg() for family in ("soft", "softpp") for size in ("tiny", "small", "medium", "large")
        },
        **{
            f"{family}_release_{size}": _cfg()
            for family in ("soft", "softpp")
            for size in ("tiny", "small", "medium", "large", "huge")
        },
        **{f"{family}_micro": _cfg(input_size=(3, 32, 32), pool_size=(1, 1)) for family in ("soft", "softpp")},
    }
)


def _create(variant: str, pretrained: bool, args: dict[str, Any], kwargs: dict[str, Any]) -> Backbone:
    """Create a model from its own arguments and those of the caller, which come first."""
    chosen = {**args, **kwargs}
    names = _stage_attentions(chosen["attention"], chosen.get("stage4", "soft"))
    # the model's own landmarks are of no use to an attention without any, and give way to the caller's options
    without = [setting for setting in unused_settings(SETTINGS, names) if setting not in kwargs]
    options = kwargs.get("attention_options") or {}
    without += [setting for setting, option in SETTINGS.items() if option in options and setting not in kwargs]
    if "landmarks" in kwargs:
        without += [setting for setting in ("ratios", "max_landmarks") if setting not in kwargs]
    return create_backbone(
        soft_backbone,
        variant,
        pretrained,
        rules=RELEASE_KEYS,
        by_hand="the Google Drive links of https://github.com/fudan-zvg/SOFT",
        **{key: value for key, value in chosen.items() if key not in without},
    )


def _create_release(family: str, size: str, pretrained: bool, args: dict[str, Any], kwargs: dict[str, Any]) -> Backbone:
    """Create a released model, whose inversion the caller's options of the attention change but do not replace."""
    names = set(per_stage(kwargs.get("attention", family), 4)) - {"softmax"}
    if len(names & set(RELEASE_OPTIONS)) == 1 and len(names) == 1:
        given = kwargs.get("attention_options") or {}
        kwargs = {**kwargs, "attention_options": release_options(names.pop(), given)}
    elif names & set(RELEASE_OPTIONS):
        listed = ", ".join(sorted(names))
        raise UserError(
            f"a released model inverts as one of soft and softpp, got attentions {listed}; name one of them"
        )
    own = {"attention": family, "stage4": "softmax", "max_landmarks": "ratio", **args}
    return _create(f"{family}_release_{size}", pretrained, own, kwargs)


def release_options(family: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the release's attention, changed by those that are given."""
    if "normalize" in given:
        raise UserError(f"normalize={given['normalize']!r} would make {family} another attention: name that one")
    own = dict(RELEASE_OPTIONS[family])
    if given.get("inverse", "newton") != "newton":
        # a direct inverse has neither a start nor iterations to differentiate
        own = {key: value for key, value in own.items() if key not in ("start", "gradient")}
    return {**own, **given}


@register_model
def soft_tiny(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT-Tiny of the paper, 13 M parameters."""
    args: dict[str, Any] = {"attention": "soft", "stage4": "softmax"}
    return _create("soft_tiny", pretrained, args, kwargs)


@register_model
def soft_small(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT-Small of the paper, 27 M parameters."""
    args: dict[str, Any] = {"attention": "soft", "depths": (2, 2, 5, 2), **_SMALL}
    return _create("soft_small", pretrained, args, kwargs)


@register_model
def soft_medium(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT-Medium of the paper, 48 M parameters."""
    args: dict[str, Any] = {"attention": "soft", "depths": (2, 2, 18, 2), **_SMALL}
    return _create("soft_medium", pretrained, args, kwargs)


@register_model
def soft_large(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT-Large of the paper, 85 M parameters."""
    args: dict[str, Any] = {"attention": "soft", "depths": (2, 2, 18, 2), **_LARGE}
    return _create("soft_large", pretrained, args, kwargs)


@register_model
def soft_release_tiny(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT-Tiny of the released code."""
    args: dict[str, Any] = {}
    return _create_release("soft", "tiny", pretrained, args, kwargs)


@register_model
def soft_release_small(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT-Small of the released code."""
    args: dict[str, Any] = {"depths": (1, 3, 20, 4)}
    return _create_release("soft", "small", pretrained, args, kwargs)


@register_model
def soft_release_medium(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT-Medium of the released code."""
    args: dict[str, Any] = {"embed_dims": (64, 128, 288, 512), "num_heads": (2, 4, 9, 16), "depths": (1, 3, 29, 5)}
    return _create_release("soft", "medium", pretrained, args, kwargs)


@register_model
def soft_release_large(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT-Large of the released code."""
    args: dict[str, Any] = {"depths": (1, 3, 40, 5)}
    return _create_release("soft", "large", pretrained, args, kwargs)


@register_model
def soft_release_huge(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT-Huge of the released code."""
    args: dict[str, Any] = {"embed_dims": (64, 128, 352, 512), "num_heads": (2, 4, 11, 16), "depths": (1, 5, 49, 5)}
    return _create_release("soft", "huge", pretrained, args, kwargs)


@register_model
def soft_micro(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """A small SOFT for small images."""
    args: dict[str, Any] = {"attention": "soft", **_MICRO}
    return _create("soft_micro", pretrained, args, kwargs)


@register_model
def softpp_tiny(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT++-Tiny of the paper, 13 M parameters."""
    args: dict[str, Any] = {"attention": "softpp", "stage4": "softmax"}
    return _create("softpp_tiny", pretrained, args, kwargs)


@register_model
def softpp_small(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT++-Small of the paper, 27 M parameters."""
    args: dict[str, Any] = {"attention": "softpp", "depths": (2, 2, 5, 2), **_SMALL}
    return _create("softpp_small", pretrained, args, kwargs)


@register_model
def softpp_medium(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT++-Medium of the paper, 48 M parameters."""
    args: dict[str, Any] = {"attention": "softpp", "depths": (2, 2, 18, 2), **_SMALL}
    return _create("softpp_medium", pretrained, args, kwargs)


@register_model
def softpp_large(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT++-Large of the paper, 85 M parameters."""
    args: dict[str, Any] = {"attention": "softpp", "depths": (2, 2, 18, 2), **_LARGE}
    return _create("softpp_large", pretrained, args, kwargs)


@register_model
def softpp_release_tiny(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT++-Tiny of the released code."""
    args: dict[str, Any] = {}
    return _create_release("softpp", "tiny", pretrained, args, kwargs)


@register_model
def softpp_release_small(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT++-Small of the released code."""
    args: dict[str, Any] = {"depths": (1, 3, 20, 4)}
    return _create_release("softpp", "small", pretrained, args, kwargs)


@register_model
def softpp_release_medium(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT++-Medium of the released code."""
    args: dict[str, Any] = {"embed_dims": (64, 128, 288, 512), "num_heads": (2, 4, 9, 16), "depths": (1, 3, 29, 5)}
    return _create_release("softpp", "medium", pretrained, args, kwargs)


@register_model
def softpp_release_large(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT++-Large of the released code."""
    args: dict[str, Any] = {"depths": (1, 3, 40, 5)}
    return _create_release("softpp", "large", pretrained, args, kwargs)


@register_model
def softpp_release_huge(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """SOFT++-Huge of the released code."""
    args: dict[str, Any] = {"embed_dims": (64, 128, 352, 512), "num_heads": (2, 4, 11, 16), "depths": (1, 5, 49, 5)}
    return _create_release("softpp", "huge", pretrained, args, kwargs)


@register_model
def softpp_micro(pretrained: bool = False, **kwargs: Any) -> Backbone:
    """A small SOFT++ for small images."""
    args: dict[str, Any] = {"attention": "softpp", **_MICRO}
    return _create("softpp_micro", pretrained, args, kwargs)


def release_backbone(family: str, config: dict[str, Any]) -> Backbone:
    """Build the released network from the arguments of its constructor."""
    args = release_config(
        config,
        family,
        required=("embed_dims", "num_heads", "depths", "sr_ratios"),
        optional={
            "mlp_ratios": (8, 8, 4, 4),
            "num_classes": 1000,
            "in_chans": 3,
            "drop_path_rate": 0.0,
            "newton_max_iter": 20,
            # the release's position embeddings are those of 224 pixels whatever it is
            "img_size": 224,
        },
        fixed={**FIXED_ARGUMENTS, "patch_size": (4,), "kernel_method": ("torch", "cuda")},
    )
    if args["mlp_ratios"][3] != 4:
        raise UserError(f"mlp_ratios must be 4 in stage 4 (the release ignores the others), got {args['mlp_ratios']}")
    return soft_backbone(
        embed_dims=args["embed_dims"],
        num_heads=args["num_heads"],
        depths=args["depths"],
        ratios=args["sr_ratios"],
        attention=family,
        stage4="softmax",
        max_landmarks="ratio",
        attention_options={**RELEASE_OPTIONS[family], "iterations": args["newton_max_iter"]},
        drop_path_rate=args["drop_path_rate"],
        num_classes=args["num_classes"],
        in_chans=args["in_chans"],
    )


# rules from the release's parameter names to ours, applied in order; q and v, or q and kv, are joined afterwards
RELEASE_KEYS: KeyRules = [
    (r"^patch_embed(?P<stage>\d)\.proj\.", r"stages.{stage}.embed.layers."),
    (r"^pos_embed(?P<stage>\d)$", r"stages.{stage}.position.weight"),
    (r"^cls_token$", r"stages.3.cls_token"),
    (r"^block(?P<stage>\d)\.(?P<block>\d+)\.(att\.)?", r"stages.{stage}.blocks.{block}."),
    (r"\.ff(?P<layer>[12])\.", r".mlp.fc{layer}."),
    (r"\.mha\.attn\.Qlandmark_op\.", r".attn.core.landmarks.conv."),
    (r"\.mha\.attn\.Qnorm_act\.0\.", r".attn.core.landmarks.norm."),
    (r"\.mha\.attn\.conv\.", r".attn.local.conv."),
    (r"\.mha\.ff\.", r".attn.proj."),
    (r"\.mha\.W_(?P<part>[qv])\.", r".attn.{part}."),
]

register_release(
    "soft",
    "softpp",
    build=release_backbone,
    rules=RELEASE_KEYS,
    models=[name for name in default_cfgs if "_release_" in name],
)
