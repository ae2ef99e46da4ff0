"""softline: vision transformers whose attention costs O(N) — SOFT, SOFT++, InLine and their rivals.

``import softline`` makes softline's models known to timm, and takes milliseconds: torch and timm are imported when they
are needed. `register_models` says how.
"""

import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from softline import backbones
    from softline.attention import ATTENTIONS, create_attention
    from softline.deploy.loading import load
    from softline.linearizing.linearize import linearize
    from softline.replacing.replace import attention_layer, replace_attention
    from softline.tasks.building import build

__all__ = [
    "ATTENTIONS",
    "__version__",
    "attention_layer",
    "backbones",
    "build",
    "create_attention",
    "linearize",
    "load",
    "replace_attention",
]

__version__ = "0.1.0"

# public names and the modules that define them, imported on first use
_LAZY = {
    "ATTENTIONS": "softline.attention",
    "attention_layer": "softline.replacing.replace",
    "build": "softline.tasks.building",
    "create_attention": "softline.attention",
    "linearize": "softline.linearizing.linearize",
    "load": "softline.deploy.loading",
    "replace_attention": "softline.replacing.replace",
}


if not TYPE_CHECKING:
    # type checkers see the imports above instead

    def __getattr__(name: str) -> Any:
        """Import a public name, or a module of the package, on first use (PEP 562)."""
        from importlib import import_module

        if name in _LAZY:
            value = getattr(import_module(_LAZY[name]), name)
        elif name in _modules():
            value = import_module(f"softline.{name}")
        else:
            raise AttributeError(f"module 'softline' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_modules()})


def _modules() -> set[str]:
    """Return the names of the modules inside the package."""
    from pkgutil import iter_modules

    return {module.name for module in iter_modules(__path__)}


def register_models() -> None:
    """Make softline's models known to timm: now if timm has been imported, otherwise as soon as it is.

    timm knows the models once `softline.backbones` has been imported, which needs torch and timm and takes seconds; a
    command that only prints its help should not wait for them. So if timm is not there yet, a finder is put on
    `sys.meta_path`. It lets the first import of timm happen as always, and imports the backbones right after it.
    Whoever calls `timm.create_model` has imported timm, and so finds softline's models there.
    """
    if sys.modules.get("timm") is not None:
        import softline.backbones  # noqa: F401
    elif not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds timm, and the modules of softline, where the finders behind it on `sys.meta_path` find them.

    It takes part in the import of softline's modules because timm may be imported by one of those that the backbones
    themselves import: then the backbones have to wait until that module is complete.
    """

    def __init__(self) -> None:
        self.importing = threading.local()

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname != "timm" and not fullname.startswith("softline."):
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
                return spec
        return None

    def execute(self, loader: Any, module: "ModuleType") -> None:
        """Execute the module; if timm is there after the outermost of these calls, import the backbones."""
        depth = getattr(self.importing, "depth", 0)
        self.importing.depth = depth + 1
        try:
            loader.exec_module(module)
            if depth == 0 and sys.modules.get("timm") is not None:
                import softline.backbones  # noqa: F401

                if self in sys.meta_path:
                    sys.meta_path.remove(self)
        finally:
            self.importing.depth = depth


class _Loader:
    """Executes a module by its own loader, which is also the one that the module shows afterwards."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self.loader, self.finder = loader, finder

    def exec_module(self, module: "ModuleType") -> None:
        assert module.__spec__ is not None, "the import system sets it"
        module.__spec__.loader = module.__loader__ = self.loader
        self.finder.execute(self.loader, module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


register_models()
