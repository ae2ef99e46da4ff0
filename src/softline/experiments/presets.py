"""The papers' tables, in miniature and at their own scale: what differs between the rows, all else being the same.

SOFT: https://arxiv.org/abs/2207.03341; InLine: https://arxiv.org/abs/2412.06590.

Deviations from the papers:
- Table 2 of SOFT: its Linformer is the spatial reduction of PVT, which it calls a special case of Linformer; here it is
  Linformer with learned projections to 49 tokens, which are 0.5 M parameters more. The number of Performer's random
  features is not stated; here there are 49. Softmax attention takes 3.5 G multiply-adds here and 3.9 G in the paper,
  which does not say what it counts.
- Table 3 of SOFT gives its ViT-Small/16 48 M parameters and 9.9 G multiply-adds; here, in Table 8, it is the model of
  that name in DeiT and timm, with 22 M and 4.6 G.
- Table 11a of SOFT: the flat network has SOFT++ attention in DeiT-S's own blocks, with heads of 32 channels.
- Table 1 of InLine: neither its model nor its feature map is in softline's sources; here it is DeiT-T with every map.
- Table 3 of InLine: windows and local residual are not in softline's sources; here both attentions see whole maps and
  have no residual, as linear attention has none.
- Table 9 of InLine: the attentions other than InLine have the three heads of DeiT-T, InLine the six of its release.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from softline.attention import ATTENTIONS
from softline.checks import check_option
from softline.engine.reading import load_recipe, merge, read_recipe, to_dict
from softline.engine.recipe import Recipe
from softline.errors import UserError

Scale = Literal["miniature", "paper"]


class Printed(NamedTuple):
    """What a paper prints for a row of its table."""

    top1: float | None = None
    """ImageNet-1K accuracy in percent."""
    millions: float | None = None
    """Parameters."""
    gmacs: float | None = None
    """Billions of multiply-adds; those of SOFT are without Newton's iterations."""


NOTHING = Printed()


@dataclass(frozen=True)
class Variant:
    """One row of a comparison."""

    name: str
    """Also the name of its directory."""
    changes: dict[str, Any]
    """Nested keys of the recipe with new values."""
    printed: Printed = NOTHING


@dataclass(frozen=True)
class Preset:
    name: str
    title: str
    reference: str
    """The table that it repeats."""
    variants: tuple[Variant, ...]
    """The rows in miniature."""
    base: str = "quickstart"
    """The recipe that the variants change."""
    overrides: tuple[str, ...] = ()
    """Overrides of the base recipe, unless another recipe is asked for."""
    paper: tuple[Variant, ...] = ()
    """The rows at the paper's scale; none for a preset that only exists in miniature."""
    paper_base: str = ""
    """The recipe that they change."""
    note: str = ""
    """What to know about the printed numbers."""

    def at(self, scale: Scale) -> "Preset":
        """The preset with the variants, the recipe and the reference of a scale."""
        check_option("scale", scale, get_args(Scale))
        if scale == "miniature":
            return dataclasses.replace(self, reference=f"{self.reference} in miniature")
        if not self.paper:
            raise UserError(f"the preset {self.name} exists in miniature only, got scale 'paper'")
        return dataclasses.replace(
            self,
            reference=f"{self.reference} at its own scale",
            variants=self.paper,
            base=self.paper_base,
            overrides=(),
        )


def attention_variant(name: str, /, label: str | None = None, **options: Any) -> Variant:
    """Create a variant with another attention and its options."""
    chosen: dict[str, Any] = {"attention": name}
    if options:
        chosen["attention_options"] = options
    return Variant(label or name, {"model": {"options": chosen}})


def attention_variants(names: Sequence[str]) -> list[Variant]:
    for name in names:
        check_option("attention", name, ATTENTIONS)
    return [attention_variant(name) for name in names]


def model_variant(label: str, model: str | None = None, printed: Printed = NOTHING, **options: Any) -> Variant:
    """Create a variant with other options of the model, or with another model and its options."""
    name = {} if model is None else {"name": model}
    return Variant(label, {"model": {**name, "options": options}}, printed)


def variant_recipe(base: Recipe, variant: Variant) -> Recipe:
    """Apply the changes of a variant to a recipe, and check the result."""
    return read_recipe(merge(to_dict(base), variant.changes), where=f"variant {variant.name}")


def check_variants(variants: Sequence[Variant]) -> None:
    if not variants:
        raise UserError("a comparison needs at least one variant, got none")
    names = [variant.name for variant in variants]
    for name in names:
        # it becomes a directory
        if not re.fullmatch(r"\w[\w.+-]*", name):
            raise UserError(f"a variant's name must be letters, digits and . + - _, got {name!r}")
        if names.count(name) > 1:
            raise UserError(f"variants must have different names, got {name!r} twice")


def load_preset(
    name: str, recipe: str | None = None, overrides: Sequence[str] = (), *, scale: Scale = "miniature"
) -> tuple[Preset, Recipe]:
    """Return a preset at a scale and the recipe that its variants change: its own, or the one named ``recipe``."""
    check_option("preset", name, PRESETS)
    preset = PRESETS[name].at(scale)
    if recipe is not None:
        return dataclasses.replace(preset, reference=PRESETS[name].reference), load_recipe(recipe, overrides)
    return preset, load_recipe(preset.base, [*preset.overrides, *overrides])


# SOFT

ATTENTIONS_PRESET = Preset(
    "attentions",
    "One backbone, different attentions",
    "Table 2 of the SOFT paper",
    (
        attention_variant("softmax"),
        # Linformer and Performer get 49 dimensions, as many as SOFT has landmarks, as in the paper
        attention_variant("linformer", rank=49),
        attention_variant("performer", num_features=49),
        attention_variant("nystrom"),
        attention_variant("soft"),
        attention_variant("softpp"),
        attention_variant("inline"),
    ),
    paper=tuple(
        model_variant(name, printed=Printed(top1, 13, gmacs), attention=name, attention_options=options)
        for name, gmacs, top1, options in (
            ("softmax", 3.9, 80.0, {}),
            ("linformer", 1.9, 78.2, {"rank": 49}),
            ("performer", 2.2, 76.1, {"num_features": 49}),
            ("nystrom", 2.0, 80.1, {}),
            ("soft", 1.9, 80.9, {}),
            ("softpp", 1.9, 80.9, {}),
        )
    ),
    paper_base="softpp_tiny",
)

SAMPLING_PRESET = Preset(
    "sampling",
    "How SOFT++ takes its landmarks",
    "Table 10 of the SOFT paper",
    tuple(
        # fewer landmarks than tokens, or every sampling would take all tokens
        attention_variant("softpp", label=sampling, sampling=sampling, max_landmarks=4)
        for sampling in ("conv", "random", "biased", "avgpool")
    ),
    paper=tuple(
        model_variant(sampling, printed=printed, sampling=sampling)
        for sampling, printed in (
            ("conv", Printed(80.9, 13.07, 2.0)),
            ("random", Printed(80.8, 12.96, 1.9)),
            ("biased", Printed(79.9, 12.96, 1.9)),
            ("avgpool", Printed(80.8, 12.96, 1.9)),
        )
    ),
    paper_base="softpp_tiny",
)

BOTTLENECK_PRESET = Preset(
    "bottleneck",
    "How many landmarks SOFT++ takes",
    "Table 9 of the SOFT paper",
    # one landmark per token where the cap allows it
    tuple(
        model_variant(f"{side}x{side}", attention="softpp", max_landmarks=side, ratios=[1, 1, 1, 1])
        for side in (3, 4, 5, 6, 7)
    ),
    paper=tuple(
        model_variant(str(count), printed=Printed(top1, gmacs=gmacs), landmarks=count)
        for count, gmacs, top1 in ((36, 1.9, 80.5), (49, 1.9, 80.9), (64, 2.0, 80.9), (81, 2.1, 80.4))
    ),
    paper_base="softpp_tiny",
)

_VIT_SMALL: dict[str, Any] = {"model": "inline_deit_tiny", "embed_dim": 384, "num_heads": 6}
# Swin's own rate
_SWIN_TINY: dict[str, Any] = {"model": "inline_swin_tiny", "drop_path_rate": 0.2}


def _symmetric_rows(name: str, network: dict[str, Any], both: tuple[float, float], **keys: Any) -> tuple[Variant, ...]:
    """Create a network's two rows of Table 8; keys: further changes of the recipe."""
    rows = (
        model_variant(
            f"{name}-{'Q-is-K' if symmetric else 'Q-and-K'}",
            printed=Printed(top1),
            attention="softmax",
            attention_options={"symmetric": symmetric},
            **network,
        )
        for symmetric, top1 in zip((False, True), both, strict=True)
    )
    return tuple(dataclasses.replace(row, changes={**row.changes, **keys}) for row in rows)


SYMMETRIC_PRESET = Preset(
    "symmetric",
    "Softmax attention whose keys are its queries, as SOFT's are",
    "Table 8 of the SOFT paper",
    (
        attention_variant("softmax", label="Q-and-K", symmetric=False),
        attention_variant("softmax", label="Q-is-K", symmetric=True),
    ),
    paper=(
        *_symmetric_rows("vit-small", _VIT_SMALL, (80.8, 80.5)),
        # Swin has no position embeddings that could decay
        *_symmetric_rows("swin-tiny", _SWIN_TINY, (81.3, 80.9), optimizer={"decay_positions": False}),
    ),
    paper_base="imagenet_soft",
)

# a DeiT with as many parameters as softpp_micro, on its first grid
_FLAT: dict[str, Any] = {"model": "inline_deit_tiny", "patch_size": 4, "embed_dim": 96, "num_heads": 3, "depth": 6}

PYRAMID_PRESET = Preset(
    "pyramid",
    "Flat networks, and SOFT++ as a pyramid",
    "Table 11a of the SOFT paper",
    (
        model_variant("deit", attention="softmax", **_FLAT),
        model_variant("flat", attention="softpp", attention_options={"ratio": 1}, **_FLAT),
        model_variant("pyramid", "softpp_micro"),
    ),
    paper=(
        model_variant("deit-small", printed=Printed(79.8), attention="softmax", **_VIT_SMALL),
        model_variant("flat", printed=Printed(80.1), attention="softpp", **{**_VIT_SMALL, "num_heads": 12}),
        model_variant("pyramid-small", "softpp_small", Printed(82.4)),
    ),
    paper_base="imagenet_soft",
)

OVERLAP_PRESET = Preset(
    "overlap",
    "PVT, and SOFT++ with and without overlap between patches",
    "Table 11b of the SOFT paper",
    (
        model_variant("pvt", "inline_micro", attention="softmax"),
        model_variant("no-overlap", "softpp_micro", overlap=False),
        model_variant("overlap", "softpp_micro", overlap=True),
    ),
    paper=(
        # with the heads of the original
        model_variant("pvt-tiny", "inline_pvt_tiny", Printed(75.1), attention="softmax", num_heads=[1, 2, 5, 8]),
        model_variant("no-overlap", "softpp_tiny", Printed(78.4), overlap=False),
        model_variant("overlap", "softpp_tiny", Printed(80.9), overlap=True),
    ),
    paper_base="imagenet_soft",
)

_KERNELS_AND_SOFTMAX = tuple(attention_variants(("softmax", "gaussian", "soft", "softpp")))

GAUSSIAN_PRESET = Preset(
    "gaussian",
    "The exact Gaussian kernel beside softmax and SOFT's approximations",
    "Appendix D of the SOFT paper",
    _KERNELS_AND_SOFTMAX,
    # 441 tokens in the first stage: with the 49 of the quick start the kernel trains as well as softmax
    overrides=(
        *("--data.image_size", "84", "--model.options.img_size", "84"),
        *("--schedule.epochs", "1", "--schedule.warmup_epochs", "0.3"),
    ),
    paper=_KERNELS_AND_SOFTMAX,
    paper_base="softpp_tiny",
)

_GRADIENTS = tuple(
    attention_variant("softpp", label=gradient, gradient=gradient) for gradient in ("one_step", "autograd")
)

GRADIENT_PRESET = Preset(
    "gradient",
    "The gradient of SOFT++'s inverse, in one step or through the iterations",
    "Eq. 12 of the SOFT paper",
    _GRADIENTS,
    paper=_GRADIENTS,
    paper_base="softpp_tiny",
)

# InLine

_INLINE_MICRO = ("--model.name", "inline_micro")
_INLINE_SWIN_TINY = Printed(82.4, 30, 4.5)
_MAPS = ("identity", "relu", "leaky_relu", "exp")

SOFTMAX_MAPS_PRESET = Preset(
    "softmax-maps",
    "Softmax attention after a feature map, injective or not",
    "Table 1 of the InLine paper",
    tuple(
        attention_variant("softmax", label=feature_map, feature_map=feature_map)
        for feature_map in (*_MAPS, "affine_relu")
    ),
    overrides=_INLINE_MICRO,
    paper=tuple(
        model_variant(feature_map, attention="softmax", attention_options={"feature_map": feature_map}, num_heads=3)
        for feature_map in (*_MAPS, "affine_relu")
    ),
    paper_base="inline_deit_tiny",
    note="The paper's numbers are not known here.",
)

_KERNELS = tuple(
    attention_variant(name, label=f"{name}-{feature_map}", feature_map=feature_map, **options)
    # linear attention has no local residual
    for name, options in (("linear", {}), ("inline", {"local_residual": False}))
    for feature_map in ("relu", "affine_relu", "leaky_relu", "identity")
)

INLINE_KERNELS_PRESET = Preset(
    "inline-kernels",
    "Feature maps of linear attention, which divides, and of InLine, which subtracts",
    "Table 3 of the InLine paper",
    _KERNELS,
    overrides=_INLINE_MICRO,
    paper=_KERNELS,
    paper_base="inline_swin_tiny",
    note="The paper's numbers are not known here.",
)

INLINE_MAPS_PRESET = Preset(
    "inline-maps",
    "Feature maps of InLine",
    "Table 10 of the InLine paper",
    tuple(attention_variant("inline", label=feature_map, feature_map=feature_map) for feature_map in _MAPS),
    overrides=_INLINE_MICRO,
    paper=tuple(
        model_variant(
            feature_map,
            printed=_INLINE_SWIN_TINY if feature_map == "identity" else NOTHING,
            attention_options={"feature_map": feature_map},
        )
        for feature_map in _MAPS
    ),
    paper_base="inline_swin_tiny",
    note="The printed numbers of the identity are those of the release; the others are not known here.",
)


def _windows(sides: Sequence[int], **options: Any) -> tuple[Variant, ...]:
    return tuple(
        model_variant(
            f"{side}x{side}-{'residual' if residual else 'plain'}",
            window_size=side,
            attention_options={"local_residual": residual},
            **options,
        )
        for residual in (False, True)
        for side in sides
    )


INLINE_WINDOWS_PRESET = Preset(
    "inline-windows",
    "InLine in growing windows, with and without the local residual",
    "Table 4 of the InLine paper",
    # on maps of 14 x 14 and 7 x 7 tokens
    _windows((4, 7, 14), patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[1, 2], stage_types="II"),
    overrides=("--model.name", "inline_swin_tiny"),
    # the last row is the released model
    paper=tuple(
        dataclasses.replace(variant, printed=_INLINE_SWIN_TINY) if variant.name == "56x56-residual" else variant
        for variant in _windows((7, 14, 28, 56))
    ),
    paper_base="inline_swin_tiny",
    note="The printed numbers of the last row are those of the release; the others are not known here.",
)

INLINE_RESIDUAL_PRESET = Preset(
    "inline-residual",
    "InLine and softmax attention with and without the local residual",
    "after Table 4 of the InLine paper",
    tuple(
        attention_variant(name, label=f"{name}-{label}", local_residual=residual)
        for name in ("inline", "softmax")
        for label, residual in (("residual", True), ("plain", False))
    ),
    overrides=_INLINE_MICRO,
)

_LINEAR_ATTENTIONS = {
    "softmax": Printed(72.2, 5.7, 1.2),
    "hydra": Printed(68.3, 5.7, 1.1),
    "efficient": Printed(70.2, 5.7, 1.1),
    "angular": Printed(70.8, 5.7, 1.1),
    "enhanced": Printed(72.9, 5.8, 1.1),
    "focused": Printed(74.1, 6.1, 1.1),
    "linear": Printed(70.5, 5.7, 1.1),
    "inline": Printed(74.5, 6.5, 1.1),
}

LINEAR_ATTENTIONS_PRESET = Preset(
    "linear-attentions",
    "InLine and other linear attentions in a flat network",
    "Table 9 of the InLine paper",
    tuple(model_variant(name, attention=name, **_FLAT) for name in _LINEAR_ATTENTIONS),
    paper=tuple(
        model_variant(name, printed=printed, attention=name, num_heads=6 if name == "inline" else 3)
        for name, printed in _LINEAR_ATTENTIONS.items()
    ),
    paper_base="inline_deit_tiny",
    note="The printed numbers are those of FLatten (ICCV 2023) and Agent Attention (ECCV 2024), of the same group, "
    "and for InLine those of its release; the numbers of InLine's own table are not known here.",
)

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        ATTENTIONS_PRESET,
        SYMMETRIC_PRESET,
        BOTTLENECK_PRESET,
        SAMPLING_PRESET,
        PYRAMID_PRESET,
        OVERLAP_PRESET,
        GAUSSIAN_PRESET,
        GRADIENT_PRESET,
        SOFTMAX_MAPS_PRESET,
        INLINE_KERNELS_PRESET,
        INLINE_WINDOWS_PRESET,
        INLINE_RESIDUAL_PRESET,
        LINEAR_ATTENTIONS_PRESET,
        INLINE_MAPS_PRESET,
    )
}
