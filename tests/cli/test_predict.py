import json
import re

import pytest
from PIL import Image

import softline
from softline.cli import main
from softline.engine.train import train
from tests.engine.small import small_recipe, write_images

SEVEN = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")


def probabilities(lines):
    return [float(line.split()[0]) for line in lines]


@pytest.fixture(scope="module")
def grey(tmp_path_factory):
    """A model of grey images and seven classes."""
    root = tmp_path_factory.mktemp("grey")
    write_images(root, train=2, val=1, classes=SEVEN)
    train(small_recipe(root, "--model.options.in_chans=1", "--schedule.epochs=1"))
    return root


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P"])
def test_five_likeliest_classes_are_printed(grey, tmp_path, capsys, mode):
    Image.open(grey / "data/val/ant/000.png").convert(mode).save(tmp_path / "image.png")
    assert main(["predict", str(grey / "run/last.pt"), str(tmp_path / "image.png")]) == 0
    name, *lines = capsys.readouterr().out.splitlines()
    assert name == str(tmp_path / "image.png")
    assert len({line.split()[-1] for line in lines} & set(SEVEN)) == 5
    assert probabilities(lines) == sorted(probabilities(lines), reverse=True)


def test_colour_model_names_its_classes(trained, tmp_path, capsys):
    images = [str(trained / "data/val/dark/000.png"), str(trained / "data/val/light/000.png")]
    json_path = tmp_path / "predictions.json"
    assert main(["predict", str(trained / "run/best.pt"), *images, "--json", str(json_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[3]] == images
    assert {line.split()[-1] for line in lines[1:3]} == {"dark", "light"}
    assert sum(probabilities(lines[1:3])) == pytest.approx(100, abs=0.2)
    written = json.loads(json_path.read_text())
    assert [prediction["name"] for prediction in written] == images
    assert sum(written[0]["probabilities"]) == pytest.approx(1)


def test_top_limits_the_classes(trained, capsys):
    assert main(["predict", str(trained / "run/best.pt"), str(trained / "data/val/dark/000.png"), "--top", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_classifiers_draw_bars_beside_the_images(trained, tmp_path, capsys):
    images = [str(trained / f"data/val/{name}.png") for name in ("dark/000", "light/001", "dark/002")]
    arguments = ["predict", str(trained / "run/best.pt"), *images]
    assert main(arguments) == 0
    alone = capsys.readouterr().out
    assert main([*arguments, "--batch-size", "2", "--out", str(tmp_path / "drawn")]) == 0
    drawn = [tmp_path / "drawn" / name for name in ("000.png", "001.png", "002.png")]
    assert capsys.readouterr().out == re.sub("(val/.*/(.*png))", rf"\1 -> {tmp_path}/drawn/\2", alone)
    model = softline.load(trained / "run/best.pt")
    for image, path in zip(images, drawn, strict=True):
        with Image.open(path) as picture:
            assert picture.size == model.predict(image).draw().size


def test_mistakes_end_in_a_message(trained, tmp_path, capsys):
    (tmp_path / "broken.png").write_bytes((trained / "data/val/dark/000.png").read_bytes()[:100])
    messages = {
        tmp_path / "broken.png": "broken.png cannot be decoded (image file is truncated)",
        tmp_path / "missing.png": "no such file",
        tmp_path: f"{tmp_path} is a directory: name files",
    }
    for image, message in messages.items():
        assert main(["predict", str(trained / "run/best.pt"), str(image)]) == 2
        assert message in capsys.readouterr().err
    image = str(trained / "data/val/dark/000.png")
    assert main(["predict", str(trained / "run/best.pt"), image, "--top", "0"]) == 2
    assert "top must be at least 1, got 0" in capsys.readouterr().err
