"""A detector whose network was exported: resizes images for it, and maps what it finds back to them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from softline.engine.graph import HEIGHT, WIDTH
from softline.engine.shipping import End, check_ends, floats
from softline.errors import UserError
from softline.heads.detectors import ImageBatches

# of each box, in the order of the network's outputs
FOUND = {
    "boxes": floats(None, 4),
    "scores": floats(None),
    "labels": End("tensor(int64)", (None,)),
    "masks": floats(None, None, None),
}


def check_detector(network: Any) -> None:
    """Check that an exported network takes one image and returns what `detection_graph` does, masks or not."""
    wanted = FOUND if "masks" in network.outputs else {name: end for name, end in FOUND.items() if name != "masks"}
    check_ends(network, floats(None, None, HEIGHT, WIDTH), wanted)


class ExportedDetector(nn.Module):
    """Does what `softline.heads.detectors.Detector` does in evaluation, with the network of `detection_graph`.

    score_threshold: of the exported network, which drops detections with a score up to this.
    """

    def __init__(
        self, network: nn.Module, *, short_side: int, long_side: int, score_threshold: float, num_classes: int
    ) -> None:
        super().__init__()
        self.network, self.num_classes = network, num_classes
        self.score_threshold = score_threshold
        # the network normalises images itself
        self.resizing = ImageBatches(short_side, long_side, (0.0,) * 3, (1.0,) * 3).eval()

    def forward(self, images: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Detect objects in images [3, H, W] with values in [0, 1] or uint8; see `Detector.forward`."""
        return [self._detect(image) for image in images]

    def _detect(self, image: Tensor) -> dict[str, Any]:
        resized, _ = self.resizing.resize(image)
        found = dict(zip(FOUND, self.network(resized[None]), strict=False))
        self._check(found)
        if "masks" in found:
            # one channel, as torchvision's heads have it
            found["masks"] = found["masks"][:, None]
        with torch.no_grad():
            sizes = [(each.shape[-2], each.shape[-1]) for each in (resized, image)]
            (placed,) = self.resizing.postprocess([found], sizes[:1], sizes[1:])
        return placed

    def _check(self, found: dict[str, Tensor]) -> None:
        """Check what the network does not declare: as many of everything, and classes that there are."""
        counts = {name: len(values) for name, values in found.items()}
        if len(set(counts.values())) > 1:
            raise UserError(f"the exported detector must find as many of everything, found {counts}")
        labels = found["labels"]
        if not ((labels >= 0) & (labels < self.num_classes)).all():
            raise UserError(f"the exported detector found a class beyond its {self.num_classes}")
