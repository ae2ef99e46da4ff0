"""Loss, metrics and inference of segmentation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Dataset

from softline.data.semantic.classes import IGNORE
from softline.engine.footprint import check_image_memory
from softline.engine.task import Loss
from softline.errors import UserError
from softline.heads.segmenters import Segmenter
from softline.layers.bands import ImageRows, whole
from softline.layers.grid import GridSize
from softline.layers.rows import each_pixel, resized, rows_likeliest, rows_of
from softline.layers.tokenwise import runs_in_parts
from softline.tasks.segmentation.windows import SlidingWindows

if TYPE_CHECKING:
    from torchmetrics import MetricCollection

# weight of the auxiliary head's loss, as in mmsegmentation
AUXILIARY_WEIGHT = 0.4


def unchanged(images: Tensor) -> Tensor:
    return images


@dataclass(eq=False)
class Segmentation:
    """Cross-entropy on the pixels that have a label, and mIoU.

    train_set, val_set: datasets of (image [3, H, W], labels [H, W] of integers, 255 for none), of which one may be
        missing. Training images are normalised, their labels are int64, and all have the same size. Validation images
        may differ in size from each other and from their labels, to whose size the prediction is resized.
    normalize: makes validation images what the model expects, a part at a time; by default they are.
    windows: windows for evaluation; None evaluates whole images.
    """

    model: nn.Module
    classes: Sequence[str]
    _: KW_ONLY
    train_set: Dataset[Any] | None = None
    val_set: Dataset[Any] | None = None
    normalize: Callable[[Tensor], Tensor] = unchanged
    windows: SlidingWindows | None = None
    channels_last: bool = False
    groups: Sequence[int] | None = None
    monitor = "mIoU"
    unit = "images"

    @property
    def layout(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def collate(self, samples: Sequence[tuple[Tensor, Tensor]]) -> list[Any]:
        """Return numbers [B] to count samples, images [B, 3, H, W] and labels [B, H, W]; lists if sizes differ."""
        images, labels = zip(*samples, strict=True)
        return [torch.arange(len(samples)), _stack(images), _stack(labels)]

    def loss(self, model: nn.Module, batch: list[Any]) -> Loss:
        _, images, labels = batch
        _check_crops(images, labels)
        output = model(images.contiguous(memory_format=self.layout))
        logits, *auxiliary = output if isinstance(output, tuple) else (output,)
        value = cross_entropy(logits, labels)
        for other in auxiliary:
            value = value + AUXILIARY_WEIGHT * cross_entropy(other, labels)
        labelled = labels != IGNORE
        right = (logits.detach().argmax(1) == labels) & labelled
        return Loss(value, {"pixel_accuracy": right.sum() / labelled.sum().clamp(min=1)})

    def metrics(self) -> "MetricCollection":
        from torchmetrics import MetricCollection

        from softline.tasks.segmentation.metrics import SegmentationMetrics

        metric = SegmentationMetrics(len(self.classes))
        return MetricCollection({"pixels": metric}, compute_groups=False)

    def update(self, metrics: "MetricCollection", model: nn.Module, batch: list[Any], valid: int) -> None:
        _, images, labels = batch
        passes = self._passes(images[:valid])
        _keep_in_step(model, images[0], passes=passes, windows=self.windows, normalize=self.normalize)
        for found, truth in zip(self._labels(model, images[:valid], labels), labels, strict=False):
            metrics["pixels"].update(found, truth)

    def details(self, metrics: "MetricCollection") -> dict[str, Any]:
        """Return IoU, accuracy and number of pixels of each class."""
        metric: Any = metrics["pixels"]
        return {"classes": [score._asdict() for score in metric.per_class(self.classes)]}

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"classes": list(self.classes), "inference": "slide" if self.windows else "whole"}
        if self.windows is not None:
            facts |= {"crop": list(self.windows.crop), "stride": list(self.windows.stride)}
        return facts

    def _labels(
        self, model: nn.Module, images: Tensor | Sequence[Tensor], truths: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """Yield the classes of each image at the size of its labels; whole images of one size run as a batch."""
        sizes = [(truth.shape[0], truth.shape[1]) for truth in truths]
        if self.windows is None:
            for image in images:
                check_whole_image(model, (image.shape[1], image.shape[2]))
        if self.windows is None and isinstance(images, Tensor):
            if len(images):
                rows = normalised_rows(images, self.normalize, layout=self.layout)
                if len(set(sizes[: len(images)])) == 1:
                    yield from batch_labels(model, rows, sizes[0])
                else:
                    found = model(rows.whole())
                    yield from (likeliest(logits, size) for logits, size in zip(found, sizes, strict=False))
            return
        for image, size in zip(images, sizes, strict=False):
            yield image_labels(model, image, size, windows=self.windows, normalize=self.normalize)

    def _passes(self, images: Tensor | Sequence[Tensor]) -> int:
        """Return how often `_labels` runs the model."""
        if self.windows is None:
            return min(len(images), 1) if isinstance(images, Tensor) else len(images)
        counts = (len(self.windows.places(*image.shape[-2:])) for image in images)
        return sum(-(-count // self.windows.batch) for count in counts)


@torch.no_grad()
def predict_labels(
    model: nn.Module, image: Tensor, size: tuple[int, int] | None = None, *, windows: SlidingWindows | None = None
) -> Tensor:
    """Predict the class of each pixel [H, W] int64 of a normalised image [3, H, W].

    model: must be in evaluation mode.
    size: rows and columns of the result; defaults to those of the image.
    """
    if model.training:
        raise UserError("predict_labels needs a model in evaluation mode: call model.eval()")
    if image.ndim != 3:
        raise UserError(f"image must have shape [3, H, W], got {tuple(image.shape)}")
    return image_labels(model, image, size or (image.shape[1], image.shape[2]), windows=windows)


def image_labels(
    model: nn.Module,
    image: Tensor,
    size: GridSize,
    *,
    windows: SlidingWindows | None = None,
    normalize: Callable[[Tensor], Tensor] = unchanged,
) -> Tensor:
    """Find the class of each pixel of an image [3, H, W], resized to ``size``, int64.

    The logits of a large image can take gigabytes: they are reduced to classes in bands, except those of windows that
    have to be resized.
    """
    if windows is None:
        return batch_labels(model, normalised_rows(image[None], normalize), size)[0]
    bands = _bands(model, image, windows, normalize)
    if tuple(size) != tuple(image.shape[-2:]):
        return likeliest(torch.cat(list(bands), dim=1), size)
    return torch.cat([likeliest(logits, (logits.shape[1], logits.shape[2])) for logits in bands])


def normalised_rows(
    images: Tensor,
    normalize: Callable[[Tensor], Tensor],
    *,
    layout: torch.memory_format = torch.contiguous_format,
) -> ImageRows:
    """Images [B, 3, H, W] whose rows are normalised when they are read."""
    batch, channels, height, width = images.shape

    def read(first: int, last: int) -> Tensor:
        return normalize(images[:, :, first:last]).contiguous(memory_format=layout)

    return ImageRows((batch, channels, height, width), images.device, read)


def check_whole_image(model: nn.Module, size: GridSize) -> None:
    """Refuse an image that does not fit into memory as a whole."""
    network = getattr(model, "module", model)
    if not isinstance(network, Segmenter) or isinstance(model, FSDPModule):
        return
    instead = "use windows (--inference slide), or images of fewer pixels (data.short_side in the recipe)"
    # pixels exist before they are normalised
    run = partial(_feature_rows, network)
    check_image_memory(network, run, size, what="an image", instead=instead, exists=True)


def _feature_rows(network: Segmenter, image: Tensor) -> object:
    """Run the backbone on an image [1, 3, H, W] whose rows are normalised when they are read."""
    return network.maps.rows(normalised_rows(image, Tensor.clone))


def batch_labels(model: nn.Module, images: Tensor | ImageRows, size: GridSize) -> list[Tensor]:
    """Find the class of each pixel of images [B, 3, H, W], resized to ``size``, int64."""
    # other networks, such as exported ones, return logits only; DDP's model is its module
    if isinstance(getattr(model, "module", model), Segmenter):
        # hooks expect tensors
        return list(model(images if runs_in_parts(model) else whole(images), size))
    return [likeliest(logits, size) for logits in model(whole(images))]


def image_logits(model: nn.Module, image: Tensor, *, windows: SlidingWindows | None = None) -> Tensor:
    """Compute the logits [K, H, W] of an image [3, H, W] in float32; where windows overlap, they are averaged."""
    if windows is None:
        return model(image[None])[0].float()
    return torch.cat(list(_bands(model, image, windows, unchanged)), dim=1)


def _bands(
    model: nn.Module, image: Tensor, windows: SlidingWindows, normalize: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """Yield the logits [K, rows, W] of an image from top to bottom, as soon as no further window reaches them."""
    height, width = image.shape[-2:]
    places = windows.places(height, width)
    # of the rows from ``top`` on
    total, seen, top = image.new_zeros(0, 0, width), image.new_zeros(0, width, dtype=torch.float32), 0
    for first in range(0, len(places), windows.batch):
        part = places[first : first + windows.batch]
        found = model(normalize(torch.stack([image[:, rows, columns] for rows, columns in part]))).float()
        if not first:
            total = found.new_zeros(found.shape[1], 0, width)
        more = max(rows.stop for rows, _ in part) - top - total.shape[1]
        total, seen = F.pad(total, (0, 0, 0, more)), F.pad(seen, (0, 0, 0, more))
        for (rows, columns), logits in zip(part, found, strict=True):
            place = slice(rows.start - top, rows.stop - top)
            total[:, place, columns] += logits
            seen[place, columns] += 1
        later = places[first + windows.batch :]
        done = (later[0][0].start if later else height) - top
        if done:
            yield total[:, :done] / seen[:done]
            total, seen, top = total[:, done:], seen[done:], top + done


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the mean cross-entropy over all pixels in float32, where pixels without a label count as 0.

    mmsegmentation does the same; the result does not depend on how a batch is divided among processes.

    logits: [B, K, H, W].
    labels: [B, H, W] int64; 255 for none.
    """
    total = F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")
    return total / labels.numel()


def likeliest(logits: Tensor, size: GridSize) -> Tensor:
    """Resize logits [K, H, W] to ``size`` and return the most probable class of each pixel, int64."""
    rows = resized(each_pixel(Tensor.float, rows_of(logits[None])), (size[0], size[1]))
    return rows_likeliest(rows, len(logits) * max(size[1], logits.shape[2]), logits.device)[0].long()


def _stack(tensors: Sequence[Tensor]) -> Tensor | list[Tensor]:
    if len(tensors) == 1:
        # not copied
        return tensors[0][None]
    if all(tensor.shape == tensors[0].shape for tensor in tensors):
        return torch.stack(list(tensors))
    return list(tensors)


def _check_crops(images: Any, labels: Any) -> None:
    if isinstance(images, Tensor) and isinstance(labels, Tensor) and images.shape[-2:] == labels.shape[-2:]:
        return
    sizes = sorted({tuple(tensor.shape[-2:]) for tensor in (*images, *labels)})
    raise UserError(f"training needs images and labels of one size, such as crops, got {sizes}")


def _keep_in_step(
    model: nn.Module,
    image: Tensor,
    *,
    passes: int,
    windows: SlidingWindows | None,
    normalize: Callable[[Tensor], Tensor],
) -> None:
    """Let a sharded model run equally often in all processes, as it must.

    How often it runs depends on the sizes of the images. A process that has fewer runs repeats a part of an image.
    """
    if not isinstance(model, FSDPModule):
        return
    most = torch.tensor(passes, device=image.device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    if windows is not None:
        rows, columns = windows.places(*image.shape[-2:])[0]
        image = image[:, rows, columns]
    for _ in range(int(most) - passes):
        model(normalize(image[None]))
