"""What the families share when they build a backbone: attentions by stage, checks of settings, sizes."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from softline.attention import ATTENTIONS, create_attention
from softline.attention.registry import option_names
from softline.checks import check_integer, check_option
from softline.errors import UserError
from softline.layers.grid import GridSize, as_pair
from softline.layers.landmarks import landmark_cap

AttentionChoice = str | Sequence[str]
# the landmark grid of the papers' models, and the default of `max_landmarks`
DEFAULT_CAP = (7, 7)
# options of softmax attention that softmax blocks in Swin's windows and CSwin's strips have
SOFTMAX_BLOCK_OPTIONS = ("symmetric", "local_residual", "qkv_bias")


def build_attention(
    name: str,
    dim: int,
    num_heads: int,
    *,
    num_prefix_tokens: int = 0,
    offers: dict[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Build the attention ``name`` for a block.

    offers: options that the backbone sets if the attention has them (landmark ratio, number of tokens).
    options: options that the attention must have.
    """
    check_option("attention", name, ATTENTIONS)
    known = option_names(name) or []
    taken = {key: value for key, value in (offers or {}).items() if key in known}
    return create_attention(name, dim, num_heads, num_prefix_tokens=num_prefix_tokens, **{**taken, **options})


def check_stages(count: int, **settings: Sequence[Any]) -> None:
    """Check that every setting has one value per stage."""
    for name, values in settings.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != count:
            raise UserError(f"{name} must have a value for each of {count} stages, got {values!r}")


def release_config(
    config: Mapping[str, Any],
    family: str,
    *,
    required: Sequence[str],
    optional: Mapping[str, Any],
    fixed: Mapping[str, Sequence[Any]],
) -> dict[str, Any]:
    """Check a release's constructor arguments and add the defaults of those that are absent.

    required: arguments that differ between the released models.
    optional: defaults of the others that softline takes over.
    fixed: arguments that softline does not take over, with the values for which it computes the same as the release.
    """
    absent = [key for key in required if key not in config]
    if absent:
        raise UserError(f"config of {family} must have {', '.join(absent)}; got {', '.join(config) or 'nothing'}")
    for key, value in config.items():
        check_option(f"an argument in the config of {family}", key, [*required, *optional, *fixed])
        if key in fixed and value not in fixed[key]:
            allowed = " or ".join(repr(choice) for choice in fixed[key])
            raise UserError(
                f"{key} in the config of {family} must be {allowed} (nothing else is supported); got {value!r}"
            )
    return {**optional, **{key: value for key, value in config.items() if key not in fixed}}


# arguments of every release that softline does not take over; it has no dropout but that of drop_path_rate
FIXED_ARGUMENTS: dict[str, Sequence[Any]] = {
    "qkv_bias": (True,),
    "qk_scale": (None,),
    "drop_rate": (0,),
    "attn_drop_rate": (0,),
}


def unused_settings(settings: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Settings of a backbone that no attention in ``names`` has; ``settings`` maps each to the option that it sets."""
    known = [option for name in set(names) for option in option_names(name) or settings.values()]
    return [setting for setting, option in settings.items() if option not in known]


def check_settings(
    settings: Mapping[str, str], names: Sequence[str], given: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Check that every setting that is given (not None) has an effect on one of the attentions ``names``.

    options: options of the attention, which would override the settings.
    """
    for setting, option in settings.items():
        if given[setting] is not None and option in options:
            raise UserError(
                f"{setting}={given[setting]!r} has no effect: attention_options sets {option}={options[option]!r}; "
                "give one of them"
            )
    for setting in unused_settings(settings, names):
        if given[setting] is not None:
            attentions = " and ".join(dict.fromkeys(names))
            raise UserError(
                f"{setting}={given[setting]!r} has no effect: {attentions} attention has no option "
                f"{settings[setting]!r}; leave it out"
            )


def landmark_cells(
    landmarks: int, names: Sequence[str], grids: Sequence[GridSize]
) -> tuple[list[int | GridSize], GridSize]:
    """Cell sizes by stage and the cap for which every stage with landmarks has ``landmarks`` of them.

    names, grids: attention and grid of each stage.
    """
    check_integer("landmarks", landmarks, 1)
    side = math.isqrt(landmarks)
    if side**2 != landmarks:
        near = " and ".join(str(number**2) for number in (side, side + 1))
        raise UserError(f"landmarks must be a square number (the nearest are {near}), got {landmarks}")
    cells: list[int | GridSize] = []
    for stage, (name, grid) in enumerate(zip(names, grids, strict=True), start=1):
        if "max_landmarks" in (option_names(name) or []) and min(grid) < side:
            raise UserError(
                f"landmarks={landmarks} cannot be taken in stage {stage}: its grid has {grid[0]} x {grid[1]} tokens, "
                f"which is less than {side} x {side}"
            )
        cells.append((max(grid[0] // side, 1), max(grid[1] // side, 1)))
    return cells, (side, side)


def check_cap(
    names: Sequence[str],
    grids: Sequence[GridSize],
    ratios: Sequence[int | GridSize],
    options: Mapping[str, Any],
) -> None:
    """Check that a cap on the landmarks which is not the default is reached in at least one stage.

    names, grids, ratios: attention, grid at the model's image size, and cell size of each stage.
    options: options of the attention; ``max_landmarks`` and ``ratio`` count.
    """
    cap = landmark_cap(options.get("max_landmarks", DEFAULT_CAP))
    stages = [
        stage for stage in zip(names, grids, ratios, strict=True) if "max_landmarks" in (option_names(stage[0]) or [])
    ]
    if cap in (None, DEFAULT_CAP) or not stages:
        return
    cells = []
    for _, grid, ratio in stages:
        rows, columns = as_pair("ratio", options.get("ratio", ratio))
        cells.append((-(-grid[0] // rows), -(-grid[1] // columns)))
    if not any(rows >= cap[0] or columns >= cap[1] for rows, columns in cells):
        grids_found = ", ".join(dict.fromkeys(f"{rows} x {columns}" for rows, columns in cells))
        raise UserError(
            f"max_landmarks={options['max_landmarks']!r} has no effect at this image size: with the cells of these "
            f"stages there are {grids_found} landmarks; choose smaller cells, or the img_size that it is meant for "
            "(weights of another size are resized when they are loaded)"
        )


def per_stage(attention: AttentionChoice, count: int) -> list[str]:
    """Return one attention name per stage."""
    names = [attention] * count if isinstance(attention, str) else list(attention)
    if len(names) != count:
        raise UserError(f"attention must be one name, or a name for each of {count} stages, got {attention!r}")
    for name in names:
        check_option("attention", name, ATTENTIONS)
    return names


def block_attentions(
    attention: AttentionChoice, stage_types: str | None, depths: Sequence[int], default: str
) -> list[list[str]]:
    """Return the attention name of every block, by stage.

    attention: one name, used in the blocks that ``stage_types`` does not assign to softmax; or one name per stage, with
        which no types are given.
    stage_types: the release's notation, per stage: I (the attention), S (softmax) or M followed by a number k (softmax
        after the first k blocks). The number may also come last: "IIM2S" and "IIMS2" are the same.
    default: types of the stages if none are given.
    """
    if not isinstance(attention, str) and stage_types is not None:
        raise UserError(
            f"stage_types={stage_types!r} has no effect: attention={attention!r} determines every stage; leave it out"
        )
    stage_types = default if stage_types is None else stage_types
    if not isinstance(attention, str):
        return [[name] * depth for name, depth in zip(per_stage(attention, len(depths)), depths, strict=True)]
    found = re.fullmatch(r"(?P<types>(?:I|S|M\d*)+)(?:(?:, ?M=)?(?P<blocks>\d+))?", stage_types)
    types = re.findall(r"I|S|M\d*", found["types"]) if found else []
    if found is None or len(types) != len(depths) or ("M" in types and found["blocks"] is None):
        raise UserError(
            f"stage_types must have I, S or M with a number of blocks for each of {len(depths)} stages "
            f'(such as "IIM2S"), got {stage_types!r}'
        )
    names: list[list[str]] = []
    for kind, depth, name in zip(types, depths, per_stage(attention, len(depths)), strict=True):
        count = int(kind[1:] or found["blocks"]) if kind[0] == "M" else {"I": depth, "S": 0}[kind]
        if count > depth:
            raise UserError(f"stage_types {stage_types!r} asks for {count} blocks of a stage that has {depth}")
        names.append([name if block < count else "softmax" for block in range(depth)])
    # the families are InLine's, which is not a choice of the caller
    if attention not in ("inline", "softmax") and all(linear_of(stage) == "softmax" for stage in names):
        raise UserError(
            f"attention={attention!r} has no effect: stage_types={stage_types!r} has softmax blocks only; "
            'name attention="softmax"'
        )
    return names


def without_stage_types(args: dict[str, Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a model, without its ``stage_types`` if the caller gives the attention of each stage."""
    if isinstance(kwargs.get("attention", ""), str):
        return args
    return {key: value for key, value in args.items() if key != "stage_types"}


def has_softmax(names: Sequence[Sequence[str]]) -> bool:
    """Whether one of the blocks' attentions, listed by stage, is softmax."""
    return any("softmax" in stage for stage in names)


def check_softmax_only(names: Sequence[Sequence[str]], setting: str, value: object) -> None:
    """Check that a setting of softmax blocks, if given (not None), finds one among the blocks' attentions."""
    if value is not None and not has_softmax(names):
        raise UserError(f"{setting}={value!r} has no effect: there is no softmax block; leave it out")


def options_of(name: str, names: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one stage's attention: those given, unless it is softmax among others."""
    return {} if name == "softmax" and len(set(names)) > 1 else dict(options)


def linear_of(stage: Sequence[str]) -> str:
    """The attention of a stage other than softmax, if there is one."""
    return next((name for name in stage if name != "softmax"), "softmax")


def softmax_options(names: Sequence[Sequence[str]], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of softmax blocks in windows or strips: those given if all blocks are softmax, else none."""
    if any(linear_of(stage) != "softmax" for stage in names):
        return {}
    for option in options:
        check_option("an option of these softmax blocks", option, SOFTMAX_BLOCK_OPTIONS)
    return dict(options)


def grid_of(img_size: int | GridSize, reduction: int) -> GridSize:
    """Token grid of an image at a stage: pixels / reduction, rounded up."""
    height, width = as_pair("img_size", img_size)
    return -(-height // reduction), -(-width // reduction)


def least_image(
    names: Sequence[str],
    ratios: Sequence[int | GridSize],
    strides: Sequence[int],
    attention_options: Mapping[str, Any] | None,
) -> int:
    """Smallest image side for which every stage with landmarks has at least one landmark cell in its grid.

    attention_options: its ``ratio``, if any, overrides ``ratios``.
    """
    sizes = [1]
    for name, ratio, stride in zip(names, ratios, strides, strict=True):
        if "ratio" in (option_names(name) or []):
            ratio = (attention_options or {}).get("ratio", ratio)
            sizes.append((max(as_pair("ratio", ratio)) - 1) * stride + 1)
    return max(sizes)


def drop_path_rates(rate: float, depths: Sequence[int]) -> list[list[float]]:
    """Stochastic-depth rates that increase linearly from 0 to ``rate`` over all blocks, split by stage."""
    total = sum(depths)
    rates = iter([rate * index / max(total - 1, 1) for index in range(total)])
    return [[next(rates) for _ in range(depth)] for depth in depths]
