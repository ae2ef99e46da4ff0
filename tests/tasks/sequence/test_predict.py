"""Models of sequences on texts, expressions, images and token ids."""

import numpy as np
import pytest
import torch
from PIL import Image

from softline.cli import main
from softline.data.sequences.listops import encode
from softline.data.sequences.pixels import open_grey_images
from softline.engine.reading import load_recipe
from softline.engine.task import definition_of
from softline.engine.train import train
from softline.errors import UserError
from softline.tasks.loading import load_trained
from tests.tasks.small_sequence import small_recipe

EXPRESSION = "[MAX 4 3 [MIN 2 3 ] 1 0 [MED 1 5 8 9 2 ] ]"


def trained_model(name, *overrides):
    """A model of a recipe with random weights."""
    recipe = load_recipe(name, overrides)
    definition = definition_of(recipe)
    facts = definition.known_facts(recipe, None)
    return definition.trained(definition.network(recipe, facts), recipe, facts)


@pytest.fixture(scope="module")
def models():
    cut = "--data.max_length=40"
    return {
        "listops": trained_model("lra_listops_small"),
        "text": trained_model("lra_text", cut),
        "retrieval": trained_model("lra_retrieval", cut),
        "image": trained_model("lra_image_small"),
    }


def assert_alike(first, second):
    torch.testing.assert_close(first.by_label, second.by_label, rtol=1e-5, atol=1e-6)


def test_an_expression_is_its_tokens_in_any_form(models, tmp_path):
    model, ids = models["listops"], encode(EXPRESSION)
    expected = model.predict(EXPRESSION)
    assert sorted(expected.classes) == list("0123456789")
    (tmp_path / "expression.txt").write_text(EXPRESSION + "\n")
    ids.flags.writeable = False
    forms = [ids, ids.tolist(), tuple(ids.tolist()), torch.tensor(ids.tolist()), tmp_path / "expression.txt"]
    for form in forms:
        assert_alike(model.predict(form), expected)
    assert model.predict(forms[-1]).name == str(forms[-1])
    assert expected.name is None
    assert model.predict(ids.astype(np.int8)).draw().mode == "RGB"


def test_texts_are_bytes_that_are_cut_as_in_training(models):
    model, text = models["text"], "ein schönes Buch, das ich gern gelesen habe; " * 3
    ids = [byte + 1 for byte in text.encode()][:40]
    assert_alike(model.predict(text), model.predict(ids))
    assert_alike(model.predict(text), model.predict(text.encode()[:40].decode()))
    assert (model.predict(text).by_label - model.predict(text[:30]).by_label).abs().max() > 1e-6


def test_a_sequence_is_the_same_alone_and_beside_longer_ones(models):
    texts = ["short", "a text that is longer than the first one", "of middle length"]
    alone = [models["text"].predict(text) for text in texts]
    for size in (1, 2, 3):
        for one, other in zip(models["text"].predict(texts, batch_size=size), alone, strict=True):
            assert_alike(one, other)


def test_of_two_sequences_a_sample_is_a_tuple(models, tmp_path):
    model, pair = models["retrieval"], ("one text", "and another")
    expected = model.predict(pair)
    path = tmp_path / "pair.tsv"
    path.write_bytes(b"one text\tand another\r\n")
    assert_alike(model.predict(path), expected)
    found = model.predict([pair, ([ord("x") + 1], "x"), path])
    assert_alike(found[0], expected)
    assert_alike(found[1], model.predict(("x", "x")))
    assert model.predict([]) == []


def test_images_are_the_pixels_that_training_reads(models, tmp_path):
    numbers = np.random.default_rng(0)
    for split, name in (("train", "a"), ("test", "a")):
        folder = tmp_path / split / name
        folder.mkdir(parents=True)
        for index in range(10):
            pixels = numbers.integers(0, 256, (32, 32, 3) if index % 2 else (32, 32), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{index}.png")
    source, model = open_grey_images(tmp_path, "test"), models["image"]
    for index in range(4):
        (tokens,), _ = source.load(index)
        expected, path = model.predict(tokens), source.name(index)
        with Image.open(path) as image:
            forms = [path, image.copy(), np.asarray(image)]
        for form in forms:
            assert_alike(model.predict(form), expected)
    assert len(model.predict(np.zeros((2, 32, 32, 3), np.uint8))) == 2


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("listops", "[MAX 4 elf ]", "the sequence: a word in a ListOps expression must be .* got 'elf'"),
        ("listops", [1, 40], r"token ids must be 0 to 31 \(vocabulary\), got 40"),
        ("listops", [["1", 2]], "token ids of sequence 0 must be whole numbers, got '1'"),
        ("listops", np.ones(3), "token ids of the sequence must be whole numbers, they are float64"),
        ("listops", np.ones((2, 3), int), r"token ids in one dimension, got ndarray \[2, 3\]"),
        ("listops", 5, "must be a text, the Path of a file, or token ids in one dimension, got 5"),
        ("text", "", r"a sequence must have 1 to 64 tokens \(positions\), got 0"),
        ("text", [1] * 65, r"a sequence must have 1 to 64 tokens \(positions\), got 65"),
        ("retrieval", "one text", "must be a tuple of 2 sequences, or the Path of a file, got 'one text'"),
        ("retrieval", [("a", "b", "c")], "sequence 0 must be a tuple of 2"),
        ("image", np.zeros((40, 40), np.uint8), r"1 to 1024 tokens \(positions\), got 1600"),
    ],
)
def test_mistakes_are_named(models, name, inputs, message):
    with pytest.raises(UserError, match=message):
        models[name].predict(inputs)


def test_a_file_must_hold_both_texts(models, tmp_path):
    (tmp_path / "one.txt").write_text("only one")
    with pytest.raises(UserError, match=r"one\.txt must hold 2 texts with a tab between them, it has 1"):
        models["retrieval"].predict(tmp_path / "one.txt")
    with pytest.raises(UserError, match=r"no such file: .*none\.txt"):
        models["text"].predict(tmp_path / "none.txt")


def test_the_command_reads_texts_and_draws_bars(tmp_path, capsys):
    train(small_recipe(tmp_path, "--schedule.epochs=0.2", "--schedule.warmup_epochs=0"))
    checkpoint, path = str(tmp_path / "run/last.pt"), tmp_path / "expression.txt"
    path.write_text(EXPRESSION)
    assert main(["predict", checkpoint, str(path), "--top", "3", "--out", str(tmp_path / "drawn")]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == f"{path} -> {tmp_path / 'drawn/expression.png'}"
    found = load_trained(checkpoint).predict(EXPRESSION, top=3)
    assert "\n".join(lines) == str(found)
    with Image.open(tmp_path / "drawn/expression.png") as drawn:
        assert drawn.tobytes() == found.draw().tobytes()
