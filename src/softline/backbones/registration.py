"""Creating registered backbones through timm, with the weights that the papers' authors publish."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.models import build_model_with_cfg, get_pretrained_cfg
from torch import nn

from softline.backbones.backbone import fit_positions
from softline.errors import UserError
from softline.weights.reading import load_official
from softline.weights.renaming import KeyRules, check_keys, rename_keys

INLINE_RELEASE = "https://github.com/LeapLabTHU/InLine"


def inline_link(name: str, file: str) -> tuple[str, str]:
    """The address where InLine's authors publish a file, and its name in the cache."""
    return f"https://cloud.tsinghua.edu.cn/f/{file}/?dl=1", f"{name}.pth"


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
    """Create a registered model through timm; ``pretrained=True`` downloads the authors' weights where possible.

    rules: renaming rules for the release's keys, see `rename_keys`.
    by_hand: where the authors publish weights that cannot be downloaded directly.
    out_indices: default features of ``features_only=True``.
    """
    overlay = dict(kwargs.get("pretrained_cfg_overlay") or {})
    # timm reads weights that the caller names or that come from a saved directory; the authors' files are read here
    named = {**(_as_dict(kwargs.get("pretrained_cfg"))), **overlay}
    fetched = pretrained and not any(named.get(source) for source in ("file", "state_dict", "hf_hub_id", "source"))
    if fetched:
        state_dict = _download(build, variant, rules, by_hand, **kwargs)
        kwargs["pretrained_cfg_overlay"] = {**overlay, "state_dict": state_dict}
    feature_cfg = {"out_indices": out_indices, "feature_cls": "getter"}
    model: Any = build_model_with_cfg(
        partial(_build_on, build),
        variant,
        pretrained,
        feature_cfg=feature_cfg,
        pretrained_filter_fn=fit_positions,
        **kwargs,
    )
    if fetched:
        # the loaded weights are not part of the model's description
        for part in (model, getattr(model, "model", None)):
            if part is not None and hasattr(part, "pretrained_cfg"):
                part.pretrained_cfg.pop("state_dict", None)
    return model


def _build_on(build: Callable[..., nn.Module], *, device: Any = None, dtype: Any = None, **options: Any) -> nn.Module:
    """Build with parameters on ``device`` and in ``dtype``, as timm's models do for these arguments."""
    with nullcontext() if device is None else torch.device(device):
        model = build(**options)
    return model if dtype is None else model.to(dtype)


def _as_dict(cfg: Any) -> dict[str, Any]:
    """timm's configuration of pretrained weights as a dict; empty for None and for the name of a configuration."""
    if cfg is None or isinstance(cfg, str):
        return {}
    return dict(cfg) if isinstance(cfg, Mapping) else dict(cfg.to_dict())


def _download(build: Callable[..., nn.Module], variant: str, rules: KeyRules, by_hand: str, **kwargs: Any) -> Any:
    cfg = get_pretrained_cfg(variant, allow_unregistered=False)
    if cfg is None or not cfg.url:
        raise UserError(_where(variant, by_hand))
    assert isinstance(cfg.url, tuple), "every address comes with a file name, see `inline_link`"
    address, file_name = cfg.url
    path = Path(kwargs.get("cache_dir") or Path(torch.hub.get_dir(), "checkpoints"), file_name)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(address, str(path), progress=False)
    state_dict = rename_keys(load_official(path), rules)
    # the authors publish no hash, so a file is accepted if it fits the published model
    published = build_model_with_cfg(partial(_build_on, build), variant, False, **_published(kwargs))
    check_keys(published, state_dict, variant)
    return state_dict


def _where(variant: str, by_hand: str) -> str:
    """Explain how to get weights that cannot be downloaded."""
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
    """The options of the published model: the architecture alone, on the meta device."""
    changed = {"num_classes", "in_chans", "features_only", "feature_cls", "out_indices", "global_pool", "img_size"}
    changed |= {"dtype", "pretrained_cfg", "pretrained_cfg_overlay"}
    return {**{key: value for key, value in kwargs.items() if key not in changed}, "device": "meta"}
