"""The papers' tables at a small scale: what differs between the rows, while everything else is the same.

SOFT: https://arxiv.org/abs/2207.03341; InLine: https://arxiv.org/abs/2412.06590.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from softline.attention import ATTENTIONS
from softline.checks import check_option
from softline.engine.reading import load_recipe, merge, read_recipe, to_dict
from softline.engine.recipe import Recipe
from softline.errors import UserError


@dataclass(frozen=True)
class Variant:
    """One row of a comparison."""

    name: str
    """Also the name of its directory."""
    changes: dict[str, Any]
    """Nested keys of the recipe with new values."""


@dataclass(frozen=True)
class Preset:
    name: str
    title: str
    reference: str
    """The table that it repeats at a small scale."""
    variants: tuple[Variant, ...]
    base: str = "quickstart"
    """The recipe that the variants change."""
    overrides: tuple[str, ...] = ()
    """Overrides of the base recipe, unless another recipe is asked for."""


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


def load_preset(name: str, recipe: str | None = None, overrides: Sequence[str] = ()) -> tuple[Preset, Recipe]:
    """Return a preset and the recipe that its variants change: its own, or the one named ``recipe``."""
    check_option("preset", name, PRESETS)
    preset = PRESETS[name]
    if recipe is not None:
        return preset, load_recipe(recipe, overrides)
    return preset, load_recipe(preset.base, [*preset.overrides, *overrides])


_INLINE_MICRO = ("--model.name", "inline_micro")

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
)

BOTTLENECK_PRESET = Preset(
    "bottleneck",
    "How many landmarks SOFT++ takes",
    "Table 9 of the SOFT paper",
    tuple(attention_variant("softpp", label=f"{side}x{side}", max_landmarks=side) for side in (3, 4, 5, 6, 7)),
)

SYMMETRIC_PRESET = Preset(
    "symmetric",
    "Softmax attention whose keys are its queries, as SOFT's are",
    "Table 8 of the SOFT paper",
    (
        attention_variant("softmax", label="Q-and-K", symmetric=False),
        attention_variant("softmax", label="Q-is-K", symmetric=True),
    ),
)

PYRAMID_PRESET = Preset(
    "pyramid",
    "SOFT++ as a pyramid, without overlap between patches, and flat",
    "Table 11 of the SOFT paper",
    (
        Variant("pyramid", {"model": {"name": "softpp_micro"}}),
        Variant("no-overlap", {"model": {"name": "softpp_micro", "options": {"overlap": False}}}),
        Variant(
            "flat",
            {
                "model": {
                    # a DeiT with as many parameters as the pyramid, on its first grid
                    "name": "inline_deit_tiny",
                    "options": {
                        "attention": "softpp",
                        "attention_options": {"ratio": 1},
                        "patch_size": 4,
                        "embed_dim": 96,
                        "num_heads": 3,
                        "depth": 6,
                    },
                }
            },
        ),
    ),
)

INLINE_KERNELS_PRESET = Preset(
    "inline-kernels",
    "Feature maps of InLine, and of linear attention, which divides where InLine subtracts",
    "Tables 3 and 10 of the InLine paper",
    tuple(
        attention_variant(name, label=f"{name}-{feature_map}", feature_map=feature_map, **options)
        # linear attention has no local residual
        for name, options in (("inline", {"local_residual": False}), ("linear", {}))
        for feature_map in ("identity", "relu", "leaky_relu", "exp")
    ),
    overrides=_INLINE_MICRO,
)

INLINE_RESIDUAL_PRESET = Preset(
    "inline-residual",
    "InLine and softmax attention with and without the local residual",
    "Table 4 of the InLine paper",
    tuple(
        attention_variant(name, label=f"{name}-{label}", local_residual=residual)
        for name in ("inline", "softmax")
        for label, residual in (("residual", True), ("plain", False))
    ),
    overrides=_INLINE_MICRO,
)

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        ATTENTIONS_PRESET,
        SAMPLING_PRESET,
        BOTTLENECK_PRESET,
        SYMMETRIC_PRESET,
        PYRAMID_PRESET,
        INLINE_KERNELS_PRESET,
        INLINE_RESIDUAL_PRESET,
    )
}
