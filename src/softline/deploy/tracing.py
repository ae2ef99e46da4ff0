"""From a trained model to a graph that torch.export records, for fixed sizes or for any."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as symbolic_shapes
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from softline.engine.graph import BATCH, HEIGHT, Graph, Sizes
from softline.errors import UserError
from softline.ops.chunks import onnx_steps

# a graph for any size is recorded with an image that has several of Swin's windows in its first three stages
LARGE = 1056
FREE_BATCH = 2


class HalfPrecision(nn.Module):
    """A network with float16 weights that takes and returns float32.

    Attention keeps sums over tokens, distances and inverses in float32; see `softline.ops`.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.half()

    def forward(self, x: Tensor) -> Any:
        found = self.network(x.half() if x.is_floating_point() else x)
        return _widened(found) if isinstance(found, Tensor) else tuple(map(_widened, found))


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


class FromBytes(nn.Module):
    """A network of images that takes bytes [B, H, W, C] as image files hold them, and normalises them itself."""

    def __init__(self, network: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.network = network
        self.factor: Tensor
        self.offset: Tensor
        # (x / 255 - mean) / std in one product and one sum
        self.register_buffer("factor", 1 / (255 * torch.tensor(std)).reshape(-1, 1, 1))
        self.register_buffer("offset", -(torch.tensor(mean) / torch.tensor(std)).reshape(-1, 1, 1))

    def forward(self, pixels: Tensor) -> Any:
        return self.network(pixels.permute(0, 3, 1, 2).float() * self.factor + self.offset)


def trace(graph: Graph, fixed: Sizes, *, onnx: bool) -> ExportedProgram:
    """Record the graph of a network.

    fixed: lengths of axes that shall have no other; the others may have any.
    onnx: prefer steps that ONNX has.
    """
    sizes = example_sizes(graph, fixed)
    free = {place: Dim.DYNAMIC for place, axis in enumerate(graph.axes) if axis is not None and axis not in fixed}
    example = graph.sample(sizes)
    try:
        # nothing is assumed about lengths of 1, for which torch.export would otherwise record graphs of their own
        any_size = symbolic_shapes.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
        with torch.no_grad(), any_size, onnx_steps(onnx), warnings.catch_warnings():
            # about torch's own functions that torchvision calls
            warnings.simplefilter("ignore", FutureWarning)
            program = torch.export.export(graph.network.eval(), (example,), dynamic_shapes=(free,), strict=False)
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
        if isinstance(error, UserError):
            raise
        network = type(graph.network).__name__
        free_size = HEIGHT in graph.axes and HEIGHT not in fixed
        hint = "; fix the size if it takes images of one size only" if free_size else ""
        raise UserError(f"the network ({network}) cannot be recorded as a graph: {_first_line(error)}{hint}") from error
    relax(program, graph, fixed)
    return program


def relax(program: ExportedProgram, graph: Graph, fixed: Sizes) -> None:
    """Let a recorded graph accept all lengths in the ranges of its axes.

    torch.export notes which lengths its reasoning about memory layouts does not cover, such as a batch of one or a map
    of a single token, and refuses them when the program runs, although its steps are right for them; `compare` runs the
    program at such lengths.
    """
    program._guards_code = []
    (value,) = (node.meta["val"] for node in program.graph.nodes if node.name in program.graph_signature.user_inputs)
    limits = ranges(graph, fixed)
    for length, axis in zip(value.shape, graph.axes, strict=True):
        if isinstance(length, torch.SymInt) and axis is not None:
            least, most = limits[axis]
            upper = int_oo if most is None else most
            program.range_constraints[length.node.expr] = ValueRanges(least or 1, upper)


def example_sizes(graph: Graph, fixed: Sizes) -> dict[str, int]:
    """Return the lengths of the axes in the input that is recorded."""
    sizes = {BATCH: FREE_BATCH if BATCH in graph.axes else 1}
    for axis, usual in graph.usual.items():
        most = graph.most.get(axis)
        sizes[axis] = max(usual, LARGE) if most is None else min(most, max(usual, graph.least.get(axis, 1)))
    sizes.update(fixed)
    return sizes


def ranges(graph: Graph, fixed: Sizes) -> dict[str, list[int | None]]:
    """Return the smallest and the largest length of each named axis, None for no limit."""
    found: dict[str, list[int | None]] = {}
    for axis in graph.axes:
        if axis is not None:
            least, most = graph.least.get(axis, 1), graph.most.get(axis)
            found[axis] = [fixed[axis], fixed[axis]] if axis in fixed else [least, most]
    return found


def check_fixed(graph: Graph, fixed: Mapping[str, int]) -> None:
    """Check lengths that a user asks for."""
    for axis, length in fixed.items():
        if axis not in graph.axes:
            names = ", ".join(name for name in graph.axes if name is not None)
            raise UserError(f"{axis} cannot be chosen: of the network's {graph.input} only {names} can")
        least, most = graph.least.get(axis, 1), graph.most.get(axis)
        if length < least or (most is not None and length > most):
            raise UserError(
                f"{axis} must be at least {least}{'' if most is None else f', at most {most}'}, got {length}"
            )


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
