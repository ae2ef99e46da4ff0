"""Renaming the parameters of the papers' official releases to softline's names."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from softline.errors import UserError

KeyRules = list[tuple[str, str | None]]
"""Pairs of a pattern and its replacement; see `rename_keys`."""


def rename_keys(state_dict: Mapping[str, Tensor], rules: KeyRules) -> dict[str, Tensor]:
    """Apply (pattern, replacement) rules to every key and join separate q, k, v projections into qkv.

    A replacement names the pattern's groups in braces; "{stage}" is decremented, as the release counts stages from 1.
    A replacement of None drops the key.
    """
    renamed = {key: _rename(key, rules) for key in state_dict}
    return _join_projections({new: state_dict[key] for key, new in renamed.items() if new is not None})


def key_map(state_dict: Mapping[str, Tensor], rules: KeyRules) -> dict[str, str | None]:
    """The new name of each key of the release; None if the key is dropped."""
    final = rename_keys(state_dict, rules)
    names = {key: _rename(key, rules) for key in state_dict}
    return {
        key: new if new is None or new in final else re.sub(r"\.attn\.(q|kv|v)\.", ".attn.qkv.", new)
        for key, new in names.items()
    }


def _rename(key: str, rules: KeyRules) -> str | None:
    for pattern, replacement in rules:
        match = re.search(pattern, key)
        if match is None:
            continue
        if replacement is None:
            return None
        groups = match.groupdict()
        if "stage" in groups:
            groups["stage"] = str(int(groups["stage"]) - 1)
        key = key[: match.start()] + replacement.format(**groups) + key[match.end() :]
    return key


def _join_projections(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join attn.q and attn.kv, or attn.q and attn.v, to attn.qkv, with their rows in that order."""
    for key in list(state_dict):
        match = re.fullmatch(r"(.*\.attn\.)q(\.weight|\.bias)", key)
        if match is None:
            continue
        start, end = match.groups()
        others = [start + part + end for part in ("kv", "v") if start + part + end in state_dict]
        if others:
            state_dict[f"{start}qkv{end}"] = torch.cat([state_dict.pop(name) for name in (key, *others)])
    return state_dict


def check_keys(model: nn.Module, state_dict: Mapping[str, Tensor], name: str) -> None:
    """Check that a state dict has exactly the model's parameters, with their shapes, before anything is loaded."""
    own = model.state_dict()
    problems = {
        "missing": [key for key in own if key not in state_dict],
        "unexpected": [key for key in state_dict if key not in own],
        "of another shape": [
            f"{key} {tuple(state_dict[key].shape)} (expected {tuple(own[key].shape)})"
            for key in own
            if key in state_dict and state_dict[key].shape != own[key].shape
        ],
        "of another kind": [
            f"{key} {state_dict[key].dtype} (expected {own[key].dtype})"
            for key in own
            if key in state_dict and own[key].is_floating_point() and not state_dict[key].is_floating_point()
        ],
    }
    found = [
        f"{len(keys)} {what}: {', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''}"
        for what, keys in problems.items()
        if keys
    ]
    if found:
        raise UserError(f"not a state dict of {name}: " + "; ".join(found))
