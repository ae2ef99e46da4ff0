"""A package adds a task by an entry point, and every command knows it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """
task: parity
output: run
batch_size: 16
model: {name: bits}
data: {highest: 63}
optimizer: {name: sgd, lr: 2.0, weight_decay: 0}
schedule: {epochs: 20}
eval_every: 20
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """An installed package, as far as Python can tell: its module and its metadata lie on the path."""
    root = tmp_path_factory.mktemp("package")
    (root / "parity.py").write_text((Path(__file__).parent / "third_party.py").read_text())
    metadata = root / "parity-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: parity\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[softline.tasks]\nparity = parity:definition\n")
    (root / "parity.yaml").write_text(RECIPE)
    (root / "seven.txt").write_text("7")
    (root / "eight.txt").write_text("8")
    return root


@pytest.fixture(scope="module")
def printed(package):
    """What the commands print, in one process of their own."""
    commands = [
        ["train", "parity.yaml"],
        ["evaluate", "run/best.pt", "--json", "evaluate.json"],
        ["evaluate", "run/best.pt", "--highest", "9", "--json", "ten.json"],
        ["evaluate", "run/best.pt", "--sizes", "224"],
        ["predict", "run/best.pt", "seven.txt", "eight.txt", "--json", "predict.json"],
        ["compare", "--attentions", "softmax", "--recipe", "parity.yaml"],
        ["analyze", "heatmap", "run/best.pt"],
        ["train", "parity.yaml", "--output", "other", "--data.lowest", "3"],
    ]
    code = (
        "import contextlib, io, json, sys\n"
        "from softline.cli import main\n"
        "told = []\n"
        f"for command in {commands!r}:\n"
        "    out, err = io.StringIO(), io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):\n"
        "        code = main(command)\n"
        "    told.append([code, out.getvalue(), err.getvalue()])\n"
        "open('told.json', 'w').write(json.dumps(told))\n"
    )
    environment = {"PYTHONPATH": str(package), "PATH": "/usr/bin:/bin", "HOME": str(package)}
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=package, env=environment, check=True)
    names = ["train", "evaluate", "other numbers", "sizes", "predict", "compare", "analyze", "unknown key"]
    return dict(zip(names, json.loads((package / "told.json").read_text()), strict=True))


def test_it_is_trained_by_its_recipe(printed):
    code, out, _ = printed["train"]
    assert code == 0
    assert "best: accuracy 100.00 %" in out


def test_its_checkpoint_is_evaluated_with_its_own_options(printed, package):
    assert printed["evaluate"][0] == printed["other numbers"][0] == 0
    (row,) = json.loads((package / "evaluate.json").read_text())["rows"]
    assert (row["highest"], row["samples"], row["metrics"]) == (63, 64, {"accuracy": 1.0})
    (row,) = json.loads((package / "ten.json").read_text())["rows"]
    assert (row["highest"], row["samples"]) == (9, 10)


def test_options_that_it_does_not_have_are_refused(printed):
    assert printed["sizes"][0] == 2
    assert "--sizes has no meaning for a judge of parity, which takes --highest" in printed["sizes"][2]
    assert printed["unknown key"][0] == 2
    assert "unknown key data.lowest" in printed["unknown key"][2]


def test_it_is_used_on_new_files(printed, package):
    assert printed["predict"][0] == 0
    found = json.loads((package / "predict.json").read_text())
    assert [each["parity"] for each in found] == ["odd", "even"]


def test_its_errors_are_told_in_a_line(printed):
    """It has no attention to compare, and no image to look at."""
    code, _, error = printed["compare"]
    assert (code, error.count("\n")) == (2, 1)
    assert "model.options: bits has none, got {'attention': 'softmax'}" in error
    code, _, error = printed["analyze"]
    assert code == 2
    assert "bits is a judge of parity: there is no image to show it" in error
