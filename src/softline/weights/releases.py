"""Models of the papers' official releases: building them from released checkpoints, and converting these."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

from softline.checks import check_option
from softline.errors import UserError
from softline.weights.reading import load_official
from softline.weights.renaming import KeyRules, check_keys, key_map, rename_keys


class Release(NamedTuple):
    """The released models of one or more families, registered by a file of `softline.backbones`."""

    build: Callable[[str, dict[str, Any]], nn.Module]
    """Builds softline's network from a family and the release's constructor arguments."""
    rules: KeyRules
    """Renaming rules for the release's parameters; see `rename_keys`."""
    models: tuple[str, ...]
    """Names of the softline models whose weights the authors publish."""


RELEASES: dict[str, Release] = {}
"""Releases by family; the backbones register theirs when they are imported."""


def register_release(*families: str, build: Callable[..., nn.Module], rules: KeyRules, models: Iterable[str]) -> None:
    """Register the released models of ``families``; the arguments are the fields of `Release`."""
    RELEASES.update(dict.fromkeys(families, Release(build, rules, tuple(models))))


def from_official(family: str, state_dict: Mapping[str, Tensor], config: Mapping[str, Any]) -> nn.Module:
    """Build the model of an official release with its weights, in evaluation mode.

    family: soft, softpp, inline_deit, inline_pvt, inline_swin or inline_cswin.
    state_dict: the release's state dict, as `load_official` reads it.
    config: the release's constructor arguments.
    """
    check_option("family", family, RELEASES)
    release = RELEASES[family]
    model = release.build(family, dict(config))
    renamed = rename_keys(state_dict, release.rules)
    check_keys(model, renamed, f"this {family} model")
    model.load_state_dict(renamed)
    return model.eval()


def read_weights(path: str | Path, model: str) -> dict[str, Tensor]:
    """Read the weights in a file of softline, timm or the authors, with the parameter names of softline's ``model``."""
    weights = load_official(path)
    # only softline's own parameter names begin with its stages
    if model in released_models() and not any(key.startswith("stages.") for key in weights):
        return rename_keys(weights, _rules(model))
    return weights


class Conversion(NamedTuple):
    """Result of `convert_official`."""

    model: str
    keys: dict[str, str | None]
    """Our parameter name for each of the release's; None for those that are not needed."""
    sha256: str
    """SHA-256 of the written weights."""


def convert_official(path: str | Path, directory: str | Path, *, model: str | None = None) -> Conversion:
    """Write an official checkpoint as a directory for ``timm.create_model("local-dir:DIRECTORY", pretrained=True)``.

    model: name of the softline model; by default it is recognised by the shapes of the weights, if these are unique.
    """
    directory = Path(directory)
    if directory.exists():
        raise UserError(f"{directory} exists already; choose another directory")
    if not directory.resolve().parent.is_dir():
        raise UserError(f"no such directory: {directory.parent}")
    state_dict = load_official(path)
    name = model or _recognise(state_dict, path)
    rules = _rules(name)
    renamed = rename_keys(state_dict, rules)
    network = timm.create_model(name, num_classes=_num_classes(renamed))
    check_keys(network, renamed, name)
    network.load_state_dict(renamed)
    # renamed when it is complete: a crash leaves no partial model there
    with tempfile.TemporaryDirectory(dir=directory.resolve().parent, prefix=".convert-") as partial:
        save_for_hf(network, f"{partial}/model", safe_serialization=True)
        os.rename(f"{partial}/model", directory)
    weights = (directory / "model.safetensors").read_bytes()
    return Conversion(name, key_map(state_dict, rules), hashlib.sha256(weights).hexdigest())


def released_models() -> dict[str, Release]:
    """Releases by model, for all models whose weights the papers' authors publish."""
    return {name: release for release in RELEASES.values() for name in release.models}


def _rules(name: str) -> KeyRules:
    check_option("model", name, released_models())
    return released_models()[name].rules


def _recognise(state_dict: Mapping[str, Tensor], path: str | Path) -> str:
    """Return the only released model whose weights have these names and shapes."""
    found = []
    for name, release in released_models().items():
        renamed = rename_keys(state_dict, release.rules)
        network = timm.create_model(name, num_classes=_num_classes(renamed), device="meta")
        own = network.state_dict()
        if own.keys() == renamed.keys() and all(own[key].shape == renamed[key].shape for key in own):
            found.append(name)
    if not found:
        raise UserError(f"{path} holds the weights of none of: {', '.join(released_models())}")
    # models for other image sizes have the same weights, and the default size is meant
    found = [name for name in found if name.removesuffix("_384") == name or name.removesuffix("_384") not in found]
    if len(found) > 1:
        raise UserError(f"{path} could be any of {', '.join(found)}: choose one with --model")
    return found[0]


def _num_classes(state_dict: Mapping[str, Tensor]) -> int:
    return state_dict["head.weight"].shape[0] if state_dict.get("head.weight", torch.empty(())).ndim == 2 else 0
