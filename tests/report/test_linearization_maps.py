"""Attention maps of a model and of its linearised form, against weights that are computed directly."""

import copy

import pytest
import timm
import torch
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer

import softline
from softline.analysis.subjects import Picture
from softline.attention import record_attention
from softline.data.images.photographs import PHOTOGRAPHS, open_photograph
from softline.report.linearization_maps import compare_maps, first_middle_last
from softline.tasks.classification.trained import Classifier

SETTINGS = {
    "image_size": 32,
    "mean": (0.5, 0.4, 0.3),
    "std": (0.2, 0.2, 0.2),
    "interpolation": "bicubic",
    "crop_pct": 1.0,
    "crop_mode": "center",
    "mode": "RGB",
}


def classifier(model, **settings):
    return Classifier("vit_tiny_patch16_224", model.eval(), ("a", "b", "c"), {**SETTINGS, **settings})


def vit(depth=2):
    options = {"patch_size": 8, "embed_dim": 32, "depth": depth, "num_heads": 2, "num_classes": 3}
    return timm.create_model("vit_tiny_patch16_224", img_size=32, **options)


def pictures(count=2, label=1):
    return [Picture(name, open_photograph(name), label) for name in list(PHOTOGRAPHS)[:count]]


def softmax_row(model, layer, images, token):
    """A row of the weights [heads, N] that a timm attention computes, from its queries and keys."""
    given = []
    attention = model.get_submodule(layer)
    with attention.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0])):
        model(images)
    (x,) = given
    q, k, _ = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, N, D]
    return (q[:, :, token, None] @ k.mT * attention.scale).softmax(-1)[0, :, 0]


@torch.no_grad()
def test_the_originals_map_is_its_softmax():
    original = classifier(vit())
    before = copy.deepcopy(original.model.state_dict())
    linearized = classifier(softline.replace_attention(copy.deepcopy(original.model), "inline"))
    (found,) = compare_maps(original, linearized, pictures(1))
    assert list(found.maps) == ["blocks.0.attn", "blocks.1.attn"]
    normalised = (found.image - torch.tensor(SETTINGS["mean"])[:, None, None]) / 0.2
    for layer, (old, _) in found.maps.items():
        assert old.grid_size == (4, 4)
        assert old.query == (2, 2)
        # after the class token
        row = softmax_row(original.model, layer, normalised[None], 1 + 2 * 4 + 2)
        torch.testing.assert_close(row.sum(-1), torch.ones(2))
        torch.testing.assert_close(old.values, row.mean(0)[1:].reshape(4, 4), atol=1e-6, rtol=1e-4)
    assert original.model.state_dict().keys() == before.keys(), "the original is as it was"


@torch.no_grad()
def test_the_linearised_map_is_a_row_of_its_weights():
    original = classifier(vit())
    linearized = classifier(softline.replace_attention(copy.deepcopy(original.model), "inline", layers=[1]))
    (found,) = compare_maps(original, linearized, pictures(1))
    assert list(found.maps) == ["blocks.1.attn"], "the other layer was not replaced"
    normalised = (found.image - torch.tensor(SETTINGS["mean"])[:, None, None]) / 0.2
    with record_attention(linearized.model) as calls:
        logits = linearized.model(normalised[None])
    weights = calls[0].weights()[0, :, 1 + 2 * 4 + 2].mean(0)
    torch.testing.assert_close(found.maps["blocks.1.attn"][1].values, weights[1:].reshape(4, 4), atol=1e-6, rtol=1e-4)
    assert found.label == "b"
    predicted, probability = found.predictions[1]
    assert predicted == "abc"[int(logits.argmax())]
    assert probability == pytest.approx(float(logits.softmax(-1).max()), abs=1e-5)


def test_the_same_attention_has_the_same_map():
    original = classifier(vit())
    same = classifier(softline.replace_attention(copy.deepcopy(original.model), "softmax"))
    for found in compare_maps(original, same, pictures()):
        for old, new in found.maps.values():
            torch.testing.assert_close(old.values, new.values)
        assert found.predictions[0] == found.predictions[1]


def test_images_have_the_size_that_the_linearised_model_learned_from():
    original = classifier(vit())
    larger = copy.deepcopy(original.model)
    larger.set_input_size(img_size=48)
    linearized = classifier(softline.replace_attention(larger, "inline"), image_size=48)
    found = compare_maps(original, linearized, pictures())
    assert {pair[0].grid_size for one in found for pair in one.maps.values()} == {(6, 6)}
    assert {pair[1].grid_size for one in found for pair in one.maps.values()} == {(6, 6)}


def test_the_first_the_middle_and_the_last_layer_are_shown():
    original = classifier(vit(depth=5))
    linearized = classifier(softline.replace_attention(copy.deepcopy(original.model), "inline"))
    (found,) = compare_maps(original, linearized, pictures(1, label=None))
    assert list(found.maps) == ["blocks.0.attn", "blocks.2.attn", "blocks.4.attn"]
    assert found.label is None
    assert first_middle_last([]) == []


def test_reduced_keys_have_no_maps():
    sizes = {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32), "num_heads": (1, 1, 2, 2), "num_classes": 3}
    original = classifier(PyramidVisionTransformerV2(**sizes), image_size=64)
    linearized = classifier(softline.replace_attention(copy.deepcopy(original.model), "inline"), image_size=64)
    assert compare_maps(original, linearized, pictures(1)) == []


def test_layers_in_windows_have_no_maps():
    sizes = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 7, "num_classes": 3}
    original = classifier(SwinTransformer(56, **sizes), image_size=56)
    replaced = softline.replace_attention(copy.deepcopy(original.model), "inline", drop_position_bias=True)
    (found,) = compare_maps(original, classifier(replaced, image_size=56), pictures(1))
    # four windows in the first stage, one in the second
    assert list(found.maps) == ["layers.1.blocks.0.attn", "layers.1.blocks.1.attn"]
    assert found.maps["layers.1.blocks.0.attn"][0].grid_size == (7, 7)
    torch.testing.assert_close(found.maps["layers.1.blocks.0.attn"][0].values.sum(), torch.tensor(1.0))
