"""Weights of the papers' official releases: reading them safely, renaming their keys, downloading them."""

import argparse
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import build_model_with_cfg, get_pretrained_cfg
from timm.models._hub import download_cached_file
from torch import Tensor, nn

from softline.backbones.backbone import fit_positions

INLINE_RELEASE = "https://github.com/LeapLabTHU/InLine"
KeyRules = list[tuple[str, str | None]]
# where a release keeps its weights inside a checkpoint; averaged ones first: they are what the papers evaluate
WEIGHT_ENTRIES = ("state_dict_ema", "model_ema", "state_dict", "model")


def inline_link(name: str, file: str) -> tuple[str, str]:
    """Where InLine's authors publish a file, and what to call it here."""
    return f"https://cloud.tsinghua.edu.cn/f/{file}/?dl=1", f"{name}.pth"


def load_official(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a release's .pth (or .safetensors) file, without ever executing what the file contains.

    Averaged (EMA) weights are taken where the file has them.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        content = load_file(path) if path.suffix == ".safetensors" else _load_pickle(path)
    except pickle.UnpicklingError as error:
        asked = re.search(r"(?:Unsupported global: GLOBAL|Trying to load unsupported GLOBAL) (\S+)", str(error))
        what = (
            f"it asks to run {asked[1]}" if asked else "it is no checkpoint that can be read without running its code"
        )
        raise ValueError(f"{path} is refused: {what}") from None
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path} is truncated or not a checkpoint: {str(error).splitlines()[0]}") from None
    return _weights(content, path)


def check_archive(path: Path) -> None:
    """torch's files are zip archives, whose checksums torch itself does not compare."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is truncated or not a checkpoint: torch's, since 1.6, are zip archives")
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"{path} is corrupt: the checksum of {damaged} is wrong")


def _load_pickle(path: Path) -> Any:
    """torch's restricted reader, which knows tensors only, with the releases' settings let through as plain data."""
    check_archive(path)
    # numpy's own reader of a stored number, which moved between its versions
    type_of_scalar = np.float64(0).__reduce__()[0]
    harmless: list[Any] = [
        argparse.Namespace,
        (OrderedDict, "yacs.config.CfgNode"),
        np.dtype,
        type(np.dtype(np.float64)),
    ]
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        harmless.append((type_of_scalar, f"{module}.scalar"))
    with torch.serialization.safe_globals(harmless):
        return torch.load(path, map_location="cpu", weights_only=True)


def _weights(content: Any, path: Path) -> dict[str, Tensor]:
    if isinstance(content, Mapping):
        for entry in WEIGHT_ENTRIES:
            if isinstance(content.get(entry), Mapping):
                content = content[entry]
                break
    named = isinstance(content, Mapping) and all(isinstance(k, str) for k in content)
    if not named or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise ValueError(f"{path} holds no state dict (a mapping of names to tensors, or one under {WEIGHT_ENTRIES})")
    return {key.removeprefix("module."): value for key, value in content.items()}


def rename_keys(state_dict: Mapping[str, Tensor], rules: KeyRules) -> dict[str, Tensor]:
    """Apply (pattern, replacement) rules to every key and join separate q, k, v projections into qkv.

    A replacement names the pattern's groups in braces; "{stage}" counts from 0 where the release counts from 1. None
    drops the key.
    """
    renamed = {key: _rename(key, rules) for key in state_dict}
    return _join_projections({new: state_dict[key] for key, new in renamed.items() if new is not None})


def key_map(state_dict: Mapping[str, Tensor], rules: KeyRules) -> dict[str, str | None]:
    """Where each key of the release went; None if it is not needed."""
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
    """attn.q + attn.kv, or attn.q + attn.v, become attn.qkv, rows in that order."""
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
        raise ValueError(f"not a state dict of {name}: " + "; ".join(found))


def create_backbone(
    build: Callable[..., nn.Module],
    variant: str,
    pretrained: bool,
    *,
    rules: KeyRules,
    by_hand: str,
    out_indices: int | tuple[int, ...] = (0, 1, 2, 3),
    **kwargs: Any,
) -> Any:
    """A registered model, through timm; ``pretrained=True`` fetches the authors' file where it can be downloaded.

    rules: the release's key names, see `rename_keys`.
    by_hand: where the authors publish the weights, for models that cannot be downloaded directly.
    out_indices: features that ``features_only=True`` gives unless told otherwise.
    """
    overlay = dict(kwargs.get("pretrained_cfg_overlay") or {})
    # weights named by the caller, or of a saved directory, are timm's to read; the authors' files are read here
    named = {**(_as_dict(kwargs.get("pretrained_cfg"))), **overlay}
    fetched = pretrained and not any(named.get(source) for source in ("file", "state_dict", "hf_hub_id", "source"))
    if fetched:
        state_dict = _download(build, variant, rules, by_hand, **kwargs)
        kwargs["pretrained_cfg_overlay"] = {**overlay, "state_dict": state_dict}
    feature_cfg = {"out_indices": out_indices, "feature_cls": "getter"}
    model: Any = build_model_with_cfg(
        build, variant, pretrained, feature_cfg=feature_cfg, pretrained_filter_fn=fit_positions, **kwargs
    )
    if fetched:
        # what was loaded is not part of the model's description
        for part in (model, getattr(model, "model", None)):
            if part is not None and hasattr(part, "pretrained_cfg"):
                part.pretrained_cfg.pop("state_dict", None)
    return model


def _as_dict(cfg: Any) -> dict[str, Any]:
    """timm's configuration of a model's weights; a name of one holds no source."""
    if cfg is None or isinstance(cfg, str):
        return {}
    return dict(cfg) if isinstance(cfg, Mapping) else dict(cfg.to_dict())


def _download(build: Callable[..., nn.Module], variant: str, rules: KeyRules, by_hand: str, **kwargs: Any) -> Any:
    cfg = get_pretrained_cfg(variant, allow_unregistered=False)
    if cfg is None or not cfg.url:
        raise ValueError(_where(variant, by_hand))
    path = download_cached_file(cfg.url, check_hash=False, cache_dir=kwargs.get("cache_dir"))
    state_dict = rename_keys(load_official(path), rules)
    # the authors publish no hash: a file is what it claims if it fits the published model
    check_keys(build_model_with_cfg(build, variant, False, **_published(kwargs)), state_dict, variant)
    return state_dict


def _where(variant: str, by_hand: str) -> str:
    """How to get weights that cannot be downloaded."""
    if variant.endswith("_micro"):
        return f"{variant} is softline's own and has no published weights: train it"
    family, _, size = variant.rpartition("_")
    if family in ("soft", "softpp"):
        return f"no weights of {variant} are published; those of the released code are of {family}_release_{size}"
    return (
        f"the weights of {variant} cannot be downloaded directly: get the file from {by_hand}, then `softline convert "
        f"FILE DIRECTORY --model {variant}` and timm.create_model('local-dir:DIRECTORY', pretrained=True)"
    )


def _published(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The options of the model as published: only its architecture is kept, and nothing is allocated."""
    changed = {"num_classes", "in_chans", "features_only", "feature_cls", "out_indices", "global_pool", "img_size"}
    changed |= {"dtype", "pretrained_cfg", "pretrained_cfg_overlay"}
    return {**{key: value for key, value in kwargs.items() if key not in changed}, "device": "meta"}
