"""Replace the attention of vision transformers by softline's, and keep everything else."""

import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeVar, get_args

import torch
from timm.layers import AttentionRope
from timm.models import beit, eva, pvt_v2, swin_transformer, vision_transformer
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionTransformer

from softline.attention import ATTENTIONS, MultiHeadAttention, create_attention
from softline.attention.registry import option_names
from softline.backbones.swin import PositionBiasAttention
from softline.checks import check_option
from softline.errors import UserError
from softline.layers.grid import GridSize, as_pair
from softline.replacing.hosted import (
    Grid,
    HostedAttention,
    HostedMap,
    HostedMultihead,
    HostedTokens,
    HostedTransformers,
    HostedWindows,
)
from softline.replacing.parts import (
    Parts,
    multihead_parts,
    pyramid_parts,
    token_parts,
    transformers_parts,
    window_parts,
)

# EfficientAttention, WindowAttn, ...
ATTENTION_NAME = re.compile(r"Attention|Attn")

M = TypeVar("M", bound=nn.Module)
Queries = Literal["mean", "query", "key", "random"]

Kind = tuple[Callable[[Any], Parts], type[HostedAttention]]
KINDS: dict[type[nn.Module], Kind] = {
    vision_transformer.Attention: (token_parts, HostedTokens),
    eva.EvaAttention: (token_parts, HostedTokens),
    AttentionRope: (token_parts, HostedTokens),
    beit.Attention: (token_parts, HostedTokens),
    nn.MultiheadAttention: (multihead_parts, HostedMultihead),
    pvt_v2.Attention: (pyramid_parts, HostedMap),
    swin_transformer.WindowAttention: (window_parts, HostedWindows),
}
"""How attention modules of other libraries are taken apart, and what replaces them."""


class Family(NamedTuple):
    """A kind of transformer."""

    blocks: Callable[[Any], list[nn.Module]]
    patches: Callable[[Any], nn.Module] | None = None
    """The layer whose output [B, C, H, W] has the grid of the patches; None where attention is told the grid."""


_of_timm = Family(lambda model: list(model.blocks), lambda model: model.patch_embed.proj)
FAMILIES: dict[type[nn.Module], Family] = {
    vision_transformer.VisionTransformer: _of_timm,
    eva.Eva: _of_timm,
    beit.Beit: _of_timm,
    TorchvisionTransformer: Family(lambda model: list(model.encoder.layers), lambda model: model.conv_proj),
    pvt_v2.PyramidVisionTransformerV2: Family(
        lambda model: [block for stage in model.stages for block in stage.blocks]
    ),
    swin_transformer.SwinTransformer: Family(lambda model: [block for layer in model.layers for block in layer.blocks]),
}
SUPPORTED = (
    "timm's VisionTransformer (ViT, DeiT, DINOv2, ...), Eva (EVA-02, DINOv3, ...), Beit without relative positions, "
    "SwinTransformer and PyramidVisionTransformerV2, torchvision's VisionTransformer, and transformers' ViTModel from "
    "version 5.10 on"
)


class Place(NamedTuple):
    """An attention module in a model."""

    name: str
    module: nn.Module
    block: int
    """Index of its block in its transformer."""
    transformer: nn.Module
    family: Family


def replace_attention(
    model: M,
    attention: str,
    *,
    layers: int | str | Sequence[int | str] | None = None,
    options: Mapping[str, Any] | None = None,
    queries: Queries = "mean",
    drop_position_bias: bool = False,
) -> M:
    """Put an attention of softline into a vision transformer, which keeps its weights; the model itself is changed.

    With "softmax" the model computes what it did before. If anything cannot be replaced, nothing is.

    model: a vision transformer of timm, torchvision or transformers, or a network that contains one.
    attention: name of the attention; see `softline.ATTENTIONS`.
    layers: blocks whose attention is replaced, by index or by a pattern of the attention's name such as
        "blocks.1*.attn"; None replaces all. Negative indices count from the last block.
    options: of the attention; see `softline.create_attention`.
    queries: what the one projection for queries and keys starts as, for attentions that have only one: the mean of both
        that there are, the query's, the key's, or random numbers as in a new network.
    drop_position_bias: give up Swin's bias for each pair of positions, which only softmax attention can have; otherwise
        Swin is refused for other attentions.
    """
    _check_options(attention, options)
    check_option("queries", queries, get_args(Queries))
    if not isinstance(model, nn.Module):
        raise UserError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    places = list(_places(model))
    if not places:
        raise UserError(
            f"{type(model).__name__} has no attention{_kinds(model)} that softline can replace. It supports {SUPPORTED}"
        )
    chosen = places if layers is None else _choose(places, [layers] if isinstance(layers, (int, str)) else layers)
    grids = {place.transformer: _known_grid(place.transformer) or Grid() for place in chosen}
    # blocks that share an attention share the new one
    made: dict[nn.Module, HostedAttention] = {}
    for place in chosen:
        try:
            _check_transformer(place.transformer)
            made[place.module] = made.get(place.module) or _replacement(
                place.module,
                attention,
                dict(options or {}),
                num_prefix_tokens=_num_prefix_tokens(place.transformer),
                grid=grids[place.transformer],
                queries=queries,
                drop_position_bias=drop_position_bias,
            )
        except UserError as error:
            raise UserError(f"the attention {place.name} cannot be replaced: {error}") from error
    # nothing fails from here on
    for place in chosen:
        _follow(place, grids[place.transformer])
        parent, _, attribute = place.name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, made[place.module])
    return model


def _check_options(attention: str, options: Mapping[str, Any] | None) -> None:
    check_option("attention", attention, ATTENTIONS)
    if options is not None and not isinstance(options, Mapping):
        raise UserError(f"options must be a dictionary, got a {type(options).__name__}")
    known = option_names(attention)
    for option in options or ():
        # whether there is a bias is inherited; the attention of another package may have any option
        if option == "qkv_bias" or (known is not None and option not in known):
            listed = ", ".join(name for name in known or () if name != "qkv_bias") or "none"
            raise UserError(f"{attention} attention has the options {listed}; got {option!r}")


def _follow(place: Place, grid: Grid) -> None:
    """Let the patch embedding of a transformer tell the grid of its images."""
    if place.family.patches is None:
        return
    patches = place.family.patches(place.transformer)
    if all(getattr(hook, "__self__", None) is not grid for hook in patches._forward_hooks.values()):
        patches.register_forward_hook(grid.note)


def replaceable(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention modules of a model that `replace_attention` knows, by their names, in its order."""
    return {place.name: place.module for place in _places(model)}


def replaced_attention(model: nn.Module) -> dict[str, HostedAttention]:
    """Return the attention modules of a model that are softline's, by their names, in its order."""
    return {name: module for name, module in replaceable(model).items() if isinstance(module, HostedAttention)}


def transformer_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of the transformers in a model by their names, in its order."""
    names = {module: name for name, module in model.named_modules()}
    places = list(_places(model))
    blocks = [block for place in places for block in place.family.blocks(place.transformer)]
    return {names[block]: block for block in dict.fromkeys(blocks)}


def _places(model: nn.Module) -> Iterator[Place]:
    """Find the attention modules of the transformers in a model, and those in their blocks that are not known."""
    kinds, families = _known_to_transformers()
    names = {module: name for name, module in model.named_modules()}
    for transformer in list(names):
        family = next((families[kind] for kind in families if isinstance(transformer, kind)), None)
        if family is None:
            continue
        for index, block in enumerate(family.blocks(transformer)):
            inside = dict(block.named_modules(prefix=names[block], remove_duplicate=False))
            known: Any = (HostedAttention, *kinds)
            found: dict[str, nn.Module] = {name: part for name, part in inside.items() if isinstance(part, known)}
            for name, part in (found or _unknown(inside)).items():
                yield Place(name, part, index, transformer, family)


def _unknown(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that seem to be an attention, without their parts."""
    named = {name: module for name, module in modules.items() if ATTENTION_NAME.search(type(module).__name__)}
    return {name: module for name, module in named.items() if not any(name.startswith(f"{other}.") for other in named)}


def _known_to_transformers() -> tuple[dict[type[nn.Module], Kind], dict[type[nn.Module], Family]]:
    """Return what is known, with the classes of transformers if it has been imported: only then there are any."""
    vit: Any = sys.modules.get("transformers.models.vit.modeling_vit")
    if vit is None or not hasattr(vit, "ViTAttention") or hasattr(vit, "ViTSelfAttention"):
        return KINDS, FAMILIES
    family = Family(lambda model: list(model.layers), lambda model: model.embeddings.patch_embeddings.projection)
    return {**KINDS, vit.ViTAttention: (transformers_parts, HostedTransformers)}, {**FAMILIES, vit.ViTModel: family}


def _replacement(
    old: nn.Module,
    name: str,
    options: dict[str, Any],
    *,
    num_prefix_tokens: int,
    grid: Grid,
    queries: Queries,
    drop_position_bias: bool,
) -> HostedAttention:
    """Make the attention ``name`` with the weights of a module; the module is not changed."""
    if isinstance(old, HostedAttention):
        parts, hosted = old.parts(), type(old)
    else:
        kinds, _ = _known_to_transformers()
        # a subclass may compute something else
        if type(old) not in kinds:
            raise UserError(
                f"it is of class {type(old).__name__}, which softline does not know. It supports {SUPPORTED}"
            )
        read, hosted = kinds[type(old)]
        parts = read(old)
    new: MultiHeadAttention | PositionBiasAttention
    if parts.position_bias is not None and name == "softmax":
        new = _with_position_bias(parts, options)
    else:
        if parts.position_bias is not None and not drop_position_bias:
            raise UserError(
                f"it adds a bias for each pair of positions, which {name} attention cannot have; drop_position_bias "
                "(--drop-position-bias of softline linearize) gives it up"
            )
        new = _without_position_bias(name, parts, options, num_prefix_tokens)
    _inherit(new, parts, queries)
    place: Any = (grid,) if issubclass(hosted, HostedTokens) else ()
    return hosted(new, name, parts, *place).train(old.training)


def attention_layer(
    attention: str, grid_size: GridSize, *, num_prefix_tokens: int = 1, **options: Any
) -> type[nn.Module]:
    """Make a class for ``attn_layer`` of timm's `VisionTransformer`, which then has this attention from the start.

    attention, options: see `softline.create_attention`.
    grid_size: rows and columns of the patches of all images; `replace_attention` follows images of any size.
    num_prefix_tokens: tokens before those of the patches, such as a class token.
    """
    _check_options(attention, options)
    grid = Grid(as_pair("grid_size", grid_size))

    class AttentionLayer(nn.Module):
        # timm asks for a class; what it makes is one that can be pickled
        def __new__(cls, dim: int, num_heads: int = 8, **given: Any) -> HostedTokens:  # type: ignore[misc]
            parts = token_parts(vision_transformer.Attention(dim, num_heads, **given))
            new = _without_position_bias(attention, parts, dict(options), num_prefix_tokens)
            _inherit(new, parts, "query")
            return HostedTokens(new, attention, parts, grid)

    return AttentionLayer


def _with_position_bias(parts: Parts, options: Mapping[str, Any]) -> PositionBiasAttention:
    assert parts.window_size is not None, "Swin has windows"
    rows, columns = parts.window_size
    if options or parts.dropout:
        given = ", ".join(options) or f"a dropout of weights of {parts.dropout:g}"
        raise UserError(f"softmax attention with a bias for each pair of positions has no options, got {given}")
    if rows != columns:
        raise UserError(f"softmax attention has square windows, got {rows} x {columns}")
    new = PositionBiasAttention(parts.weight.shape[1], parts.num_heads, rows)
    assert parts.position_bias is not None, "asked before"
    new.position_bias = parts.position_bias
    return new


def _without_position_bias(
    name: str, parts: Parts, options: dict[str, Any], num_prefix_tokens: int
) -> MultiHeadAttention:
    if name == "softmax":
        if parts.reduction:
            raise UserError(f"its keys and values are those of {parts.reduction}; softmax attention would be another")
        options.setdefault("dropout", parts.dropout)
    elif parts.dropout:
        raise UserError(
            f"it drops attention weights ({parts.dropout:g}), which {name} attention does not compute; "
            "build the model without this dropout"
        )
    new = create_attention(name, parts.weight.shape[1], parts.num_heads, num_prefix_tokens=num_prefix_tokens, **options)
    if not isinstance(new, MultiHeadAttention):
        raise UserError(f"{name} attention has no projections that could inherit weights")
    return new


def _inherit(new: MultiHeadAttention | PositionBiasAttention, parts: Parts, queries: Queries) -> None:
    """Give an attention the projections of another, or a part of them if its keys are its queries."""
    new.to(parts.weight.device, parts.weight.dtype)
    new.proj = parts.proj
    qkv = new.qkv
    shared = qkv.out_features == 2 * qkv.in_features
    for name, values in (("weight", parts.weight), ("bias", parts.bias)):
        if values is None:
            setattr(qkv, name, None)
        elif shared:
            q, k, v = values.detach().chunk(3)
            own = getattr(qkv, name).detach()[: len(q)]
            first = {"mean": (q + k) / 2, "query": q, "key": k, "random": own}[queries]
            setattr(qkv, name, nn.Parameter(torch.cat([first, v]), values.requires_grad))
        elif isinstance(values, nn.Parameter):
            # it stays the one that an optimizer may know
            setattr(qkv, name, values)
        else:
            setattr(qkv, name, nn.Parameter(values.detach().clone(), values.requires_grad))


def _choose(places: Sequence[Place], layers: Sequence[int | str]) -> list[Place]:
    """Return the places that any of the indices or patterns means, in the order of the model."""
    if not layers:
        raise UserError("layers must name at least one block; None replaces the attention of all")
    counts: dict[nn.Module, int] = {}
    for place in places:
        counts[place.transformer] = max(counts.get(place.transformer, 0), place.block + 1)
    count = max(counts.values())
    wanted: set[str] = set()
    for layer in layers:
        if isinstance(layer, str):
            found = {place.name for place in places if fnmatchcase(place.name, layer)}
            rule = f"a pattern of names such as {places[0].name}"
        else:
            if not hasattr(layer, "__index__"):
                raise UserError(f"layers must be indices of blocks or patterns, got {layer!r}")
            found = {place.name for place in places if place.block == _index_of(layer, counts[place.transformer])}
            rule = f"an index from {-count} to {count - 1}"
        if not found:
            raise UserError(f"layers must be indices of blocks or patterns: {layer!r} is not {rule}")
        wanted |= found
    return [place for place in places if place.name in wanted]


def _index_of(layer: SupportsIndex, count: int) -> int:
    """Return the index of a block from the first; negative ones count from the last of ``count``."""
    index = operator.index(layer)
    return index if index >= 0 else index + count


def _check_transformer(transformer: Any) -> None:
    """Refuse what makes the tokens of a transformer another set than the patches of its images."""
    if getattr(transformer, "rel_pos_bias", None) is not None:
        raise UserError("the model adds a bias for each pair of positions, which only the N x N weights have")
    dropped = getattr(transformer, "patch_drop", None)
    if dropped is not None and not isinstance(dropped, nn.Identity):
        raise UserError("the model drops patches in training (patch_drop_rate), and attention needs all of the grid")


def _num_prefix_tokens(transformer: Any) -> int:
    if isinstance(transformer, (pvt_v2.PyramidVisionTransformerV2, swin_transformer.SwinTransformer)):
        return 0
    # those of torchvision and transformers have a class token
    return int(getattr(transformer, "num_prefix_tokens", 1))


def _known_grid(transformer: nn.Module) -> Grid | None:
    """Return the grid that an earlier replacement follows."""
    hosted = (module for module in transformer.modules() if isinstance(module, HostedTokens))
    return next((module.grid for module in hosted if module.grid.fixed is None), None)


def _kinds(model: nn.Module) -> str:
    """Name the attention modules that a model has, by their classes."""
    found = {type(module).__name__ for module in model.modules()}
    kinds = sorted(name for name in found if ATTENTION_NAME.search(name)) or sorted(
        name for name in found if name.endswith("Block")
    )
    return f" ({', '.join(kinds)})" if kinds else ""
