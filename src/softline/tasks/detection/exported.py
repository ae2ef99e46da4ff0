"""A detector whose network was exported: resizes images for it, and maps what it finds back to them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from softline.heads.detectors import ImageBatches

# of each box, in the order of the network's outputs
FOUND = ("boxes", "scores", "labels", "masks")


class ExportedDetector(nn.Module):
    """Does what `softline.heads.detectors.Detector` does in evaluation, with the network of `detection_graph`.

    score_threshold: of the exported network, which drops detections with a score up to this.
    """

    def __init__(self, network: nn.Module, *, short_side: int, long_side: int, score_threshold: float) -> None:
        super().__init__()
        self.network = network
        self.score_threshold = score_threshold
        # the network normalises images itself
        self.resizing = ImageBatches(short_side, long_side, (0.0,) * 3, (1.0,) * 3).eval()

    def forward(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Detect objects in images [3, H, W] with values in [0, 1]; see `Detector.forward`."""
        return [self._detect(image) for image in images]

    def _detect(self, image: Tensor) -> dict[str, Tensor]:
        resized, _ = self.resizing.resize(image)
        found = dict(zip(FOUND, self.network(resized[None]), strict=False))
        if "masks" in found:
            # one channel, as torchvision's heads have it
            found["masks"] = found["masks"][:, None]
        with torch.no_grad():
            sizes = [(each.shape[-2], each.shape[-1]) for each in (resized, image)]
            (placed,) = self.resizing.postprocess([found], sizes[:1], sizes[1:])
        return placed
