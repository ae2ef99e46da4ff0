"""Creating timm models, softline's own included, for a given image size."""

import difflib
from typing import Any

import timm
from torch import nn

from softline.backbones import MODEL_NAMES
from softline.errors import UserError


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
    except (AssertionError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        # if it also fails without the size, the cause is something else, and this call reports it
        model = _create(name, options)
        if isinstance(error, TypeError) and "img_size" in str(error):
            # a convolutional network takes any size
            return model
        raise UserError(f"{name} cannot take images of {size} x {size} pixels: {error}") from error
    if 0 in (getattr(getattr(model, "patch_embed", None), "grid_size", None) or ()):
        raise UserError(f"{name} cannot take images of {size} x {size} pixels: they are smaller than a patch")
    return model


def _create(name: str, options: dict[str, Any]) -> Any:
    try:
        return timm.create_model(name, **options)
    except TypeError as error:
        raise UserError(f"model.options of {name}: {error}") from error
    except (AssertionError, RuntimeError, ZeroDivisionError) as error:
        raise UserError(f"{name} cannot be built: {error}") from error


def check_model_name(name: str) -> None:
    # timm resolves local-dir: and hf-hub: names
    if ":" in name or timm.is_model(name):
        return
    near = difflib.get_close_matches(name, sorted({*MODEL_NAMES, *timm.list_models()}), 3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `softline models` lists softline's"
    raise UserError(f"timm knows no model {name!r}{hint}")
