"""The papers' released checkpoints as models; the code is in `softline.weights`."""

# importing the backbones makes their releases known
import softline.backbones  # noqa: F401
from softline.weights.reading import load_official
from softline.weights.releases import Conversion, convert_official, from_official

__all__ = ["Conversion", "convert_official", "from_official", "load_official"]
