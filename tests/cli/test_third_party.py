"""evaluate and predict with a task that softline does not know: its options, its metrics, its drawings."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image

from softline.cli import main
from softline.engine.evaluate import Evaluation
from softline.engine.trained import Measured, Result, Trained

METRICS = {"AP": 0.5, "AP50": 0.75, "AP75": 0.25, "AP_small": -1.0, "AR": 0.6}
CLASSES = [{"name": "brick", "iou": 0.5, "pixels": 1234}, {"name": "leaf", "iou": None, "pixels": 0}]


@dataclass(frozen=True)
class Things(Result):
    name: str

    def __str__(self):
        return "one object"

    def to_dict(self):
        return {"objects": [1]}

    def draw(self):
        return Image.new("RGB", (4, 4))

    def drawings(self):
        return {"": self.draw(), "_mask": self.draw()}


class Thing(Trained):
    """A model with one switch, one number and two drawings."""

    kind = "a thing"
    unit = "scenes"
    drawings = ("", "_mask")
    asked = None

    def __init__(self):
        super().__init__("thing_tiny", torch.nn.Identity(), ["brick", "leaf"])

    def evaluate(self, data, evaluator, *, split="val", flip=False, temperature=1.0):
        self.asked = {"split": split, "flip": flip, "temperature": temperature}
        evaluator.notify("all images are fine")
        evaluator.progress(1, 3)
        yield Measured({"size": 32, "split": split}, Evaluation({"loss": 0.5, "top1": 0.25}, 3, 1234.5, {}))
        yield Measured({"size": 256, "split": split}, Evaluation({"loss": 0.25, "top1": 0.125}, 3, 12.25, {}))
        yield Measured({"source": data}, Evaluation({"mIoU": 0.5}, 3, 1.0, {"classes": CLASSES}))
        yield Measured({"source": data}, Evaluation(METRICS, 1000, 7.5, {}))

    def predict(self, inputs, *, flip=False):
        self.asked = {"flip": flip}
        assert all(isinstance(path, Path) for path in inputs)
        return [Things(str(path)) for path in inputs]


@pytest.fixture
def thing(monkeypatch):
    made = Thing()
    monkeypatch.setattr("softline.tasks.loading.load_trained", lambda source: made)
    return made


@pytest.fixture
def images(tmp_path):
    for name in ("a", "b"):
        Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.jpg")
    return [str(tmp_path / "a.jpg"), str(tmp_path / "b.jpg")]


def test_results_are_lines_or_tables_as_long_as_they_are(thing, capsys, tmp_path):
    path = tmp_path / "out.json"
    assert main(["evaluate", "x.pt", "somewhere", "--json", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines() == [
        "all images are fine",
        "size   split  top-1 %    loss  scenes/s  scenes",
        "32     val      25.00  0.5000     1,234       3",
        "256    val      12.50  0.2500     12.25       3",
        "class      iou  pixels",
        "brick  50.00 %   1,234",
        "leaf      none       0",
        "",
        "source     mIoU %  scenes/s  scenes",
        "somewhere   50.00      1.00       3",
        "source somewhere",
        "metric      value",
        "AP        50.00 %",
        "AP50      75.00 %",
        "AP75      25.00 %",
        "AP_small     none",
        "AR        60.00 %",
        "1,000 scenes, 7.50 scenes/s",
    ]
    written = json.loads(path.read_text())
    assert {key: written[key] for key in ("checkpoint", "model", "data")} == {
        "checkpoint": "x.pt",
        "model": "thing_tiny",
        "data": "somewhere",
    }
    assert written["environment"]["torch"]
    assert written["rows"][0] == {
        **{"size": 32, "split": "val", "metrics": {"loss": 0.5, "top1": 0.25}},
        **{"samples": 3, "per_second": 1234.5, "details": {}},
    }


def test_options_of_a_task_are_passed_on_as_yaml(thing):
    assert main(["evaluate", "x.pt", "--flip", "--temperature", "1e-1", "somewhere", "--split", "test"]) == 0
    assert thing.asked == {"split": "test", "flip": True, "temperature": 0.1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "x.pt", "--sizes", "32"], "--sizes has no meaning for a thing, which takes --split, --flip"),
        (["evaluate", "x.pt", "--skip-corrupt"], "--skip-corrupt has no meaning for a thing"),
        (["evaluate", "x.pt", "--test-time-flip", "2"], "--test-time-flip has no meaning for a thing"),
        (["evaluate", "x.pt", "--temperature", "[1"], "--temperature '[1' is not YAML: "),
        (
            ["predict", "x.pt", "a.png", "--top", "3", "--out", "y"],
            "--top has no meaning for a thing, which takes --flip",
        ),
        (["predict", "x.pt", "a.png", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["predict", "x.pt", "a.png", "--batch-size", "2"], "--batch-size has no meaning for a thing"),
        (["predict", "x.pt", "one/a.png", "two/a.jpg", "--out", "y"], "several files would be drawn to a.png"),
        (["predict", "x.pt", "a.png", "a_mask.png", "--out", "y"], "several files would be drawn to a_mask.png"),
        (["predict", "x.pt", "a.png", "--out", "."], "a.png is one of the files and would be overwritten"),
        (["predict", "x.pt", "none.png", "--out", "y"], "no such file: none.png"),
    ],
)
def test_mistakes_end_in_a_message(thing, arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


def test_drawings_are_files_with_their_suffixes(thing, images, capsys, tmp_path):
    out, path = tmp_path / "drawn", tmp_path / "found.json"
    assert main(["predict", "x.pt", *images, "--out", str(out), "--flip", "--json", str(path)]) == 0
    assert thing.asked == {"flip": True}
    assert capsys.readouterr().out == "".join(
        f"{image} -> {out}/{name}.png: one object\n" for image, name in zip(images, "ab", strict=True)
    )
    assert sorted(file.name for file in out.iterdir()) == ["a.png", "a_mask.png", "b.png", "b_mask.png"]
    assert json.loads(path.read_text()) == [{"name": image, "objects": [1]} for image in images]
    assert main(["predict", "x.pt", images[0]]) == 0
    assert capsys.readouterr().out == f"{images[0]}: one object\n"


def test_all_images_are_looked_for_before_the_first_is_used(thing, images, capsys, tmp_path):
    assert main(["predict", "x.pt", *images, "none.png", "--out", str(tmp_path / "drawn")]) == 2
    assert "no such file: none.png" in capsys.readouterr().err
    assert not (tmp_path / "drawn").exists()
    assert thing.asked is None


def test_a_task_without_drawings_refuses_to_draw(thing, images, capsys):
    thing.drawings = ()
    assert main(["predict", "x.pt", images[0], "--out", "y"]) == 2
    assert "--out has no meaning for a thing, which draws nothing" in capsys.readouterr().err
