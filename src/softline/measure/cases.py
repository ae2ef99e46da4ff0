"""What can be measured: a case has a name and builds, for any size, a function and the tensors to call it with."""

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
from softline.backbones.building import build_attention
from softline.backbones.creation import check_model_name, create_for_size, use_grad_checkpointing
from softline.backbones.sequence import SequenceClassifier, SequenceEncoder
from softline.checks import check_at_least, check_option
from softline.errors import UserError
from softline.layers.blocks import PreNormBlock
from softline.layers.grid import GridSize
from softline.plain import read_yaml

Mode = Literal["infer", "train"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# torch's softmax attention in separate steps, which keeps all N x N weights in memory
MATH = "softmax-math"
# the landmark grid of the SOFT paper's own measurements
LANDMARK_GRID = 7
LANDMARKS = LANDMARK_GRID**2
PATCH = 16
CLASSES = 1000


@dataclass(frozen=True)
class Setting:
    """The settings that all cases of a measurement share."""

    batch: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    compiled: bool = False
    warm_ups: int = 0
    """Runs of each case before those that are measured."""


def check_device(device: str) -> None:
    """Raise unless the device is the CPU or a CUDA GPU of this machine."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UserError(f"device must be cpu, cuda or cuda:N, got {device!r}")
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise UserError(f"device {device}: torch finds no CUDA device here")
    last = torch.cuda.device_count() - 1
    if (torch.device(device).index or 0) > last:
        raise UserError(f"device must be at most cuda:{last} here, got {device!r}")


class Workload(NamedTuple):
    """A function, the tensors to call it with, and the module that holds its weights, if it has any."""

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    module: nn.Module | None = None


class Case(Protocol):
    """Something to measure at several sizes. Cases can be pickled, as memory is measured in other processes."""

    @property
    def name(self) -> str: ...

    def tokens(self, size: int) -> int:
        """Return the number of tokens at this size, against which growth is fitted; raise for an impossible size."""

    def label(self, size: int) -> str:
        """Return the size as tables print it."""

    def warm_up_size(self, size: int) -> int:
        """Return a smaller size that runs the same code, or ``size`` if it is not certain that one is accepted."""

    def build(self, size: int, setting: Setting) -> Workload:
        """Create it with random weights and inputs, in float32 on the CPU."""


class Runs(NamedTuple):
    eager: Callable[[], object]
    run: Callable[[], object]
    """The same function, compiled if the setting says so."""


def prepare(case: Case, size: int, mode: Mode, setting: Setting) -> Runs:
    """Prepare one forward pass without gradients, or one forward and backward pass without an optimizer step.

    A training step computes the gradients of all weights and of all inputs that require one. The setting's warm-ups
    have been run.
    """
    torch.manual_seed(0)
    function, inputs, module = case.build(size, setting)
    dtype = DTYPES[setting.dtype]
    if module is not None:
        module.to(setting.device, dtype).train(mode == "train")
    inputs = tuple(_place(tensor, setting.device, dtype) for tensor in inputs)
    leaves = [leaf for leaf in (*inputs, *(module.parameters() if module else ())) if leaf.requires_grad]
    eager = _pass(function, inputs, leaves, mode)
    run = _pass(torch.compile(function), inputs, leaves, mode) if setting.compiled else eager
    for _ in range(setting.warm_ups):
        run()
    return Runs(eager, run)


def _place(tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    # token ids stay integers
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
    """Return all outputs of a model that have gradients, such as its feature maps."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    parts = output.values() if isinstance(output, dict) else output
    return [tensor for part in parts for tensor in _tensors(part)]


def with_math(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function so that torch computes scaled dot-product attention in separate steps."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return function(*args, **options)

    return run


# operators


def _operators() -> dict[str, Callable[..., Tensor]]:
    """Return every attention of `softline.ops` by name, softmax first."""
    found = {name.removesuffix("_attention"): getattr(ops, name) for name in ops.__all__ if name.endswith("_attention")}
    soft = found.pop("soft")
    softmax = found.pop("softmax")
    first = {"softmax": softmax, MATH: with_math(softmax)}
    both = {"soft": functools.partial(soft, normalize=False), "softpp": functools.partial(soft, normalize=True)}
    return {**first, **both, "inline": found.pop("inline"), **found}


OPERATORS = _operators()


@dataclass(frozen=True)
class OperatorCase:
    """A function of `softline.ops` on random tensors [B, H, N, D]; the size is N.

    SOFT and Nystrom get 49 landmarks, and Linformer projects to 49 tokens. Choosing landmarks is not measured.
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

    def build(self, size: int, setting: Setting) -> Workload:
        operator = OPERATORS[self.name]
        parameters = inspect.signature(operator).parameters.values()
        names = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]
        inputs = _operator_inputs((setting.batch, self.num_heads, size, self.head_dim))
        unknown = [name for name in names if name not in inputs]
        if unknown:
            raise UserError(f"the operator {self.name} takes inputs that cannot be generated: {', '.join(unknown)}")
        return Workload(
            lambda *tensors: operator(**dict(zip(names, tensors, strict=True))),
            tuple(inputs[name]() for name in names),
        )


def _operator_inputs(shape: tuple[int, int, int, int]) -> dict[str, Callable[[], Tensor]]:
    """Return functions that create the inputs of operators, by the names of their arguments."""
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
    """Return the module, and the function that calls it."""
    module = build_attention("softmax" if name == MATH else name, dim, num_heads, offers=offers)
    return module, with_math(module) if name == MATH else module


@dataclass(frozen=True)
class LayerCase:
    """One attention layer with its projections on square images; the size is the image's side in pixels."""

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

    def build(self, size: int, setting: Setting) -> Workload:
        tokens, side = self.tokens(size), size // self.patch_size
        module, call = _attention(self.name, self.dim, self.num_heads, max_tokens=tokens)
        x = torch.randn(setting.batch, tokens, self.dim).requires_grad_()
        return Workload(lambda x: call(x, (side, side)), (x,), module)


@dataclass(frozen=True)
class VitCase:
    """The network of Fig. 1b of the SOFT paper: 12 layers of width 384, 12 heads, 49 landmarks.

    A size p stands for a grid of 28 x 28 p tokens. There is no patch embedding and no classifier.
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

    def build(self, size: int, setting: Setting) -> Workload:
        tokens, grid_size = self.tokens(size), (self.side, self.side * size)
        offers = {"max_tokens": tokens, "rank": LANDMARKS, "max_landmarks": LANDMARK_GRID}
        blocks = [
            PreNormBlock(self.dim, _attention(self.name, self.dim, self.num_heads, **offers)[0])
            for _ in range(self.depth)
        ]
        network = _Blocks(blocks, grid_size)
        x = torch.randn(setting.batch, tokens, self.dim).requires_grad_()
        return Workload(with_math(network) if self.name == MATH else network, (x,), network)


@dataclass(frozen=True)
class SequenceCase:
    """The Long Range Arena encoder with a classifier on random bytes; the size is the length of the sequence."""

    name: str

    def tokens(self, size: int) -> int:
        check_at_least("length", size, 1)
        return size

    def label(self, size: int) -> str:
        return f"{size:,} tokens"

    def warm_up_size(self, size: int) -> int:
        return min(size, 256)

    def build(self, size: int, setting: Setting) -> Workload:
        attention = "softmax" if self.name == MATH else self.name
        # torch's fused kernel on the CPU has no dropout
        options = {"dropout": 0.0} if attention == "softmax" else {}
        module = SequenceClassifier(SequenceEncoder(512, size, attention=attention, attention_options=options), 10)
        tokens = torch.randint(1, 257, (setting.batch, 1, size))
        return Workload(with_math(module) if self.name == MATH else module, (tokens,), module)


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
    """A timm model on random square images; the size is the image's side in pixels.

    name: what tables call it: the model's name with its options, as the user wrote them.
    options: of `timm.create_model`, and grad_checkpointing, which lets a training step compute blocks twice.
    """

    name: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)

    def tokens(self, size: int) -> int:
        """Count patches of 16 x 16 pixels whatever the model's own patches are, as a measure of the image's area."""
        check_at_least("image size", size, 1)
        return max(size * size // PATCH**2, 1)

    def label(self, size: int) -> str:
        return f"{size}x{size}"

    def warm_up_size(self, size: int) -> int:
        return size

    def build(self, size: int, setting: Setting) -> Workload:
        options = {"num_classes": CLASSES, **self.options}
        checkpointing = options.pop("grad_checkpointing", False)
        if not isinstance(checkpointing, bool):
            raise UserError(f"grad_checkpointing must be true or false, got {checkpointing!r}")
        with warnings.catch_warnings():
            # timm warns while it resizes position embeddings
            warnings.filterwarnings("ignore", category=UserWarning)
            model = create_for_size(self.model, size, **options)
        if checkpointing:
            use_grad_checkpointing(model, self.model)
        # images need no gradient
        images = torch.randn(setting.batch, self.options.get("in_chans", 3), size, size)
        return Workload(model, (images,), model)


@dataclass(frozen=True)
class WindowCase:
    """Swin-T on images of 224 x 224 pixels; the size is the side of its windows in tokens.

    name: "inline_swin_tiny" has windows of this size in the stages with InLine attention, "swin_tiny" in all stages.
    """

    name: str

    def tokens(self, size: int) -> int:
        check_at_least("window side", size, 1)
        return size * size

    def label(self, size: int) -> str:
        return f"{size}x{size} tokens"

    def warm_up_size(self, size: int) -> int:
        return size

    def build(self, size: int, setting: Setting) -> Workload:
        options: dict[str, Any] = {"window_size": size}
        if self.name == "swin_tiny":
            options = {"attention": "softmax", "softmax_windows": size}
        return ModelCase(self.name, "inline_swin_tiny", options).build(FIGURE_5_PIXELS, setting)


# Fig. 5 of the InLine paper

FIGURE_5_PIXELS = 224


class SpeedPanel(NamedTuple):
    """What one panel of a figure measures."""

    cases: tuple[Case, ...]
    sizes: tuple[int, ...]


def _figure_5() -> dict[str, SpeedPanel]:
    # PVT and DeiT have fewer heads than with InLine attention, as in the original papers
    pvt = {"attention": "softmax", "num_heads": [1, 2, 5, 8]}
    runtime: list[Case] = []
    for size in ("small", "medium", "large"):
        runtime += [ModelCase(f"pvt_{size}", f"inline_pvt_{size}", pvt)]
        runtime += [ModelCase(f"inline_pvt_{size}", f"inline_pvt_{size}")]
    for size in ("tiny", "small", "base"):
        runtime += [ModelCase(f"swin_{size}", f"inline_swin_{size}", {"attention": "softmax"})]
        runtime += [ModelCase(f"inline_swin_{size}", f"inline_swin_{size}")]
    deit = ModelCase("deit_tiny", "inline_deit_tiny", {"attention": "softmax", "num_heads": 3})
    return {
        "runtime": SpeedPanel(tuple(runtime), (FIGURE_5_PIXELS,)),
        "windows": SpeedPanel((WindowCase("swin_tiny"), WindowCase("inline_swin_tiny")), (7, 14, 28, 56)),
        "resolution": SpeedPanel((deit, ModelCase("inline_deit_tiny", "inline_deit_tiny")), (224, 384, 640, 1024)),
    }


FIGURE_5 = _figure_5()
"""The panels of the speed figure of the InLine paper, each softmax model before its InLine counterpart."""


def parse_model(text: str) -> ModelCase:
    """Read ``softpp_tiny`` or ``softpp_tiny:attention=inline,drop_rate=0.1``; option values are YAML."""
    name, _, listed = text.partition(":")
    if name in ("local-dir", "hf-hub"):
        # a source that timm resolves, not options
        return ModelCase(text, text)
    check_model_name(name)
    if name == text:
        return ModelCase(text, name)
    options = {}
    # a comma inside a list is not followed by KEY=
    for part in re.split(r",(?=\s*\w+=)", listed):
        key, equals, value = part.partition("=")
        if not equals or not key.strip().isidentifier():
            raise UserError(f"options of a model are KEY=VALUE,... as in softpp_tiny:attention=inline; got {text!r}")
        options[key.strip()] = read_yaml(value, f"{key.strip()}={value} of {name}")
    return ModelCase(text, name, options)
