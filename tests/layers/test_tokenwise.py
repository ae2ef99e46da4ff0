import pytest
import torch
import torch.nn.functional as F

from softline.layers import tokenwise
from softline.layers.tokenwise import TanhGELU, for_each_token


def test_tokens_in_chunks_give_what_they_give_at_once(monkeypatch):
    monkeypatch.setattr(tokenwise, "CPU_NUMBERS", 1)
    monkeypatch.setattr(tokenwise, "LEAST_ROWS", 4)
    x, y = torch.randn(2, 7, 3), torch.randn(2, 7, 3)
    sizes = []

    def function(x, y):
        sizes.append(x.shape[0])
        return torch.cat([x * y, x + y], dim=-1)

    with torch.no_grad():
        out = for_each_token(function, x, y, width=8, training=False)
    assert sizes == [4, 4, 4, 2]
    torch.testing.assert_close(out, torch.cat([x * y, x + y], dim=-1), rtol=0, atol=0)


@pytest.mark.parametrize(("training", "gradient"), [(True, False), (False, True)])
def test_training_and_gradients_see_all_tokens_at_once(monkeypatch, training, gradient):
    """Stochastic depth drops samples, and autograd would keep every chunk."""
    monkeypatch.setattr(tokenwise, "CPU_NUMBERS", 1)
    monkeypatch.setattr(tokenwise, "LEAST_ROWS", 1)
    shapes = []
    with torch.set_grad_enabled(gradient):
        for_each_token(lambda x: shapes.append(x.shape) or x, torch.randn(2, 7, 3), width=8, training=training)
    assert shapes == [(2, 7, 3)]


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
