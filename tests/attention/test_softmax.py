import pytest
import torch

from softline import create_attention, ops


def test_dropout_is_for_training_alone():
    dropping, plain = create_attention("softmax", 8, 2, dropout=0.5), create_attention("softmax", 8, 2)
    plain.load_state_dict(dropping.state_dict())
    x = torch.randn(2, 12, 8)
    with torch.no_grad():
        assert torch.equal(dropping.eval()(x, (3, 4)), plain.eval()(x, (3, 4)))
        assert not torch.equal(dropping.train()(x, (3, 4)), plain.train()(x, (3, 4)))


def test_dropout_leaves_out_its_share_of_the_weights_and_keeps_their_mean():
    q, k = torch.randn(2, 4, 60, 8).unbind(0)[0][None], torch.randn(1, 4, 60, 8)
    whole = ops.softmax_weights(q, k)
    dropped = ops.softmax_weights(q, k, dropout=0.25)
    left_out = (dropped == 0).float().mean().item()
    assert left_out == pytest.approx(0.25, abs=0.02)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)


def test_attention_with_dropout_has_the_mean_of_attention_without():
    q, k, v = torch.randn(3, 1, 1, 6, 4).unbind(0)
    draws = ops.softmax_attention(*(part.expand(20_000, 1, 6, 4) for part in (q, k, v)), dropout=0.3)
    error = draws.std(0) / 20_000**0.5
    assert ((draws.mean(0) - ops.softmax_attention(q, k, v)[0]).abs() <= 5 * error).all()


@pytest.mark.parametrize("dropout", [-0.1, 1.0])
def test_dropout_must_be_a_share(dropout):
    with pytest.raises(ValueError, match=f"dropout must be .*, got {dropout}"):
        create_attention("softmax", 8, 2, dropout=dropout)


@pytest.mark.parametrize("name", ["softmax", "gaussian"])
def test_symmetric_attention_shares_the_query_and_key_projection(name):
    plain = create_attention(name, 32, 2, symmetric=False)
    shared = create_attention(name, 32, 2, symmetric=True)
    sizes = [sum(p.numel() for p in module.parameters()) for module in (plain, shared)]
    assert sizes[0] - sizes[1] == 32 * 32 + 32
    if name == "gaussian":
        weights = shared.weights(torch.randn(2, 35, 32), (7, 5))
        torch.testing.assert_close(weights, weights.mT)


def test_the_local_residual_of_inline_is_added():
    module = create_attention("softmax", 32, 2, local_residual=True)
    plain = create_attention("softmax", 32, 2)
    missing, unexpected = plain.load_state_dict(module.state_dict(), strict=False)
    assert missing == []
    assert all(key.startswith("local.") for key in unexpected)
    tokens = torch.randn(2, 35, 32)
    difference = module(tokens, (7, 5)) - plain(tokens, (7, 5))
    v = plain.qkv(tokens)[..., 64:].unflatten(-1, (2, 16)).transpose(1, 2)
    local = module.local(tokens, v, (7, 5)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(difference, local @ plain.proj.weight.T, rtol=1e-4, atol=1e-6)
