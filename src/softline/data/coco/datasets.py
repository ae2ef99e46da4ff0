"""Detection datasets with torchvision's transforms of images, boxes and masks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from softline.checks import check_integer, check_range
from softline.data.coco.source import CocoSource, Instances
from softline.data.images.datasets import to_mode
from softline.data.randomness import repeatable
from softline.errors import UserError

Target = dict[str, Tensor]
Transform = Callable[[Tensor, Target], tuple[Tensor, Target]]

# in pixels of the resized image; a smaller box says nothing about its content
LEAST_SIDE = 1.0


class DetectionImages(Dataset[tuple[Tensor, Target]]):
    """Transformed images and their objects, by index or by (epoch, index); a plain index belongs to epoch 0.

    A random transform depends on (seed, epoch, index) only: not on the number of workers or processes, nor on where a
    run was interrupted.

    An image is [3, H, W], float32 in [0, 1] for training and uint8 for evaluation. Its target has boxes [n, 4]
    (float32; left, top, right, bottom), labels [n] (int64, from 0), masks [n, H, W] (uint8; if requested), iscrowd [n]
    (int64, 0 or 1), area [n] (float32, in pixels of the original image, regardless of the transform) and image_id []
    (int64).

    masks: include masks in the targets.
    training: leave out crowds, which mark regions and not objects, and images without any object; indices refer to the
        remaining images. Evaluation needs all of them.
    """

    def __init__(self, source: CocoSource, transform: Transform, *, seed: int = 0, masks: bool, training: bool) -> None:
        check_integer("seed", seed, 0)
        if masks:
            source.check_masks()
        if training:
            source = _with_objects(source)
        self.source, self.transform = source, transform
        self.seed, self.masks, self.training = seed, masks, training

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: int | tuple[int, int]) -> tuple[Tensor, Target]:
        epoch, index = key if isinstance(key, tuple) else (0, key)
        image, objects = self.source.load(index)
        image = to_mode(image, "RGB", lambda: self.source.name(index))
        if self.training:
            objects = objects.only(~objects.crowd)
        target = self._target(objects, self.source.image_id(index))
        with repeatable(self.seed, epoch, index):
            return self.transform(v2.functional.to_image(image), target)

    def _target(self, objects: Instances, image_id: int) -> Target:
        target = {
            "boxes": tv_tensors.BoundingBoxes(objects.boxes, format="XYXY", canvas_size=objects.size),
            "labels": objects.labels,
            "iscrowd": objects.crowd.long(),
            "area": objects.area,
            "image_id": torch.tensor(image_id),
        }
        return {**target, "masks": tv_tensors.Mask(objects.masks())} if self.masks else target

    def aspect_groups(self) -> list[int]:
        """0 for each image that is wide or square, 1 if it is tall: batches of one group need less padding."""
        sizes = map(self.source.size, range(len(self)))
        return [int(height > width) for height, width in sizes]


def detection_train_transform(*, short_sides: Sequence[int], long_side: int, hflip: float) -> Transform:
    """Random horizontal flip and resize; boxes less than `LEAST_SIDE` wide or high after it are dropped.

    short_sides: sizes from which that of the shorter side is drawn.
    long_side: maximum size of the longer side; if it would be exceeded, the shorter side becomes smaller.
    hflip: probability of a horizontal flip.
    """
    if not short_sides:
        raise UserError("short_sides must be one or more sizes, got none")
    for side in short_sides:
        check_integer("short_sides", side, 1)
    check_integer("long_side", long_side, max(short_sides))
    check_range("hflip", hflip, 0, 1)
    transform: Transform = v2.Compose(
        [
            v2.RandomHorizontalFlip(hflip),
            v2.RandomShortestSize(list(short_sides), long_side),
            # the next step would drop boxes that exceed the border by a rounding error
            v2.ClampBoundingBoxes(),
            v2.SanitizeBoundingBoxes(min_size=LEAST_SIDE, labels_getter=_one_for_each_box),
            v2.ToDtype(torch.float32, scale=True),
            v2.ToPureTensor(),
        ]
    )
    return transform


def detection_eval_transform() -> Transform:
    """The pixels as they are, uint8: detectors resize them, and return boxes in pixels of the original image."""
    transform: Transform = v2.ToPureTensor()
    return transform


def _with_objects(source: CocoSource) -> CocoSource:
    usable = set(source.with_objects())
    if not usable:
        raise UserError(f"none of the {len(source)} images has an object to train on; the first is {source.name(0)}")
    return source.without([index for index in range(len(source)) if index not in usable])


def _one_for_each_box(sample: tuple[Tensor, Target]) -> tuple[Tensor, ...]:
    """The values to drop together with a box; torchvision finds masks by their type."""
    return tuple(sample[1][name] for name in ("labels", "iscrowd", "area"))
