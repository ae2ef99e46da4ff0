"""Bad command lines of every command: one line that says what is wrong, exit code 2, and nothing left behind."""

import pytest

from softline.cli import COMMANDS, main

# {trained} is a directory with data, recipe.yaml and a run; file and directory are in the working directory
TRAIN = "train {trained}/recipe.yaml --output new/run"
COMPARE = "compare --attentions softmax --output new/out"
EVALUATE = "evaluate {trained}/run/best.pt {trained}/data"
PREDICT = "predict {trained}/run/best.pt {trained}/data/val/dark/000.png"
BENCH = "bench ops --ops inline --tokens 49 --no-memory"
LINEARIZE = "linearize {trained}/run/best.pt --data {trained}/data --output new/out"
LRA = "lra --tasks listops --attentions inline --output new/out"

MISTAKES = [
    (f"{TRAIN} --workers 100000", "workers must be at most"),
    (f"{TRAIN} --schedule.epochs .inf", "schedule.epochs must be a finite number"),
    (f"{TRAIN} --schedule.epochs 1e300", "schedule.epochs must be above 0 and at most 1e+06"),
    (f"{TRAIN} --optimizer.name adahessian", "optimizer.name adahessian with optimizer.options {}: "),
    (f"{TRAIN} --optimizer.options.eps -1", "optimizer.name adamw with optimizer.options {'eps': -1}: Invalid epsilon"),
    (f"{TRAIN} --optimizer.options.betas 3", "optimizer.name adamw with optimizer.options {'betas': 3}: "),
    (f"{TRAIN} --data.image_size 1000000", "batch_size 8 and data.image_size 1000000: a batch of 8 inputs takes"),
    (f"{TRAIN} --model.name none", "timm knows no model 'none'"),
    (f"{TRAIN} --model.options.in_chans x", "in_chans"),
    (f"{TRAIN} --data.source none", "source 'none' does not exist"),
    (f"{TRAIN} --augment.auto_augment foo", "auto_augment"),
    (f"{TRAIN} --output file", "could not create the directory file"),
    (f"{TRAIN} --output file/run", "could not create the directory file/run"),
    ("train none", "no recipe is named 'none'"),
    ("train", "name a recipe"),
    (f"{EVALUATE} --sizes 1000000", "--sizes 1000000: a batch of 1 inputs takes"),
    (f"{EVALUATE} --sizes -1", "--sizes must be at least 1"),
    (f"{EVALUATE} --workers 100000", "--workers must be at most"),
    (f"{EVALUATE} --json directory", "directory is a directory: name a file"),
    (f"{EVALUATE} --json /dev/null", "/dev/null is not a regular file: name a file"),
    ("evaluate none.pt", "none.pt"),
    (f"{PREDICT} {{trained}}/data/val/light/000.png --out new/drawn", "several files would be drawn to 000.png"),
    (f"{PREDICT} --batch-size 0 --out new/drawn", "--batch-size must be at least 1, got 0"),
    (f"{PREDICT} --top 0 --out new/drawn", "top must be at least 1, got 0"),
    (f"{PREDICT} --json none/found.json", "no such directory: none"),
    (f"{PREDICT} none.png --json new.json", "none.png"),
    (f"{COMPARE} --figure x.bmp", "--figure must end in .png, .svg, .pdf; got 'x.bmp'"),
    (f"{COMPARE} --figure none/x.png", "no such directory: none"),
    (f"{COMPARE} --json directory", "directory is a directory: name a file"),
    (f"{COMPARE} --json x.png --figure x.png", "two results would be written to x.png"),
    (f"{COMPARE} --optimizer.options.eps -1", "optimizer.name adamw with optimizer.options {'eps': -1}"),
    (f"{COMPARE} --workers 100000", "workers must be at most"),
    (f"{COMPARE} --data.source none", "source 'none' does not exist"),
    (f"{COMPARE} --seeds 0,0", "seeds must be different whole numbers"),
    (f"{COMPARE} --jobs 0", "jobs must be at least 1"),
    ("compare none --output new", "got 'none'"),
    (f"{LINEARIZE} --attention none", "got 'none'"),
    (f"{LINEARIZE} --attention linear", "It supports timm's VisionTransformer"),
    (f"{LINEARIZE} --attention linear --stages none", "got 'none'"),
    (f"{LINEARIZE} --attention linear --options 3", "--options must hold keys and values, got 3"),
    (f"{LINEARIZE} --attention linear --json none/x.json", "no such directory: none"),
    ("linearize none.pt --attention linear --data {trained}/data --output new", "none.pt"),
    (f"{LRA} --workers 100000", "workers must be at most"),
    (f"{LRA} --data.generate.workers 100000", "data.generate.workers must be at most"),
    (f"{LRA} --model.options.depth -1", "depth"),
    (f"{LRA} --json none/lra.json", "no such directory: none"),
    ("lra --tasks image --data directory --output new", "directory"),
    ("quickstart --attentions none --output new", "got 'none'"),
    ("quickstart --json directory --output new", "directory is a directory"),
    ("quickstart --output file", "could not create the directory file"),
    (f"{BENCH} --figure x.bmp", "--figure must end in"),
    (f"{BENCH} --json none/x.json", "no such directory: none"),
    (f"{BENCH} --json x.svg --figure x.svg", "two results would be written to x.svg"),
    (f"{BENCH} --threads 100000000", "--threads must be at most"),
    (f"{BENCH} --rounds 100000000000000000000", "--rounds must be at least 1 and at most 1e+06"),
    ("analyze heatmap none --output new/figures", "none"),
    ("analyze cost --grids 0 --output new/figures", "got 0"),
    ("analyze accuracy --runs none --output new/figures", "none"),
    ("analyze heatmap {trained}/run/best.pt --images none --output new/figures", "none"),
    ("models none", "none"),
    ("models --json directory", "directory is a directory"),
    ("convert file new", "file"),
    ("convert {trained}/run/best.pt none/new", "no such directory: none"),
    ("explore none", "none"),
    ("export none --to new.onnx", "none"),
    ("export {trained}/run/best.pt --to none/new.onnx", "no such directory: none"),
    ("export {trained}/run/best.pt --to new.tflite", "must end in .onnx"),
    ("export {trained}/run/best.pt --to new.onnx --json new.onnx", "two results would be written to new.onnx"),
    ("export {trained}/run/best.pt --to new.onnx --length 5", "length cannot be chosen"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES, ids=[line.replace("{trained}/", "") for line, _ in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing(line, message, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("text")
    before = sorted(tmp_path.rglob("*"))
    assert main([part.format(trained=trained) for part in line.split(" ")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"softline {line.split()[0]}: error: ")
    assert printed.count("\n") == 1
    assert message in printed
    assert sorted(tmp_path.rglob("*")) == before


def test_every_command_has_a_mistake():
    assert {line.split()[0] for line, _ in MISTAKES} == set(COMMANDS)


@pytest.mark.parametrize("line", ["compare --output ", "quickstart --json ", "bench ops --figure ", "convert x "])
def test_an_empty_name_is_no_file(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(line.split(" "))
    assert stop.value.code == 2
    assert "expected the name of a file or directory, got nothing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
