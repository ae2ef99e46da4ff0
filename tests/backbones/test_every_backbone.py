"""What holds for every registered backbone; a new one is picked up by registering it."""

import copy

import pytest
import timm
import torch
from timm.models import group_parameters
from torch import nn

from softline import ATTENTIONS
from softline.backbones import MODEL_NAMES
from softline.layers.bands import CPU_BAND_NUMBERS, shrunk_bands

MICRO = [name for name in MODEL_NAMES if name.endswith("_micro")]
# narrow and shallow versions of every registered architecture would not be what is registered: the real ones on small
# images, largest sizes of a family left to `make test-slow`
SMALLEST = [name for name in MODEL_NAMES if name.endswith(("_micro", "_tiny"))]
LARGER = [name for name in MODEL_NAMES if name not in SMALLEST]
# one of each file, as small as it can be
FAMILIES = {
    "softpp_micro": {"depths": (1, 1, 1, 1)},
    "inline_deit_tiny": {"depth": 2, "embed_dim": 16, "num_heads": 2},
    "inline_pvt_tiny": {"depths": (1, 1, 1, 1), "embed_dims": (8, 8, 8, 8), "num_heads": (1, 1, 1, 1)},
    "inline_swin_tiny": {"depths": (1, 1, 1, 2), "embed_dim": 8, "num_heads": (1, 1, 1, 1), "stage_types": "IIII"},
    "inline_cswin_tiny": {"depths": (1, 1, 1, 1), "embed_dim": 8, "num_heads": (2, 2, 2, 2), "stage_types": "IIII"},
}

every_micro = pytest.mark.parametrize("name", MICRO)
every_name = pytest.mark.parametrize("name", MODEL_NAMES)


def build(name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **options).eval()


@pytest.fixture(scope="module", params=[*SMALLEST, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER)])
def model(request) -> nn.Module:
    """Each registered model in turn, built once. Not to be changed."""
    return build(request.param)


@every_name
def test_builds_on_the_meta_device_with_timms_configuration(name, described):
    model = described(name)
    assert all(parameter.is_meta for parameter in model.parameters())
    cfg = model.default_cfg
    assert cfg["architecture"] == name
    assert dict(model.named_modules())[cfg["classifier"]] is model.get_classifier()
    assert dict(model.named_modules())[cfg["first_conv"]].in_channels == 3


@every_name
def test_optimizer_groups_cover_every_parameter(name, described):
    model = described(name)
    names = {parameter for parameter, _ in model.named_parameters()}
    assert model.no_weight_decay() <= names
    for coarse in (False, True):
        groups = group_parameters(model, model.group_matcher(coarse=coarse))
        assert {parameter for group in groups.values() for parameter in group} == names


def test_forward_and_backward_at_any_image_size(model):
    for height, width in ((32, 32), (64, 96), (75, 47)):
        x = torch.randn(1, 3, height, width, requires_grad=True)
        logits = model(x)
        assert logits.shape == (1, 1000)
        logits.square().sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    model.zero_grad()


@torch.no_grad()
def test_the_classifier_can_be_replaced_and_removed(model):
    model, x = copy.deepcopy(model), torch.randn(2, 3, 64, 64)
    model.reset_classifier(11)
    assert model(x).shape == (2, 11)
    assert model.get_classifier().out_features == model.num_classes == 11
    model.reset_classifier(0)
    assert model(x).shape == (2, model.num_features)
    assert model.forward_head(model.forward_features(x), pre_logits=True).shape == (2, model.head_hidden_size)
    model.reset_classifier(0, "")
    assert model(x).ndim == 3


@torch.no_grad()
def test_state_dict_restores_the_output(model):
    # without any numbers of its own
    second = timm.create_model(model.default_cfg["architecture"], device="meta").to_empty(device="cpu").eval()
    second.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(model(x), second(x))


@torch.no_grad()
def test_a_sample_does_not_depend_on_its_batch(model):
    x = torch.randn(3, 3, 64, 64)
    x[1] = 1
    x[2] *= 50
    alone = torch.cat([model(image[None]) for image in x])
    torch.testing.assert_close(model(x), alone, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_finite_under_bfloat16_autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(1, 3, 64, 96)).isfinite().all()


@pytest.mark.parametrize("name", SMALLEST)
@torch.no_grad()
def test_features_have_the_strides_and_channels_that_timm_is_told(name):
    # the numbers do not matter, and drawing them takes longest
    model = timm.create_model(name, features_only=True, device="meta").to_empty(device="cpu").eval()
    for height, width in ((64, 96), (75, 47)):
        features = model(torch.zeros(1, 3, height, width))
        assert len(features) == len(model.feature_info.channels())
        for feature, channels, stride in zip(
            features, model.feature_info.channels(), model.feature_info.reduction(), strict=True
        ):
            assert feature.shape == (1, channels, -(-height // stride), -(-width // stride))


@every_micro
def test_intermediates_agree_with_the_features_and_the_output(name):
    model, x = build(name), torch.randn(2, 3, 64, 48)
    final, intermediates = model.forward_intermediates(x)
    torch.testing.assert_close(final, model.forward_features(x))
    torch.testing.assert_close(model.forward_head(final), model(x))
    only = model.forward_intermediates(x, indices=[1, 2], intermediates_only=True)
    for actual, expected in zip(only, intermediates[1:3], strict=True):
        torch.testing.assert_close(actual, expected)
    tokens = model.forward_intermediates(x, indices=1, output_fmt="NLC", intermediates_only=True)[0]
    torch.testing.assert_close(tokens.mT.unflatten(-1, intermediates[-1].shape[2:]), intermediates[-1])
    early, first = model.forward_intermediates(x, indices=[0], stop_early=True)
    torch.testing.assert_close(first[0], intermediates[0])
    assert early.shape[-1] == first[0].shape[1]
    with pytest.raises(ValueError, match="output_fmt must be NCHW or NLC, got 'NHWC'"):
        model.forward_intermediates(x, output_fmt="NHWC")


@pytest.mark.parametrize(
    ("name", "options"), [("softpp_micro", {"attention_options": {"iterations": 1}}), ("inline_micro", {})]
)
def test_compiles_without_graph_breaks(name, options):
    """The whole network by Dynamo alone; what else a compiler does is tested for each attention."""
    torch.compiler.reset()
    model, x = build(name, depths=(1, 1, 1, 1), **options), torch.randn(2, 3, 32, 48)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    out = compiled(x)
    torch.testing.assert_close(out, model(x), rtol=1e-3, atol=1e-4)
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@every_micro
def test_gradient_checkpointing_changes_nothing(name):
    model, x = build(name).train(), torch.randn(2, 3, 32, 32)
    expected = model(x)
    model.set_grad_checkpointing()
    actual = model(x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    actual.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@every_micro
def test_other_channels_devices_and_dtypes(name):
    model = build(name, in_chans=5, dtype=torch.float64)
    assert next(model.parameters()).dtype == torch.float64
    assert model(torch.randn(1, 5, 32, 32, dtype=torch.float64)).shape == (1, 1000)
    with pytest.raises(ValueError, match=r"images must have shape \[B, 5, H, W\], got \(1, 3, 32, 32\)"):
        model(torch.randn(1, 3, 32, 32, dtype=torch.float64))


@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_every_family_takes_every_attention(attention):
    for name, options in FAMILIES.items():
        model = build(name, attention=attention, img_size=64, num_classes=3, **options)
        found = [module.operator.name for module in model.modules() if hasattr(module, "operator")]
        blocks = sum(len(stage.blocks) for stage in model.stages)
        # the last stage of SOFT is softmax unless told otherwise, and softmax of PVT, Swin and CSwin is their own
        assert set(found) <= {attention, "softmax"}, name
        assert attention == "softmax" or found.count(attention) >= blocks - 1, name
        assert model(torch.randn(1, 3, 64, 64)).isfinite().all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("softpp_micro", {"depths": (1, 1, 2)}, "depths must have a value for each of 4 stages"),
        ("softpp_micro", {"depths": (1, 1, 2, 1, 7)}, "depths must have a value for each of 4 stages"),
        ("softpp_micro", {"num_heads": (1, 2, 3)}, "num_heads must have a value for each of 4 stages"),
        ("softpp_micro", {"stage4": "hard"}, "stage4 must be one of soft, softmax; got 'hard'"),
        ("inline_micro", {"mlp_ratios": (4,)}, "mlp_ratios must have a value for each of 4 stages"),
        ("inline_swin_tiny", {"softmax_windows": (7, 7)}, "softmax_windows must have a value for each of 4 stages"),
        ("inline_swin_tiny", {"window_size": 0}, "window_size must be at least 1, got 0"),
        ("inline_swin_tiny", {"stage_types": "IIM9S"}, "asks for 9 blocks of a stage that has 6"),
        ("inline_cswin_tiny", {"strips": (1, 2)}, "strips must have a value for each of 4 stages"),
        ("softpp_micro", {"num_classes": -1}, "num_classes must be at least 0, got -1"),
        ("softpp_micro", {"in_chans": 0}, "in_chans must be at least 1, got 0"),
        ("softpp_micro", {"attention_options": {"nonsense": 1}}, "an option of 'softpp' must be one of"),
        (
            "inline_micro",
            {"embed_dims": (30, 64, 96, 128), "num_heads": (4, 2, 3, 4)},
            "must be divisible by num_heads",
        ),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model(name, **options)


def test_each_stage_may_have_its_own_attention():
    model = build("softpp_micro", attention=("inline", "inline", "softmax", "linear"))
    operators = [stage.blocks[0].attn.operator.name for stage in model.stages]
    assert operators == ["inline", "inline", "softmax", "linear"]
    with pytest.raises(ValueError, match="a name for each of 4 stages"):
        build("softpp_micro", attention=("inline", "inline"))
    with pytest.raises(ValueError, match=r"attention must be one of .*; got 'sofpp'; did you mean 'softpp'"):
        build("softpp_micro", attention="sofpp")


@every_micro
def test_saved_for_the_hub_and_loaded_from_the_directory(name, tmp_path):
    model, x = build(name, num_classes=4), torch.randn(1, 3, 32, 32)
    timm.models.save_for_hf(model, str(tmp_path / "model"), safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True).eval()
    torch.testing.assert_close(again(x), model(x))


@every_micro
def test_another_native_image_size_keeps_the_output(name):
    model, x = build(name), torch.randn(1, 3, 64, 96)
    expected = model(x)
    model.set_input_size((64, 96))
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_patches_of_soft_may_be_embedded_without_overlap():
    model = build("softpp_micro", overlap=False, features_only=True)
    convolutions = [stage.embed.layers[0] for stage in model.model.stages]
    assert [conv.kernel_size for conv in convolutions] == [conv.stride for conv in convolutions]
    shapes = [feature.shape[2:] for feature in model(torch.randn(1, 3, 75, 47))]
    assert shapes == [(19, 12), (10, 6), (5, 3), (3, 2)]


def test_images_that_are_too_small_are_named():
    model = build("soft_tiny")
    with pytest.raises(ValueError, match="images must be at least 29x29 pixels, got 28x64"):
        model(torch.randn(1, 3, 28, 64))


def test_prefix_tokens_can_be_had_with_the_features():
    model, x = build("softpp_micro"), torch.randn(1, 3, 64, 64)
    *_, last = model.forward_intermediates(x, return_prefix_tokens=True, intermediates_only=True)
    assert last[0].shape == (1, 128, 2, 2)
    assert last[1].shape == (1, 1, 128)


def test_no_pixel_is_left_out_of_odd_images():
    model = build("inline_cswin_tiny")
    x = torch.randn(1, 3, 66, 98, requires_grad=True)
    model(x).square().sum().backward()
    assert x.grad is not None
    assert (x.grad[:, :, -1] != 0).any()
    assert (x.grad[:, :, :, -1] != 0).any()


def test_a_pool_needs_its_token():
    model = build("inline_micro")
    with pytest.raises(ValueError, match='global_pool="token" needs a class token'):
        model.reset_classifier(3, "token")


@pytest.mark.parametrize("name", ["softpp_micro", "inline_micro"])
def test_per_sample_gradients_and_ensembles_by_vmap(name):
    model = timm.create_model(name, num_classes=3).eval()
    weights = {key: value.detach() for key, value in model.named_parameters()}
    buffers = dict(model.named_buffers())
    images = torch.randn(2, 3, 32, 32)

    def loss(weights, image):
        return torch.func.functional_call(model, {**weights, **buffers}, (image[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, images)
    alone = torch.func.grad(loss)(weights, images[1])
    for key, gradient in alone.items():
        torch.testing.assert_close(each[key][1], gradient, rtol=1e-3, atol=1e-5 * max(gradient.abs().max().item(), 1))
    pair = {key: torch.stack([value, 1.1 * value]) for key, value in weights.items()}
    with torch.no_grad():
        both = torch.func.vmap(lambda w: torch.func.functional_call(model, {**w, **buffers}, (images,)))(pair)
        torch.testing.assert_close(both[0], model(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["softpp_micro", "inline_micro", "inline_swin_tiny"])
def test_hooks_see_the_same_calls_with_and_without_gradients_and_nothing_they_saw_changes(name):
    model = timm.create_model(name, num_classes=3, **({"depths": (1, 1, 1, 1)} if "swin" in name else {})).eval()
    calls: dict[bool, list] = {True: [], False: []}
    for key, module in model.named_modules():

        def see(module, inputs, output, key=key):
            seen = output[0] if isinstance(output, tuple) else output
            if isinstance(seen, torch.Tensor):
                calls[torch.is_grad_enabled()].append((key, seen, seen.detach().clone()))

        module.register_forward_hook(see)
    size = 64 if "swin" in name else 96
    image = torch.randn(1, 3, size, size)
    model(image)
    with torch.no_grad():
        model(image)
    assert [(key, seen.shape) for key, seen, _ in calls[True]] == [(key, seen.shape) for key, seen, _ in calls[False]]
    # a ReLU in place changes what the norm before it gave, as in every network of convolutions
    changed = {key for key, seen, then in calls[False] if not torch.equal(seen, then)}
    assert all(".embed." in key for key in changed)


@pytest.mark.parametrize("name", FAMILIES)
def test_large_images_are_computed_in_bands_with_the_same_result(name):
    model = build(name, **FAMILIES[name]).double()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(std=0.1)
            part.running_var.uniform_(0.5, 2)
    # DeiT's attention has a class token, and no image is so large
    images = torch.randn(2, 3, *((224, 224) if "deit" in name else (190, 133))).double()
    with torch.no_grad():
        expected, maps = model(images), model.forward_intermediates(images, intermediates_only=True)
        with shrunk_bands(2**11 / CPU_BAND_NUMBERS):
            found, in_bands = model(images), model.forward_intermediates(images, intermediates_only=True)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-11)
    for each, wanted in zip(in_bands, maps, strict=True):
        assert torch.allclose(each, wanted, rtol=1e-9, atol=1e-9)
