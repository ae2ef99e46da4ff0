"""What the attention layers of a backbone are given for some images, and what they make of it.

The analyses of both papers read single rows of the attention weights: here a layer is found by its place in the
network, its input is caught while the network runs, and rows are read block by block where N x N do not fit in memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from softline.attention.multihead import MultiHeadAttention, RowReader
from softline.backbones.backbone import Backbone
from softline.backbones.cswin import StripAttention
from softline.checks import check_index
from softline.errors import UserError
from softline.layers.grid import GridSize
from softline.layers.windows import WindowedAttention

# of the rows that are held at a time
BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Layer:
    """The attention of one block."""

    stage: int
    block: int
    attention: nn.Module
    name: str
    """Its place, counted from 1 as papers do."""

    @property
    def operator(self) -> str:
        """The attention's name in the registry, or its class."""
        inner = self.inner
        return inner.operator.name if isinstance(inner, MultiHeadAttention) else type(inner).__name__

    @property
    def inner(self) -> nn.Module:
        """The attention inside its windows, if it has any."""
        attention = self.attention
        return cast(nn.Module, attention.attention) if isinstance(attention, WindowedAttention) else attention

    @property
    def prefix(self) -> int:
        """Tokens before the grid."""
        return int(getattr(self.attention, "num_prefix_tokens", 0))


@dataclass(frozen=True)
class LayerInput:
    """The tokens that a layer is given for a batch of images."""

    layer: Layer
    x: Tensor
    """[B, N, C]"""
    grid_size: GridSize
    key_mask: Tensor | None = None
    """Which tokens are real [B, N], where some are padding: inside windows."""

    @property
    def tokens(self) -> int:
        return self.x.shape[1]

    @property
    def sees_all(self) -> bool:
        """Whether a token may see every other, not those of a window or strip alone."""
        attention = self.layer.attention
        if isinstance(attention, WindowedAttention):
            return max(self.grid_size) <= attention.window_size
        return not isinstance(attention, StripAttention) or attention.strip is None

    def rows(self) -> RowReader:
        """What reads rows of the weights on the whole grid [B, heads, R, N]."""
        attention: Any = self.layer.attention
        mask = {} if self.key_mask is None else {"key_mask": self.key_mask}
        if hasattr(attention, "rows"):
            return cast(RowReader, attention.rows(self.x, self.grid_size, **mask))
        # an attention of another package, which only promises all of them
        weights = attention.weights(self.x, self.grid_size, **mask)
        return lambda tokens: weights.index_select(-2, tokens)

    def row_blocks(self, *, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows, in blocks that take about ``block_bytes``: token indices [R], weights [B, heads, R, N]."""
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
        """Rows [..., N] laid out on the grid, without prefix tokens [..., height, width]."""
        return rows[..., self.layer.prefix :].unflatten(-1, self.grid_size)


def find_backbone(model: nn.Module, name: str = "") -> Backbone:
    """The backbone of softline that the model is, or that a detector or segmenter has."""
    for module in model.modules():
        if isinstance(module, Backbone):
            return module
    called = f"{name} ({type(model).__name__})" if name else type(model).__name__
    raise UserError(f"{called} has no attention to show: it must be, or have, a backbone of softline")


def attention_layers(model: nn.Module) -> list[Layer]:
    """The attentions of a backbone that can give their weights, in the order of the network."""
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
    """The first layer of each stage; of a flat network's many stages some, spread evenly."""
    first = [next(one for one in layers if one.stage == stage) for stage in dict.fromkeys(one.stage for one in layers)]
    if len(first) <= most:
        return first
    return [first[round(place * (len(first) - 1) / (most - 1))] for place in range(most)]


def choose_layers(layers: Sequence[Layer], places: Sequence[int]) -> list[Layer]:
    """Layers by their place in the list; negative places count from the end."""
    for place in places:
        if not -len(layers) <= place < len(layers):
            listed = ", ".join(f"{index}: {layer.name} ({layer.operator})" for index, layer in enumerate(layers))
            raise UserError(f"layer must be from {-len(layers)} to {len(layers) - 1} ({listed}), got {place}")
    return [layers[place] for place in places]


@torch.no_grad()
def look(model: nn.Module, images: Tensor, layers: Sequence[Layer]) -> tuple[list[LayerInput], Tensor]:
    """Run the model on images [B, C, H, W]: what each layer is given, and the model's output."""
    if model.training:
        raise UserError("the model must be in eval mode: call model.eval() first")
    caught: dict[nn.Module, LayerInput] = {}

    def catch(layer: Layer) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            x, grid_size, *others = arguments
            # Swin's own attention has a mask of pairs in its place
            masked = isinstance(module, MultiHeadAttention)
            mask = (others[0] if others else options.get("key_mask")) if masked else None
            caught[module] = LayerInput(layer, x, grid_size, mask)

        return layer.attention.register_forward_pre_hook(hook, with_kwargs=True)

    hooks = [catch(layer) for layer in layers]
    try:
        output = model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return [caught[layer.attention] for layer in layers], output
