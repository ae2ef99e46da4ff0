import pytest
import timm
import torch

import softline  # noqa: F401
from softline.backbones.inspection import attention_layers, look
from softline.data.images import open_source
from softline.report.examples import HeatMap, attention_maps, brightest_token, first_of_classes

ATTENTIONS = ["softmax", "softpp", "inline"]


def micro(attention="softpp", **options):
    return timm.create_model("softpp_micro", attention=attention, in_chans=1, num_classes=4, **options).eval()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_map_is_the_row_of_the_query_in_the_weights_on_the_captured_input(attention):
    model, images = micro(attention), torch.randn(2, 1, 28, 20)
    maps = attention_maps(model, images, [(2, 3), (6, 0)])
    (given,), _ = look(model, images, attention_layers(model)[:1])
    assert given.grid_size == (7, 5)
    weights = given.layer.attention.weights(given.x, given.grid_size)
    torch.testing.assert_close(maps[0].row, weights[0, 0, 2 * 5 + 3].reshape(7, 5))
    torch.testing.assert_close(maps[1].row, weights[1, 0, 6 * 5].reshape(7, 5))


def test_class_tokens_are_left_out():
    model = timm.create_model("inline_deit_tiny", img_size=32, num_classes=4).eval()
    images = torch.randn(1, 3, 32, 32)
    (found,) = attention_maps(model, images, [(1, 0)])
    (given,), _ = look(model, images, attention_layers(model)[:1])
    weights = given.layer.attention.weights(given.x, given.grid_size)
    torch.testing.assert_close(found.row, weights[0, 0, 1 + 2, 1:].reshape(2, 2))


def test_the_prediction_is_the_models():
    model, images = micro(), torch.randn(3, 1, 28, 28)
    chances = model(images).softmax(-1)
    maps = attention_maps(model, images, [(0, 0)] * 3)
    assert [found.predicted for found in maps] == chances.argmax(-1).tolist()
    assert [found.probability for found in maps] == pytest.approx(chances.amax(-1).tolist())


def test_contrast_turns_at_the_mean_and_reaches_one():
    found = HeatMap(torch.tensor([[-1.0, 0.0], [1.0, 4.0]]), (0, 0), 0, 1.0)
    torch.testing.assert_close(found.contrast(), torch.tensor([[-2 / 3, -1 / 3], [0.0, 1.0]]))


def test_an_even_row_has_no_contrast():
    assert torch.equal(HeatMap(torch.full((7, 7), 1 / 49), (0, 0), 0, 1.0).contrast(), torch.zeros(7, 7))


def test_the_brightest_token_lies_where_the_image_is_bright():
    image = torch.zeros(1, 28, 20)
    image[:, 21:23, 9:11] = 1
    assert brightest_token(image, (7, 5)) == (5, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": [(7, 0)]}, "query row must be at least 0 and below 7, got 7"),
        ({"queries": [(0, -1)]}, "query column must be at least 0 and below 7, got -1"),
        ({"queries": []}, "one token for each of 1 images, got 0"),
        ({"stage": 4}, "stage must be at least 0 and below 4"),
        ({"block": 1}, "block must be at least 0 and below 1"),
        ({"head": 1}, "head must be at least 0 and below 1"),
    ],
)
def test_mistakes_are_named(change, message):
    arguments = {"queries": [(0, 0)], **change}
    with pytest.raises(ValueError, match=message):
        attention_maps(micro(), torch.randn(1, 1, 28, 28), **arguments)


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match="eval mode"):
        attention_maps(micro().train(), torch.randn(2, 1, 28, 28), [(0, 0)] * 2)


def test_examples_are_the_first_images_of_different_classes():
    source = open_source("embedded", "val")
    indices = first_of_classes(source, 5)
    assert indices == [0, 200, 400, 600, 800]
    assert first_of_classes(source, 99) == list(range(0, 1000, 100))


def test_models_of_others_are_refused():
    with pytest.raises(
        ValueError, match="Linear has no attention to show: it must be, or have, a backbone of softline"
    ):
        attention_maps(torch.nn.Linear(1, 1), torch.randn(1, 1), [(0, 0)])
