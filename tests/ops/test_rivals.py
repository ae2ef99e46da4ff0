"""The operators that SOFT and InLine are compared with, against their papers' equations."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from softline import ops
from tests.support import assert_fast_matches_definition, prefix_mask


def qkv(tokens: int = 35, heads: int = 2, dim: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(2, heads, tokens, dim, dtype=dtype) for _ in range(3)]


def options(name: str, q: Tensor) -> dict[str, object]:
    """What each operator takes besides queries, keys and values."""
    head_dim = q.shape[-1]
    projection = torch.randn(2, 6, 256, generator=torch.Generator().manual_seed(0), dtype=q.dtype) / 16
    # queries' and keys' landmarks alike, so that their softmax is well conditioned
    landmarks = 2 * torch.randn(2, 2, 5, head_dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {
        "performer": {"features": ops.performer_features(20, head_dim, seed=0)},
        "linformer": {"key_projection": projection[0], "value_projection": projection[1]},
        "nystrom": {"q_landmarks": landmarks.to(q.dtype), "k_landmarks": 0.9 * landmarks.to(q.dtype)},
        "reformer": {"rotations": ops.reformer_rotations(head_dim, num_buckets=6, rounds=2, seed=0), "bucket_size": 8},
    }.get(name, {})


NAMES = ["softmax", "gaussian", "linear", "performer", "linformer", "nystrom", "reformer", "efficient", "focused"]
every_operator = pytest.mark.parametrize("name", NAMES)


def functions(name: str):
    attention, weights = getattr(ops, f"{name}_attention"), getattr(ops, f"{name}_weights")
    if name == "reformer":
        return lambda q, k, v, **o: attention(q, v, **o), lambda q, k, **o: weights(q, **o)
    return attention, weights


@every_operator
@pytest.mark.parametrize("count", [1, 49, 63, 196])
def test_fast_form_matches_definition(name, count):
    attention, weights = functions(name)
    assert_fast_matches_definition(
        lambda q, k, v: attention(q, k, v, **options(name, q)),
        lambda q, k, v: weights(q, k, **options(name, q)) @ v,
        *qkv(count, dtype=torch.float32),
    )


@every_operator
def test_masked_tokens_count_for_nothing(name):
    attention, _ = functions(name)
    q, k, v = qkv()
    mask = prefix_mask([35, 21], 35)
    masked = attention(q, k, v, **options(name, q), key_mask=mask)
    short = attention(q[:, :, :21], k[:, :, :21], v[:, :, :21], **options(name, q))
    whole = attention(q, k, v, **options(name, q))
    torch.testing.assert_close(masked[1, :, :21], short[1], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(masked[0], whole[0], rtol=1e-9, atol=1e-11)
    assert (masked[1, :, 21:] == 0).all()


@every_operator
def test_bad_tensors_are_named(name):
    attention, _ = functions(name)
    q, k, v = qkv()
    extra = options(name, q)
    with pytest.raises(ValueError, match=r"q must have shape \[B, H, N, D\], got \(2, 35, 8\)"):
        attention(q[:, 0], k[:, 0], v[:, 0], **extra)
    with pytest.raises(ValueError, match=r"v must share batch, heads and tokens with q"):
        attention(q, k, v[:, :, :-1], **extra)
    with pytest.raises(ValueError, match=r"v must have the dtype and device of q \(torch.float64 on cpu\), got"):
        attention(q, k, v.float(), **extra)
    with pytest.raises(ValueError, match=r"q must be a floating-point tensor, got torch.int64"):
        attention(q.long(), k.long(), v.long(), **extra)
    with pytest.raises(ValueError, match=r"key_mask must have shape \[B, N\] = \(2, 35\), got \(35,\)"):
        attention(q, k, v, **extra, key_mask=torch.ones(35, dtype=torch.bool))
    with pytest.raises(ValueError, match="key_mask must be a bool tensor"):
        attention(q, k, v, **extra, key_mask=torch.ones(2, 35))
    if name != "reformer":
        with pytest.raises(ValueError, match=r"k must (have the shape of|share the head dimension with) q"):
            attention(q, k[..., :-1], v, **extra)
        with pytest.raises(ValueError, match=r"k must have the shape of q"):
            attention(q, k[:, :, :-1], v, **extra)


@every_operator
def test_only_tensors_are_taken(name):
    attention, _ = functions(name)
    q, k, v = (x.numpy() for x in qkv())
    with pytest.raises(ValueError, match=r"must be a torch.Tensor, got ndarray|takes torch.Tensors, got none"):
        attention(q, k, v, **options(name, qkv()[0]))


def test_softmax_is_torch_softmax():
    q, k, v = qkv()
    torch.testing.assert_close(ops.softmax_weights(q, k), (q @ k.mT / 8**0.5).softmax(-1))
    torch.testing.assert_close(ops.softmax_attention(q, k, v, scale=0.3), (0.3 * q @ k.mT).softmax(-1) @ v)


def test_gaussian_weights_are_symmetric_with_unit_diagonal():
    q = qkv()[0]
    weights = ops.gaussian_weights(q, q)
    torch.testing.assert_close(weights, weights.mT)
    torch.testing.assert_close(weights.diagonal(dim1=-2, dim2=-1), torch.ones(2, 2, 35, dtype=torch.float64))
    assert torch.linalg.eigvalsh(weights).min() > -1e-12


@pytest.mark.parametrize("feature_map", list(ops.FEATURE_MAPS))
def test_linear_attention_equals_its_equation(feature_map):
    q, k, v = qkv()
    phi = {
        "elu": lambda x: F.elu(x) + 1,
        "relu": torch.relu,
        "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
        "identity": lambda x: x,
        "exp": torch.exp,
    }[feature_map]
    similarity = phi(q) @ phi(k).mT
    expected = similarity / similarity.sum(-1, keepdim=True)
    torch.testing.assert_close(ops.linear_weights(q, k, feature_map=feature_map), expected)
    torch.testing.assert_close(ops.linear_attention(q, k, v, feature_map=feature_map), expected @ v)


@pytest.mark.parametrize("scale", [1, 30, 1000])
def test_exponential_features_neither_overflow_nor_vanish(scale):
    q, k, v = qkv()
    q, k = scale * q, scale * k
    # phi(q) . phi(k) = sum over channels of exp(q + k)
    exact = torch.logsumexp(q[:, :, :, None] + k[:, :, None], -1).softmax(-1) @ v
    out = ops.linear_attention(q.float(), k.float(), v.float(), feature_map="exp")
    torch.testing.assert_close(out, exact.float(), rtol=1e-4, atol=1e-5 * scale)


def test_a_query_without_features_attends_to_nothing():
    q, k, v = qkv()
    q[:, :, 3] = -1
    assert (ops.linear_attention(q, k, v, feature_map="relu")[:, :, 3] == 0).all()


def test_unknown_feature_map_lists_the_known_ones():
    with pytest.raises(ValueError, match="one of elu, exp, identity, leaky_relu, relu; got 'gelu'; did you mean 'elu'"):
        ops.linear_attention(*qkv(), feature_map="gelu")


def test_performer_approaches_softmax_with_many_features():
    q, k, _ = (0.5 * x for x in qkv())
    softmax = ops.softmax_weights(q, k)
    errors = [
        (ops.performer_weights(q, k, features=ops.performer_features(count, 8, seed=0)) - softmax).abs().mean().item()
        for count in (16, 16384)
    ]
    # not 32 times: what remains is the stabiliser of 1e-4
    assert errors[1] < errors[0] / 4


def test_performer_features_are_orthogonal_in_blocks_and_follow_the_seed():
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


def test_performer_features_estimate_the_kernel_without_bias():
    """The mean over draws of phi(x) . phi(y) is exp(x . y), also where all channels have one sign."""
    x = torch.full((8,), 0.35, dtype=torch.float64)
    for sign in (1, -1):
        estimates = []
        for seed in range(4000):
            w = ops.performer_features(8, 8, seed=seed).double()
            estimates.append(torch.exp(2 * sign * (w @ x) - x @ x).mean())
        estimate = torch.stack(estimates)
        error = (estimate.mean() - torch.exp(x @ x)).abs()
        assert error < 4 * estimate.std() / len(estimates) ** 0.5


def test_linformer_tokens_take_columns_by_their_rank_among_the_real_ones():
    q, k, v = qkv()
    mask = torch.rand(2, 35) > 0.4
    masked = ops.linformer_attention(q, k, v, **options("linformer", q), key_mask=mask)
    for sample in range(2):
        real = mask[sample]
        short = [x[sample : sample + 1, :, real] for x in (q, k, v)]
        alone = ops.linformer_attention(*short, **options("linformer", q))
        torch.testing.assert_close(masked[sample][:, real], alone[0], rtol=1e-9, atol=1e-11)


def test_linformer_equals_its_equation_up_to_its_maximum_and_refuses_more():
    q, k, v = qkv()
    E, P = torch.randn(4, 35, dtype=torch.float64), torch.randn(4, 35, dtype=torch.float64)
    expected = (q @ (E @ k).mT / 8**0.5).softmax(-1) @ (P @ v)
    projections = {"key_projection": E, "value_projection": P}
    torch.testing.assert_close(ops.linformer_attention(q, k, v, **projections), expected)
    short = ops.linformer_attention(q[:, :, :9], k[:, :, :9], v[:, :, :9], **projections)
    shorter = {"key_projection": E[:, :9], "value_projection": P[:, :9]}
    torch.testing.assert_close(short, ops.linformer_attention(q[:, :, :9], k[:, :, :9], v[:, :, :9], **shorter))
    with pytest.raises(ValueError, match="covers at most 9 tokens, got 35"):
        ops.linformer_attention(q, k, v, **shorter)


def test_nystrom_is_exact_when_every_token_is_a_landmark():
    q, k, v = (0.3 * x for x in qkv(tokens=9))
    out = ops.nystrom_attention(q, k, v, q_landmarks=q, k_landmarks=k, iterations=40)
    torch.testing.assert_close(out, ops.softmax_attention(q, k, v), rtol=1e-6, atol=1e-7)


def test_reformer_with_one_chunk_is_softmax_over_the_other_tokens():
    q, _, v = qkv()
    rotations = ops.reformer_rotations(8, num_buckets=4, rounds=3, seed=0)
    scores = q @ F.normalize(q, dim=-1).mT / 8**0.5
    others = scores.masked_fill(torch.eye(35, dtype=torch.bool), float("-inf")).softmax(-1)
    torch.testing.assert_close(ops.reformer_attention(q, v, rotations=rotations, bucket_size=64), others @ v)


def test_reformer_tokens_see_their_own_chunk_and_the_one_before():
    q = qkv(tokens=40)[0]
    rotations = ops.reformer_rotations(8, num_buckets=8, rounds=1, seed=0)
    weights = ops.reformer_weights(q, rotations=rotations, bucket_size=8)
    rotated = q @ rotations[0].double()
    bucket = torch.cat([rotated, -rotated], -1).argmax(-1)
    for sample in range(2):
        for head in range(2):
            order = sorted(range(40), key=lambda i: (bucket[sample, head, i].item(), i))
            for place, token in enumerate(order):
                chunk = place // 8
                seen = {t for t in order[max(0, chunk - 1) * 8 : chunk * 8 + 8] if t != token}
                assert set(weights[sample, head, token].nonzero().flatten().tolist()) == seen


def test_a_single_token_sees_itself_in_reformer():
    q, _, v = qkv(tokens=1)
    rotations = ops.reformer_rotations(8, num_buckets=4, rounds=2, seed=0)
    torch.testing.assert_close(ops.reformer_attention(q, v, rotations=rotations), v)


def test_reformer_options_are_checked():
    q, _, v = qkv()
    with pytest.raises(ValueError, match="num_buckets must be even, got 5"):
        ops.reformer_rotations(8, num_buckets=5)
    with pytest.raises(ValueError, match=r"rotations must have shape .* with D = 8, got \(4, 6, 16\)"):
        ops.reformer_attention(q, v, rotations=ops.reformer_rotations(6))


def test_efficient_attention_equals_its_equation():
    q, k, v = qkv()
    torch.testing.assert_close(ops.efficient_attention(q, k, v), q.softmax(-1) @ (k.softmax(-2).mT @ v))


def test_hydra_equals_its_equation():
    q, k, v = qkv()
    flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    state = (F.normalize(flat_k, dim=-1) * flat_v).sum(1, keepdim=True)
    expected = (F.normalize(flat_q, dim=-1) * state).unflatten(-1, (2, 8)).transpose(1, 2)
    torch.testing.assert_close(ops.hydra_attention(q, k, v), expected)
    assert ops.hydra_weights(q, k).shape == (2, 16, 35, 35)
    with pytest.raises(ValueError, match="v must have the shape of q"):
        ops.hydra_attention(q, k, v[..., :4])


def test_focused_attention_equals_its_equation():
    q, k, v = qkv()

    def focus(x: Tensor) -> Tensor:
        x = torch.relu(x).transpose(1, 2).flatten(2) + 1e-6
        sharp = x**3 / torch.linalg.vector_norm(x**3, dim=-1, keepdim=True)
        return (sharp * torch.linalg.vector_norm(x, dim=-1, keepdim=True)).unflatten(-1, (2, 8)).transpose(1, 2)

    similarity = focus(q) @ focus(k).mT
    expected = similarity / similarity.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(ops.focused_attention(q, k, v), expected)
    with pytest.raises(ValueError, match=r"power must be at least 1, got 0\.5"):
        ops.focused_attention(q, k, v, power=0.5)
