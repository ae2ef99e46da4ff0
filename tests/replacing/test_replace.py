"""Models of other libraries with softline's attention: the same with softmax, right with the others, or refused."""

import copy
import io

import pytest
import timm
import torch
from timm.models.eva import Eva
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torchvision.models import VisionTransformer as TorchvisionTransformer

import softline
from softline.attention import find_attentions, record_attention
from softline.errors import UserError
from softline.replacing.hosted import HostedAttention

SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3, "img_size": 64, "num_classes": 7}
ANY_SIZE = {**SMALL, "dynamic_img_size": True}
SIZES = ((64, 64), (48, 80))


PYRAMID = {"depths": (1, 1, 1, 2), "embed_dims": (16, 16, 32, 32), "num_heads": (1, 1, 2, 2), "num_classes": 7}


def swin(img_size: int | tuple[int, int] = 112) -> nn.Module:
    return SwinTransformer(img_size, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=7, num_classes=7)


def transformers_vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96, image_size=64, num_labels=7
    )
    return Logits(transformers.ViTForImageClassification(config))


class Logits(nn.Module):
    """A model of transformers, as a part of another network."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images, interpolate_pos_encoding=True).logits


MODELS = {
    "vit": lambda: VisionTransformer(**ANY_SIZE),
    "vit with normed queries": lambda: VisionTransformer(**ANY_SIZE, qk_norm=True, scale_attn_norm=True),
    "vit without biases": lambda: VisionTransformer(**ANY_SIZE, qkv_bias=False, proj_bias=False),
    "deit with two tokens": lambda: timm.create_model("deit_tiny_distilled_patch16_224", **ANY_SIZE),
    "dinov2 with registers": lambda: timm.create_model(
        "vit_small_patch14_reg4_dinov2", **{**ANY_SIZE, "patch_size": 16}
    ),
    "parallel attentions": lambda: timm.create_model("vit_small_patch16_18x2_224", **ANY_SIZE),
    "normed after attention": lambda: timm.create_model("vit_base_patch16_rpn_224", **ANY_SIZE),
    "eva02": lambda: timm.create_model("eva02_tiny_patch14_224", **{**ANY_SIZE, "patch_size": 16}),
    "eva with fused projections": lambda: Eva(**ANY_SIZE, use_rot_pos_emb=True, qkv_fused=True, scale_attn_inner=True),
    "dinov3": lambda: timm.create_model("vit_small_patch16_dinov3", **ANY_SIZE),
    "rope": lambda: timm.create_model("vit_small_patch16_rope_224", **ANY_SIZE),
    "mixed rope": lambda: timm.create_model("vit_small_patch16_rope_mixed_224", **ANY_SIZE),
    "torchvision": lambda: TorchvisionTransformer(64, 16, 2, 3, 48, 96, num_classes=7),
    "transformers": transformers_vit,
    "pyramid": lambda: PyramidVisionTransformerV2(**PYRAMID),
    "swin": swin,
    "swin, oblong": lambda: swin((112, 168)),
}
# images of one size only
FIXED = {"torchvision": (64, 64), "swin": (112, 112), "swin, oblong": (112, 168)}
# blocks whose keys are not reduced
LAYERS = {"pyramid": "stages.3.*"}


def build(name: str) -> nn.Module:
    """A model whose weights are spread as trained ones, so that attention counts."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def sizes(name: str) -> tuple[tuple[int, int], ...]:
    return (FIXED[name],) if name in FIXED else SIZES


@pytest.mark.parametrize("name", MODELS)
def test_softmax_is_what_was_there_before(name):
    original = build(name)
    replaced = softline.replace_attention(copy.deepcopy(original), "softmax", layers=LAYERS.get(name))
    assert [f"{path}.attention" for path in hosted(replaced)] == list(find_attentions(replaced)) != []
    for size in sizes(name):
        images = torch.randn(2, 3, *size, requires_grad=True)
        outputs = [model(images) for model in (original, replaced)]
        torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
        gradients = [torch.autograd.grad(out.square().sum(), images)[0] for out in outputs]
        assert gradients[0].abs().max() > 0
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5 * float(gradients[0].abs().max()))
        with torch.no_grad():
            torch.testing.assert_close(replaced(images), original(images), rtol=1e-5, atol=1e-5)


def hosted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, HostedAttention)]


@pytest.mark.parametrize("attention", ["inline", "softpp", "linear"])
@pytest.mark.parametrize(
    "name", ["vit", "deit with two tokens", "eva02", "torchvision", "transformers", "pyramid", "swin"]
)
def test_a_linear_model_runs_trains_and_differs(name, attention):
    original = build(name)
    model = softline.replace_attention(copy.deepcopy(original), attention, drop_position_bias=name == "swin")
    for size in sizes(name):
        images = torch.randn(2, 3, *size)
        with torch.no_grad():
            out, before = model(images), original(images)
        assert out.shape == before.shape
        assert out.isfinite().all()
        assert not torch.allclose(out, before, rtol=1e-3, atol=1e-3)
    model.train()
    model(images).square().sum().backward()
    for path in hosted(model):
        for part, parameter in model.get_submodule(path).named_parameters():
            assert parameter.grad is not None, f"{path}.{part}"


def test_the_attention_is_the_one_that_was_asked_for():
    """The values of a class token and the grid, by the definition of InLine."""
    model = softline.replace_attention(build("vit"), "inline", options={"local_residual": False})
    with torch.no_grad(), record_attention(model) as calls:
        model(torch.randn(1, 3, 48, 80))
    call = calls[0]
    assert call.grid_size == (3, 5)
    q, k, _ = call.module.qkv(call.x).unflatten(-1, (3, 3, 16)).permute(2, 0, 3, 1, 4)
    tokens = 1 + 3 * 5
    scores = q @ k.mT / (16**0.5 * tokens)
    torch.testing.assert_close(call.weights(), scores - scores.mean(-1, keepdim=True) + 1 / tokens)


@pytest.mark.parametrize("queries", ["mean", "query", "key"])
def test_soft_inherits_one_projection(queries):
    original = build("vit")
    model = softline.replace_attention(copy.deepcopy(original), "softpp", queries=queries)
    q, k, v = original.blocks[0].attn.qkv.weight.chunk(3)
    expected = {"mean": (q + k) / 2, "query": q, "key": k}[queries]
    torch.testing.assert_close(model.blocks[0].attn.attention.qkv.weight, torch.cat([expected, v]))
    torch.testing.assert_close(model.blocks[0].attn.attention.proj.weight, original.blocks[0].attn.proj.weight)


def test_layers_are_chosen_by_index_and_by_name():
    chosen = {
        (0,): ["blocks.0.attn"],
        (-1,): ["blocks.1.attn"],
        ("blocks.*.attn",): ["blocks.0.attn", "blocks.1.attn"],
        (1, "*0.attn"): ["blocks.0.attn", "blocks.1.attn"],
    }
    for layers, names in chosen.items():
        assert hosted(softline.replace_attention(build("vit"), "inline", layers=layers)) == names
    assert hosted(softline.replace_attention(build("vit"), "inline", layers=1)) == ["blocks.1.attn"]
    for layer in (2, -3, "blocks.7.*"):
        with pytest.raises(UserError, match="layers must be indices"):
            softline.replace_attention(build("vit"), "inline", layers=layer)


def test_attention_can_be_replaced_again():
    original = build("eva02")
    model = softline.replace_attention(copy.deepcopy(original), "inline")
    softline.replace_attention(model, "softmax", layers=0)
    assert [model.get_submodule(path).name for path in hosted(model)] == ["softmax", "inline"]
    softline.replace_attention(model, "softmax")
    images = torch.randn(1, 3, 80, 48)
    with torch.no_grad():
        torch.testing.assert_close(model(images), original(images), rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=r"blocks\.0\.attn cannot be replaced: soft attention has one projection"):
        softline.replace_attention(softline.replace_attention(model, "soft"), "inline")


@pytest.mark.parametrize("name", ["vit", "eva02"])
def test_a_replaced_model_is_saved_copied_compiled_and_exported(name):
    model = softline.replace_attention(build(name), "inline").eval()
    images, others = torch.randn(2, 3, 64, 64), torch.randn(2, 3, 48, 80)
    with torch.no_grad():
        expected, expected_others = model(images), model(others)
        again = softline.replace_attention(MODELS[name]().eval(), "inline")
        again.load_state_dict(model.state_dict())
        torch.testing.assert_close(again(images), expected)

        # a copy has a grid of its own
        twin = copy.deepcopy(model)
        model(images)
        torch.testing.assert_close(twin(others), expected_others)
        assert [each.blocks[0].attn.grid.latest for each in (model, twin)] == [(4, 4), (3, 5)]

        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        torch.testing.assert_close(torch.load(file, weights_only=False)(images), expected)

        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
        torch.testing.assert_close(compiled(images), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(compiled(others), expected_others, rtol=1e-4, atol=1e-4)

        program = torch.export.export(model, (images,), strict=False)
        torch.testing.assert_close(program.module()(images), expected, rtol=1e-4, atol=1e-4)


def test_parameters_stay_the_ones_that_an_optimizer_knows():
    model = build("vit")
    before = dict(model.named_parameters())
    softline.replace_attention(model, "softmax")
    kept = {id(parameter) for parameter in model.parameters()}
    assert kept == {id(parameter) for parameter in before.values()}


@pytest.mark.parametrize("attention", ["inline", "softpp", "softmax"])
def test_timm_builds_its_vision_transformer_with_a_layer_of_softline(attention):
    layer = softline.attention_layer(attention, (4, 4), num_prefix_tokens=1)
    model = VisionTransformer(**SMALL, attn_layer=layer, qkv_bias=True, qk_norm=True).eval()
    other = softline.replace_attention(VisionTransformer(**SMALL, qkv_bias=True, qk_norm=True).eval(), attention)
    other.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(images), other(images))
    with pytest.raises(UserError, match=r"N must be num_prefix_tokens \+ H\*W = 1 \+ 4\*4, got 26 tokens"):
        VisionTransformer(**{**SMALL, "img_size": 80}, attn_layer=layer)(torch.randn(1, 3, 80, 80))


REFUSED = {
    "biases": (
        lambda: timm.create_model("beit_base_patch16_224", depth=2, embed_dim=48, num_heads=3, img_size=64),
        r"blocks\.0\.attn cannot be replaced: it adds a bias for each pair of positions",
    ),
    "shared biases": (
        lambda: timm.models.beit.Beit(64, depth=2, embed_dim=48, num_heads=3, use_shared_rel_pos_bias=True),
        "the model adds a bias for each pair of positions",
    ),
    "dropped patches": (lambda: VisionTransformer(**SMALL, patch_drop_rate=0.5), "patch_drop_rate"),
    "dropped weights": (lambda: VisionTransformer(**SMALL, attn_drop_rate=0.2), r"drops attention weights \(0\.2\)"),
    "biases of windows": (
        swin,
        r"layers\.0\.blocks\.0\.attn cannot be replaced: .* drop_position_bias .* gives it up",
    ),
    "no attention": (
        lambda: nn.Sequential(nn.Linear(2, 2)),
        "Sequential has no attention that softline can replace. It supports timm's VisionTransformer",
    ),
    "cross-attention": (
        lambda: nn.TransformerDecoderLayer(8, 2),
        r"TransformerDecoderLayer has no attention \(MultiheadAttention\) that softline can replace",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_replaced_is_named_and_left_alone(case):
    make, message = REFUSED[case]
    model = make()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(UserError, match=message):
        softline.replace_attention(model, "inline")
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks for module in model.modules())


def test_softmax_of_a_reduced_map_is_refused():
    model = PyramidVisionTransformerV2(**PYRAMID)
    with pytest.raises(UserError, match=r"stages\.0\.blocks\.0\.attn .* keys and values are those of a map of fewer"):
        softline.replace_attention(model, "softmax")


@pytest.mark.parametrize("attention", ["inline", "softpp", "linear"])
def test_tokens_from_opposite_sides_of_the_map_do_not_meet(attention):
    model = softline.replace_attention(build("swin"), attention, drop_position_bias=True)
    block = model.layers[0].blocks[1]
    mask = block.attn_mask  # [windows, N, N] of a shifted block
    windows = torch.randn(2 * len(mask), 49, 16)
    changed = windows.clone()
    # the last token of the last window is from the corner of the map
    changed[len(mask) - 1, -1] += 1
    with torch.no_grad():
        difference = (block.attn(changed, mask=mask) - block.attn(windows, mask=mask)).abs().amax(-1)
    met = torch.zeros(2 * len(mask), 49, dtype=torch.bool)
    met[len(mask) - 1] = mask[-1, -1] == 0
    assert 1 < met.sum() < 49
    assert difference[~met].max() == 0
    assert (difference[met] > 0).all()


def test_a_failure_in_the_last_block_changes_none():
    model = build("vit")
    model.blocks[1].attn.attn_drop.p = 0.5
    with pytest.raises(UserError, match=r"blocks\.1\.attn cannot be replaced"):
        softline.replace_attention(model, "inline")
    assert hosted(model) == []
    with pytest.raises(UserError, match="attention must be one of"):
        softline.replace_attention(model, "flash")


def test_masks_and_parts_of_a_model_are_refused_when_it_runs():
    model = softline.replace_attention(build("vit"), "inline")
    with pytest.raises(UserError, match="inline attention needs the grid of the image"):
        model.blocks[0](torch.randn(1, 17, 48))
    images = torch.randn(1, 3, 64, 64)
    with pytest.raises(UserError, match="takes no attn_mask"):
        model(images, attn_mask=torch.ones(17, 17, dtype=torch.bool))
