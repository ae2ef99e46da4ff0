"""The rival operators against implementations that others published as packages.

Both sides get the same weights and inputs in float64; values and gradients may differ by rounding only. A package that
is not installed skips its tests. What the other side does differently is named where it is evened out.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from softline.ops import (
    efficient_attention,
    linear_attention,
    linformer_attention,
    nystrom_attention,
    performer_attention,
    performer_features,
    reformer_attention,
)
from softline.ops.reformer import SELF_SCORE

pytestmark = pytest.mark.rivals

# while it is imported, performer-pytorch compares torch versions with distutils
imports_distutils = pytest.mark.filterwarnings("ignore:.*distutils:DeprecationWarning")

# sums over some tens of tokens or channels, on both sides
ROUNDINGS = 32
# a step of the third-order inverse: (13 - 15 + 7 - 1) / 4 = 1 is left, (13 + 15 + 7 + 1) / 4 = 9 times that is rounded
INVERSE_ROUNDINGS = 9 * ROUNDINGS


@pytest.mark.parametrize("masked", [False, True])
# the other side takes one path for few tokens and another for more than it has channels
@pytest.mark.parametrize("tokens", [5, 49])
def test_linear_attention_matches_kornia(tokens, masked):
    kornia = pytest.importorskip("kornia.feature.loftr.loftr_module.linear_attention")
    layer = kornia.LinearAttention(eps=0.0)
    mask = draw_mask(2, tokens) if masked else None

    def theirs(*qkv):
        return layer(*(x.transpose(1, 2) for x in qkv), q_mask=mask, kv_mask=mask).transpose(1, 2)

    assert_agree(lambda *qkv: linear_attention(*qkv, key_mask=mask), theirs, *draw(3, 2, 3, tokens, 8))


@imports_distutils
@pytest.mark.parametrize(
    ("feature_map", "phi"),
    [("elu", lambda x: F.elu(x) + 1), ("relu", F.relu), ("exp", torch.exp)],
    ids=["elu", "relu", "exp"],
)
def test_linear_attention_matches_performer_pytorch_under_each_positive_feature_map(feature_map, phi):
    performer = pytest.importorskip("performer_pytorch.performer_pytorch")
    assert_agree(
        lambda *qkv: linear_attention(*qkv, feature_map=feature_map),
        lambda q, k, v: performer.linear_attention(phi(q), phi(k), v),
        *draw(3, 2, 3, 49, 16),
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [5, 49])
def test_efficient_attention_matches_linear_attention_transformer(tokens, masked):
    rival = pytest.importorskip("linear_attention_transformer.linear_attention_transformer")
    mask = draw_mask(2, tokens) if masked else None

    def theirs(q, k, v):
        # cloned because it masks in place; its additional factor D^-0.5 is not in the paper
        out = math.sqrt(q.shape[-1]) * rival.linear_attn(q, k.clone(), v.clone(), kv_mask=mask)
        return real_tokens(merge_heads(out), mask)

    def ours(*qkv):
        return real_tokens(merge_heads(efficient_attention(*qkv, key_mask=mask)), mask)

    assert_agree(ours, theirs, *draw(3, 2, 3, tokens, 8))


@imports_distutils
def test_efficient_attention_matches_performer_pytorch_without_projection():
    performer = pytest.importorskip("performer_pytorch")
    assert_agree(efficient_attention, performer.FastAttention(8, no_projection=True), *draw(3, 2, 3, 49, 8))


@imports_distutils
def test_performer_without_its_stabilizer_matches_performer_pytorch(monkeypatch):
    performer = pytest.importorskip("performer_pytorch.performer_pytorch")
    monkeypatch.setattr("softline.ops.performer.STABILIZER", 0.0)
    features = performer_features(20, 8)
    theirs = their_performer(performer, features, stabilizer=0.0)
    assert_agree(lambda *qkv: performer_attention(*qkv, features=features), theirs, *draw(3, 2, 3, 49, 8))


@imports_distutils
def test_performer_matches_performer_pytorch_for_tokens_of_one_length():
    performer = pytest.importorskip("performer_pytorch.performer_pytorch")
    features = performer_features(20, 8)
    q, k, v = draw(3, 2, 3, 49, 8)
    q, k = 2 * F.normalize(q, dim=-1), 2 * F.normalize(k, dim=-1)
    # the stabilizer is relative to the largest exp(w.x - |x|^2 / 2) here and to the largest exp(w.x) there
    theirs = their_performer(performer, features, stabilizer=1e-4 * math.exp(-0.5 * 2**2 / math.sqrt(8)))
    assert_agree(lambda *qkv: performer_attention(*qkv, features=features), theirs, q, k, v)


@pytest.mark.parametrize("tokens", [1, 49, 64])
def test_linformer_matches_linformer_up_to_its_longest_sequence(tokens):
    linformer = pytest.importorskip("linformer")
    layer = linformer.LinformerSelfAttention(24, seq_len=64, k=7, heads=3).double()

    def ours(x):
        q, k, v = (split_heads(project(x), 3) for project in (layer.to_q, layer.to_k, layer.to_v))
        out = linformer_attention(q, k, v, key_projection=layer.proj_k.mT, value_projection=layer.proj_v.mT)
        return layer.to_out(merge_heads(out))

    assert_agree(ours, layer, draw(2, tokens, 24))


@pytest.mark.parametrize("masked", [False, True])
# their default start is the maximum over batch and heads: comparable for a single matrix
@pytest.mark.parametrize(("start", "batch", "heads"), [("original", 1, 1), ("each matrix", 2, 3)])
def test_nystrom_matches_transformers_nystromformer(start, batch, heads, masked):
    rival = pytest.importorskip("transformers.models.nystromformer.modeling_nystromformer")
    config = rival.NystromformerConfig(
        hidden_size=8 * heads, num_attention_heads=heads, segment_means_seq_len=49, num_landmarks=7
    )
    layer = rival.NystromformerSelfAttention(config).double().eval()
    # the convolution of the values is a layer of its own; the config's switch for the start raises
    layer.conv_kernel_size, layer.init_option = None, start
    mask = draw_mask(batch, 49) if masked else None
    bias = None if mask is None else (~mask[:, None, None, :]).double() * torch.finfo(torch.float64).min

    def ours(x):
        q, k, v = (split_heads(project(x), heads) for project in (layer.query, layer.key, layer.value))
        # they average masked tokens into the landmarks like real ones
        ql, kl = (x.reshape(batch, heads, 7, 7, 8).mean(3) for x in (q, k))
        out = nystrom_attention(q, k, v, q_landmarks=ql, k_landmarks=kl, key_mask=mask)
        return real_tokens(merge_heads(out), mask)

    # inputs large enough for the landmarks to differ from one another
    x = 4 * draw(batch, 49, 8 * heads)
    assert_agree(ours, lambda x: real_tokens(layer(x, bias)[0], mask), x, roundings=INVERSE_ROUNDINGS)


# a masked landmark is a unit row here and a uniform one there: the same once both inverses have converged, which also
# makes their start from a maximum over the batch irrelevant
@pytest.mark.parametrize(("batch", "heads", "iterations", "empty_segments"), [(1, 1, 6, 0), (2, 3, 20, 1)])
def test_nystrom_with_masked_landmarks_matches_nystrom_attention(batch, heads, iterations, empty_segments):
    rival = pytest.importorskip("nystrom_attention")
    # eps keeps the mean over an empty segment from 0/0 and vanishes beside any count
    layer = rival.NystromAttention(
        24, dim_head=8, heads=heads, num_landmarks=7, pinv_iterations=iterations, residual=False, eps=1e-20
    ).double()
    mask = draw_mask(batch, 49)
    mask[:, 49 - 7 * empty_segments :] = False
    segments = mask.reshape(batch, 7, 7)

    def ours(x):
        q, k, v = (split_heads(part, heads) for part in layer.to_qkv(x).chunk(3, dim=-1))
        real = segments[:, None, :, :, None]
        ql, kl = ((x.reshape(batch, heads, 7, 7, 8) * real).sum(3) / real.sum(3).clamp(min=1) for x in (q, k))
        options = {"iterations": iterations, "key_mask": mask, "landmark_mask": segments.any(-1)}
        out = nystrom_attention(q, k, v, q_landmarks=ql, k_landmarks=kl, **options)
        return real_tokens(layer.to_out(merge_heads(out)), mask)

    # queries equal keys and tokens of a segment resemble each other, so that the matrix to invert is well conditioned
    with torch.no_grad():
        query, key, _ = layer.to_qkv.weight.chunk(3)
        key.copy_(query)
    x = draw(batch, 49, 24) + 4 * draw(batch, 7, 24).repeat_interleave(7, dim=1)
    assert_agree(ours, lambda x: real_tokens(layer(x, mask=mask), mask), x, roundings=INVERSE_ROUNDINGS)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("tokens", [1, 7, 21, 40])
def test_reformer_matches_reformer_pytorch_when_its_last_chunk_is_padding(tokens, rounds):
    reformer = pytest.importorskip("reformer_pytorch")
    bucket_size, head_dim, padded = 8, 12, 48
    num_buckets = padded // bucket_size
    layer = reformer.LSHAttention(bucket_size=bucket_size, n_hashes=rounds)
    # it draws its rotations from torch's generator, first thing
    torch.manual_seed(2)
    rotations = draw(head_dim, rounds, num_buckets // 2).transpose(0, 1)
    # their first chunk looks back at the last one of the round before. One whole chunk of masked tokens that every
    # round hashes to the last bucket, -e_last after rotation, leaves nothing to see there
    last = torch.zeros(rounds, num_buckets // 2, dtype=torch.float64)
    last[:, -1] = -1
    padding = torch.linalg.pinv(rotations.mT.flatten(0, 1)) @ last.flatten()

    def theirs(q, v):
        q, v = q.flatten(0, 1), v.flatten(0, 1)
        q = torch.cat([q, padding.expand(len(q), padded - tokens, -1)], dim=1)
        v = F.pad(v, (0, 0, 0, padded - tokens), value=7.0)
        mask = (torch.arange(padded) < tokens).expand(len(q), -1)
        torch.manual_seed(2)
        out, _, buckets = layer(q, v, input_mask=mask)
        assert (buckets.unflatten(1, (rounds, padded))[..., tokens:] % num_buckets == num_buckets - 1).all()
        return out[:, :tokens].unflatten(0, (2, 3))

    assert_agree(
        lambda q, v: reformer_attention(q, v, rotations=rotations, bucket_size=bucket_size),
        theirs,
        *draw(2, 2, 3, tokens, head_dim),
        # a lone token has no score but this one, and they take exp(score - logsumexp) of its roundings
        roundings=abs(SELF_SCORE) if tokens == 1 else ROUNDINGS,
    )


def assert_agree(
    ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor, roundings: float = ROUNDINGS
) -> None:
    """Equal values and equal gradients for every input, up to so many roundings of the largest entry."""
    names = ("the value", *(f"the gradient of input {i}" for i in range(len(inputs))))
    results = value_and_gradients(ours, inputs), value_and_gradients(theirs, inputs)
    for name, found, expected in zip(names, *results, strict=True):
        assert found.shape == expected.shape
        error = (found - expected).abs().max().item()
        budget = roundings * torch.finfo(torch.float64).eps * expected.abs().max().item()
        assert error <= budget, f"{name} is {error:.1e} apart, rounding explains {budget:.1e}"


def value_and_gradients(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = function(*leaves)
    direction = torch.randn(value.shape, dtype=value.dtype, generator=torch.Generator().manual_seed(1))
    return [value.detach(), *torch.autograd.grad(value, leaves, direction)]


def their_performer(performer: Any, features: Tensor, *, stabilizer: float) -> Callable[..., Tensor]:
    def attend(q, k, v):
        phi_q = performer.softmax_kernel(q, projection_matrix=features, is_query=True, eps=stabilizer)
        phi_k = performer.softmax_kernel(k, projection_matrix=features, is_query=False, eps=stabilizer)
        return performer.linear_attention(phi_q, phi_k, v)

    return attend


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def draw_mask(batch: int, tokens: int) -> Tensor:
    """[B, N], about a quarter of the tokens masked, never the first."""
    mask = torch.rand(batch, tokens) > 0.25
    mask[:, 0] = True
    return mask


def real_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """The real tokens of x [B, N, C]: what a masked one holds is not defined on the other side."""
    return x if mask is None else x[mask]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, N, H * D] -> [B, H, N, D]"""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, N, D] -> [B, N, H * D]"""
    return x.transpose(1, 2).flatten(2)
