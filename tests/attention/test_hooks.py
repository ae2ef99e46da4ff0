import copy
import textwrap

import pytest
import timm
import torch
from torch import nn

import softline  # noqa: F401
from softline.attention import (
    ATTENTIONS,
    create_attention,
    find_attentions,
    hooks,
    record_attention,
    replace_attended,
    replace_weights,
    uncapped_landmarks,
    without_attention,
)
from softline.backbones.cswin import cswin_backbone

# every class that attends: MultiHeadAttention, spatial reduction, windows with and without a position bias, strips
FAMILIES = [
    ("softpp_micro", {}),
    ("inline_deit_tiny", {"depth": 2}),
    ("inline_pvt_tiny", {"attention": "softmax", "depths": (1, 1, 1, 1)}),
    ("inline_swin_tiny", {"window_size": 7, "stage_types": "ISIS", "depths": (2, 2, 2, 1)}),
    ("inline_cswin_tiny", {"stage_types": "ISSS", "depths": (1, 1, 1, 1)}),
]


def build(name, **options):
    return timm.create_model(name, num_classes=4, img_size=64, **options).eval()


def halved(weights, call):
    return weights / 2


@pytest.fixture(params=FAMILIES, ids=lambda family: family[0])
def model(request):
    name, options = request.param
    return build(name, **options)


@pytest.fixture
def images():
    # neither square nor a multiple of the windows
    return torch.randn(2, 3, 72, 56)


@torch.no_grad()
def test_outputs_are_bitwise_equal_before_and_after(model, images):
    before = model(images)
    for context in (without_attention(model), replace_weights(model, halved)):
        with context:
            assert not torch.equal(model(images), before)
        assert torch.equal(model(images), before)
    with record_attention(model):
        assert torch.equal(model(images), before)
    assert torch.equal(model(images), before)


@torch.no_grad()
def test_a_models_own_weights_give_its_output(model, images):
    model, images = model.double(), images.double()
    with replace_weights(model, lambda weights, call: weights):
        output = model(images)
    torch.testing.assert_close(output, model(images))


@pytest.mark.parametrize("name", ATTENTIONS)
@torch.no_grad()
def test_replaced_weights_are_mixed_with_the_masked_values(name):
    module, x, mask = create_attention(name, 32, 2).eval(), torch.randn(2, 20, 32), torch.rand(2, 20) < 0.7
    with replace_weights(module, halved):
        output = module(x, (4, 5), mask)
    expected = module.mix(module.weights(x, (4, 5), mask) / 2, x, (4, 5), mask)
    assert torch.equal(output, expected)


@torch.no_grad()
def test_without_attention_no_token_sees_another():
    # PVT and DeiT with softmax have no convolutions in their attention
    for name, options in (FAMILIES[1], FAMILIES[2]):
        model = build(name, **{**options, "attention": "softmax"})
        images = torch.randn(1, 3, 64, 64)
        changed = images.clone()
        changed[..., :32, :32] += 1
        with without_attention(model):
            difference = model.forward_features(images) - model.forward_features(changed)
        tokens = difference[0, model.num_prefix_tokens :].abs().amax(-1)
        side = int(len(tokens) ** 0.5)
        assert tokens.reshape(side, side)[: side // 2, : side // 2].all()
        assert tokens.count_nonzero() == len(tokens) // 4


@torch.no_grad()
def test_switching_off_reaches_every_block(model, images):
    blocks = sum(len(stage.blocks) for stage in model.stages)
    seen = []
    with replace_attended(model, lambda values, call: seen.append(call) or torch.zeros_like(values)):
        zeros = model(images)
    assert len(seen) == blocks == len(find_attentions(model))
    with without_attention(model):
        assert torch.equal(model(images), zeros)


@torch.no_grad()
def test_attended_values_can_be_any_function_of_the_values():
    module, x = create_attention("inline", 32, 2).eval(), torch.randn(2, 20, 32)
    even = torch.full((2, 2, 20, 20), 1 / 20)
    with replace_attended(module, lambda values, call: values.mean(-2, keepdim=True).expand_as(values)):
        output = module(x, (4, 5))
    torch.testing.assert_close(output, module.mix(even, x, (4, 5)))


def test_gradients_flow_through_what_is_replaced():
    module, x = create_attention("softmax", 32, 2), torch.randn(1, 9, 32)
    with replace_weights(module, lambda weights, call: weights * gate):
        gate = torch.ones(1, 2, 1, 1, requires_grad=True)
        module(x, (3, 3)).sum().backward()
    assert gate.grad.abs().min() > 0
    assert module.qkv.weight.grad.abs().min() > 0


@torch.no_grad()
def test_the_innermost_context_counts_and_each_is_restored():
    model, images = build("softpp_micro"), torch.randn(1, 3, 32, 32)
    before = model(images)
    with without_attention(model):
        off = model(images)
        with replace_weights(model, halved), record_attention(model) as calls:
            half = model(images)
        assert len(calls) == 5
        assert torch.equal(model(images), off)
    with replace_weights(model, halved):
        assert torch.equal(model(images), half)
    assert torch.equal(model(images), before)


@torch.no_grad()
def test_modules_are_restored_after_an_exception():
    model, images = build("softpp_micro"), torch.randn(1, 3, 32, 32)
    before = model(images)
    for context in (
        record_attention(model),
        without_attention(model),
        replace_weights(model, halved),
        uncapped_landmarks(model),
    ):
        with pytest.raises(ZeroDivisionError), context as calls:
            raise ZeroDivisionError
        assert torch.equal(model(images), before)
        assert not calls


@torch.no_grad()
def test_a_copy_made_inside_uses_its_own_weights():
    module, x = create_attention("softmax", 32, 2).eval(), torch.randn(1, 9, 32)
    with replace_weights(module, lambda weights, call: weights):
        other = copy.deepcopy(module)
        other.qkv.weight.mul_(3)
        output = other(x, (3, 3))
    module.qkv.weight.mul_(3)
    torch.testing.assert_close(output, module(x, (3, 3)))


# recording


@torch.no_grad()
def test_calls_are_recorded_in_order_with_what_was_given(model, images):
    with record_attention(model) as calls:
        model(images)
    assert [call.module for call in calls] == list(find_attentions(model).values())
    for call in calls:
        chosen = torch.tensor([call.x.shape[1] - 1, 0])
        torch.testing.assert_close(call.rows()(chosen), call.weights()[:, :, chosen])


@torch.no_grad()
def test_a_call_gives_weights_rows_and_factors_of_the_masked_input():
    module, x, mask = create_attention("softpp", 32, 2).eval(), torch.randn(2, 20, 32), torch.rand(2, 20) < 0.7
    with record_attention(module) as calls:
        output = module(x=x, grid_size=(4, 5), key_mask=mask)
        module(x, (4, 5))
    first, second = calls
    assert (first.x is x, first.grid_size, first.mask is mask, second.mask) == (True, (4, 5), True, None)
    left, middle, right = first.factors()
    torch.testing.assert_close(left @ middle @ right, first.weights())
    torch.testing.assert_close(module.mix(first.weights(), x, (4, 5), mask), output, rtol=1e-4, atol=1e-5)
    assert torch.equal(first.operands()["key_mask"], mask)


@torch.no_grad()
def test_attention_inside_windows_can_be_recorded_too():
    model = build("inline_swin_tiny", window_size=7, stage_types="IIII", depths=(1, 1, 1, 1))
    inner = model.stages[0].blocks[0].attn.attention
    with record_attention([inner]) as calls:
        model(torch.randn(1, 3, 64, 64))
    # 16 x 16 tokens in windows of 7 x 7, padded to 21 x 21
    assert calls[0].x.shape[:2] == (9, 49)
    assert int(calls[0].mask.sum()) == 16 * 16


class Even(nn.Module):
    """An attention of another package, which has weights alone."""

    def forward(self, x, grid_size, key_mask=None):
        return x.mean(1, keepdim=True).expand_as(x)

    def weights(self, x, grid_size, key_mask=None):
        return x.new_full((len(x), 3, x.shape[1], x.shape[1]), 1 / x.shape[1])


def test_an_attention_of_another_package_is_recorded_but_not_replaced():
    module = Even()
    with record_attention(nn.Sequential(module, nn.Identity())[:1]) as calls:
        module(torch.randn(1, 4, 8), (2, 2))
    assert torch.equal(calls[0].rows()(torch.tensor([3])), torch.full((1, 3, 1, 4), 1 / 4))
    with pytest.raises(ValueError, match=r"Even has no factors\(\)"):
        calls[0].factors()
    with (
        pytest.raises(ValueError, match="the attention of Even cannot be replaced: it has no `override`"),
        without_attention(module),
    ):
        pass


# landmarks


@torch.no_grad()
def test_landmarks_without_a_cap_are_those_of_the_fixed_ratio():
    capped, fixed = (create_attention("softpp", 32, 2, ratio=2, max_landmarks=cap).eval() for cap in ((3, 3), None))
    fixed.load_state_dict(capped.state_dict())
    x = torch.randn(1, 144, 32)
    before = capped(x, (12, 12))
    with uncapped_landmarks(capped):
        assert torch.equal(capped(x, (12, 12)), fixed(x, (12, 12)))
    assert torch.equal(capped(x, (12, 12)), before)
    assert not torch.allclose(before, fixed(x, (12, 12)))


# mistakes and documentation


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="there is no attention module in Linear"), without_attention(nn.Linear(1, 1)):
        pass
    with pytest.raises(ValueError, match="there is no attention module in an empty list"), record_attention([]):
        pass
    with (
        pytest.raises(ValueError, match="there are no landmarks in these modules"),
        uncapped_landmarks(create_attention("inline", 32, 2)),
    ):
        pass
    module, x = create_attention("inline", 32, 2), torch.randn(1, 9, 32)
    with (
        replace_attended(module, lambda values, call: values[:, :, :4]),
        pytest.raises(
            ValueError, match=r"attended values must have the shape of the values \(1, 2, 9, 16\), got \(1, 2, 4, 16\)"
        ),
    ):
        module(x, (3, 3))
    with (
        replace_weights(module, lambda weights, call: weights[:, :, :4]),
        pytest.raises(
            ValueError, match=r"weights must have shape \[B, heads, N, N\] = \(1, 2, 9, 9\), got \(1, 2, 4, 9\)"
        ),
    ):
        module(x, (3, 3))


def test_the_example_of_the_module_runs():
    lines = hooks.__doc__.splitlines()
    code = textwrap.dedent("\n".join(line for line in lines if not line or line.startswith("    ")))
    found = {}
    exec(code, found)
    assert found["first"].shape == (1, 1, 64, 64)
    assert found["changed"].shape == found["ablated"].shape == (1, 1000)


# torch.compile


@torch.no_grad()
def test_a_compiled_model_follows_the_contexts_in_one_graph():
    # InLine in one stage, softmax inside strips in the other
    options = {"embed_dim": 64, "depths": (1, 1), "num_heads": (2, 4), "stage_types": "IS", "strips": (2, 2)}
    model, images = cswin_backbone(**options, num_classes=4).eval(), torch.randn(1, 3, 64, 64)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    before = compiled(images)
    torch.testing.assert_close(before, model(images))
    with without_attention(model):
        torch.testing.assert_close(compiled(images), model(images))
        assert not torch.allclose(compiled(images), before, atol=1e-3)
    assert torch.equal(compiled(images), before)
