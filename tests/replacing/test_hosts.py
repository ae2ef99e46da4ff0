"""What the models of other libraries go through: threads, checkpoints, frozen weights, changed parts."""

import copy
import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import timm
import torch
from timm.layers import DiffAttention
from timm.models.vision_transformer import Attention, ParallelScalingBlock, VisionTransformer
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import softline
from softline.attention import record_attention
from softline.errors import UserError
from softline.layers.bands import CPU_BAND_NUMBERS, shrunk_bands
from softline.replacing.hosted import HostedTokens

SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3, "img_size": 64, "num_classes": 7, "dynamic_img_size": True}


def vit(**options) -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer(**{**SMALL, **options}).eval()


def dinov3() -> nn.Module:
    return timm.create_model("vit_small_patch16_dinov3", **SMALL).eval()


@pytest.mark.parametrize("make", [vit, dinov3])
def test_threads_that_run_one_model_keep_their_own_grids(make):
    model = softline.replace_attention(make(), "softpp").double()
    # as many patches each
    images = [torch.randn(1, 3, *size, dtype=torch.float64) for size in ((64, 64), (32, 128))]
    with torch.no_grad():
        expected = [model(image) for image in images]

        def run(index):
            with torch.no_grad():
                return index, model(images[index])

        with ThreadPoolExecutor(4) as pool:
            for index, out in pool.map(run, [number % 2 for number in range(40)]):
                torch.testing.assert_close(out, expected[index])


def test_crops_of_two_sizes_are_recomputed_in_one_backward_pass():
    gradients = []
    for checkpointing in (False, True):
        model = softline.replace_attention(vit(), "inline").double().train()
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(1)
        images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
        (model(images).square().sum() + model(images[..., :32, :48]).square().sum()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_recorded_weights_keep_the_rotation_of_their_call():
    model = softline.replace_attention(dinov3(), "inline")
    with torch.no_grad(), record_attention(model) as calls:
        model(torch.randn(1, 3, 64, 64))
        before = calls[0].weights()
        model(torch.randn(1, 3, 32, 128))
        model(torch.randn(1, 3, 96, 96))
        torch.testing.assert_close(calls[0].weights(), before)


def test_every_parameter_of_shared_queries_and_keys_learns():
    """Otherwise DDP would wait for its gradient."""
    model = softline.replace_attention(vit(qk_norm=True), "softpp").train()
    model(torch.randn(2, 3, 64, 64)).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("attention", ["softmax", "inline", "softpp"])
@pytest.mark.parametrize("make", [vit, lambda: timm.create_model("eva02_tiny_patch14_224", **SMALL, patch_size=16)])
def test_frozen_weights_stay_frozen_and_new_ones_learn(make, attention):
    model = softline.replace_attention(make().requires_grad_(False), attention)
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not any(".qkv." in name or ".proj." in name for name in learning)
    assert bool(learning) == (attention != "softmax")
    trainable = softline.replace_attention(make(), attention)
    assert all(parameter.requires_grad for parameter in trainable.parameters())


class Adapted(nn.Linear):
    """A linear layer that adds something."""

    def forward(self, x):
        return super().forward(x) + 1


class OwnAttention(Attention):
    def forward(self, x, **others):
        return 2 * super().forward(x, **others)


def changed(change):
    model = vit()
    change(model.blocks[1].attn)
    return model


def with_attention(attention):
    model = vit()
    model.blocks[1].attn = attention
    return model


def other_scale(attention):
    attention.scale, attention.fused_attn = 2 * attention.scale, False


REFUSED = {
    "adapted projection": (
        lambda: changed(lambda attention: setattr(attention, "qkv", Adapted(48, 144))),
        "its projection is of class Adapted, not torch's Linear",
    ),
    "parametrized projection": (
        lambda: changed(lambda attention: weight_norm(attention.qkv)),
        "of class ParametrizedLinear",
    ),
    "hooks": (lambda: changed(lambda attention: attention.register_forward_hook(print)), "Attention has hooks"),
    "other scale": (lambda: changed(other_scale), "it scales scores by 0.5, softline's attentions by .*0.25"),
    "subclass": (lambda: with_attention(OwnAttention(48, 3, qkv_bias=True)), "it is of class OwnAttention"),
    "unknown class": (
        lambda: with_attention(DiffAttention(48, 3)),
        "of class DiffAttention, .* It supports timm",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_lost_is_refused_and_nothing_is_changed(case):
    make, message = REFUSED[case]
    model = make()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(UserError, match=rf"blocks\.1\.attn cannot be replaced: .*{message}"):
        softline.replace_attention(model, "softmax")
    assert {name: type(module) for name, module in model.named_modules()} == before
    # the others can be chosen
    softline.replace_attention(model, "softmax", layers=0)
    assert isinstance(model.blocks[0].attn, HostedTokens)


def test_blocks_that_share_an_attention_share_the_new_one():
    model = vit()
    model.blocks[1].attn = model.blocks[0].attn
    images = torch.randn(2, 3, 64, 64)
    expected = model(images)
    softline.replace_attention(model, "softmax")
    assert model.blocks[1].attn is model.blocks[0].attn
    torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)


def test_a_changed_patch_embedding_is_noticed():
    model = softline.replace_attention(vit(), "softmax")
    model(torch.randn(1, 3, 64, 64))
    model.set_input_size(patch_size=8)
    images = torch.randn(1, 3, 64, 64)
    with pytest.raises(UserError, match=r"none with 64 patches is known: .* replace the attention again"):
        model(images)
    assert softline.replace_attention(model, "softmax")(images).shape == (1, 7)


def test_models_with_an_attention_layer_are_pickled_and_replaced():
    layer = softline.attention_layer("inline", (4, 4))
    model = vit(attn_layer=layer, dynamic_img_size=False)
    images = torch.randn(2, 3, 64, 64)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(images), model(images))
    linear = softline.replace_attention(copy.deepcopy(model), "linear")
    assert linear.blocks[0].attn.name == "linear"
    assert linear.blocks[0].attn.grid.fixed is None
    assert linear(images).shape == (2, 7)
    with pytest.raises(UserError, match="attention must be one of"):
        softline.attention_layer("none", (4, 4))
    with pytest.raises(UserError, match=r"inline attention has the options .*; got 'wings'"):
        softline.attention_layer("inline", (4, 4), wings=2)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.short, self.long = vit(depth=2), vit(depth=3)


def test_negative_indices_count_from_the_last_block_of_each_transformer():
    towers = softline.replace_attention(Towers(), "inline", layers=-1)
    hosted = [name for name, module in towers.named_modules() if isinstance(module, HostedTokens)]
    assert hosted == ["short.blocks.1.attn", "long.blocks.2.attn"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": []}, "layers must name at least one block"),
        ({"layers": [None]}, "layers must be indices of blocks or patterns, got None"),
        ({"layers": 2}, "2 is not an index from -2 to 1"),
        ({"options": [1]}, "options must be a dictionary, got a list"),
        ({"options": {"num_prefix_tokens": 2}}, "got 'num_prefix_tokens'"),
        ({"options": {"dim": 2}}, "got 'dim'"),
        ({"options": {"qkv_bias": False}}, "got 'qkv_bias'"),
    ],
)
def test_mistakes_are_named(given, message):
    with pytest.raises(UserError, match=message):
        softline.replace_attention(vit(), "inline", **given)


def test_indices_may_be_numpys_and_a_model_has_to_be_one():
    model = softline.replace_attention(vit(), "inline", layers=[np.int64(1)])
    assert isinstance(model.blocks[1].attn, HostedTokens)
    with pytest.raises(UserError, match=r"model must be a torch\.nn\.Module, got a str"):
        softline.replace_attention("vit_tiny_patch16_224", "inline")


def test_blocks_without_an_attention_module_are_named():
    model = vit(block_fn=ParallelScalingBlock)
    with pytest.raises(UserError, match=r"has no attention \(ParallelScalingBlock\) that softline can replace"):
        softline.replace_attention(model, "inline")


@pytest.mark.parametrize("attention", ["softpp", "inline"])
@pytest.mark.parametrize(
    "make",
    [
        vit,
        lambda: vit(class_token=False, global_pool="avg", qk_norm=True, init_values=0.5),
        dinov3,
        lambda: timm.create_model("pvt_v2_b0", num_classes=7).eval(),
    ],
    ids=["vit", "norms", "rotations", "pvt"],
)
def test_large_images_have_the_same_result_in_bands(make, attention):
    model = softline.replace_attention(make(), attention).double()
    images = torch.randn(1, 3, 192, 128, dtype=torch.float64)
    with torch.no_grad():
        expected = model(images)
        with shrunk_bands(2**9 / CPU_BAND_NUMBERS):
            torch.testing.assert_close(model(images), expected, rtol=1e-9, atol=1e-9)
