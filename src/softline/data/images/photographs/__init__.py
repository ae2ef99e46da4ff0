"""Two example photographs, both in the public domain (CC0).

chelsea.jpg: a cat, by Stefan van der Walt. coffee.jpg: a cup of coffee, by Rachel Michetti. Both are from
scikit-image's collection and at most 640 pixels wide and high.
"""

import io
from importlib.resources import files

from PIL import Image

from softline.checks import check_option
from softline.data.images.interface import decode

PHOTOGRAPHS = {"cat": "chelsea.jpg", "coffee": "coffee.jpg"}


def open_photograph(name: str) -> Image.Image:
    """Open the photograph ``name`` of `PHOTOGRAPHS` in RGB."""
    check_option("photograph", name, PHOTOGRAPHS)
    return decode(io.BytesIO((files(__name__) / PHOTOGRAPHS[name]).read_bytes()))
