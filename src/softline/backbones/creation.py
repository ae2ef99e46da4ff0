"""Creating timm models, softline's own included, for a given image size."""

import difflib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from softline.backbones import MODEL_NAMES
from softline.errors import UserError
from softline.files import read_bytes
from softline.plain import check_entries, check_plain, read_json
from softline.weights.reading import load_official

T = TypeVar("T", bound=nn.Module)
# arguments of timm.create_model, and of the functions that it calls, which name files to read or addresses to fetch
SOURCE_OPTIONS = ("cache_dir", "checkpoint_path", "model_name", "pretrained")
MAX_NUMBER = 10**7
# timm's names of the weights in a directory
SAVED_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
# what a saved model says of its images and classes; where its weights came from is not asked
SAVED_CFG = {
    **{"input_size": list[int], "test_input_size": list[int], "mean": list[float], "std": list[float]},
    **{"interpolation": str, "crop_pct": float, "test_crop_pct": float, "crop_mode": str, "fixed_input_size": bool},
    **{"num_classes": int, "label_names": list | dict, "classifier": str | list[str], "first_conv": str | list[str]},
    **{"pool_size": list[int] | None, "architecture": str, "tag": str},
}
# what a constructor may raise for an argument that it does not expect
UNBUILDABLE = (
    *(AssertionError, AttributeError, LookupError, MemoryError, OverflowError, RecursionError, RuntimeError),
    *(TypeError, ValueError, ZeroDivisionError),
)


@contextmanager
def building(what: str) -> Iterator[None]:
    """Turn whatever a constructor raises about its arguments into a UserError that begins with ``what``."""
    try:
        yield
    except UserError:
        raise
    except UNBUILDABLE as error:
        raise UserError(f"{what}: {str(error) or type(error).__name__}") from error


def build_bounded(build: Callable[[], T], weights: Mapping[str, Tensor]) -> T:
    """Build the network of ``weights``, unless it turns out to be larger than they are.

    A description of a few bytes can ask for a network that no memory holds, or for layers without end. It is built
    without memory first, as far as its constructors allow that.
    """
    _check_fit(build, weights)
    with _counted(weights):
        return build()


def _check_fit(build: Callable[[], nn.Module], weights: Mapping[str, Tensor]) -> None:
    with _counted(weights), _unless_unable(), torch.device("meta"):
        build()


@contextmanager
def _unless_unable() -> Iterator[None]:
    """Give up quietly where a constructor needs the numbers of a tensor, or fails, which it will again with memory."""
    try:
        yield
    except UserError:
        raise
    except (NotImplementedError, *UNBUILDABLE):
        pass


@contextmanager
def _counted(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Stop as soon as a network has more parameters, or far more buffers, than its weights have numbers."""
    numbers = sum(tensor.numel() for tensor in weights.values())
    # layers that share a parameter, and classifiers that are replaced, count twice; masks of windows are not saved
    left = {"parameters": 2 * numbers + 10**6, "buffers": 4 * numbers + 10**8}
    thread = threading.get_ident()

    def count(kind: str, tensor: Any) -> None:
        # the hooks are for all threads
        if threading.get_ident() == thread and tensor is not None:
            left[kind] -= tensor.numel()
            if left[kind] < 0:
                raise UserError(f"it describes a network with more {kind} than the {numbers:,} numbers of its weights")

    handles = [
        register_module_parameter_registration_hook(lambda _, __, tensor: count("parameters", tensor)),
        register_module_buffer_registration_hook(lambda _, __, tensor: count("buffers", tensor)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def set_image_size(model: nn.Module, name: str, size: int) -> None:
    """Adapt a built timm model to another image size; softline's own models accept any size."""
    if name in MODEL_NAMES or not hasattr(model, "set_input_size"):
        return
    try:
        model.set_input_size(img_size=size)  # type: ignore[operator]
    except (AssertionError, RuntimeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{name} cannot take images of {size} x {size} pixels: {error}") from error


def create_for_size(name: str, size: int | None, **options: Any) -> Any:
    """Call `timm.create_model` for images of ``size``, if the model's constructor takes a size.

    The model's set_input_size is not used: it also changes parts that are learned for a size, such as Swin's windows.
    """
    if size is None or "img_size" in options:
        return _create(name, options)
    try:
        model = timm.create_model(name, img_size=size, **options)
    except UNBUILDABLE as error:
        # if it also fails without the size, the cause is something else, and this call reports it
        model = _create(name, options)
        if isinstance(error, TypeError) and "img_size" in str(error):
            # a convolutional network takes any size
            return model
        raise UserError(f"{name} cannot take images of {size} x {size} pixels: {error}") from error
    if 0 in (getattr(getattr(model, "patch_embed", None), "grid_size", None) or ()):
        raise UserError(f"{name} cannot take images of {size} x {size} pixels: they are smaller than a patch")
    return model


def use_grad_checkpointing(model: Any, name: str) -> None:
    """Let a model compute its blocks again in the backward pass instead of keeping what they computed."""
    try:
        model.set_grad_checkpointing(True)
    except (AssertionError, AttributeError):
        # timm asserts
        raise UserError(f"grad_checkpointing: {name} does not offer it") from None


def create_saved(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Create the model that timm saved in a directory, with its weights, as "local-dir:" does; return its options too.

    config.json and the weights are read by softline, which executes nothing in them; timm is given their content.
    """
    config = _saved_config(path / "config.json")
    name, options, cfg = config["architecture"], config.get("model_args", {}), config["pretrained_cfg"]
    check_architecture(name)
    check_model_options(options, "model_args")
    found = [path / file for file in SAVED_WEIGHTS if (path / file).exists()]
    if not found:
        raise UserError(f"there are no weights: expected one of {', '.join(SAVED_WEIGHTS)}")
    weights = load_official(found[0])
    with building(f"{name} cannot be built from its config.json and {found[0].name}"):
        _check_fit(lambda: timm.create_model(name, pretrained_cfg=cfg, **options), weights)
        with _counted(weights):
            model: nn.Module = timm.create_model(
                name, pretrained=True, pretrained_cfg=cfg, pretrained_cfg_overlay={"state_dict": weights}, **options
            )
    # the weights are not part of the model's description
    model.pretrained_cfg.pop("state_dict", None)  # type: ignore[operator, union-attr]
    return model, options


def _saved_config(file: Path) -> dict[str, Any]:
    config = read_json(read_bytes(file), file.name)
    check_plain(config, file.name)
    check_entries(config, {"architecture": str}, file.name)
    # older versions of timm have one dictionary for everything
    cfg = config.get("pretrained_cfg", config)
    check_entries(cfg, {}, f"pretrained_cfg in {file.name}")
    cfg = {**cfg, **{key: config[key] for key in ("num_classes", "label_names") if key in config}}
    cfg = {key: value for key, value in cfg.items() if key in SAVED_CFG and value is not None}
    check_entries(cfg, {key: kind for key, kind in SAVED_CFG.items() if key in cfg}, f"pretrained_cfg in {file.name}")
    for key, length in {"input_size": 3, "test_input_size": 3}.items():
        if key in cfg and (len(cfg[key]) != length or min(cfg[key]) < 1):
            raise UserError(f"{key} in {file.name} must be {length} positive numbers, got {cfg[key]}")
    if isinstance(names := cfg.get("label_names"), dict):
        # of classes with gaps between them
        names = [names.get(str(index), index) for index in range(cfg.get("num_classes", 0))]
    cfg |= {} if names is None else {"label_names": list(map(str, names))}
    check_entries(config, {"model_args": dict} if "model_args" in config else {}, file.name)
    return {**config, "pretrained_cfg": cfg}


def _create(name: str, options: dict[str, Any]) -> Any:
    with building(f"{name} cannot be built"):
        try:
            return timm.create_model(name, **options)
        except TypeError as error:
            raise UserError(f"model.options of {name}: {error}") from error


def check_model_options(options: dict[str, Any], where: str) -> None:
    """Refuse options by which timm would read files or the network, and numbers that no network has."""
    for name in options:
        if not isinstance(name, str) or name in SOURCE_OPTIONS or name.startswith("pretrained"):
            raise UserError(
                f"{where}.{name} is refused: it makes timm read other files or the network; a recipe names weights by "
                "model.pretrained or model.checkpoint"
            )
        largest = max((abs(number) for number in _numbers(options[name])), default=0)
        if largest > MAX_NUMBER:
            raise UserError(f"{where}.{name} is refused: {largest:,} is more than the {MAX_NUMBER:,} of any network")


def _numbers(value: Any) -> list[int]:
    if isinstance(value, dict | list | tuple):
        return [number for item in (value.values() if isinstance(value, dict) else value) for number in _numbers(item)]
    return [value] if isinstance(value, int) else []


def check_architecture(name: str) -> None:
    """Check that a name is that of a model, and not of a place where timm would look for one."""
    if ":" in name or "/" in name:
        raise UserError(
            f"model.name must be the name of a model, such as softpp_tiny, not a place to read it from, got {name!r}; "
            "the weights of a directory are its model.safetensors, which model.checkpoint can name"
        )
    check_model_name(name)


def check_model_name(name: str) -> None:
    # timm resolves local-dir: and hf-hub: names
    if ":" in name or timm.is_model(name):
        return
    near = difflib.get_close_matches(name, sorted({*MODEL_NAMES, *timm.list_models()}), 3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `softline models` lists softline's"
    raise UserError(f"timm knows no model {name!r}{hint}")
