"""Weights of the papers' official releases: reading them safely, renaming their keys, downloading them."""

from collections.abc import Callable, Mapping
from typing import Any

from timm.models import build_model_with_cfg, get_pretrained_cfg
from timm.models._hub import download_cached_file
from torch import nn

from softline.backbones.backbone import fit_positions
from softline.errors import UserError
from softline.weights.reading import load_official
from softline.weights.renaming import KeyRules, check_keys, rename_keys

INLINE_RELEASE = "https://github.com/LeapLabTHU/InLine"


def inline_link(name: str, file: str) -> tuple[str, str]:
    """Where InLine's authors publish a file, and what to call it here."""
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
        raise UserError(_where(variant, by_hand))
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
