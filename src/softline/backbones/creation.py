"""From a recipe of classification to its task: model, data, transforms."""

import difflib
from typing import Any

import timm
from torch import nn

from softline.backbones import MODEL_NAMES
from softline.errors import UserError


def set_image_size(model: nn.Module, name: str, size: int) -> None:
    """Fit one of timm's models, already built, to images of another size; softline's own take any."""
    if name in MODEL_NAMES or not hasattr(model, "set_input_size"):
        return
    try:
        model.set_input_size(img_size=size)  # type: ignore[operator]
    except (AssertionError, RuntimeError, ValueError, ZeroDivisionError) as error:
        raise UserError(f"{name} cannot take images of {size} x {size} pixels: {error}") from None


def create_for_size(name: str, size: int | None, **options: Any) -> Any:
    """`timm.create_model` for images of ``size``, where the model's constructor asks for it.

    Not by its set_input_size, which also changes what is learned for a size, such as the windows of Swin.
    """
    if size is None or "img_size" in options:
        return _create(name, options)
    try:
        model = timm.create_model(name, img_size=size, **options)
        if 0 in (getattr(getattr(model, "patch_embed", None), "grid_size", None) or ()):
            raise UserError("they are smaller than a patch")
        return model
    except (AssertionError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        failure = error.with_traceback(None)
    # what fails without the size too is the fault of something else, and says so
    model = _create(name, options)
    if isinstance(failure, TypeError) and "img_size" in str(failure):
        # a network of convolutions takes any size
        return model
    raise UserError(f"{name} cannot take images of {size} x {size} pixels: {failure}")


def _create(name: str, options: dict[str, Any]) -> Any:
    try:
        return timm.create_model(name, **options)
    except TypeError as error:
        raise UserError(f"model.options of {name}: {error}") from None
    except (AssertionError, RuntimeError, ZeroDivisionError) as error:
        raise UserError(f"{name} cannot be built: {error}") from None


def check_model_name(name: str) -> None:
    # local-dir: and hf-hub: are for timm to resolve
    if ":" in name or timm.is_model(name):
        return
    near = difflib.get_close_matches(name, sorted({*MODEL_NAMES, *timm.list_models()}), 3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `softline models` lists softline's"
    raise UserError(f"timm knows no model {name!r}{hint}")
