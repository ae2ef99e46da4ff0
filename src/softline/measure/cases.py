"""What can be measured: a case is a named thing that, for a size, gives a function and tensors to call it with."""

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from softline import ops
from softline.attention import ATTENTIONS
from softline.backbones.backbone import build_attention
from softline.backbones.creation import check_model_name
from softline.backbones.sequence import SequenceClassifier, SequenceEncoder
from softline.checks import check_at_least, check_option
from softline.engine.reading import yaml_value
from softline.engine.recipe import ModelRecipe
from softline.errors import UserError
from softline.layers.blocks import PreNormBlock
from softline.layers.grid import GridSize
from softline.tasks.networks import build_model

Mode = Literal["infer", "train"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# softmax as three separate steps, with all N x N weights in memory
MATH = "softmax-math"
# of the SOFT paper's measurements
LANDMARK_GRID = 7
LANDMARKS = LANDMARK_GRID**2
PATCH = 16


@dataclass(frozen=True)
class Setting:
    """What all cases of a measurement share."""

    batch: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    compiled: bool = False


def check_device(device: str) -> None:
    """The CPU, or a GPU of CUDA that is there."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UserError(f"device must be cpu, cuda or cuda:N, got {device!r}")
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise UserError(f"device {device}: torch finds no CUDA device here")
    last = torch.cuda.device_count() - 1
    if (torch.device(device).index or 0) > last:
        raise UserError(f"device must be at most cuda:{last} here, got {device!r}")


class Subject(NamedTuple):
    """A function of tensors; ``module`` holds what it learns, if anything."""

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    module: nn.Module | None = None


class Case(Protocol):
    """Something to measure at several sizes; it can be sent to another process."""

    @property
    def name(self) -> str: ...

    def tokens(self, size: int) -> int:
        """How much there is to do, to fit growth against; ValueError for a size that makes no sense."""

    def label(self, size: int) -> str:
        """The size for people."""

    def warm_up_size(self, size: int) -> int:
        """A size that runs the same code in less time; ``size`` itself if no other is sure to be taken."""

    def build(self, size: int, setting: Setting) -> Subject:
        """In float32 on the CPU, the weights random."""


class Runs(NamedTuple):
    eager: Callable[[], object]
    run: Callable[[], object]
    """The same, compiled if that is the setting."""


def prepare(case: Case, size: int, mode: Mode, setting: Setting) -> Runs:
    """One forward pass without gradients, or one forward and backward pass without optimizer, ready to be called.

    A training step computes the gradients of all weights and of all inputs that require one.
    """
    torch.manual_seed(0)
    function, inputs, module = case.build(size, setting)
    dtype = DTYPES[setting.dtype]
    if module is not None:
        module.to(setting.device, dtype).train(mode == "train")
    inputs = tuple(_place(tensor, setting.device, dtype) for tensor in inputs)
    leaves = [leaf for leaf in (*inputs, *(module.parameters() if module else ())) if leaf.requires_grad]
    eager = _pass(function, inputs, leaves, mode)
    return Runs(eager, _pass(torch.compile(function), inputs, leaves, mode) if setting.compiled else eager)


def _place(tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    # token ids stay whole numbers
    moved = tensor.detach().to(device, dtype if tensor.is_floating_point() else None)
    return moved.requires_grad_(tensor.requires_grad)


def _pass(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], leaves: Sequence[Tensor], mode: Mode
) -> Callable[[], object]:
    def infer() -> object:
        with torch.no_grad():
            return function(*inputs)

    def train() -> None:
        outputs = _tensors(function(*inputs))
        torch.autograd.backward(outputs, [torch.ones_like(out) for out in outputs])
        for leaf in leaves:
            leaf.grad = None

    return train if mode == "train" else infer


def _tensors(output: Any) -> list[Tensor]:
    """All of a model's outputs that have gradients, such as its feature maps."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    parts = output.values() if isinstance(output, dict) else output
    return [tensor for part in parts for tensor in _tensors(part)]


def with_math(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with torch's scaled dot-product attention spelt out."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return function(*args, **options)

    return run


# operators


def _operators() -> dict[str, Callable[..., Tensor]]:
    """Every attention of `softline.ops`, softmax first."""
    found = {name.removesuffix("_attention"): getattr(ops, name) for name in ops.__all__ if name.endswith("_attention")}
    soft = found.pop("soft")
    softmax = found.pop("softmax")
    first = {"softmax": softmax, MATH: with_math(softmax)}
    both = {"soft": functools.partial(soft, normalize=False), "softpp": functools.partial(soft, normalize=True)}
    return {**first, **both, "inline": found.pop("inline"), **found}


OPERATORS = _operators()


@dataclass(frozen=True)
class OperatorCase:
    """A function of `softline.ops` on random tensors [B, H, N, D]; a size is N.

    SOFT and Nystrom get 49 landmarks, Linformer projects to 49 tokens; how landmarks are taken does not count.
    """

    name: str
    num_heads: int = 16
    head_dim: int = 32

    def tokens(self, size: int) -> int:
        check_at_least("tokens", size, 1)
        return size

    def label(self, size: int) -> str:
        return f"{size:,} tokens"

    def warm_up_size(self, size: int) -> int:
        return min(size, 256)

    def build(self, size: int, setting: Setting) -> Subject:
        operator = OPERATORS[self.name]
        parameters = inspect.signature(operator).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]
        inputs = _operator_inputs((setting.batch, self.num_heads, size, self.head_dim))
        unknown = [name for name in names if name not in inputs]
        if unknown:
            raise UserError(f"bench does not know what to give {self.name} as {', '.join(unknown)}")
        return Subject(
            lambda *tensors: operator(**dict(zip(names, tensors, strict=True))),
            tuple(inputs[name]() for name in names),
        )


def _operator_inputs(shape: tuple[int, int, int, int]) -> dict[str, Callable[[], Tensor]]:
    """What operators take, by the names of their arguments."""
    tokens, head_dim = shape[2:]

    def queries() -> Tensor:
        return torch.randn(shape).requires_grad_()

    def landmarks() -> Tensor:
        return torch.randn(*shape[:2], min(LANDMARKS, tokens), head_dim).requires_grad_()

    def projection() -> Tensor:
        return (torch.randn(LANDMARKS, tokens) * tokens**-0.5).requires_grad_()

    return {
        **dict.fromkeys(("q", "k", "v"), queries),
        **dict.fromkeys(("landmarks", "q_landmarks", "k_landmarks"), landmarks),
        **dict.fromkeys(("key_projection", "value_projection"), projection),
        "features": lambda: ops.performer_features(2 * head_dim, head_dim, seed=0),
        "rotations": lambda: ops.reformer_rotations(head_dim, num_buckets=32, rounds=4, seed=0),
    }


# attention modules


def check_attentions(names: Sequence[str]) -> None:
    for name in names:
        check_option("attention", name, [*ATTENTIONS, MATH])


def _attention(name: str, dim: int, num_heads: int, **offers: Any) -> tuple[nn.Module, Callable[..., Any]]:
    """The module, and how it is called: "softmax-math" is softmax, spelt out."""
    module = build_attention("softmax" if name == MATH else name, dim, num_heads, offers=offers)
    return module, with_math(module) if name == MATH else module


@dataclass(frozen=True)
class LayerCase:
    """One attention layer with its projections on square images; a size is the image's side."""

    name: str
    dim: int = 64
    num_heads: int = 2
    patch_size: int = 8

    def tokens(self, size: int) -> int:
        if size < self.patch_size:
            raise UserError(f"image size must be at least one patch of {self.patch_size} pixels, got {size}")
        return (size // self.patch_size) ** 2

    def label(self, size: int) -> str:
        return f"{size}x{size}"

    def warm_up_size(self, size: int) -> int:
        return min(size, 16 * self.patch_size)

    def build(self, size: int, setting: Setting) -> Subject:
        tokens, side = self.tokens(size), size // self.patch_size
        module, call = _attention(self.name, self.dim, self.num_heads, max_tokens=tokens)
        x = torch.randn(setting.batch, tokens, self.dim).requires_grad_()
        return Subject(lambda x: call(x, (side, side)), (x,), module)


@dataclass(frozen=True)
class VitCase:
    """The network of Fig. 1b of the SOFT paper: 12 layers of width 384, 12 heads, 49 landmarks.

    A size p is a grid of 28 x 28 p tokens. Blocks only: no patch embedding and no classifier.
    """

    name: str
    depth: int = 12
    dim: int = 384
    num_heads: int = 12
    side: int = 28

    def tokens(self, size: int) -> int:
        check_at_least("the multiple of 784 tokens", size, 1)
        return self.side * self.side * size

    def label(self, size: int) -> str:
        return f"{self.tokens(size):,} tokens"

    def warm_up_size(self, size: int) -> int:
        return 1

    def build(self, size: int, setting: Setting) -> Subject:
        tokens, grid_size = self.tokens(size), (self.side, self.side * size)
        offers = {"max_tokens": tokens, "rank": LANDMARKS, "max_landmarks": LANDMARK_GRID}
        blocks = [
            PreNormBlock(self.dim, _attention(self.name, self.dim, self.num_heads, **offers)[0])
            for _ in range(self.depth)
        ]
        network = _Blocks(blocks, grid_size)
        x = torch.randn(setting.batch, tokens, self.dim).requires_grad_()
        return Subject(with_math(network) if self.name == MATH else network, (x,), network)


@dataclass(frozen=True)
class SequenceCase:
    """The encoder of the Long Range Arena and a classifier on random bytes; a size is the length of a sequence."""

    name: str

    def tokens(self, size: int) -> int:
        check_at_least("length", size, 1)
        return size

    def label(self, size: int) -> str:
        return f"{size:,} tokens"

    def warm_up_size(self, size: int) -> int:
        return min(size, 256)

    def build(self, size: int, setting: Setting) -> Subject:
        attention = "softmax" if self.name == MATH else self.name
        # torch's fused kernel on the CPU has no dropout
        options = {"dropout": 0.0} if attention == "softmax" else {}
        module = SequenceClassifier(SequenceEncoder(512, size, attention=attention, attention_options=options), 10)
        tokens = torch.randint(1, 257, (setting.batch, 1, size))
        return Subject(with_math(module) if self.name == MATH else module, (tokens,), module)


class _Blocks(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module], grid_size: GridSize) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.grid_size = grid_size

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.grid_size)
        return x


# whole models


@dataclass(frozen=True)
class ModelCase:
    """A timm model on random square images; a size is the image's side.

    name: as it was asked for, with its options.
    """

    name: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)

    def tokens(self, size: int) -> int:
        """Patches of 16 x 16 pixels, whatever the model's own are: a measure of the image's area."""
        check_at_least("image size", size, 1)
        return max(size * size // PATCH**2, 1)

    def label(self, size: int) -> str:
        return f"{size}x{size}"

    def warm_up_size(self, size: int) -> int:
        return size

    def build(self, size: int, setting: Setting) -> Subject:
        with warnings.catch_warnings():
            # timm's own, while it resizes positions
            warnings.filterwarnings("ignore", category=UserWarning)
            model = build_model(ModelRecipe(name=self.model, options=self.options), 1000, size)
        # no gradient: nobody trains the images
        images = torch.randn(setting.batch, self.options.get("in_chans", 3), size, size)
        return Subject(model, (images,), model)


def parse_model(text: str) -> ModelCase:
    """``softpp_tiny`` or ``softpp_tiny:attention=inline,drop_rate=0.1``: values are YAML."""
    name, _, listed = text.partition(":")
    if name in ("local-dir", "hf-hub"):
        # for timm to resolve
        return ModelCase(text, text)
    check_model_name(name)
    if name == text:
        return ModelCase(text, name)
    options = {}
    # a comma inside a list does not stand before KEY=
    for part in re.split(r",(?=\s*\w+=)", listed):
        key, equals, value = part.partition("=")
        if not equals or not key.strip().isidentifier():
            raise UserError(f"options of a model are KEY=VALUE,... as in softpp_tiny:attention=inline; got {text!r}")
        options[key.strip()] = yaml_value(f"{key.strip()} of {name}", value)
    return ModelCase(text, name, options)
