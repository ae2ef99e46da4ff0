import torch

from softline import ops
from tests.support import qkv


def test_approaches_softmax_with_many_features():
    q, k, _ = (0.5 * x for x in qkv())
    softmax = ops.softmax_weights(q, k)
    errors = [
        (ops.performer_weights(q, k, features=ops.performer_features(count, 8, seed=0)) - softmax).abs().mean().item()
        for count in (16, 16384)
    ]
    # not 32 times: what remains is the stabiliser of 1e-4
    assert errors[1] < errors[0] / 4


def test_features_are_orthogonal_in_blocks_and_follow_the_seed():
    features = ops.performer_features(20, 8, seed=3)
    assert features.shape == (20, 8)
    for block in features.split(8):
        gram = block @ block.T
        torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-5)
    assert torch.equal(features, ops.performer_features(20, 8, seed=3))
    assert not torch.equal(features, ops.performer_features(20, 8, seed=4))
    torch.manual_seed(7)
    drawn = ops.performer_features(20, 8)
    torch.manual_seed(7)
    assert torch.equal(drawn, ops.performer_features(20, 8))


def test_features_estimate_the_kernel_without_bias():
    """The mean over draws of phi(x) . phi(y) is exp(x . y), also where all channels have one sign."""
    x = torch.full((8,), 0.35, dtype=torch.float64)
    draws = ops.performer_features(4000 * 8, 8, seed=0).double().reshape(4000, 8, 8)
    for sign in (1, -1):
        estimate = torch.exp(2 * sign * (draws @ x) - x @ x).mean(1)
        error = (estimate.mean() - torch.exp(x @ x)).abs()
        assert error < 4 * estimate.std() / len(estimate) ** 0.5
