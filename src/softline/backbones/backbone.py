"""The model class of all backbones: stages, final norm, classifier, timm's methods."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, cast, get_args

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import resize_rel_pos_bias_table_simple
from timm.models import checkpoint

# timm exports it under no public name
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from softline.backbones.building import grid_of
from softline.checks import check_integer, check_option
from softline.errors import UserError
from softline.layers.bands import ImageRows
from softline.layers.embed import PositionEmbed
from softline.layers.grid import GridSize, as_pair, token_map
from softline.layers.tokenwise import runs_in_parts
from softline.ops.chunks import may_overwrite

GlobalPool = Literal["avg", "token", ""]


class HeadOptions(TypedDict, total=False):
    """Options that every family passes on to `Backbone`, which documents them."""

    num_classes: int
    global_pool: GlobalPool | None
    drop_rate: float


class Stage(nn.Module):
    """Blocks on one token grid, preceded by a patch embedding if the stage starts a new grid.

    embed: module ``maps -> tokens, grid_size``; None continues with the previous stage's tokens.
    cls_token: prepend a learned class token (only where a grid starts).
    position: position embedding, added where a grid starts.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        dim: int,
        *,
        reduction: int,
        embed: nn.Module | None = None,
        cls_token: bool = False,
        num_prefix_tokens: int = 0,
        position: PositionEmbed | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.reduction = reduction
        self.num_prefix_tokens = num_prefix_tokens
        self.embed = embed
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim)) if cls_token else None
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=0.02)
        self.position = position
        self.blocks = nn.ModuleList(blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor | ImageRows, grid_size: GridSize | None) -> tuple[Tensor, GridSize]:
        """Return tokens [B, N, C] and their grid; x is maps [B, C, H, W] if the stage has an embedding, else tokens."""
        tokens, grid_size = (x, grid_size) if self.embed is None else self._embedded(x)
        assert grid_size is not None, "a stage without an embedding follows one that has it"
        assert isinstance(tokens, Tensor), "only embeddings read rows of images"
        for block in self.blocks:
            tokens = checkpoint(block, tokens, grid_size) if self.grad_checkpointing else block(tokens, grid_size)
        return tokens, grid_size

    def _embedded(self, images: Tensor | ImageRows) -> tuple[Tensor, GridSize]:
        assert self.embed is not None, "the stage has one"
        x, grid_size = self.embed(images)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        if self.position is not None:
            # nobody else has what the embedding returns, unless there are hooks
            x = self.position(x, grid_size, fresh=may_overwrite() and runs_in_parts(self))
        return x, grid_size


class Backbone(nn.Module):
    """Stages, a final norm and a classifier, with the methods of timm's models.

    stages: the first one starts with a patch embedding of the images.
    norm: final norm of the tokens; `nn.Identity` for none.
    global_pool: input of the classifier: "avg" (mean of the grid's tokens), "token" (class token) or "" (all tokens).
        Defaults to the class token if the last stage has one, else to "avg".
    drop_rate: dropout before the classifier.
    img_size: image size that position embeddings are learned for; they are interpolated for any other.
    min_size: smallest image side that every stage accepts.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        norm: nn.Module,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: GlobalPool | None = None,
        drop_rate: float = 0.0,
        img_size: int | GridSize = 224,
        min_size: int = 1,
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.min_size = min_size
        self.num_stages = len(stages)  # before pruning
        self.in_chans = in_chans
        self.img_size = as_pair("img_size", img_size)
        self.num_features = self.head_hidden_size = self.embed_dim = stages[-1].dim
        self.num_prefix_tokens = stages[-1].num_prefix_tokens
        self.num_classes = num_classes
        self.norm = norm
        self.head_drop = nn.Dropout(drop_rate)
        if global_pool is None:
            global_pool = "token" if self.num_prefix_tokens else "avg"
        self.global_pool: GlobalPool = global_pool
        self.head: nn.Module = nn.Identity()
        self.reset_classifier(num_classes, global_pool)
        self.feature_info = [
            {"num_chs": stage.dim, "reduction": stage.reduction, "module": f"stages.{index}"}
            for index, stage in enumerate(stages)
        ]
        self.apply(_init_linear)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] -> logits [B, num_classes]."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """Tokens of the last stage after the final norm [B, N, C]."""
        self._check(x)
        grid_size = None
        for index in range(len(self.stages)):
            x, grid_size = self._advance(x, grid_size, index)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        if self.global_pool == "avg":
            x = x[:, self.num_prefix_tokens :].mean(1)
        elif self.global_pool == "token":
            x = x[:, 0]
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    @property
    def reads_rows(self) -> bool:
        """Whether `forward_intermediates` also takes `ImageRows`."""
        return getattr(self.stages[0].embed, "reads_rows", False)

    def forward_intermediates(
        self,
        x: Tensor | ImageRows,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Return the final tokens and the outputs of the stages in ``indices`` (None: all, an int: the last n).

        return_prefix_tokens: return (output, prefix tokens) for stages that have a class token.
        norm: apply the final norm to the last stage's output.
        stop_early: skip the stages after the last index; the final tokens are then that stage's, without norm.
        output_fmt: "NCHW" for maps, "NLC" for tokens; both without prefix tokens.
        intermediates_only: return only the list of outputs; implies ``stop_early``.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise UserError(f"output_fmt must be NCHW or NLC, got {output_fmt!r}")
        taken, last = feature_take_indices(len(self.stages), indices)
        count = last + 1 if stop_early or intermediates_only else len(self.stages)
        self._check(x)
        grid_size = None
        intermediates = []
        for index in range(count):
            x, grid_size = self._advance(x, grid_size, index)
            if index in taken:
                out = self.norm(x) if norm and index == self.num_stages - 1 else x
                prefix = self.stages[index].num_prefix_tokens
                grid_tokens = out[:, prefix:]
                out_map = token_map(grid_tokens, grid_size) if output_fmt == "NCHW" else grid_tokens
                intermediates.append((out_map, out[:, :prefix]) if return_prefix_tokens and prefix else out_map)
        if intermediates_only:
            return intermediates
        return (self.norm(x) if count == self.num_stages else x), intermediates

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what the given intermediates do not need and return their absolute indices."""
        taken, last = feature_take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: GlobalPool | None = None) -> None:
        """Replace the classifier by a new one for ``num_classes`` (0: none)."""
        if global_pool is not None:
            check_option("global_pool", global_pool, get_args(GlobalPool))
            if global_pool == "token" and not self.num_prefix_tokens:
                raise UserError('global_pool="token" needs a class token, which this backbone does not have; use "avg"')
            self.global_pool = global_pool
        check_integer("num_classes", num_classes, 0)
        self.num_classes = num_classes
        like = next(self.stages.parameters())
        self.head = (
            nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)
            if num_classes
            else nn.Identity()
        )
        _init_linear(self.head)

    def set_input_size(self, img_size: int | GridSize) -> None:
        """Resize the learned position embeddings to another image size."""
        self.img_size = as_pair("img_size", img_size)
        for stage in self._stages():
            if stage.position is not None:
                stage.position.set_grid(grid_of(self.img_size, stage.reduction))

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self._stages():
            stage.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Names of position embeddings, class tokens and position-bias tables."""
        marks = ("cls_token", "position.weight", "position_bias")
        return {name for name, _ in self.named_parameters() if name.endswith(marks)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups for layer-wise learning rates: the embedding and the blocks of each stage, in order."""
        blocks: list[tuple[str, tuple[int] | None]] = [(r"^stages\.(\d+)", None), (r"^norm", (99999,))]
        if not coarse:
            blocks[:1] = [
                (r"^stages\.(\d+)\.(?:embed|cls_token|position)", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            ]
        return {"stem": r"^stages\.0\.(?:embed|cls_token|position)", "blocks": blocks}

    def _stages(self) -> list[Stage]:
        return cast(list[Stage], list(self.stages))

    def _advance(self, x: Tensor | ImageRows, grid_size: GridSize | None, index: int) -> tuple[Tensor, GridSize]:
        """Run one stage on images (the first stage) or on the previous stage's tokens and grid."""
        stage = self.stages[index]
        if grid_size is not None and stage.embed is not None:
            assert isinstance(x, Tensor), "only the first stage has images"
            x = token_map(x[:, self.stages[index - 1].num_prefix_tokens :], grid_size)
        return stage(x, grid_size)

    def _check(self, x: Tensor | ImageRows) -> None:
        if len(x.shape) != 4 or x.shape[1] != self.in_chans:
            raise UserError(f"images must have shape [B, {self.in_chans}, H, W], got {tuple(x.shape)}")
        least = self.min_size
        if x.shape[2] < least or x.shape[3] < least:
            raise UserError(f"images must be at least {least}x{least} pixels, got {x.shape[2]}x{x.shape[3]}")


def fit_positions(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Resize position embeddings of square images and position biases of square windows to the sizes of the model."""
    own = model.state_dict()
    for name, position in model.named_modules():
        key = f"{name}.weight"
        if not isinstance(position, PositionEmbed) or key not in state_dict:
            continue
        count, prefix = state_dict[key].shape[1], position.num_prefix_tokens
        side = math.isqrt(max(count - prefix, 0))
        if count != position.weight.shape[1] and side**2 + prefix == count:
            state_dict[key] = position.resize(state_dict[key], (side, side), position.grid_size)
    return {key: _fit_bias(key, value, own) for key, value in state_dict.items()}


def _fit_bias(key: str, table: Tensor, own: Mapping[str, Tensor]) -> Tensor:
    """Resize a table of position biases to the model's window size."""
    if not key.endswith("position_bias") or key not in own or own[key].shape == table.shape:
        return table
    window = (math.isqrt(len(own[key])) + 1) // 2
    return resize_rel_pos_bias_table_simple(table, (window, window), tuple(own[key].shape))


def imagenet_cfg(**changes: Any) -> dict[str, Any]:
    """timm's data configuration for an ImageNet model."""
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "classifier": "head",
        **changes,
    }


def inline_cfg(**changes: Any) -> dict[str, Any]:
    """Data configuration of an InLine model: the authors resize to a square, ignoring the aspect ratio, and crop."""
    usual = {"crop_pct": 0.875, "crop_mode": "squash", "first_conv": "stages.0.embed.proj"}
    return imagenet_cfg(**{**usual, **changes})


def _init_linear(module: nn.Module) -> None:
    """Initialise linear layers with a truncated normal (std 0.02) and zero bias; other layers keep torch's defaults."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
