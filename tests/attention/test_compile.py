"""torch.compile and torch.export of every attention: no graph breaks, and one graph for many image sizes.

Iterations are one: more of them are the same operations again, and only take longer to trace.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softline import ATTENTIONS, create_attention
from softline.attention.registry import option_names
from tests.support import prefix_mask, value_and_gradients

# code that the defaults do not reach
VARIANTS = {
    "soft, average pooling, cholesky": ("soft", {"sampling": "avgpool", "inverse": "cholesky", "ridge": 0.01}),
    "softpp, random landmarks, eigendecomposition": ("softpp", {"sampling": "random", "inverse": "pinv"}),
    "softpp, biased landmarks, halving": ("softpp", {"sampling": "biased", "start": "halving", "value_conv": None}),
    "soft, as released": ("soft", {"start": "release", "ridge": 0.01}),
    "softpp, as released": ("softpp", {"start": "release", "gradient": "autograd", "max_landmarks": "ratio"}),
    "inline, exp": ("inline", {"feature_map": "exp"}),
    "linear, exp": ("linear", {"feature_map": "exp"}),
    "linear, relu of a learned map": ("linear", {"feature_map": "affine_relu"}),
    "focused, position encoding": ("focused", {"position_grid": (4, 5)}),
}


def build(name: str, prefix: int = 0, **options: Any) -> nn.Module:
    name, variant = VARIANTS.get(name, (name, {}))
    iterates = "iterations" in (option_names(name) or ()) and "inverse" not in variant
    once = {"iterations": 1} if iterates else {}
    return create_attention(name, 32, 2, num_prefix_tokens=prefix, **once, **variant, **options).eval()


def assert_compiles(module: nn.Module, x: Tensor, key_mask: Tensor | None, *, backend: str) -> None:
    """In one graph, which gives the eager module's values and gradients."""
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    eager = value_and_gradients(lambda x: module(x, (7, 5), key_mask), x)
    graph = value_and_gradients(lambda x: compiled(x, (7, 5), key_mask), x)
    for actual, expected in zip(graph, eager, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(ATTENTIONS))
def test_compiles_without_graph_breaks_forward_and_backward(name):
    x = torch.randn(2, 36, 32)
    assert_compiles(build(name, prefix=1), x, prefix_mask([36, 22], 36), backend="aot_eager")
    assert_compiles(build(name), x[:, 1:], None, backend="eager")


@pytest.mark.parametrize("name", VARIANTS)
def test_options_compile_without_graph_breaks(name):
    assert_compiles(build(name, prefix=1), torch.randn(2, 36, 32), prefix_mask([36, 22], 36), backend="eager")


class OnMaps(nn.Module):
    """An attention of maps [B, 32, H, W], whose sizes it reads."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.attention = build(name, **options)

    def forward(self, maps: Tensor) -> Tensor:
        return self.attention(maps.flatten(2).mT, (maps.shape[2], maps.shape[3]))


@pytest.mark.parametrize("name", ["softpp", "inline"])
def test_one_compiled_graph_serves_all_image_sizes(name):
    torch.compiler.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        graphs.append(graph)
        return graph.forward

    module = OnMaps(name).eval()
    attend = torch.compile(module, fullgraph=True, dynamic=True, backend=backend)
    for size in ((16, 20), (24, 12), (31, 45)):
        maps = torch.randn(1, 32, *size)
        torch.testing.assert_close(attend(maps), module(maps), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("name", "options", "example"),
    [
        # the ratio of a real model's first stage; below, at and above the paper's 7 x 7 landmarks
        ("softpp", {"ratio": 8}, (67, 75)),
        ("inline", {}, (16, 20)),
    ],
)
def test_exports_for_all_image_sizes(name, options, example):
    module, auto = OnMaps(name, **options).eval(), torch.export.Dim.AUTO
    maps = torch.randn(1, 32, *example)
    program = torch.export.export(module, (maps,), dynamic_shapes=({2: auto, 3: auto},), strict=False).module()
    for size in ((40, 60), (56, 56), (9, 100), (120, 99)):
        maps = torch.randn(1, 32, *size)
        torch.testing.assert_close(program(maps), module(maps), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["soft", "softpp", "inline"])
def test_inductor_gives_the_same_forward_and_backward(name):
    """The default backend, which needs a C++ compiler."""
    torch.compiler.reset()
    module = create_attention(name, 32, 2)
    compiled = torch.compile(module, fullgraph=True)
    tokens = torch.randn(2, 196, 32, requires_grad=True)
    eager, graph = module(tokens, (14, 14)), compiled(tokens, (14, 14))
    torch.testing.assert_close(graph, eager, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(out.square().sum(), tokens)[0] for out in (eager, graph)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-4)
