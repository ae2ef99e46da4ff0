"""What the operators share that SOFT and InLine are compared with; Hydra's head axis has another meaning."""

import pytest
import torch
from torch import Tensor

from softline import ops
from tests.support import assert_fast_matches_definition, prefix_mask, qkv

NAMES = [
    *("softmax", "gaussian", "linear", "performer", "linformer", "nystrom", "reformer", "efficient", "focused"),
    "angular",
]
every_operator = pytest.mark.parametrize("name", NAMES)


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
