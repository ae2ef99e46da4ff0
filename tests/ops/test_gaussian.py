import torch

from softline import ops
from tests.support import qkv


def test_gaussian_kernel_equals_explicit_differences():
    x, y = torch.randn(2, 3, 9, 8, dtype=torch.float64), torch.randn(2, 3, 5, 8, dtype=torch.float64)
    expected = torch.exp(-0.35 / 2 * (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1))
    torch.testing.assert_close(ops.gaussian_kernel(x, y, scale=0.35), expected)


def test_gaussian_weights_are_symmetric_with_unit_diagonal():
    q = qkv()[0]
    weights = ops.gaussian_weights(q, q)
    torch.testing.assert_close(weights, weights.mT)
    torch.testing.assert_close(weights.diagonal(dim1=-2, dim2=-1), torch.ones(2, 2, 35, dtype=torch.float64))
    assert torch.linalg.eigvalsh(weights).min() > -1e-12
