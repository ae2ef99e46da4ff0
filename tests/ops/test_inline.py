import pytest
import torch
from torch import Tensor

from softline.ops import inline_attention, inline_weights, linear_weights, softmax_weights
from tests.support import assert_fast_matches_definition

KEYS = [[0.608, 1.847], [1.012, 1.014], [1.948, 0.646], [1.812, 0.313]]
# Figure 1 of the paper: printed weights of four queries on four keys
COLLINEAR = {
    "softmax": [[0.31, 0.23, 0.25, 0.20], [0.36, 0.22, 0.25, 0.17], [0.41, 0.20, 0.24, 0.15], [0.44, 0.19, 0.23, 0.13]],
    "linear": [[0.32, 0.23, 0.25, 0.19]] * 4,
    "inline": [[0.31, 0.23, 0.25, 0.20], [0.35, 0.22, 0.26, 0.17], [0.39, 0.21, 0.26, 0.14], [0.42, 0.21, 0.26, 0.12]],
}
AFFINE = {
    "softmax": [[0.36, 0.25, 0.21, 0.18], [0.37, 0.23, 0.22, 0.17], [0.39, 0.21, 0.24, 0.16], [0.41, 0.19, 0.25, 0.14]],
    "linear": [[0.31, 0.24, 0.25, 0.21]] * 4,
    "inline": [[0.35, 0.23, 0.24, 0.18], [0.37, 0.23, 0.24, 0.16], [0.40, 0.23, 0.24, 0.13], [0.45, 0.22, 0.24, 0.10]],
}


def tokens(values: list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[None, None]


def figure_weights(q: Tensor, k: Tensor, phi) -> dict[str, Tensor]:
    return {
        "softmax": softmax_weights(q, k)[0, 0],
        "linear": linear_weights(phi(q), phi(k), feature_map="identity")[0, 0],
        "inline": inline_weights(phi(q), phi(k))[0, 0],
    }


@pytest.mark.parametrize("kind", ["softmax", "linear", "inline"])
def test_figure_1a_is_reproduced(kind):
    """ReLU features and queries on one line through the origin."""
    q = tokens([[t, 1.796 * t] for t in (0.396, 0.678, 0.944, 1.106)])
    weights = figure_weights(q, tokens(KEYS), torch.relu)[kind]
    torch.testing.assert_close(weights, tokens(COLLINEAR[kind])[0, 0], rtol=0, atol=0.005)


@pytest.mark.parametrize("kind", ["softmax", "linear", "inline"])
def test_figure_1b_is_reproduced(kind):
    """ReLU(A x + b) features and queries on one line that misses the origin.

    The figure prints no vectors: queries, A and b are fitted, one of many sets that give its numbers.
    """
    A = torch.tensor([[0.5455, 0.3765], [-0.1660, 0.7897]], dtype=torch.float64)
    b = torch.tensor([0.7360, 0.2140], dtype=torch.float64)
    q = tokens([[0.0506, 0.6720], [0.3080, 0.9503], [0.6879, 1.3610], [1.1963, 1.9106]])
    weights = figure_weights(q, tokens(KEYS), lambda x: torch.relu(x @ A.T + b))[kind]
    torch.testing.assert_close(weights, tokens(AFFINE[kind])[0, 0], rtol=0, atol=0.005)


@pytest.mark.parametrize("count", [1, 49, 63, 196])
def test_rows_sum_to_one(count):
    q, k = (10 * torch.randn(2, 3, count, 8, dtype=torch.float64) for _ in range(2))
    for scale in (None, 0.1):
        sums = inline_weights(q, k, scale=scale).sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-11)


def test_collinear_queries_that_linear_attention_confuses_are_told_apart():
    direction, k = torch.rand(1, 1, 1, 8), torch.randn(1, 1, 16, 8)
    q = direction * torch.linspace(0.5, 2, 16)[None, None, :, None]
    linear = linear_weights(q, k, feature_map="relu")[0, 0]
    inline = inline_weights(q.relu(), k.relu())[0, 0]
    torch.testing.assert_close(linear, linear[:1].expand_as(linear))
    distances = torch.cdist(inline, inline) + torch.eye(16)
    assert distances.min() > 1e-4


def test_injective_when_the_keys_span():
    """Proposition: with rank [K, 1] = D + 1, different queries have different weights."""
    q, k = torch.randn(1, 1, 40, 8, dtype=torch.float64), torch.randn(1, 1, 40, 8, dtype=torch.float64)
    weights = inline_weights(q, k)[0, 0]
    # the weights determine the query: solve for it again
    centred = (k - k.mean(-2, keepdim=True))[0, 0]
    recovered = torch.linalg.lstsq(centred, (weights - 1 / 40).T * 40 * 8**0.5).solution.T
    torch.testing.assert_close(recovered, q[0, 0])


@pytest.mark.parametrize("count", [1, 49, 63, 196])
@pytest.mark.parametrize("scale", [None, 0.05])
def test_linear_form_matches_definition(count, scale):
    assert_fast_matches_definition(
        lambda q, k, v: inline_attention(q, k, v, scale=scale),
        lambda q, k, v: inline_weights(q, k, scale=scale) @ v,
        *(torch.randn(2, 3, count, 16) for _ in range(3)),
    )


def test_output_equals_the_release_formula():
    """q^T (K^T V) s + (1 - s q . sum k) mean(v), s = D^-0.5 / N."""
    q, k, v = (torch.randn(2, 3, 35, 16, dtype=torch.float64) for _ in range(3))
    s = 16**-0.5 / 35
    expected = s * q @ (k.mT @ v) + (1 - s * q @ k.sum(-2, keepdim=True).mT) * v.mean(-2, keepdim=True)
    torch.testing.assert_close(inline_attention(q, k, v), expected)


def test_every_implementation_gives_the_same():
    q, k, v = (torch.randn(2, 3, 35, 16, dtype=torch.float64) for _ in range(3))
    linear = inline_attention(q, k, v, impl="linear")
    assert torch.equal(linear, inline_attention(q, k, v))
    torch.testing.assert_close(linear, inline_attention(q, k, v, impl="explicit"))
    with pytest.raises(ValueError, match="impl must be one of auto, explicit, linear; got 'cuda'"):
        inline_attention(q, k, v, impl="cuda")


def test_gradients_of_gradients():
    mask = torch.tensor([[True, True, True, True, False]])
    q, k, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for key_mask in (None, mask):
        assert torch.autograd.gradcheck(lambda *x, m=key_mask: inline_attention(*x, key_mask=m), (q, k, v))
        assert torch.autograd.gradgradcheck(lambda *x, m=key_mask: inline_attention(*x, key_mask=m), (q, k, v))


def test_per_sample_gradients_by_vmap():
    q, k, v = (torch.randn(3, 2, 5, 4, dtype=torch.float64) for _ in range(3))

    def loss(q, k, v):
        return inline_attention(q[None], k[None], v[None]).square().sum()

    together = torch.func.vmap(torch.func.grad(loss))(q, k, v)
    alone = torch.stack([torch.func.grad(loss)(*sample) for sample in zip(q, k, v, strict=True)])
    torch.testing.assert_close(together, alone)


def test_training_keeps_only_the_inputs():
    q, k, v = (torch.randn(2, 2, 50, 4, requires_grad=True) for _ in range(3))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        inline_attention(q, k, v)
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in (q, k, v)}


def test_a_gradient_that_overflows_is_not_finite():
    """Loss scaling looks for it: only results saturate in float16."""
    q, k, v = ((30 * torch.randn(1, 1, 50, 4)).half().requires_grad_() for _ in range(3))
    out = inline_attention(q, k, v, scale=1.0)
    gradients = torch.autograd.grad(out, (q, k, v), torch.full_like(out, 6e4))
    assert not all(gradient.isfinite().all() for gradient in gradients)


def test_scale_is_a_number():
    q, k, v = (torch.randn(1, 1, 5, 4) for _ in range(3))
    with pytest.raises(ValueError, match=r"scale must be a finite number, got tensor"):
        inline_attention(q, k, v, scale=torch.tensor(0.5, requires_grad=True))
