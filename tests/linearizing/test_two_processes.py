"""Two processes linearise a model as one does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import softline
from softline.engine.events import read_log
from tests.tasks.small_vit import STAGES, train_teacher

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
TOLERANCE = 1e-4
NUMBERS = ("top1", "agreement", "divergence")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Results of one process, and of two with the same recipes."""
    root = tmp_path_factory.mktemp("processes")
    teacher = str(train_teacher(root))
    # one process draws other random numbers for its batch than two, and drop path is the only use of them
    same = (*STAGES, "--model.options.drop_path_rate=0")
    options = {"softmax_layers": 1, "sizes": (16,), "cost_sizes": (), "overrides": same}
    softline.linearize(teacher, "inline", data=f"{root}/data", output=root / "one", **options)
    command = [teacher, "--attention=inline", f"--data={root}/data", f"--output={root}/two", "--softmax-layers=1"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    done = subprocess.run(
        [*TORCHRUN, "softline.cli", "linearize", *command, "--sizes=16", "--cost-sizes=0", *same],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (root / "printed").write_text(done.stdout)
    return root


def losses(run):
    return [line["loss"] for line in read_log(run / "log.jsonl") if line["event"] == "stepped"]


@pytest.mark.parametrize("stage", ["transfer", "finetune"])
def test_both_stages_take_the_same_course(root, stage):
    assert len(losses(root / "one" / stage)) == 10
    assert losses(root / "two" / stage) == pytest.approx(losses(root / "one" / stage), rel=TOLERANCE)


def test_every_image_counts_once(root):
    one, two = (json.loads((root / name / "linearized.json").read_text()) for name in ("one", "two"))
    assert two["kept"] == one["kept"]
    for ours, theirs in zip(one["steps"], two["steps"], strict=True):
        numbers = [{key: found["scores"][0][key] for key in NUMBERS} for found in (ours, theirs)]
        assert numbers[1] == pytest.approx(numbers[0], rel=TOLERANCE, abs=1e-6)
        assert theirs["errors"] == pytest.approx(ours["errors"], rel=TOLERANCE)


def test_one_process_speaks(root):
    printed = (root / "printed").read_text()
    assert printed.count("linearised model:") == 1
    assert printed.count("transfer: each new attention") == 1
    assert (root / "two" / "report.html").exists()
