import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softline.attention import create_attention
from softline.layers import tokenwise
from softline.layers.blocks import PostNormBlock, PreNormBlock
from softline.layers.tokenwise import TanhGELU, for_each_token


class Recorded(nn.Module):
    """Two results for each token, and the shapes it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return for_each_token(self, self.step, x, y, width=8)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return torch.cat([self.inner(x) * y, x + y], dim=-1)


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setattr(tokenwise, "CPU_NUMBERS", 1)
    monkeypatch.setattr(tokenwise, "LEAST_ROWS", 6)
    return Recorded().eval()


@pytest.mark.parametrize(
    ("shape", "shapes"),
    [
        # samples that are too large are cut, small ones are taken together
        ((2, 10, 3), [(1, 6, 3), (1, 4, 3), (1, 6, 3), (1, 4, 3)]),
        ((5, 3, 3), [(2, 3, 3), (2, 3, 3), (1, 3, 3)]),
        ((2, 3, 3), [(2, 3, 3)]),
        ((0, 3, 3), [(0, 3, 3)]),
    ],
)
def test_tokens_in_parts_give_what_they_give_at_once(module, shape, shapes):
    x, y = torch.randn(shape), torch.randn(shape)
    with torch.no_grad():
        out = module(x, y)
    assert module.shapes == shapes
    torch.testing.assert_close(out, torch.cat([x * y, x + y], dim=-1), rtol=0, atol=0)


@pytest.mark.parametrize("reason", ["gradient", "training", "a part in training", "a hook"])
def test_whoever_needs_all_tokens_sees_them_at_once(module, reason):
    """Autograd would keep every part, stochastic depth drops samples, hooks expect one call."""
    if reason == "training":
        module.train()
    elif reason == "a part in training":
        module.inner.train()
    elif reason == "a hook":
        module.inner.register_forward_hook(lambda *_: None)
    with torch.set_grad_enabled(reason == "gradient"):
        module(torch.randn(2, 10, 3), torch.randn(2, 10, 3))
    assert module.shapes == [(2, 10, 3)]


def test_gelu_through_the_exponential_is_the_form_with_tanh():
    x = torch.cat([torch.linspace(-12, 12, 1001), torch.tensor([0.0, -1e4, 1e4, -1e30, 1e30])])
    expected = F.gelu(x.double(), approximate="tanh")
    with torch.no_grad():
        in_place = TanhGELU()(x)
    torch.testing.assert_close(in_place.double(), expected, rtol=1e-6, atol=1e-6)
    compiled = torch.compile(TanhGELU(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x).double(), expected, rtol=1e-6, atol=1e-6)
    half = x.clamp(-1e4, 1e4).to(torch.float16)
    assert compiled(half).dtype == torch.float16
    torch.testing.assert_close(compiled(half), F.gelu(half, approximate="tanh"), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("block", [PreNormBlock, PostNormBlock])
def test_autocast_does_not_narrow_large_inputs(block):
    attention = create_attention("softpp", 16, 2, ratio=4)
    module = block(16, attention).eval()
    few, many = torch.randn(1, 64, 16), torch.randn(1, 128 * 128, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert module(many, (128, 128)).dtype == module(few, (8, 8)).dtype == torch.float32
