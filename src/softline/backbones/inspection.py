"""Inspect the attention layers of a backbone: what each is given for some images, and its weights.

The analyses of both papers read single rows of the attention weights: here a layer is found by its place in the
network, its input is recorded while the network runs, and rows are read block by block where N x N does not fit in
memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from softline.attention.hooks import AttentionCall, record_attention
from softline.attention.multihead import MultiHeadAttention, RowReader
from softline.backbones.backbone import Backbone
from softline.backbones.cswin import StripAttention
from softline.checks import check_index
from softline.errors import UserError
from softline.layers.grid import GridSize
from softline.layers.windows import WindowedAttention

BLOCK_BYTES = 64 * 2**20
"""Memory that `LayerInput.row_blocks` holds at a time."""


@dataclass(frozen=True)
class Layer:
    """The attention of one block."""

    stage: int
    block: int
    attention: nn.Module
    name: str
    """Place in the network, counted from 1 as papers do."""

    @property
    def operator(self) -> str:
        """The attention's name in the registry, or the name of its class."""
        inner = self.inner
        return inner.operator.name if isinstance(inner, MultiHeadAttention) else type(inner).__name__

    @property
    def inner(self) -> nn.Module:
        """The attention inside the windows, or the attention itself if it has none."""
        attention = self.attention
        return cast(nn.Module, attention.attention) if isinstance(attention, WindowedAttention) else attention

    @property
    def prefix(self) -> int:
        """Number of tokens before the grid."""
        return int(getattr(self.attention, "num_prefix_tokens", 0))


@dataclass(frozen=True)
class LayerInput:
    """What a layer is given for a batch of images."""

    layer: Layer
    call: AttentionCall

    @property
    def x(self) -> Tensor:
        """Tokens [B, N, C]."""
        return self.call.x

    @property
    def grid_size(self) -> GridSize:
        return self.call.grid_size

    @property
    def key_mask(self) -> Tensor | None:
        """Real tokens [B, N] where some are padding, as inside windows."""
        return self.call.mask

    @property
    def tokens(self) -> int:
        return self.x.shape[1]

    @property
    def sees_all(self) -> bool:
        """Whether every token sees every other, not only those of its window or strip."""
        attention = self.layer.attention
        if isinstance(attention, WindowedAttention):
            return max(self.grid_size) <= attention.window_size
        return not isinstance(attention, StripAttention) or attention.strip is None

    def rows(self) -> RowReader:
        """A function that reads rows of the weights on the whole grid: token indices [R] -> [B, heads, R, N]."""
        return self.call.rows()

    def row_blocks(self, *, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows in blocks of about ``block_bytes``: token indices [R] and weights [B, heads, R, N]."""
        read, device = self.rows(), self.x.device
        one = read(torch.zeros(1, dtype=torch.long, device=device))
        count = max(block_bytes // (one.numel() * one.element_size()), 1)
        for tokens in torch.arange(self.tokens, device=device).split(count):
            yield tokens, read(tokens)

    def token(self, row: int, column: int) -> int:
        """The index of a token of the grid."""
        check_index("query row", row, self.grid_size[0])
        check_index("query column", column, self.grid_size[1])
        return self.layer.prefix + row * self.grid_size[1] + column

    def on_grid(self, rows: Tensor) -> Tensor:
        """Rows [..., N] laid out on the grid, without prefix tokens: [..., height, width]."""
        return rows[..., self.layer.prefix :].unflatten(-1, self.grid_size)


def find_backbone(model: nn.Module, name: str = "") -> Backbone:
    """The softline backbone that the model is, or that a detector or segmenter contains.

    name: what the error calls the model.
    """
    for module in model.modules():
        if isinstance(module, Backbone):
            return module
    called = f"{name} ({type(model).__name__})" if name else type(model).__name__
    raise UserError(f"{called} has no attention to show: it must be, or have, a backbone of softline")


def attention_layers(model: nn.Module) -> list[Layer]:
    """The layers of a backbone whose attention can return its weights, in the order of the network."""
    stages: list[Any] = list(find_backbone(model).stages)
    # a flat network is a stage for each block, so that each can be had as a feature map
    flat = all(stage.embed is None for stage in stages[1:])
    layers = [
        Layer(stage, block, module.attn, f"block {stage + 1}" if flat else f"stage {stage + 1}, block {block + 1}")
        for stage, part in enumerate(stages)
        for block, module in enumerate(part.blocks)
    ]
    return [layer for layer in layers if hasattr(layer.attention, "weights")]


def one_of_each_stage(layers: Sequence[Layer], most: int = 4) -> list[Layer]:
    """The first layer of each stage; a few, spread evenly, of a flat network's many stages."""
    first = [next(one for one in layers if one.stage == stage) for stage in dict.fromkeys(one.stage for one in layers)]
    if len(first) <= most:
        return first
    return [first[round(place * (len(first) - 1) / (most - 1))] for place in range(most)]


def choose_layers(layers: Sequence[Layer], places: Sequence[int]) -> list[Layer]:
    """Layers by their index in the list; negative indices count from the end."""
    for place in places:
        if not -len(layers) <= place < len(layers):
            listed = ", ".join(f"{index}: {layer.name} ({layer.operator})" for index, layer in enumerate(layers))
            raise UserError(f"layer must be from {-len(layers)} to {len(layers) - 1} ({listed}), got {place}")
    return [layers[place] for place in places]


@torch.no_grad()
def look(model: nn.Module, images: Tensor, layers: Sequence[Layer]) -> tuple[list[LayerInput], Tensor]:
    """Run the model on images [B, C, H, W]; return what each layer is given, and the model's output."""
    if model.training:
        raise UserError("the model must be in eval mode: call model.eval() first")
    with record_attention([layer.attention for layer in layers]) as calls:
        output = model(images)
    by_module = {call.module: call for call in calls}
    for layer in layers:
        if layer.attention not in by_module:
            raise UserError(f"{layer.name} did not run where it can be seen: pass the model before torch.compile")
    return [LayerInput(layer, by_module[layer.attention]) for layer in layers], output
