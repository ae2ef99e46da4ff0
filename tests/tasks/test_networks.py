"""Networks of recipes whose attention is replaced."""

import pytest
import timm
import torch

import softline
from softline.engine.recipe import ModelRecipe, ReplaceRecipe
from softline.engine.train import train
from softline.errors import UserError
from softline.replacing.hosted import HostedAttention
from softline.tasks.loading import load_trained
from softline.tasks.networks import build_body, build_model
from tests.engine.small import write_images
from tests.tasks.small_vit import vit_recipe

OPTIONS = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}


def recipe(attention=None, **changes):
    replace = None if attention is None else ReplaceRecipe(attention=attention)
    return ModelRecipe(name="vit_tiny_patch16_224", options=OPTIONS, replace=replace, **changes)


def save(model, path):
    torch.save(model.state_dict(), path)
    return str(path)


def assert_same(one, other):
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.allclose(one.eval()(images), other.eval()(images), atol=1e-6)


def test_weights_from_before_the_replacement_are_inherited(tmp_path):
    plain = build_model(recipe(), 3, 16)
    path = save(plain, tmp_path / "plain.pth")
    replaced = build_model(recipe("inline", checkpoint=path), 3, 16)
    torch.manual_seed(0)
    expected = softline.replace_attention(build_model(recipe(checkpoint=path), 3, 16), "inline")
    own = replaced.state_dict()
    for name, value in expected.state_dict().items():
        # new parts start at random
        if "local" not in name:
            assert torch.equal(own[name], value), name
    assert_same(build_model(recipe("softmax", checkpoint=path), 3, 16), plain)


def test_weights_from_after_the_replacement_are_loaded_as_they_are(tmp_path):
    first = build_model(recipe("inline"), 3, 16)
    again = build_model(recipe("inline", checkpoint=save(first, tmp_path / "replaced.pth")), 3, 16)
    assert_same(first, again)


def test_weights_of_another_attention_are_refused(tmp_path):
    path = save(build_model(recipe("inline"), 3, 16), tmp_path / "inline.pth")
    with pytest.raises(UserError, match="not a state dict of vit_tiny_patch16_224"):
        build_model(recipe("softpp", checkpoint=path), 3, 16)
    with pytest.raises(UserError, match="not a state dict of vit_tiny_patch16_224"):
        build_model(recipe(checkpoint=path), 3, 16)


def test_a_replaced_network_trains_and_is_loaded_again(tmp_path):
    write_images(tmp_path)
    replaced = ["--model.replace.attention=linear", "--model.replace.layers=[0, blocks.2.attn]"]
    path = train(vit_recipe(tmp_path, *replaced, "--schedule.epochs=1")).output / "last.pt"
    model = load_trained(str(path)).model
    names = [name for name, module in model.named_modules() if isinstance(module, HostedAttention)]
    assert names == ["blocks.0.attn", "blocks.2.attn"]


def test_the_body_of_a_dense_network_can_be_replaced():
    body = build_body(
        ModelRecipe(
            name="vit_tiny_patch16_224",
            options={**OPTIONS, "img_size": 16, "depth": 3},
            replace=ReplaceRecipe(attention="inline"),
        )
    )
    assert len([module for module in body.modules() if isinstance(module, HostedAttention)]) == 3


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        ({"attention": "none"}, "attention must be one of"),
        (
            {"attention": "inline", "options": {"checkpoint_path": "x"}},
            "model.replace.options.checkpoint_path is refused",
        ),
        ({"attention": "inline", "layers": ("blocks.9*",)}, "a pattern of names"),
    ],
)
def test_a_replacement_that_is_impossible_is_refused(replace, message):
    with pytest.raises(UserError) as error:
        build_model(ModelRecipe(name="vit_tiny_patch16_224", options=OPTIONS, replace=ReplaceRecipe(**replace)), 3, 16)
    assert message in str(error.value)


def test_models_without_such_attention_are_refused():
    with pytest.raises(UserError, match="ResNet has no attention"):
        build_model(ModelRecipe(name="resnet18", replace=ReplaceRecipe(attention="inline")), 3)
    assert timm.is_model("resnet18")
