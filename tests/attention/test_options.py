"""Options of the other attentions."""

import pytest
import torch

from softline import ATTENTIONS, create_attention, ops


def x(tokens: int = 35, dim: int = 32) -> torch.Tensor:
    return torch.randn(2, tokens, dim)


@pytest.mark.parametrize("name", ["softmax", "gaussian"])
def test_symmetric_attention_shares_the_query_and_key_projection(name):
    plain = create_attention(name, 32, 2, symmetric=False)
    shared = create_attention(name, 32, 2, symmetric=True)
    sizes = [sum(p.numel() for p in module.parameters()) for module in (plain, shared)]
    assert sizes[0] - sizes[1] == 32 * 32 + 32
    if name == "gaussian":
        weights = shared.weights(x(), (7, 5))
        torch.testing.assert_close(weights, weights.mT)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("soft", {}, {"iterations": 2}),
        ("soft", {"iterations": 3}, {"iterations": 3, "start": "halving"}),
        ("soft", {"iterations": 3}, {"iterations": 3, "inverse": "pinv"}),
        ("soft", {"ridge": 0.1, "iterations": 3}, {"ridge": 0.1, "inverse": "cholesky"}),
        ("softpp", {}, {"ridge": 0.1}),
        ("softpp", {}, {"normalize": False}),
        ("softpp", {}, {"max_landmarks": 3}),
        ("linear", {}, {"feature_map": "relu"}),
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


@pytest.mark.parametrize("name", list(ATTENTIONS))
def test_projections_can_do_without_bias(name):
    assert create_attention(name, 32, 2).qkv.bias is not None
    assert create_attention(name, 32, 2, qkv_bias=False).qkv.bias is None


def test_nystrom_takes_landmarks_of_queries_and_of_keys():
    module, tokens = create_attention("nystrom", 32, 2).double(), x(49).double()
    q, k, _ = (p.unflatten(-1, (2, 16)).transpose(1, 2) for p in module.qkv(tokens).split(32, dim=-1))
    weights = module.weights(tokens, (7, 7))
    torch.testing.assert_close(weights, ops.nystrom_weights(q, k, q_landmarks=q, k_landmarks=k))


def test_linformer_projects_keys_and_values_apart():
    module, tokens = create_attention("linformer", 32, 2, max_tokens=35), x()
    before = module(tokens, (7, 5))
    with torch.no_grad():
        module.core.value_projection.zero_()
    torch.testing.assert_close(module(tokens, (7, 5)), module.proj.bias.expand_as(before))


def test_the_learned_scale_of_focused_attention_divides_queries_and_keys():
    module, tokens = create_attention("focused", 32, 2).double(), x().double()
    with torch.no_grad():
        module.core.scale.normal_()
    scale = torch.nn.functional.softplus(module.core.scale)
    q, k, _ = (p.unflatten(-1, (2, 16)).transpose(1, 2) for p in module.qkv(tokens).split(32, dim=-1))
    torch.testing.assert_close(module.weights(tokens, (7, 5)), ops.focused_weights(q / scale, k / scale))


def test_softmax_takes_the_local_residual_of_inline():
    module = create_attention("softmax", 32, 2, local_residual=True)
    plain = create_attention("softmax", 32, 2)
    missing, unexpected = plain.load_state_dict(module.state_dict(), strict=False)
    assert missing == []
    assert all(key.startswith("local.") for key in unexpected)
    tokens = x()
    difference = module(tokens, (7, 5)) - plain(tokens, (7, 5))
    v = plain.qkv(tokens)[..., 64:].unflatten(-1, (2, 16)).transpose(1, 2)
    local = module.local(tokens, v, (7, 5)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(difference, local @ plain.proj.weight.T, rtol=1e-4, atol=1e-6)


def test_inline_feature_maps_change_the_weights():
    maps = {"identity": lambda t: t, "relu": torch.relu, "exp": lambda t: torch.exp(0.2 * t)}
    maps["leaky_relu"] = lambda t: torch.where(t > 0, t, 0.01 * t)
    tokens = x()
    for feature_map, phi in maps.items():
        module = create_attention("inline", 32, 2, feature_map=feature_map)
        q, k, _ = (p.unflatten(-1, (2, 16)).transpose(1, 2) for p in module.qkv(tokens).split(32, dim=-1))
        scores = phi(q) @ phi(k).mT / 4 / 35
        expected = scores - scores.mean(-1, keepdim=True) + 1 / 35
        torch.testing.assert_close(module.weights(tokens, (7, 5)), expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="feature_map must be one of exp, identity, leaky_relu, relu; got 'elu'"):
        create_attention("inline", 32, 2, feature_map="elu")


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


def test_linformer_names_its_maximum():
    module = create_attention("linformer", 32, 2, max_tokens=30, rank=4)
    assert module(x(30), (6, 5)).shape == (2, 30, 32)
    with pytest.raises(ValueError, match="covers at most 30 tokens, got 35"):
        module(x(35), (7, 5))


def test_weights_of_hydra_have_a_map_for_each_channel():
    assert create_attention("hydra", 32, 2).weights(x(), (7, 5)).shape == (2, 32, 35, 35)


@pytest.mark.parametrize("name", ["soft", "softpp", "inline"])
def test_one_compiled_graph_serves_all_image_sizes(name):
    torch.compiler.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph.forward

    module = create_attention(name, 32, 2).eval()

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def attend(maps: torch.Tensor) -> torch.Tensor:
        return module(maps.flatten(2).mT, (maps.shape[2], maps.shape[3]))

    for height, width in ((16, 20), (24, 12), (31, 45)):
        maps = torch.randn(1, 32, height, width)
        torch.testing.assert_close(attend(maps), module(maps.flatten(2).mT, (height, width)), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ["soft", "softpp", "inline"])
def test_exports_with_dynamic_image_sizes(name):
    class OnMaps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = create_attention(name, 32, 2)

        def forward(self, maps: torch.Tensor) -> torch.Tensor:
            return self.attention(maps.flatten(2).mT, (maps.shape[2], maps.shape[3]))

    module = OnMaps().eval()
    height, width = torch.export.Dim("height", min=8, max=512), torch.export.Dim("width", min=8, max=512)
    program = torch.export.export(
        module, (torch.randn(1, 32, 16, 20),), dynamic_shapes=({2: height, 3: width},), strict=False
    )
    for size in ((16, 20), (40, 9), (63, 63)):
        maps = torch.randn(1, 32, *size)
        torch.testing.assert_close(program.module()(maps), module(maps), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ratio", [8, 4])
def test_exports_the_ratios_of_real_models_at_all_sizes(ratio):
    class OnMaps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = create_attention("softpp", 32, 2, ratio=ratio)

        def forward(self, maps: torch.Tensor) -> torch.Tensor:
            return self.attention(maps.flatten(2).mT, (maps.shape[2], maps.shape[3]))

    module, auto = OnMaps().eval(), torch.export.Dim.AUTO
    program = torch.export.export(module, (torch.randn(1, 32, 67, 75),), dynamic_shapes=({2: auto, 3: auto},))
    # below, at and above the 7 x 7 landmarks of the paper
    for size in ((40, 60), (56, 56), (9, 100), (120, 99)):
        maps = torch.randn(1, 32, *size)
        torch.testing.assert_close(program.module()(maps), module(maps), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(ATTENTIONS))
@pytest.mark.parametrize("masked", [False, True])
def test_an_empty_batch_passes_through(name, masked):
    mask = torch.ones(0, 35, dtype=torch.bool) if masked else None
    assert create_attention(name, 32, 2)(torch.randn(0, 35, 32), (7, 5), mask).shape == (0, 35, 32)


@pytest.mark.parametrize("name", ["performer", "reformer", "linformer", "focused"])
def test_what_was_built_on_the_meta_device_can_be_initialised(name):
    with torch.device("meta"):
        module = create_attention(name, 32, 2)
    module = module.to_empty(device="cpu")
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert module.eval()(x(), (7, 5)).isfinite().all()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("soft", {"ratio": 2.5}),
        ("soft", {"ratio": "22"}),
        ("soft", {"ratio": None}),
        ("soft", {"max_landmarks": True}),
        ("soft", {"max_landmarks": (7.0, 7.0)}),
        ("soft", {"iterations": 2.5}),
        ("soft", {"iterations": True}),
        ("soft", {"ridge": "0.1"}),
        ("soft", {"ridge": float("inf")}),
        ("soft", {"value_conv": 3.0}),
        ("soft", {"num_prefix_tokens": 1.5}),
        ("linformer", {"rank": 4.0}),
        ("reformer", {"bucket_size": 4.5}),
        ("reformer", {"rounds": 2.0}),
        ("focused", {"power": "3"}),
        ("performer", {"seed": "a"}),
    ],
)
def test_options_of_the_wrong_kind_are_named(name, options):
    (option,) = options
    with pytest.raises(ValueError, match=option.replace("value_conv", "value convolution")):
        create_attention(name, 32, 2, **options)


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["soft", "softpp", "inline"])
def test_inductor_gives_the_same_forward_and_backward(name):
    """The default backend, which needs a C++ compiler."""
    torch.compiler.reset()
    module = create_attention(name, 32, 2)
    compiled = torch.compile(module, fullgraph=True)
    tokens = x(196).requires_grad_()
    eager, graph = module(tokens, (14, 14)), compiled(tokens, (14, 14))
    torch.testing.assert_close(graph, eager, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(out.square().sum(), tokens)[0] for out in (eager, graph)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-3, atol=1e-4)
