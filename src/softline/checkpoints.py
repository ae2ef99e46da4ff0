"""Checkpoints of the papers' official releases."""

import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from softline.backbones import soft
from softline.ops.inputs import check_option

# each family's file builds its released network and maps its parameter names
FAMILIES: dict[str, ModuleType] = {"soft": soft, "softpp": soft}


def from_official(family: str, state_dict: Mapping[str, Tensor], config: Mapping[str, Any]) -> nn.Module:
    """The model of an official release, with its weights.

    family: soft, softpp, inline_deit, inline_pvt, inline_swin or inline_cswin.
    state_dict: the release's own.
    config: the release's constructor arguments.
    """
    check_option("family", family, FAMILIES)
    model = FAMILIES[family].release_backbone(family, dict(config))
    renamed = rename_keys(state_dict, FAMILIES[family].RELEASE_KEYS)
    check_keys(model, renamed, family)
    model.load_state_dict(renamed)
    return model.eval()


def rename_keys(state_dict: Mapping[str, Tensor], rules: list[tuple[str, str | None]]) -> dict[str, Tensor]:
    """Apply (pattern, replacement) rules to every key and join separate q, k, v projections into qkv.

    A replacement names the pattern's groups in braces; "{stage}" counts from 0 where the release counts from 1. None
    drops the key.
    """
    renamed: dict[str, Tensor] = {}
    for key, value in state_dict.items():
        new: str | None = key
        for pattern, replacement in rules:
            if new is None or (match := re.search(pattern, new)) is None:
                continue
            if replacement is None:
                new = None
                continue
            groups = match.groupdict()
            if "stage" in groups:
                groups["stage"] = str(int(groups["stage"]) - 1)
            new = new[: match.start()] + replacement.format(**groups) + new[match.end() :]
        if new is not None:
            renamed[new] = value
    return _join_projections(renamed)


def check_keys(model: nn.Module, state_dict: Mapping[str, Tensor], family: str) -> None:
    """Every parameter is there with its shape, and nothing else: checked before anything is loaded."""
    own = model.state_dict()
    problems = {
        "missing": [key for key in own if key not in state_dict],
        "unexpected": [key for key in state_dict if key not in own],
        "of another shape": [
            f"{key} {tuple(state_dict[key].shape)} (expected {tuple(own[key].shape)})"
            for key in own
            if key in state_dict and state_dict[key].shape != own[key].shape
        ],
    }
    found = [
        f"{len(keys)} {what}: {', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''}"
        for what, keys in problems.items()
        if keys
    ]
    if found:
        raise ValueError(f"not a state dict of this {family} model: " + "; ".join(found))


def _join_projections(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """attn.q + attn.kv, or attn.q + attn.v, become attn.qkv, rows in that order."""
    for key in list(state_dict):
        if (match := re.fullmatch(r"(.*\.attn\.)q(\.weight|\.bias)", key)) is None:
            continue
        start, end = match.groups()
        others = [start + part + end for part in ("kv", "v") if start + part + end in state_dict]
        if others:
            parts = [state_dict.pop(name) for name in (key, *others)]
            state_dict[f"{start}qkv{end}"] = torch.cat(parts)
    return state_dict
