"""torch.compile and torch.export: one graph, without breaks, for images of many sizes.

What torch itself decides: a graph whose first image is square is one for square images (sizes that are equal at first
are taken to stay equal), and a grid of a single row or column is a case of its own.
"""

from collections.abc import Iterable
from typing import Any

import pytest
import timm
import torch
from functorch.compile import aot_module_simplified, make_boxed_func
from torch import Tensor, nn

import softline  # noqa: F401

Size = tuple[int, int]

# one block of each kind and few channels: how long torch reasons about sizes depends on neither
_SHALLOW: dict[str, Any] = {"depths": (1, 1, 1, 1)}
_NARROW: dict[str, Any] = {**_SHALLOW, "embed_dims": (8, 8, 8, 8), "num_heads": (1, 1, 1, 1)}
_ITERATE_ONCE: dict[str, Any] = {"attention_options": {"iterations": 1}}
OPTIONS: dict[str, dict[str, Any]] = {
    "soft_micro": {**_SHALLOW, **_ITERATE_ONCE},
    "softpp_micro": {**_SHALLOW, **_ITERATE_ONCE},
    "soft_tiny": {**_NARROW, **_ITERATE_ONCE},
    "softpp_tiny": {**_NARROW, **_ITERATE_ONCE, "stage4": "soft"},
    "softpp_release_tiny": {**_NARROW, **_ITERATE_ONCE},
    "inline_micro": _SHALLOW,
    "inline_pvt_tiny": _NARROW,
    "inline_deit_tiny": {"depth": 1, "embed_dim": 16, "num_heads": 2},
    "inline_swin_tiny": {"depths": (1, 1, 1, 2), "embed_dim": 8, "num_heads": (1, 1, 1, 1)},
    "inline_cswin_tiny": {**_SHALLOW, "embed_dim": 8, "num_heads": (2, 2, 2, 2)},
}
# others take minutes
QUICK = ("inline_deit_tiny", True)
every_family_in_both_modes = pytest.mark.parametrize(
    ("name", "training"),
    [
        pytest.param(name, training, id=f"{name}-{mode}", marks=() if (name, training) == QUICK else pytest.mark.slow)
        for name in OPTIONS
        for mode, training in (("inference", False), ("training", True))
    ],
)
# whole windows and strips and incomplete ones, odd sizes, that of the position embeddings; all in one case of Swin and
# CSwin (see `test_windows_have_a_graph_for_each_case`)
SIZES: list[Size] = [(128, 160), (160, 128), (224, 224), (149, 203), (192, 120)]


def build(name: str, *, training: bool) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=5, **OPTIONS[name]).train(training)


def differentiated(graph: Any, inputs: Any) -> Any:
    """The graph and its gradient, traced as every compiler that trains does."""
    return aot_module_simplified(graph, inputs, fw_compiler=lambda traced, _: make_boxed_func(traced.forward))


def graphs_after_each(
    model: nn.Module, sizes: Iterable[Size], *, dynamic: bool | None, compiler: Any = differentiated
) -> list[int]:
    """How many graphs have been compiled after each size, in training if the model is; all equal the eager model."""
    torch.compiler.reset()
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        # counted once it returns: torch may raise out of a first attempt and repeat it
        graphs.append(compiler(graph, inputs))
        return graphs[-1]

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    counts = []
    for size in sizes:
        assert_equal(compiled, model, torch.randn(2, 3, *size))
        counts.append(len(graphs))
    return counts


def assert_equal(compiled: Any, model: nn.Module, x: Tensor) -> None:
    run = gradients if model.training else logits
    for actual, expected in zip(run(compiled, model, x), run(model, model, x), strict=True):
        # in proportion to the largest: entries that cancel have no digits of their own
        assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max() + 1e-6


def logits(forward: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [forward(x)]


def gradients(forward: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    """Logits, and the gradients of the image and of every parameter."""
    x = x.clone().requires_grad_()
    out = forward(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *model.parameters()])]


@every_family_in_both_modes
def test_one_graph_serves_all_sizes(name, training):
    expected = [1] * len(SIZES)
    if name == "inline_cswin_tiny" and training:
        # the first square image costs another, for good
        expected = [1, 1, 2, 2, 2]
    assert graphs_after_each(build(name, training=training), SIZES, dynamic=True) == expected


def test_the_second_size_makes_the_graph_dynamic():
    model = build("inline_deit_tiny", training=False)
    counts = graphs_after_each(
        model, [(224, 224), (160, 128), *SIZES], dynamic=None, compiler=lambda graph, _: graph.forward
    )
    assert counts == [1, *[2] * (len(SIZES) + 1)]


@pytest.mark.slow
def test_a_square_first_image_costs_one_more_graph():
    model = build("inline_micro", training=False)
    assert graphs_after_each(model, [(96, 96), (128, 128), *SIZES], dynamic=True) == [1, 1, *[2] * len(SIZES)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cases"),
    [
        # a map of up to 56 tokens is one window, and so is one of 7 in the last stage: up to 224 pixels in both
        ("inline_swin_tiny", [[(128, 96), (75, 224)], [(256, 320), (230, 384)]]),
        # a map of up to 7 tokens is one strip: 112 pixels in the third stage
        ("inline_cswin_tiny", [[(128, 160), (300, 230)], [(112, 128), (75, 230)]]),
    ],
)
def test_windows_have_a_graph_for_each_case(name, cases):
    """Those of one window along an axis, and those of several."""
    counts = graphs_after_each(build(name, training=False), [size for case in cases for size in case], dynamic=True)
    assert counts == [1, 1, 2, 2]


def exported(name: str) -> tuple[nn.Module, nn.Module]:
    """A model, and what torch.export makes of it for images whose sides are multiples of 32."""
    model = build(name, training=False)
    height, width = (32 * torch.export.Dim(axis, min=2, max=32) for axis in ("rows", "columns"))
    program = torch.export.export(model, (torch.randn(2, 3, 96, 128),), dynamic_shapes={"x": {2: height, 3: width}})
    return model, program.module()


@pytest.mark.parametrize(
    "name",
    ["inline_micro", *(pytest.param(name, marks=pytest.mark.slow) for name in ("inline_pvt_tiny", "softpp_micro"))],
)
def test_exports_for_images_of_many_sizes(name):
    model, program = exported(name)
    for size in ((128, 96), (224, 224), (64, 320)):
        assert_equal(program, model, torch.randn(2, 3, *size))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softpp_micro", "inline_micro"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_the_default_compiler_agrees(name, training):
    """Needs a C++ compiler."""
    torch.compiler.reset()
    model = build(name, training=training)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for size in ((64, 96), (128, 96)):
        assert_equal(compiled, model, torch.randn(2, 3, *size))
