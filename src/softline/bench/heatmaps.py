"""Where a model looks: rows of the explicit attention weights, laid out on the image."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from softline.backbones.backbone import Backbone
from softline.layers.grid import GridSize


@dataclass(frozen=True)
class HeatMap:
    """How much one token of an image takes from each of the others, in one head."""

    row: Tensor
    """Weights [H, W] of the query; class tokens are left out."""
    query: tuple[int, int]
    """Row and column of the query in the grid."""
    predicted: int
    """The model's class."""
    probability: float
    """That the model gives to it."""

    def contrast(self) -> Tensor:
        """Each weight's difference from the row's mean, divided by the largest difference: -1 to 1 [H, W].

        The mean, not zero, is where it turns: rows that sum to one differ little from 1 / N, and SOFT's weights may be
        negative. An even row is all zero.
        """
        difference = self.row - self.row.mean()
        largest = difference.abs().max()
        # what is left of an even row is rounding
        even = largest <= 1e-6 * self.row.abs().max()
        return torch.zeros_like(difference) if even else difference / largest


def attention_maps(
    model: nn.Module, images: Tensor, queries: list[tuple[int, int]], *, stage: int = 0, block: int = 0, head: int = 0
) -> list[HeatMap]:
    """One heat map for each image, as in Figs. 4 and 7 of the SOFT paper: a row of the weights of one head.

    model: a backbone of softline, in eval mode.
    images: [B, C, H, W].
    queries: for each image the token (row, column) whose row is taken.
    """
    if len(queries) != len(images):
        raise ValueError(f"queries must name one token for each of {len(images)} images, got {len(queries)}")
    attention = find_attention(model, stage, block)
    x, grid_size, logits = capture_input(model, attention, images)
    with torch.no_grad():
        weights = attention.weights(x, grid_size)  # [B, heads, N, N]
    _check_index("head", head, weights.shape[1])
    prefix = attention.num_prefix_tokens
    chances = logits.softmax(-1)
    maps = []
    for index, (row, column) in enumerate(queries):
        _check_index("query row", row, grid_size[0])
        _check_index("query column", column, grid_size[1])
        grid_row = weights[index, head, prefix + row * grid_size[1] + column, prefix:].unflatten(0, grid_size)
        probability, predicted = chances[index].max(-1)
        maps.append(HeatMap(grid_row.float(), (row, column), int(predicted), float(probability)))
    return maps


def find_attention(model: nn.Module, stage: int, block: int) -> Any:
    """The attention of a block, which must be able to give its weights on the whole grid."""
    if not isinstance(model, Backbone):
        raise ValueError(f"heat maps need a backbone of softline, got {type(model).__name__}")
    _check_index("stage", stage, len(model.stages))
    blocks: Any = model.stages[stage].blocks
    _check_index("block", block, len(blocks))
    attention = blocks[block].attn
    if not hasattr(attention, "weights"):
        raise ValueError(f"{type(attention).__name__} of stage {stage} has no weights over the whole grid")
    return attention


def capture_input(model: nn.Module, attention: nn.Module, images: Tensor) -> tuple[Tensor, GridSize, Tensor]:
    """The tokens [B, N, C] that the attention is given for these images, their grid, and the model's output."""
    given: list[tuple[Tensor, GridSize]] = []

    def remember(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        x, grid_size = arguments[:2]
        given.append((x, grid_size))

    hook = attention.register_forward_pre_hook(remember, with_kwargs=True)
    try:
        with torch.no_grad():
            output = model(images)
    finally:
        hook.remove()
    x, grid_size = given[0]
    return x, grid_size, output


def brightest_token(image: Tensor, grid_size: GridSize) -> tuple[int, int]:
    """Row and column of the patch of ``image`` [C, H, W] that is brightest: on the object, where the ground is dark."""
    patches = nn.functional.adaptive_avg_pool2d(image.mean(0, keepdim=True), grid_size)[0]  # [H, W]
    row, column = divmod(int(patches.argmax()), grid_size[1])
    return row, column


def _check_index(name: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise ValueError(f"{name} must be at least 0 and below {count}, got {index}")
