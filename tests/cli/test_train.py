import os
import pickle
import re
import shutil

import pytest
import torch

from softline.cli import main
from softline.engine.checkpoint import load_checkpoint
from softline.engine.events import read_log
from tests.engine.small import write_images


@pytest.fixture
def recipe(trained):
    return str(trained / "recipe.yaml")


@pytest.fixture
def fails(recipe, tmp_path, capsys):
    """Run `softline train`, which must end in a message, with nothing written."""

    def run(*arguments, name=recipe, output=tmp_path / "run"):
        assert main(["train", name, "--output", str(output), *map(str, arguments)]) == 2
        assert not (tmp_path / "run").exists()
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch_size", "400"], "batch_size (400) is larger than the number of training images (40)"),
        (
            ["--batch_size", "8", "--accumulate", "3"],
            "batch_size (8) must be divisible by processes (1) * accumulate (3)",
        ),
        (["--model.name", "softp_micro"], "timm knows no model 'softp_micro'; did you mean softpp_micro or soft_micro"),
        (["--model.options.attention", "inlin"], "got 'inlin'; did you mean 'inline'?"),
        (["--model.options.colour", "red"], "model.options of softpp_micro: "),
        (["--model.options.in_chans", "2"], "images have 1 (grey) or 3 (colour) channels; the model's in_chans is 2"),
        (["--precision", "fp16", "--device", "cpu"], "precision fp16 needs a GPU: use bf16 or fp32 on the CPU"),
        (["--optimizer.name", "adamx"], "optimizer.name must be one of"),
        (["--data.source", "/no/such/place"], "source '/no/such/place' does not exist; it must be a directory"),
    ],
)
def test_what_cannot_be_trained_ends_in_a_message(fails, arguments, message):
    assert message in fails(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer.lrr", "1"], "unknown key optimizer.lrr; did you mean optimizer.lr?"),
        (["--optimizer.lr", "fast"], "optimizer.lr must be a float, got fast"),
        (["--batch_size", "0"], "batch_size must be at least 1, got 0"),
        (["--precision", "fp8"], "precision must be one of"),
    ],
)
def test_recipe_is_checked_before_any_data_is_read(fails, arguments, message):
    """The data source does not exist, and yet the message is about the recipe."""
    printed = fails("--data.source", "/no/such/place", *arguments)
    assert message in printed
    assert "/no/such/place" not in printed


def test_unknown_recipe_is_suggested(fails):
    assert "no recipe is named 'quickstar'. Did you mean quickstart?" in fails(name="quickstar")
    assert "no such recipe file: quickstart.yml" in fails(name="quickstart.yml")


def test_image_too_small_for_the_model_ends_in_a_message(fails):
    arguments = ["--model.name", "vit_tiny_patch16_224", "--model.options", "{}", "--data.image_size", "8"]
    assert "vit_tiny_patch16_224 cannot take images of 8 x 8 pixels: " in fails(*arguments)


def test_models_of_timm_take_the_size_of_the_images(trained, recipe, tmp_path, capsys):
    model = ["--model.name", "vit_tiny_patch16_224", "--model.options", "{depth: 1}", "--data.image_size", "32"]
    assert main(["train", recipe, *model, "--output", str(tmp_path), "--schedule.epochs", "1"]) == 0
    assert main(["evaluate", str(tmp_path / "best.pt"), str(trained / "data"), "--sizes", "32,48"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["32", "48"]


def test_empty_data_is_named(fails, tmp_path):
    (tmp_path / "data").mkdir()
    assert f"expected {tmp_path}/data/train/<class>/*.jpg" in fails("--data.source", tmp_path / "data")
    (tmp_path / "data/train").mkdir()
    assert f"{tmp_path}/data/train holds no images" in fails("--data.source", tmp_path / "data")


def test_other_classes_in_validation_are_named(fails, tmp_path):
    data = write_images(tmp_path)
    (data / "val/light").rename(data / "val/bright")
    assert "missing in validation: light; only in validation: bright" in fails("--data.source", data)


def test_output_that_cannot_be_created_is_named(fails, tmp_path):
    (tmp_path / "file").write_text("kept")
    for output, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file/run", "Not a directory")):
        assert f"error: could not create the directory {output}: {reason}" in fails(output=output)
    assert (tmp_path / "file").read_text() == "kept"


def test_corrupt_image_is_named_and_can_be_left_out(recipe, tmp_path, capsys):
    data = write_images(tmp_path)
    broken = data / "train/dark/003.png"
    broken.write_bytes(broken.read_bytes()[:100])
    command = ["train", recipe, "--data.source", str(data), "--schedule.epochs", "1", "--output", str(tmp_path / "run")]
    assert main(command) == 2
    assert f"{broken} cannot be decoded (image file is truncated); repair or delete it" in capsys.readouterr().err
    assert main([*command, "--skip-corrupt"]) == 0
    printed = capsys.readouterr().out
    assert f"train: 1 of 40 images are corrupt and left out: {broken} (image file is truncated)\n" in printed
    assert "val: 0 of 18 images are corrupt and left out\n" in printed
    assert (tmp_path / "run/best.pt").exists()


def test_finished_run_is_not_overwritten(trained, recipe, capsys):
    before = (trained / "run/last.pt").read_bytes()
    assert main(["train", recipe]) == 2
    assert f"{trained}/run holds a checkpoint: continue by --resume" in capsys.readouterr().err
    assert (trained / "run/last.pt").read_bytes() == before


class Program:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def truncate(path):
    path.write_bytes(path.read_bytes()[:20000])


def pickle_program(path):
    path.write_bytes(pickle.dumps(Program()))


def save_program(path):
    torch.save({"format": 1, "recipe": Program()}, path)


def change(keys, value):
    """Return a function that writes the checkpoint with another value."""

    def rewrite(path):
        content = torch.load(path, weights_only=True)
        *places, last = keys.split("/")
        place = content
        for key in places:
            place = place[key]
        place[last] = value
        torch.save(content, path)

    return rewrite


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change("optimizer", {}), "does not fit this run: its state of the optimizer is another's"),
        (change("optimizer/state/head.bias/exp_avg", torch.ones(7)), "exp_avg of head.bias has the shape (7,)"),
        (change("optimizer/state/head.bias/exp_avg", torch.full((2,), float("nan"))), "is not finite"),
        (change("best", {"other": 0.5}), "it has no top1 in best"),
        (change("step", 10**6), "it has step 1000000 of"),
        (change("step", -1), "it has step -1 of"),
        (truncate, "last.pt is truncated or not a checkpoint"),
        (pickle_program, "last.pt is truncated or not a checkpoint"),
        (save_program, "is refused: it asks to run "),
    ],
)
def test_spoilt_checkpoint_is_not_resumed(trained, recipe, tmp_path, monkeypatch, capsys, spoil, message):
    monkeypatch.chdir(tmp_path)
    shutil.copy(trained / "run/last.pt", tmp_path)
    spoil(tmp_path / "last.pt")
    before = (tmp_path / "last.pt").read_bytes()
    assert main(["train", recipe, "--output", str(tmp_path), "--resume", "--schedule.epochs", "1"]) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "last.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


def test_checkpoint_of_another_model_is_not_resumed(trained, recipe, tmp_path, capsys):
    shutil.copy(trained / "run/last.pt", tmp_path)
    other = ["--schedule.epochs", "1", "--model.options.attention", "softmax"]
    assert main(["train", recipe, "--output", str(tmp_path), "--resume", *other]) == 2
    assert "was trained by another recipe, which differs in model.options.attention" in capsys.readouterr().err


def test_any_model_of_timm_is_trained_and_evaluated(trained, recipe, tmp_path, capsys):
    model = ["--model.name", "resnet10t", "--model.options", "{}", "--schedule.epochs", "1"]
    assert main(["train", recipe, *model, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert re.search(
        r"^step 5: epoch 1.00  0:00 left  loss [\d.]+  accuracy [\d.]+ .* images/s ", printed.out, re.MULTILINE
    )
    assert printed.out.endswith(f"checkpoints and logs: {tmp_path}\n")
    assert main(["evaluate", str(tmp_path / "best.pt"), str(trained / "data")]) == 0
    logged = [line for line in read_log(tmp_path / "log.jsonl") if line["event"] == "evaluated"][-1]["metrics"]
    assert f"{100 * logged['top1']:.2f}" in capsys.readouterr().out.splitlines()[-1]
    assert load_checkpoint(tmp_path / "best.pt")["arch"] == "resnet10t"


def test_recipes_are_listed_and_shown(recipe, capsys):
    assert main(["train", "--list"]) == 0
    assert "quickstart" in capsys.readouterr().out.split()
    assert main(["train", recipe, "--show", "--optimizer.lr", "0.5"]) == 0
    assert "lr: 0.5\n" in capsys.readouterr().out
