"""Names, label ids and colours of the classes of semantic segmentation datasets."""

import functools
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from softline.checks import check_integer, check_option
from softline.errors import UserError

Layout = Literal["ade20k", "cityscapes", "folder"]
LAYOUTS = ("ade20k", "cityscapes", "folder")
IGNORE = 255
"""The label of unlabelled pixels, which losses and metrics ignore."""


class CityscapesClass(NamedTuple):
    name: str
    id: int
    """Value in the _labelIds.png files."""
    colour: tuple[int, int, int]


# the classes that are trained and evaluated, in the order of their train ids; ids run from 0 to 33
CITYSCAPES = (
    CityscapesClass("road", 7, (128, 64, 128)),
    CityscapesClass("sidewalk", 8, (244, 35, 232)),
    CityscapesClass("building", 11, (70, 70, 70)),
    CityscapesClass("wall", 12, (102, 102, 156)),
    CityscapesClass("fence", 13, (190, 153, 153)),
    CityscapesClass("pole", 17, (153, 153, 153)),
    CityscapesClass("traffic light", 19, (250, 170, 30)),
    CityscapesClass("traffic sign", 20, (220, 220, 0)),
    CityscapesClass("vegetation", 21, (107, 142, 35)),
    CityscapesClass("terrain", 22, (152, 251, 152)),
    CityscapesClass("sky", 23, (70, 130, 180)),
    CityscapesClass("person", 24, (220, 20, 60)),
    CityscapesClass("rider", 25, (255, 0, 0)),
    CityscapesClass("car", 26, (0, 0, 142)),
    CityscapesClass("truck", 27, (0, 0, 70)),
    CityscapesClass("bus", 28, (0, 60, 100)),
    CityscapesClass("train", 31, (0, 80, 100)),
    CityscapesClass("motorcycle", 32, (0, 0, 230)),
    CityscapesClass("bicycle", 33, (119, 11, 32)),
)
CITYSCAPES_IDS = 34

# classes of the 2016 scene parsing challenge, each by the first of its synonyms; label k is k + 1 in the files
# fmt: off
ADE20K = (
    "wall", "building", "sky", "floor", "tree", "ceiling", "road", "bed", "windowpane", "grass",
    "cabinet", "sidewalk", "person", "earth", "door", "table", "mountain", "plant", "curtain", "chair",
    "car", "water", "painting", "sofa", "shelf", "house", "sea", "mirror", "rug", "field",
    "armchair", "seat", "fence", "desk", "rock", "wardrobe", "lamp", "bathtub", "railing", "cushion",
    "base", "box", "column", "signboard", "chest of drawers", "counter", "sand", "sink", "skyscraper", "fireplace",
    "refrigerator", "grandstand", "path", "stairs", "runway", "case", "pool table", "pillow", "screen door", "stairway",
    "river", "bridge", "bookcase", "blind", "coffee table", "toilet", "flower", "book", "hill", "bench",
    "countertop", "stove", "palm", "kitchen island", "computer",
    "swivel chair", "boat", "bar", "arcade machine", "hovel",
    "bus", "towel", "light", "truck", "tower", "chandelier", "awning", "streetlight", "booth", "television receiver",
    "airplane", "dirt track", "apparel", "pole", "land", "bannister", "escalator", "ottoman", "bottle", "buffet",
    "poster", "stage", "van", "ship", "fountain", "conveyer belt", "canopy", "washer", "plaything", "swimming pool",
    "stool", "barrel", "basket", "waterfall", "tent", "bag", "minibike", "cradle", "oven", "ball",
    "food", "step", "tank", "trade name", "microwave", "pot", "animal", "bicycle", "lake", "dishwasher",
    "screen", "blanket", "sculpture", "hood", "sconce", "vase", "traffic light", "tray", "ashcan", "fan",
    "pier", "crt screen", "plate", "monitor", "bulletin board", "shower", "radiator", "glass", "clock", "flag",
)
# fmt: on


def palette(classes: int | Literal["ade20k", "cityscapes"]) -> NDArray[np.uint8]:
    """Colours by label, uint8 [K, 3].

    classes: number of classes, or a layout. Cityscapes has its own colours; others get colours that are far from each
        other, from black and from white. The colour of a label does not depend on the number of classes.
    """
    if isinstance(classes, str):
        check_option("classes", classes, ("ade20k", "cityscapes"))
        if classes == "cityscapes":
            return np.array([known.colour for known in CITYSCAPES], np.uint8)
        classes = len(ADE20K)
    check_class_count(classes)
    return _spread_colours(classes).copy()


def check_class_count(count: int) -> None:
    check_integer("classes", count, 1)
    if count > IGNORE:
        raise UserError(
            f"classes must be at most {IGNORE}, as labels are bytes and {IGNORE} means no label; got {count}"
        )


@functools.cache
def _spread_colours(count: int) -> NDArray[np.uint8]:
    """Choose colours from a grid, each as far as possible from all previous ones."""
    levels = np.linspace(0, 255, 9).round()
    grid = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(-1, 3)
    # the eye distinguishes greens best and reds worst at equal steps of RGB values
    weights = np.array([2.0, 4.0, 3.0])

    def squared_distance(colour: NDArray[Any]) -> NDArray[Any]:
        return ((grid - colour) ** 2 * weights).sum(1)

    nearest = np.minimum(squared_distance(np.zeros(3)), squared_distance(np.full(3, 255.0)))
    chosen = []
    for _ in range(count):
        chosen.append(grid[nearest.argmax()])
        nearest = np.minimum(nearest, squared_distance(chosen[-1]))
    return np.array(chosen, np.uint8)
