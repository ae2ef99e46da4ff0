import pytest
import torch

from softline.attention import create_attention
from softline.attention.bands import KEPT_BANDS, wants_bands
from softline.layers.bands import CPU_BAND_NUMBERS, shrunk_bands
from softline.layers.local import LocalSum, ValueConv
from softline.measure.counting import count_macs

# bands of a few rows
FEW = 2**11 / CPU_BAND_NUMBERS
GRID = (37, 21)
CASES = {
    "soft": {"ratio": 4},
    "softpp": {"ratio": 4, "value_conv": 9},
    "softpp-avgpool": {"ratio": 3, "sampling": "avgpool"},
    "softpp-ratio": {"ratio": 5, "max_landmarks": "ratio", "value_conv": None},
    "softpp-random": {"ratio": 5, "sampling": "random"},
    "softpp-cholesky": {"ratio": 5, "inverse": "cholesky", "ridge": 0.01},
    "inline": {},
    "inline-exp": {"feature_map": "exp", "local_residual": False},
    "inline-large": {"local_kernel": 5, "qkv_bias": False},
}


def attention(case, dim=16, heads=2, **options):
    module = create_attention(case.partition("-")[0], dim, heads, **CASES[case], **options).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return module


@pytest.mark.parametrize("share", [FEW / 2, FEW], ids=["values-twice", "values-kept"])
@pytest.mark.parametrize("case", CASES)
def test_bands_give_what_all_tokens_at_once_give(case, share):
    module = attention(case).double()
    # far from zero, where sums of products would cancel
    x = torch.randn(2, GRID[0] * GRID[1], 16).double() + 3
    with torch.no_grad():
        assert not wants_bands(module, x)
        expected = module(x, GRID)
        with shrunk_bands(share):
            assert wants_bands(module, x)
            found = module(x, GRID)
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10 * expected.abs().max())


def test_few_values_are_projected_once_and_many_twice():
    module = attention("softpp").eval()
    x = torch.randn(1, GRID[0] * GRID[1], 16)
    projection = x.shape[1] * 16 * 16
    with torch.no_grad():
        with shrunk_bands(-(-x.numel() // KEPT_BANDS) / CPU_BAND_NUMBERS):
            kept = count_macs(lambda: module(x, GRID))
        with shrunk_bands(x.numel() // (KEPT_BANDS + 1) / CPU_BAND_NUMBERS):
            twice = count_macs(lambda: module(x, GRID))
    # those of rows around a band are projected with it
    assert projection <= twice - kept < 2 * projection


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", ["softpp", "inline"])
def test_bands_keep_the_precision_of_the_tokens(case, dtype):
    module = attention(case)
    x = torch.randn(1, GRID[0] * GRID[1], 16)
    with torch.no_grad():
        exact = module.double()(x.double(), GRID)
        whole = module.to(dtype)(x.to(dtype), GRID)
        with shrunk_bands(FEW):
            found = module(x.to(dtype), GRID)
    assert found.dtype == dtype
    errors = [(each.double() - exact).abs().max() for each in (found, whole)]
    assert errors[0] <= 2 * errors[1] + 1e-6


def test_several_local_terms_and_a_context():
    module = attention("inline").double()
    module.local = LocalSum([ValueConv(2, 8, 5, shared="none"), module.local]).double()
    x, context = torch.randn(2, 1, GRID[0] * GRID[1], 16).double()
    with torch.no_grad():
        expected = module(x, GRID, context=context)
        with shrunk_bands(FEW):
            assert torch.allclose(module(x, GRID, context=context), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "reason", ["mask", "prefix", "gradients", "training", "hook", "explicit", "override", "autocast"]
)
def test_all_tokens_are_attended_at_once_otherwise(reason, monkeypatch):
    options = {"num_prefix_tokens": 1} if reason == "prefix" else {"impl": "explicit"} if reason == "explicit" else {}
    module = attention("softpp", **options).train(reason == "training")
    x = torch.randn(1, GRID[0] * GRID[1] + (reason == "prefix"), 16)
    mask = torch.ones(x.shape[:2], dtype=torch.bool) if reason == "mask" else None
    if reason == "hook":
        module.local.register_forward_hook(lambda *_: None)
    if reason == "override":
        module.override = lambda module, v, *_: v

    def refuse(*_):
        raise AssertionError("computed in bands")

    monkeypatch.setattr("softline.attention.multihead.attend_in_bands", refuse)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=reason == "autocast")
    with torch.set_grad_enabled(reason == "gradients"), shrunk_bands(FEW), autocast:
        assert module(x, GRID, mask).isfinite().all()
        if reason == "mask":
            with pytest.raises(AssertionError, match="in bands"):
                module(x, GRID)


@pytest.mark.parametrize(
    "options", [{}, {"num_prefix_tokens": 1}, {"symmetric": True}, {"feature_map": "exp"}, {"qkv_bias": False}]
)
def test_softmax_attends_a_few_queries_at_a_time(options, monkeypatch):
    module = create_attention("softmax", 16, 2, **options).double().eval()
    tokens = GRID[0] * GRID[1] + options.get("num_prefix_tokens", 0)
    x = torch.randn(2, tokens, 16).double()
    monkeypatch.setattr("softline.attention.bands.QUERIES", 100)
    counts = []
    mixed = module.mixed
    monkeypatch.setattr(module, "mixed", lambda part: counts.append(part.shape[2]) or mixed(part))
    with torch.no_grad():
        expected = module(x, GRID)
        assert counts == [tokens]
        with shrunk_bands(FEW):
            found = module(x, GRID)
    assert max(counts[1:]) == 100
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reason", ["mask", "gradients", "training", "hook", "override", "autocast", "local"])
def test_all_queries_are_attended_at_once_otherwise(reason, monkeypatch):
    module = create_attention("softmax", 16, 2, local_residual=reason == "local").train(reason == "training")
    x = torch.randn(1, GRID[0] * GRID[1], 16)
    mask = torch.ones(x.shape[:2], dtype=torch.bool) if reason == "mask" else None
    if reason == "hook":
        module.core.register_forward_hook(lambda *_: None)
    if reason == "override":
        module.override = lambda module, v, *_: v

    def refuse(*_):
        raise AssertionError("computed in parts")

    monkeypatch.setattr("softline.attention.multihead.attend_each_query", refuse)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=reason == "autocast")
    with torch.set_grad_enabled(reason == "gradients"), shrunk_bands(FEW), autocast:
        assert module(x, GRID, mask).isfinite().all()
