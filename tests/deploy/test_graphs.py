"""The forms that operators and layers take in exported graphs, against those that are executed."""

import pytest
import torch
from torch import Tensor, nn

from softline.attention import ATTENTIONS, create_attention
from softline.deploy.onnx_files import OnnxNetwork, start_session, write_onnx
from softline.deploy.tracing import trace
from softline.engine.graph import BATCH, HEIGHT, IMAGE_AXES, WIDTH, Graph, Sizes
from softline.errors import UserError
from softline.layers.grid import map_tokens
from softline.layers.windows import WindowedAttention
from softline.ops.newton import newton_inverse

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

CHANNELS = 16
GRIDS = ((9, 12), (20, 17), (3, 5), (8, 8))


class OnMaps(nn.Module):
    """An attention on maps [B, C, H, W]."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, maps: Tensor) -> Tensor:
        return self.attention(map_tokens(maps), (maps.shape[2], maps.shape[3]))


def graph_of(network: nn.Module, channels: int = CHANNELS) -> Graph:
    def sample(sizes) -> Tensor:
        return torch.randn(sizes[BATCH], channels, sizes[HEIGHT], sizes[WIDTH])

    outputs = {"out": (BATCH, None, None)}
    usual = {HEIGHT: 24, WIDTH: 26}
    return Graph(network=network, input="maps", axes=IMAGE_AXES, outputs=outputs, usual=usual, sample=sample)


def check_exported(network: nn.Module, fixed: Sizes | None = None, *, torch_too: bool = True) -> None:
    """Compare the exported forms of a network with itself, on grids of several sizes or on the one that is fixed."""
    fixed = fixed or {}
    graph = graph_of(network.eval())
    session = start_session(write_onnx(trace(graph, fixed, onnx=True), graph, {}))
    runs = [OnnxNetwork(session, list(graph.axes), {})]
    if torch_too:
        runs.append(trace(graph, fixed, onnx=False).module())
    for grid in [(fixed[HEIGHT], fixed[WIDTH])] if fixed else GRIDS:
        for batch in (1, 3):
            maps = graph.sample({BATCH: batch, HEIGHT: grid[0], WIDTH: grid[1]})
            with torch.no_grad():
                expected = network(maps)
                for run in runs:
                    torch.testing.assert_close(run(maps), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


ONE_SIZE = ("linformer", "reformer")
FREE = sorted(set(ATTENTIONS) - set(ONE_SIZE))


@pytest.mark.parametrize("name", FREE)
def test_one_graph_of_an_attention_serves_all_grids(name):
    options = {"ratio": 2} if name in ("soft", "softpp") else {}
    check_exported(OnMaps(create_attention(name, CHANNELS, 2, **options)), torch_too=name in ("softpp", "inline"))


@pytest.mark.parametrize("name", ONE_SIZE)
def test_attentions_that_need_a_size_say_so_and_are_right_with_it(name):
    torch.manual_seed(0)
    network = OnMaps(create_attention(name, CHANNELS, 2))
    with pytest.raises(UserError, match=f"{name} attention can only be exported for a fixed number of tokens.*--size"):
        check_exported(network)
    check_exported(network, {HEIGHT: 9, WIDTH: 12})


@pytest.mark.parametrize("shifted", [False, True])
def test_one_graph_serves_a_single_window_and_several(shifted):
    attention = WindowedAttention(create_attention("inline", CHANNELS, 2), 8, shifted=shifted)
    check_exported(OnMaps(attention))


class Inverse(nn.Module):
    def forward(self, matrices: Tensor) -> Tensor:
        return newton_inverse(matrices, iterations=20).inverse


def test_the_exported_newton_steps_are_those_of_algorithm_2():
    points = torch.randn(4, 12, 3)
    kernels = (-torch.cdist(points, points).square() / 2).exp()
    program = torch.export.export(Inverse(), (kernels,), strict=False)
    exact = newton_inverse(kernels.double(), iterations=20).inverse
    for found in (program.module()(kernels), newton_inverse(kernels, iterations=20).inverse):
        torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))
