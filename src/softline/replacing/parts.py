"""What attention modules of other libraries consist of, so that another attention can take it over."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softline.errors import UserError


class Parts(NamedTuple):
    """An attention module without the attention itself."""

    num_heads: int
    weight: Tensor
    """Of queries, keys and values [3 C, C]."""
    bias: Tensor | None
    proj: nn.Module
    dropout: float
    """Of the weights in training."""
    proj_drop: nn.Module | None = None
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    rotates: bool = False
    """Whether queries and keys are rotated by their position."""
    rotate_half: bool = False
    window_size: tuple[int, int] | None = None
    position_bias: nn.Parameter | None = None
    """Bias of each offset between two tokens of a window [(2 rows - 1) (2 columns - 1), heads]."""
    reduction: str = ""
    """How keys and values are made of fewer tokens than queries are."""


def multihead_parts(module: Any) -> Parts:
    """Take `torch.nn.MultiheadAttention` apart, which torchvision uses."""
    _check_hooks(module)
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn or not module.batch_first:
        raise UserError("its projections are not those of self-attention with the batch first")
    return Parts(module.num_heads, module.in_proj_weight, module.in_proj_bias, module.out_proj, module.dropout)


def transformers_parts(module: Any) -> Parts:
    """Take the attention of transformers' ViT apart."""
    weight, bias = joined(module.q_proj, module.k_proj, module.v_proj)
    _check_shape(module, weight, module.num_attention_heads)
    return Parts(module.num_attention_heads, weight, bias, module.o_proj, module.attention_dropout)


def pyramid_parts(module: Any) -> Parts:
    """Take the attention of timm's PVTv2 apart."""
    weight, bias = joined(module.q, module.kv)
    _check_shape(module, weight, module.num_heads)
    reduction = "" if module.sr is None else "a pooled map" if module.pool is not None else "a map of fewer tokens"
    return Parts(module.num_heads, weight, bias, module.proj, module.attn_drop.p, module.proj_drop, reduction=reduction)


def window_parts(module: Any) -> Parts:
    """Take the attention of timm's Swin apart."""
    weight, bias = joined(module.qkv)
    _check_shape(module, weight, module.num_heads)
    return Parts(
        module.num_heads,
        weight,
        bias,
        module.proj,
        module.attn_drop.p,
        module.proj_drop,
        window_size=tuple(module.window_size),
        position_bias=module.relative_position_bias_table,
    )


def token_parts(module: Any) -> Parts:
    """Take the attention of timm's ViT, EVA or BEiT apart."""
    if getattr(module, "gate", None) is not None:
        raise UserError("its output is gated")
    if getattr(module, "num_kv_groups", 1) != 1:
        raise UserError("several heads share keys and values")
    if getattr(module, "relative_position_bias_table", None) is not None:
        raise UserError("it adds a bias for each pair of positions, which only the N x N weights have")
    if module.qkv is None:
        weight, bias = joined(module.q_proj, module.k_proj, module.v_proj)
    else:
        weight, bias = joined(module.qkv)
        if getattr(module, "q_bias", None) is not None:
            bias = _cat([module.q_bias, module.k_bias, module.v_bias])
    _check_shape(module, weight, module.num_heads)
    norm = _used(module, "norm")
    return Parts(
        module.num_heads,
        weight,
        bias,
        module.proj if norm is None else nn.Sequential(norm, module.proj),
        module.attn_drop.p,
        module.proj_drop,
        _used(module, "q_norm"),
        _used(module, "k_norm"),
        rotates=hasattr(module, "rotate_half"),
        rotate_half=getattr(module, "rotate_half", False),
    )


def _used(module: nn.Module, name: str) -> nn.Module | None:
    """Return a part of a module unless it has none, or one that does nothing."""
    part = getattr(module, name, None)
    return None if isinstance(part, nn.Identity) else part


def joined(*layers: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of several linear layers side by side; those without a bias have zeros."""
    for layer in layers:
        if type(layer) is not nn.Linear:
            raise UserError(f"its projection is of class {type(layer).__name__}, not torch's Linear")
        _check_hooks(layer)
    weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
    if len(layers) == 1:
        return weights[0], biases[0]
    if all(bias is None for bias in biases):
        return _cat(weights), None
    zeros = [weight.new_zeros(len(weight)) for weight in weights]
    return _cat(weights), _cat([zero if bias is None else bias for zero, bias in zip(zeros, biases, strict=True)])


@torch.enable_grad()
def _cat(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors; the result requires a gradient if one of them does."""
    return torch.cat(list(tensors))


def _check_hooks(module: nn.Module) -> None:
    """Refuse a module with hooks, which would be lost."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise UserError(f"its {type(module).__name__} has hooks, which the new attention would not call")


def _check_shape(module: Any, weight: Tensor, num_heads: int) -> None:
    """Refuse heads that softline's attentions do not have."""
    _check_hooks(module)
    if weight.shape[0] != 3 * weight.shape[1]:
        raise UserError(f"its {num_heads} heads have {weight.shape[0] // 3} channels, its tokens {weight.shape[1]}")
    usual = (weight.shape[1] // num_heads) ** -0.5
    scale = getattr(module, "scale", getattr(module, "scaling", usual))
    if isinstance(scale, Tensor) or not math.isclose(scale, usual, rel_tol=1e-6):
        raise UserError(f"it scales scores by {scale}, softline's attentions by the head dimension's {usual:g}")
