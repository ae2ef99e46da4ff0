"""Feature maps of a backbone's stages, for the heads of dense tasks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from softline.errors import UserError
from softline.layers.bands import ImageRows, return_bands
from softline.layers.rows import RowMap, each_pixel, rows_of
from softline.layers.tokenwise import runs_in_parts

# the strides that feature pyramids expect
STRIDES = (4, 8, 16, 32)


class StageMaps(nn.Module):
    """Feature maps [B, C, H / 4, W / 4] to [B, C, H / 32, W / 32] of images, with a LayerNorm per stage.

    The stages of a transformer with pre-norm blocks end in a residual sum that is not normalised: without these norms
    the first losses of a detector are orders of magnitude too large.

    body: timm model created with ``features_only=True``.
    norm: False leaves normalisation to the head.
    stages: indices of the stages to return, in order. A stage that is left out has no norm, because DDP waits for the
        gradient of every parameter.
    """

    def __init__(self, body: nn.Module, *, norm: bool = True, stages: Sequence[int] = (0, 1, 2, 3)) -> None:
        super().__init__()
        info: Any = body.feature_info
        if tuple(info.reduction()) != STRIDES:
            raise UserError(
                f"dense tasks need a backbone with strides {STRIDES}, got {tuple(info.reduction())}; if it has "
                "more, choose them by model.options.out_indices"
            )
        if not stages or list(stages) != sorted(set(stages) & set(range(len(STRIDES)))):
            raise UserError(f"stages must be some of 0, 1, 2, 3 in order, got {tuple(stages)}")
        self.stages = tuple(stages)
        self.channels: list[int] = [info.channels()[stage] for stage in stages]
        self.body = body
        self.norms = nn.ModuleList(LayerNorm2d(channels) if norm else nn.Identity() for channels in self.channels)

    def forward(self, images: Tensor, sizes: Sequence[tuple[int, int]] | None = None) -> list[Tensor]:
        """Images [B, 3, H, W] -> one map [B, C, H / stride, W / stride] per stage.

        sizes: rows and columns of each image without padding. Attention is global, so padding would change the
            features: each image is run at its own size, rounded up to whole patches of the last stage, together with
            others of that size, and its maps are zero-padded. BatchNorm layers in training mode therefore see each of
            these sizes separately, and the number of calls of the body depends on the batch.
        """
        if sizes is None:
            return self._maps(images)
        whole = _whole_patches(images, sizes)
        if all(size == tuple(images.shape[-2:]) for size in whole):
            return self._maps(images)
        maps: list[list[Tensor]] = [[] for _ in images]
        for size in dict.fromkeys(whole):
            places = [place for place, other in enumerate(whole) if other == size]
            found = self._maps(images[places, :, : size[0], : size[1]])
            for row, place in enumerate(places):
                maps[place] = [stage[row] for stage in found]
        target = [tuple(side // STRIDES[stage] for side in images.shape[-2:]) for stage in self.stages]
        return [
            torch.stack([_pad(m, size) for m in stage])
            for stage, size in zip(zip(*maps, strict=True), target, strict=True)
        ]

    def rows(self, images: ImageRows) -> list[RowMap]:
        """The same maps, whose rows are normalised when they are read."""
        # other backbones, and hooks, expect tensors
        able = getattr(getattr(self.body, "model", None), "reads_rows", False) and runs_in_parts(self.body)
        stages = self._stages(images if able else images.whole())
        return_bands(math.prod(images.shape), images.device)
        return [each_pixel(norm, rows_of(stage)) for norm, stage in zip(self.norms, stages, strict=True)]

    def _maps(self, images: Tensor) -> list[Tensor]:
        return [norm(stage) for norm, stage in zip(self.norms, self._stages(images), strict=True)]

    def _stages(self, images: Tensor | ImageRows) -> list[Tensor]:
        try:
            found = self.body(images)
        except AssertionError as error:
            # timm checks the image size by an assertion
            height, width = images.shape[-2:]
            raise UserError(
                f"the backbone refuses images of {height} x {width}: {error} (some of timm's models take any size "
                "with model.options.strict_img_size=false)"
            ) from error
        if getattr(self.body, "output_fmt", "NCHW") == "NHWC":
            found = [stage.permute(0, 3, 1, 2) for stage in found]
        return [found[stage] for stage in self.stages]


def _whole_patches(images: Tensor, sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Round each size up to whole patches of the last stage."""
    last = STRIDES[-1]
    height, width = images.shape[-2:]
    if height % last or width % last:
        raise UserError(f"images must be padded to multiples of {last}, got {height} x {width}")
    if len(sizes) != len(images):
        raise UserError(f"sizes must have one entry per image ({len(images)}), got {len(sizes)}")
    for rows, columns in sizes:
        if not (0 < rows <= height and 0 < columns <= width):
            raise UserError(f"sizes must lie within the images' {height} x {width}, got {rows} x {columns}")
    return [(-(-rows // last) * last, -(-columns // last) * last) for rows, columns in sizes]


def _pad(maps: Tensor, size: tuple[int, ...]) -> Tensor:
    """Zero-pad maps [C, H, W] at the bottom and the right."""
    return F.pad(maps, (0, size[1] - maps.shape[-1], 0, size[0] - maps.shape[-2]))
