"""Networks of recipes: a timm model as a classifier, or as the backbone under a head."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from timm.data import resolve_model_data_config
from timm.layers import freeze_batch_norm_2d
from torch import Tensor, nn

from softline.backbones.backbone import fit_positions
from softline.backbones.creation import (
    building,
    check_architecture,
    check_model_options,
    create_for_size,
    use_grad_checkpointing,
)
from softline.engine.recipe import ModelRecipe, ReplaceRecipe
from softline.engine.task import Notify, log
from softline.replacing.replace import replace_attention, replaceable
from softline.weights.releases import read_weights
from softline.weights.renaming import check_keys


class ChannelData(Protocol):
    """The part of a recipe that describes the channels of images."""

    @property
    def mean(self) -> tuple[float, ...] | None: ...

    @property
    def std(self) -> tuple[float, ...] | None: ...


def build_model(recipe: ModelRecipe, num_classes: int, image_size: int | None = None) -> nn.Module:
    """Create the model, with a classifier for the classes and position embeddings for the images."""
    check_network(recipe)
    options: dict[str, Any] = {"num_classes": num_classes, **recipe.options}
    model = create_for_size(recipe.name, image_size, pretrained=recipe.pretrained, **options)
    furnish(model, recipe, load_weights)
    network = prepare_network(model, recipe)
    return network.to(memory_format=torch.channels_last) if recipe.channels_last else network


def check_network(recipe: ModelRecipe) -> None:
    """Check that name and options describe a network, and no place from which timm would read one."""
    check_architecture(recipe.name)
    check_model_options(recipe.options, "model.options")
    if recipe.replace is not None:
        check_model_options(recipe.replace.options, "model.replace.options")


def furnish(network: nn.Module, recipe: ModelRecipe, load: Callable[..., None]) -> None:
    """Give a network the weights and the attention of a recipe.

    Weights of the network as it was before its attention is replaced are inherited; those of a network with the
    attention already replaced are loaded after that.

    load: is given the network, the weights, and ``name`` and ``path`` for messages.
    """
    weights = None if recipe.checkpoint is None else read_weights(recipe.checkpoint, recipe.name)
    inherited = recipe.replace is None or (weights is not None and attention_keys(network) <= set(weights))
    if weights is not None and inherited:
        load(network, weights, name=recipe.name, path=recipe.checkpoint)
    if recipe.replace is not None:
        put_attention(network, recipe.replace)
    if weights is not None and not inherited:
        load(network, weights, name=recipe.name, path=recipe.checkpoint)


def attention_keys(network: nn.Module) -> set[str]:
    """Return the names of the parameters in the attention of a network, which a replacement renames."""
    return {f"{name}.{key}" for name, module in replaceable(network).items() for key in module.state_dict()}


def put_attention(network: nn.Module, recipe: ReplaceRecipe) -> None:
    replace_attention(
        network,
        recipe.attention,
        layers=recipe.layers,
        options=recipe.options,
        queries=recipe.queries,
        drop_position_bias=recipe.drop_position_bias,
    )


def prepare_network(network: Any, recipe: ModelRecipe) -> nn.Module:
    """Apply what a recipe asks of a network that has its weights."""
    if recipe.grad_checkpointing:
        use_grad_checkpointing(network, recipe.name)
    prepared: nn.Module = freeze_batch_norm_2d(network) if recipe.freeze_batch_norm else network
    return prepared


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], *, name: str, path: str) -> None:
    """Load initial weights: position embeddings are interpolated, a classifier for other classes is left out."""
    weights = fit_positions(dict(weights), model)
    own = model.state_dict()
    classifier = [key for key in own if key.startswith(f"{_classifier_name(model)}.")]
    if any(key in weights and weights[key].shape != own[key].shape for key in classifier):
        weights |= {key: own[key] for key in classifier}
    check_keys(model, weights, f"{name} (model.checkpoint {path})")
    model.load_state_dict(weights)


def _classifier_name(model: nn.Module) -> str:
    cfg: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    return str(cfg.get("classifier") or "head")


def build_body(recipe: ModelRecipe, *, notify: Notify = log.info) -> nn.Module:
    """Create the backbone as a features_only model of timm, whose stages a head reads."""
    check_network(recipe)
    body: nn.Module = create_for_size(
        recipe.name, None, pretrained=recipe.pretrained, features_only=True, **recipe.options
    )
    # timm's features_only model of a convolutional network is the network itself
    network: Any = getattr(body, "model", body)
    furnish(network, recipe, partial(load_body, notify=notify))
    prepare_network(network, recipe)
    return body


def load_body(network: nn.Module, weights: Mapping[str, Tensor], *, name: str, path: str, notify: Notify) -> None:
    """Load initial weights from a classifier, which must have all of the backbone's; the others are not needed."""
    own = network.state_dict()
    weights = fit_positions(_flattened(weights, own), network)
    needed = {key: value for key, value in weights.items() if key in own}
    check_keys(network, needed, f"{name} (model.checkpoint {path})")
    network.load_state_dict(needed)
    left = [key for key in weights if key not in own]
    unused = f"; not needed: {', '.join(left[:6])}{', ...' if len(left) > 6 else ''}" if left else ""
    notify(f"{name}: all {len(needed)} tensors of the backbone loaded from {path}{unused}; the head starts afresh")


def _flattened(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """stages.0.weight as stages_0.weight, where timm's features_only model has it so."""
    flat = {key: re.sub(r"^(\w+)\.(\d+)\.", r"\1_\2.", key) for key in weights}
    return {flat[key] if flat[key] in own else key: value for key, value in weights.items()}


def channel_statistics(model: nn.Module, data: ChannelData) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel: the recipe's if it has them, otherwise the backbone's."""
    known = [module for module in model.modules() if getattr(module, "pretrained_cfg", None)]
    own = resolve_model_data_config(known[0] if known else model)
    return data.mean or own["mean"], data.std or own["std"]


def with_head(
    heads: Mapping[str, Callable[..., nn.Module]], recipe: Any, body: nn.Module, num_classes: int, **given: Any
) -> nn.Module:
    with building(f"head.options of {recipe.name}"):
        return heads[recipe.name](body, num_classes, **{**given, **recipe.options})
