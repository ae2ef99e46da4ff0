import json
import os

import pytest
import timm
import torch
from timm.models import save_for_hf

from softline import __version__
from softline.cli import main
from tests.engine.small import write_images


@pytest.fixture
def evaluate(trained, capsys):
    """Run `softline evaluate` on the trained model; code, output, errors."""

    def run(*arguments, checkpoint=trained / "run/last.pt", data=trained / "data"):
        code = main(["evaluate", str(checkpoint), str(data), *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


def test_sizes_are_rows_of_a_table_and_of_json(evaluate, trained, tmp_path):
    code, out, _ = evaluate("--sizes", "16,24,7", "--batch-size", "4", "--json", tmp_path / "rows.json")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["size", "16", "24", "7"]
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["model"] == "softpp_micro"
    assert written["data"] == str(trained / "data")
    assert written["environment"]["softline"] == __version__
    assert [(row["size"], row["samples"]) for row in written["rows"]] == [(16, 18), (24, 18), (7, 18)]
    for row, line in zip(written["rows"], out.splitlines()[1:], strict=True):
        metrics = row["metrics"]
        shown = [f"{100 * metrics['top1']:.2f}", f"{100 * metrics['top5']:.2f}", f"{metrics['loss']:.4f}"]
        assert line.split()[1:4] == shown
        assert row["per_second"] > 0


def test_landmarks_at_a_fixed_ratio_change_only_images_with_more_cells_than_the_cap(evaluate, tmp_path):
    """At 32 pixels the first stage has 4 x 4 cells, at 128 pixels 16 x 16: more than 7 x 7."""
    model = timm.create_model("soft_micro", num_classes=2)
    for name, parameter in model.named_parameters():
        # far from uniform attention
        parameter.data *= 20 if "qkv.weight" in name else 1
    save_for_hf(model, tmp_path / "saved", model_config={"num_classes": 2, "label_names": ["dark", "light"]})
    rows = []
    for further in ((), ("--uncapped",)):
        written = ("--json", tmp_path / "rows.json")
        assert evaluate("--sizes", "32,128", *written, *further, checkpoint=tmp_path / "saved")[0] == 0
        rows.append([row["metrics"]["loss"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]])
    (capped, capped_large), (uncapped, uncapped_large) = rows
    assert capped == pytest.approx(uncapped, rel=1e-5)
    assert capped_large != pytest.approx(uncapped_large, rel=1e-5)
    code, _, error = evaluate("--uncapped")
    assert code == 2
    assert "there are no landmarks in these modules" in error


def test_workers_change_nothing(evaluate, tmp_path):
    rows = []
    for workers in ("0", "2"):
        assert evaluate("--workers", workers, "--batch-size", "5", "--json", tmp_path / "rows.json")[0] == 0
        rows.append(json.loads((tmp_path / "rows.json").read_text())["rows"][0]["metrics"])
    assert rows[0] == rows[1]


def test_directory_that_timm_saved_is_evaluated(evaluate, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=2, pretrained_cfg_overlay={"input_size": (3, 32, 32)})
    save_for_hf(model, tmp_path / "saved", model_config={"num_classes": 2, "label_names": ["dark", "light"]})
    code, out, _ = evaluate("--sizes", "32", checkpoint=tmp_path / "saved")
    assert code == 0
    assert out.splitlines()[-1].split()[-1] == "18"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--workers", "-1"], "--workers must be at least 0, got -1"),
        (["--sizes", "0"], "--sizes must be at least 1, got 0"),
        (["--split", "half"], "split must be one of"),
        (["--json", "/no/such/place/rows.json"], "no such directory: /no/such/place"),
    ],
)
def test_mistakes_end_in_a_message_alone(evaluate, arguments, message):
    code, out, errors = evaluate(*arguments)
    assert (code, out) == (2, "")
    assert message in errors


@pytest.mark.skipif(torch.accelerator.is_available(), reason="fp16 works there")
def test_half_precision_on_a_cpu_is_refused(evaluate):
    assert "precision fp16 needs a GPU" in evaluate("--precision", "fp16")[2]


class Program:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_checkpoints_that_are_none_are_told_apart(evaluate, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "truncated.pt").write_bytes((trained / "run/last.pt").read_bytes()[:20000])
    torch.save({"format": 1, "recipe": Program()}, tmp_path / "program.pt")
    torch.save({"weight": torch.zeros(3)}, tmp_path / "weights.pt")
    messages = {
        tmp_path / "truncated.pt": "truncated.pt is truncated or not a checkpoint",
        tmp_path / "program.pt": "program.pt is refused: it asks to run ",
        tmp_path / "weights.pt": "weights.pt is not a checkpoint of softline: it has no recipe",
        tmp_path / "missing.pt": "no such file",
        trained / "run": "name a checkpoint file (there is a best.pt in it)",
        "softpp_micr": "timm knows no model 'softpp_micr'; did you mean softpp_micro or soft_micro",
        "softpp_micro": "softpp_micro is softline's own and has no published weights: train it",
    }
    for checkpoint, message in messages.items():
        code, out, errors = evaluate(checkpoint=checkpoint)
        assert (code, out) == (2, "")
        assert message in errors
    assert not (tmp_path / "executed").exists()


def test_checkpoint_of_another_model_is_refused(evaluate, trained, tmp_path):
    content = torch.load(trained / "run/last.pt", weights_only=True)
    content["recipe"]["model"]["options"]["embed_dims"] = [16, 16, 32, 32]
    torch.save(content, tmp_path / "other.pt")
    code, _, errors = evaluate(checkpoint=tmp_path / "other.pt")
    assert code == 2
    assert str(tmp_path / "other.pt") in errors


def test_other_classes_are_named(evaluate, tmp_path):
    data = write_images(tmp_path, classes=("dark", "bright"))
    code, out, errors = evaluate(data=data)
    assert (code, out) == (2, "")
    assert "not those the model was trained for: missing light; unknown bright" in errors


def test_corrupt_image_is_named_and_can_be_left_out(evaluate, tmp_path):
    data = write_images(tmp_path)
    (data / "val/dark/001.png").write_bytes(b"")
    code, out, errors = evaluate(data=data)
    assert (code, out) == (2, "")
    assert f"{data}/val/dark/001.png cannot be decoded" in errors
    code, out, _ = evaluate("--skip-corrupt", data=data)
    assert code == 0
    assert f"val: 1 of 18 images are corrupt and left out: {data}/val/dark/001.png" in out
    assert out.splitlines()[-1].split()[-1] == "17"
