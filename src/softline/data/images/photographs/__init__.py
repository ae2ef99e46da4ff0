"""Two photographs to look at models with, both dedicated to the public (CC0).

chelsea.jpg: a cat, by Stefan van der Walt. coffee.jpg: a cup of coffee, by Rachel Michetti. Both from scikit-image's
collection, not larger than 640 pixels.
"""

import io
from importlib.resources import files

from PIL import Image

from softline.checks import check_option
from softline.data.images.interface import decode

PHOTOGRAPHS = {"cat": "chelsea.jpg", "coffee": "coffee.jpg"}


def open_photograph(name: str) -> Image.Image:
    """The photograph ``name`` of `PHOTOGRAPHS`, in RGB."""
    check_option("photograph", name, PHOTOGRAPHS)
    return decode(io.BytesIO((files(__name__) / PHOTOGRAPHS[name]).read_bytes()))
