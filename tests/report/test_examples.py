import pytest
import torch

from softline.analysis.subjects import open_subject
from softline.data.images import open_source
from softline.engine.train import train
from softline.report.examples import brightest_token, compare_attention, first_of_classes
from tests.engine.small import small_recipe, write_images


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Images of two classes, and a network for them with each of two attentions."""
    root = tmp_path_factory.mktemp("examples")
    write_images(root, train=4, val=4)
    for attention in ("softmax", "inline"):
        options = [f"--model.options.attention={attention}", f"--output={root / attention}", "--schedule.epochs=1"]
        train(small_recipe(root, *options))
    return root


@torch.no_grad()
def test_an_example_has_the_weights_of_one_query_and_the_prediction_of_each_model(root):
    checkpoints = {name: root / name / "last.pt" for name in ("softmax", "inline")}
    source = open_source(str(root / "data"), "val")
    examples = compare_attention(checkpoints, source, count=2)
    assert [example.label for example in examples] == ["dark", "light"]
    for name, path in checkpoints.items():
        subject = open_subject(str(path))
        image = subject.prepare(source.load(4)[0])
        (given,), logits = subject.look(image[None], subject.layers[:1])
        found = examples[1].maps[name]
        assert found.query == brightest_token(image, given.grid_size)
        weights = given.call.weights()[0, 0, given.token(*found.query)]
        torch.testing.assert_close(found.values, weights.reshape(given.grid_size))
        predicted, probability = examples[1].predictions[name]
        assert predicted == subject.classes[int(logits.argmax())]
        assert probability == pytest.approx(float(logits.softmax(-1).max()))
        torch.testing.assert_close(examples[1].image, subject.shown(image))


def test_without_models_there_are_no_examples():
    assert compare_attention({}, open_source("embedded", "val")) == []


def test_the_brightest_token_lies_where_the_image_is_bright():
    image = torch.zeros(1, 28, 20)
    image[:, 21:23, 9:11] = 1
    assert brightest_token(image, (7, 5)) == (5, 2)


def test_examples_are_the_first_images_of_different_classes():
    source = open_source("embedded", "val")
    assert first_of_classes(source, 5) == [0, 200, 400, 600, 800]
    assert first_of_classes(source, 99) == list(range(0, 1000, 100))
