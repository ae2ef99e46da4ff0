import pytest
import torch

from softline import create_attention


def x(tokens: int = 35, dim: int = 32) -> torch.Tensor:
    return torch.randn(2, tokens, dim)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("soft", {}, {"iterations": 2}),
        ("soft", {"iterations": 3}, {"iterations": 3, "start": "halving"}),
        ("soft", {"iterations": 3}, {"inverse": "pinv"}),
        ("soft", {"ridge": 0.1, "iterations": 3}, {"ridge": 0.1, "inverse": "cholesky"}),
        ("softpp", {}, {"ridge": 0.1}),
        ("softpp", {}, {"normalize": False}),
        ("softpp", {}, {"max_landmarks": 3}),
        ("linear", {}, {"feature_map": "relu"}),
        ("softmax", {}, {"feature_map": "relu"}),
        ("nystrom", {}, {"iterations": 1}),
        ("nystrom", {}, {"max_landmarks": 3}),
        ("reformer", {}, {"bucket_size": 8}),
        ("focused", {}, {"power": 2.0}),
    ],
)
def test_every_option_reaches_the_operator(name, before, after):
    """Same weights, another option: another result."""
    plain, changed = (create_attention(name, 32, 2, **options).eval() for options in (before, after))
    changed.load_state_dict(plain.state_dict())
    tokens = 0.3 * x(63)
    assert not torch.allclose(changed(tokens, (9, 7)), plain(tokens, (9, 7)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("grid_size", [None, 35, "75", (7.0, 5.0), (7, 5, 1)])
def test_grids_of_the_wrong_kind_are_named(grid_size):
    with pytest.raises(ValueError, match="grid_size must be"):
        create_attention("softmax", 32, 2)(x(), grid_size)


@pytest.mark.parametrize("wrong", [None, torch.ones(2, 35, 32, dtype=torch.int64), [[1.0]]])
def test_tokens_of_the_wrong_kind_are_named(wrong):
    with pytest.raises(ValueError, match="x must be a floating-point tensor"):
        create_attention("softpp", 32, 2)(wrong, (7, 5))


def test_mixing_takes_weights_of_its_own_shape_only():
    module, tokens = create_attention("inline", 32, 2), x()
    weights = module.weights(tokens, (7, 5))
    for wrong in (weights[:1], weights[:, :1], weights[..., :-1], weights.repeat(1, 2, 1, 1)):
        with pytest.raises(ValueError, match=r"weights must have shape \[B, heads, N, N\] = \(2, 2, 35, 35\)"):
            module.mix(wrong, tokens, (7, 5))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("performer", "reformer", "linformer", "focused")),
        ("focused", {"position_grid": (7, 5)}),
        ("inline", {"feature_map": "affine_relu"}),
    ],
)
def test_what_was_built_on_the_meta_device_can_be_initialised(name, options):
    with torch.device("meta"):
        module = create_attention(name, 32, 2, **options)
    module = module.to_empty(device="cpu")
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert module.eval()(x(), (7, 5)).isfinite().all()


@pytest.mark.parametrize("name", ["performer", "reformer"])
def test_random_features_follow_the_seed_and_can_be_redrawn(name):
    first, second = (create_attention(name, 32, 2, seed=5) for _ in range(2))
    second.load_state_dict({**first.state_dict(), **{k: v for k, v in second.state_dict().items() if "core" in k}})
    tokens = x(200)
    assert torch.equal(first(tokens, (20, 10)), second(tokens, (20, 10)))
    second.core.redraw(seed=6)
    assert not torch.allclose(first(tokens, (20, 10)), second(tokens, (20, 10)))
    second.core.redraw(seed=5)
    assert torch.equal(first(tokens, (20, 10)), second(tokens, (20, 10)))
