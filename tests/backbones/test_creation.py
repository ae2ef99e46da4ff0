import pytest
import timm
import torch

from softline.backbones.creation import check_model_name, create_for_size, set_image_size

VIT = "vit_tiny_patch16_224"
SHALLOW = {"depth": 1, "num_classes": 3}


@torch.no_grad()
def test_a_model_of_timm_is_built_for_the_size_of_the_images():
    model = create_for_size(VIT, 48, **SHALLOW).eval()
    assert model.pos_embed.shape[1] == 1 + 3 * 3
    assert model(torch.randn(1, 3, 48, 48)).shape == (1, 3)


def test_what_a_model_learns_for_its_own_size_stays():
    """timm's set_input_size would enlarge the windows, and their table of position biases with them."""
    options = {"depths": (1, 1, 1, 1), "device": "meta"}
    native = timm.create_model("swin_tiny_patch4_window7_224", **options)
    built = create_for_size("swin_tiny_patch4_window7_224", 448, **options)
    assert {k: v.shape for k, v in native.named_parameters()} == {k: v.shape for k, v in built.named_parameters()}


def test_networks_of_convolutions_take_any_size():
    model = create_for_size("resnet10t", 40, num_classes=3)
    assert model(torch.randn(2, 3, 40, 40)).shape == (2, 3)


def test_the_size_may_be_left_to_the_model_or_to_its_options():
    assert create_for_size(VIT, None, **SHALLOW).pos_embed.shape[1] == 1 + 14 * 14
    assert create_for_size(VIT, 224, img_size=32, **SHALLOW).pos_embed.shape[1] == 1 + 2 * 2


def test_models_of_softline_are_built_for_any_size():
    assert create_for_size("softpp_micro", 20, num_classes=3).eval()(torch.randn(1, 3, 20, 20)).shape == (1, 3)


@pytest.mark.parametrize(
    ("name", "size", "options", "message"),
    [
        (VIT, 8, {}, f"{VIT} cannot take images of 8 x 8 pixels: they are smaller than a patch"),
        ("resnet10t", 40, {"windows": 3}, "model.options of resnet10t: .*windows"),
        (VIT, 48, {"num_heads": 5}, f"{VIT} cannot be built: "),
    ],
)
def test_what_cannot_be_built_is_named(name, size, options, message):
    with pytest.raises(ValueError, match=message):
        create_for_size(name, size, **options)


@torch.no_grad()
def test_a_built_model_is_fitted_to_another_size():
    model = timm.create_model(VIT, **SHALLOW).eval()
    set_image_size(model, VIT, 64)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 3)
    own = timm.create_model("inline_deit_tiny", img_size=64, **SHALLOW)
    before = own.stages[0].position.grid_size
    set_image_size(own, "inline_deit_tiny", 96)
    assert own.stages[0].position.grid_size == before


def test_a_size_that_a_built_model_cannot_take_is_named():
    model = timm.create_model(VIT, **SHALLOW)
    with pytest.raises(ValueError, match=f"{VIT} cannot take images of 8 x 8 pixels: "):
        set_image_size(model, VIT, 8)


def test_unknown_names_are_refused_with_the_closest():
    for known in ("softpp_micro", "resnet18", "local-dir:anywhere", "hf-hub:someone/model"):
        check_model_name(known)
    with pytest.raises(ValueError, match=r"timm knows no model 'sofpp_micro'; did you mean softpp_micro"):
        check_model_name("sofpp_micro")
    with pytest.raises(ValueError, match="timm knows no model 'zzzz'; `softline models` lists softline's"):
        check_model_name("zzzz")
