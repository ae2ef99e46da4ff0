"""Semantic segmentation heads: UPerNet, Semantic FPN and SegFormer's on the feature maps of a backbone.

Papers: Unified Perceptual Parsing for Scene Understanding, https://arxiv.org/abs/1807.10221; Panoptic Feature Pyramid
Networks, https://arxiv.org/abs/1901.02446; SegFormer: Simple and Efficient Design for Semantic Segmentation with
Transformers, https://arxiv.org/abs/2105.15203. The decoders are those of segmentation-models-pytorch; everything else
(width, dropout, auxiliary head, initialisation of the classifier) follows mmsegmentation, with which SOFT++ and InLine
were trained.

Deviations: the auxiliary head has its own LayerNorm; in mmsegmentation it shares the decoder's. Semantic FPN's decoder
upsamples maps by 2 instead of resizing them to the next level, so its images are padded to multiples of 32. SegFormer's
decoder multiplies maps before it resizes them, which gives the same result at a fraction of the cost.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from softline.checks import check_integer, check_range
from softline.errors import UserError
from softline.heads.features import STRIDES, StageMaps
from softline.layers.bands import ImageRows, whole
from softline.layers.grid import GridSize, as_pair, pad_to_whole
from softline.layers.rows import (
    RowMap,
    added,
    doubled,
    each_neighbourhood,
    each_pixel,
    group_normed,
    joined,
    resized,
    rows_likeliest,
    rows_of,
)
from softline.ops.chunks import is_exported

M = TypeVar("M", Tensor, RowMap)

# the third of four stages, at stride 16
AUXILIARY_STAGE = 2
# number of groups of GroupNorm in segmentation-models-pytorch
GROUPS = 32
# numbers in the largest tensor of a decoder that is made whole: 256 MB in float32
WHOLE_NUMBERS = 2**26
# how many times larger than elsewhere a decoder's bands are, and rows of logits that they have at least
DECODER_BANDS, LEAST_ROWS = 16, 64


class Segmenter(nn.Module):
    """A network that predicts logits for each pixel.

    decoder: decoder of segmentation-models-pytorch; its output is a map at stride 4.
    classifier: module from the decoder's map to logits at stride 4.
    decode_rows: does what the decoder does for maps at strides 4, 8, 16 and 32, in evaluation, row by row.
    decoder_width: channels of the widest map at stride 4 inside the decoder.
    auxiliary: module from the third stage's map to logits at stride 16, for training only.
    divisor: images are zero-padded at the bottom and the right to multiples of it, and the logits are cropped.
    least_rows: rows of logits that a band has at least.
    """

    def __init__(
        self,
        maps: StageMaps,
        decoder: nn.Module,
        classifier: nn.Sequential,
        *,
        decode_rows: Callable[[Any, Sequence[RowMap]], RowMap],
        decoder_width: int,
        auxiliary: nn.Module | None = None,
        divisor: int = 1,
        least_rows: int = LEAST_ROWS,
    ) -> None:
        super().__init__()
        self.maps = maps
        self.decoder = decoder
        self.classifier = classifier
        self.decode_rows = decode_rows
        self.decoder_width = decoder_width
        self.auxiliary = auxiliary
        self.divisor = divisor
        self.least_rows = least_rows
        last: Any = classifier[-1]
        self.num_classes: int = last.out_channels

    def forward(self, images: Tensor | ImageRows, size: GridSize | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Images [B, 3, H, W] of any size -> logits [B, K, H, W] in float32.

        In training with an auxiliary head the result is (logits, auxiliary logits), both [B, K, H, W].

        size: in evaluation, return instead the most probable class of each pixel of the logits resized to this size
            [B, *size], int64. The logits of large images, and what the decoder makes, then exist in bands of rows only,
            which is equal up to rounding. So do large images if they are given as `ImageRows`.
        """
        if size is not None:
            # the maps of the stages are gone before each label has 8 bytes
            return self._labels(images, size).long()
        images = whole(images)
        self._check_batch(images)
        padded = pad_to_whole(images, self.divisor)
        maps = self.maps(padded)
        # the decoders expect maps from stride 1 on, and ignore those at strides 1 and 2
        decoded = self.decoder([padded, padded, *maps])  # [B, channels, H / 4, W / 4]
        logits = _enlarge(self.classifier(decoded), padded, images)
        if self.auxiliary is None or not self.training:
            return logits
        return logits, _enlarge(self.auxiliary(maps[AUXILIARY_STAGE]), padded, images)

    def _labels(self, images: Tensor | ImageRows, size: GridSize) -> Tensor:
        batch, _, height, width = images.shape
        pixels = max(height * width, size[0] * size[1])
        largest = batch * max(self.num_classes * pixels, self.decoder_width * height * width // STRIDES[0] ** 2)
        rows = (images if isinstance(images, ImageRows) else ImageRows.of(images)).padded(self.divisor)
        if largest <= WHOLE_NUMBERS:
            padded = rows.whole()
            decoded = rows_of(self.decoder([padded, padded, *self.maps(padded)]))
        else:
            decoded = self.decode_rows(self.decoder, self.maps.rows(rows))
        coarse = each_pixel(lambda part: self.classifier(part).float(), decoded)
        enlarged = resized(coarse, (rows.shape[2], rows.shape[3]))
        logits = RowMap((height, width), lambda first, last: enlarged.read(first, last)[..., :width])
        # a row of logits needs a quarter of a row of the decoder's map, of which a band has more than others: what its
        # convolutions need of the rows around is computed again for each band
        row_numbers = max(
            self.num_classes * max(width, size[1]), self.decoder_width * width // STRIDES[0] ** 2 // DECODER_BANDS
        )
        return rows_likeliest(resized(logits, size), batch * row_numbers, images.device, least=self.least_rows)

    def _check_batch(self, images: Tensor) -> None:
        if not self.training or len(images) > 1:
            return
        modules = list(self.decoder.modules())
        pools = any(isinstance(module, nn.AdaptiveAvgPool2d) for module in modules)
        # synchronised BatchNorm is of another class and counts the images of all processes
        if pools and any(isinstance(module, nn.BatchNorm2d) and module.training for module in modules):
            raise UserError(
                "the decoder pools each image to one pixel, and BatchNorm needs more than one: training needs at least "
                f"2 images in each process's batch, got {len(images)}"
            )


def upernet(
    body: nn.Module, num_classes: int, *, channels: int = 512, dropout: float = 0.1, auxiliary: bool = True
) -> Segmenter:
    """UPerNet: pyramid pooling on the last stage, a feature pyramid, and all levels fused at stride 4.

    Images of any size need no padding: the decoder resizes each map to the size of the next.

    body: timm model created with ``features_only=True``, with strides 4, 8, 16 and 32.
    channels: width of the decoder; the auxiliary head has half of it.
    dropout: dropout probability of channels before the classifiers.
    auxiliary: add an auxiliary head on the third stage, for training.
    """
    from segmentation_models_pytorch.base.initialization import initialize_decoder
    from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder

    check_integer("num_classes", num_classes, 1)
    check_integer("channels", channels, 2)
    check_range("dropout", dropout, 0, 1, open_high=True)
    # the decoder normalises the stages itself
    maps = StageMaps(body, norm=False)
    decoder = UPerNetDecoder(encoder_channels=[0, 0, *maps.channels], decoder_channels=channels)
    initialize_decoder(decoder)
    _pool_any_size(decoder)
    side = _fcn(maps.channels[AUXILIARY_STAGE], channels // 2, num_classes, dropout) if auxiliary else None
    return Segmenter(
        maps,
        decoder,
        _classifier(channels, num_classes, dropout),
        decode_rows=_upernet_rows,
        decoder_width=len(maps.channels) * channels,
        auxiliary=side,
    )


def _upernet_rows(decoder: Any, maps: Sequence[RowMap]) -> RowMap:
    """What segmentation-models-pytorch's UPerNetDecoder does."""
    *fine, coarsest = (each_pixel(norm, stage) for norm, stage in zip(decoder.feature_norms, maps, strict=True))
    # the only part that sees the whole image; the map at stride 32 is small
    states = [rows_of(decoder.psp(coarsest.whole()))]
    for block, stage in zip(decoder.fpn_lateral_blocks, reversed(fine), strict=True):
        states.append(added([resized(states[-1], stage.size), each_pixel(block.conv_norm_relu, stage)]))
    levels = [
        states[0],
        *(each_neighbourhood(conv, state) for conv, state in zip(decoder.fpn_conv_blocks, states[1:], strict=True)),
    ]
    stacked = joined([resized(level, states[-1].size) for level in reversed(levels)])
    return each_neighbourhood(decoder.fusion_block, stacked)


def semantic_fpn(
    body: nn.Module, num_classes: int, *, channels: int = 256, head_channels: int = 128, dropout: float = 0.1
) -> Segmenter:
    """Semantic FPN: a feature pyramid whose levels are upsampled to stride 4 by convolutions and summed.

    body: timm model created with ``features_only=True``, with strides 4, 8, 16 and 32.
    channels: width of the pyramid.
    head_channels: width of the upsampling convolutions; a multiple of 32, at least 64.
    dropout: dropout probability of channels before the classifier.
    """
    from segmentation_models_pytorch.base.initialization import initialize_decoder
    from segmentation_models_pytorch.decoders.fpn.decoder import FPNDecoder

    check_integer("num_classes", num_classes, 1)
    check_integer("channels", channels, 1)
    check_integer("head_channels", head_channels, 1)
    check_range("dropout", dropout, 0, 1, open_high=True)
    # GroupNorm with one channel per group cannot normalise a map of a single cell
    if head_channels % GROUPS or head_channels == GROUPS:
        raise UserError(
            f"head_channels must be a multiple of {GROUPS}, at least {2 * GROUPS}, for GroupNorm, got {head_channels}"
        )
    maps = StageMaps(body)
    decoder = FPNDecoder(
        encoder_channels=maps.channels,
        pyramid_channels=channels,
        segmentation_channels=head_channels,
        # the decoder applies dropout before the classifier, so the classifier has none
        dropout=dropout,
    )
    initialize_decoder(decoder)
    return Segmenter(
        maps,
        decoder,
        _classifier(head_channels, num_classes, 0.0),
        decode_rows=_semantic_fpn_rows,
        decoder_width=len(maps.channels) * head_channels,
        divisor=STRIDES[-1],
    )


def _semantic_fpn_rows(decoder: Any, maps: Sequence[RowMap]) -> RowMap:
    """What segmentation-models-pytorch's FPNDecoder does."""
    finest, fine, coarse, coarsest = maps
    # these two are small enough to be kept
    p5 = decoder.p5(coarsest.whole())
    p4 = added([doubled(rows_of(p5)), each_pixel(decoder.p4.skip_conv, coarse)])
    p4 = p4.stored(p5.shape[1] * coarse.size[1], p5.device)
    p3 = added([doubled(p4), each_pixel(decoder.p3.skip_conv, fine)])
    p2 = added([doubled(p3), each_pixel(decoder.p2.skip_conv, finest)])
    branches = []
    for branch, level in zip(decoder.seg_blocks, (rows_of(p5), p4, p3, p2), strict=True):
        for block in branch.block:
            conv, norm, activation = block.block
            level = each_pixel(activation, group_normed(norm, each_neighbourhood(conv, level), p5.device))
            if block.upsample:
                level = resized(level, (2 * level.size[0], 2 * level.size[1]), align_corners=True)
        branches.append(level)
    return added(branches)


def segformer(body: nn.Module, num_classes: int, *, channels: int = 256, dropout: float = 0.1) -> Segmenter:
    """SegFormer's head: every stage is projected to the same width, resized to stride 4, and the sum is classified.

    It has no convolution larger than 1 x 1, so that it costs a small part of what a linear backbone does, and images of
    any size need no padding.

    body: timm model created with ``features_only=True``, with strides 4, 8, 16 and 32.
    channels: width of the projections.
    dropout: dropout probability of channels before the classifier.
    """
    from segmentation_models_pytorch.base.initialization import initialize_decoder
    from segmentation_models_pytorch.decoders.segformer.decoder import SegformerDecoder

    check_integer("num_classes", num_classes, 1)
    check_integer("channels", channels, 1)
    check_range("dropout", dropout, 0, 1, open_high=True)
    maps = StageMaps(body)
    decoder = SegformerDecoder(encoder_channels=[3, 0, *maps.channels], segmentation_channels=channels)
    initialize_decoder(decoder)
    return Segmenter(
        maps,
        ProjectedSum(decoder),
        _classifier(channels, num_classes, dropout),
        decode_rows=ProjectedSum.rows,
        decoder_width=channels,
        # no convolution needs rows around a band, so bands may be small
        least_rows=1,
    )


class ProjectedSum(nn.Module):
    """SegFormer's decoder, activation(norm(W [resize(L_1 x_1 + b_1), ...])), with its products before the resizing.

    Resizing is linear and treats all channels alike, so that W [resize(L_1 x_1 + b_1), ...] is the sum of
    resize(W_1 L_1 x_1 + W_1 b_1), .... Each stage is multiplied by one matrix at its own resolution, and nothing has
    four times the width at stride 4.

    decoder: segmentation-models-pytorch's SegformerDecoder, which keeps the parameters.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Maps at strides 4, 8, 16 and 32, the last four of ``features`` -> [B, channels, H / 4, W / 4]."""
        finest, total = features[-4], None
        for stage, product in self._products(features):
            found = product(stage)
            if stage is not finest:
                found = F.interpolate(found, size=finest.shape[-2:], mode="bilinear", align_corners=False)
            total = found if total is None else total + found
        assert total is not None, "there are stages"
        return self._rest(total)

    def rows(self, features: Sequence[RowMap]) -> RowMap:
        """`forward` row by row."""
        projected = [each_pixel(product, stage) for stage, product in self._products(features)]
        # the finest stage is the last one
        return each_pixel(self._rest, added([resized(part, projected[-1].size) for part in projected]))

    def _products(self, features: Sequence[M]) -> list[tuple[M, Callable[[Tensor], Tensor]]]:
        """The stages, the coarsest first as in the decoder, and the product that each of them enters."""
        decoder: Any = self.decoder
        parts = decoder.fuse_stage[0].weight[..., 0, 0].chunk(len(decoder.mlp_stage), dim=1)
        linears = [projection.linear for projection in decoder.mlp_stage]
        products = [
            partial(F.conv2d, weight=(part @ linear.weight)[..., None, None], bias=part @ linear.bias)
            for part, linear in zip(parts, linears, strict=True)
        ]
        return list(zip(features[: -len(products) - 1 : -1], products, strict=True))

    def _rest(self, total: Tensor) -> Tensor:
        decoder: Any = self.decoder
        for module in list(decoder.fuse_stage)[1:]:
            total = module(total)
        return total


class AdaptiveMean(nn.AdaptiveAvgPool2d):
    """torch's adaptive average pooling, which in an exported graph serves maps of any size.

    torch would record the cells of the map it is shown; here they are two matrices that depend on its sides.
    """

    def forward(self, maps: Tensor) -> Tensor:
        if not is_exported():
            return super().forward(maps)
        sides: Any = as_pair("output_size", self.output_size)  # type: ignore[arg-type]
        rows, columns = (_cell_shares(length, count, maps) for length, count in zip(maps.shape[2:], sides, strict=True))
        return rows @ maps @ columns.mT


def _cell_shares(length: int, count: int, like: Tensor) -> Tensor:
    """The share of each place in the mean of each cell [count, length]; cells overlap if they do not divide it."""
    cell = torch.arange(count, device=like.device)[:, None]
    place = torch.arange(length, device=like.device)
    inside = (place >= cell * length // count) & (place < ((cell + 1) * length + count - 1) // count)
    return inside.to(like.dtype) / inside.sum(1, keepdim=True)


def _pool_any_size(decoder: nn.Module) -> None:
    for module in list(decoder.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, nn.AdaptiveAvgPool2d):
                setattr(module, name, AdaptiveMean(part.output_size))


def _enlarge(logits: Tensor, padded: Tensor, images: Tensor) -> Tensor:
    """Resize logits to the padded images and crop the padding; in float32, which losses and averages need."""
    height, width = images.shape[-2:]
    logits = F.interpolate(logits.float(), size=padded.shape[-2:], mode="bilinear", align_corners=False)
    # FSDP warns about a module that returns a view
    return logits if padded.shape == images.shape else logits[..., :height, :width].clone()


def _classifier(channels: int, num_classes: int, dropout: float) -> nn.Sequential:
    last = nn.Conv2d(channels, num_classes, 1)
    nn.init.normal_(last.weight, std=0.01)
    assert last.bias is not None, "convolutions have a bias by default"
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Dropout2d(dropout), last)


def _fcn(in_channels: int, channels: int, num_classes: int, dropout: float) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
    nn.init.kaiming_uniform_(conv.weight, nonlinearity="relu")
    return nn.Sequential(
        LayerNorm2d(in_channels),
        conv,
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        _classifier(channels, num_classes, dropout),
    )
