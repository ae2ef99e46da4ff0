import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from softline.engine.checkpoint import load_checkpoint
from softline.engine.events import read_log
from softline.engine.train import train
from tests.tasks.small_dense import DETECTION, SEGMENTATION, dense_recipe, write_coco, write_scenes
from tests.tasks.two_processes_dense import PLAIN

TOLERANCE = 32 * 2**-23
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Runs of one process, and what two made of the same recipes."""
    root = tmp_path_factory.mktemp("dense")
    write_coco(root)
    write_scenes(root)
    train(dense_recipe(DETECTION, root, *PLAIN, f"--output={root}/boxes_one"))
    train(dense_recipe(SEGMENTATION, root, f"--output={root}/pixels_one"))
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    done = subprocess.run(
        [*TORCHRUN, "tests.tasks.two_processes_dense", str(root)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return root


def losses(output):
    return [line["loss"] for line in read_log(output / "log.jsonl") if line["event"] == "stepped"]


def test_a_detector_takes_the_same_course_on_two_processes(root):
    assert len(losses(root / "boxes_one")) == 8
    assert losses(root / "boxes_ddp") == pytest.approx(losses(root / "boxes_one"), abs=TOLERANCE)


@pytest.mark.parametrize("name", ["boxes", "pixels"])
def test_every_image_counts_once_on_two_processes(root, name):
    (row,) = json.loads((root / f"{name}.json").read_text())["rows"]
    assert row["samples"] == 3
    assert row["metrics"] == pytest.approx(load_checkpoint(root / f"{name}_one/last.pt")["metrics"], rel=1e-5)


def test_a_segmenter_trains_in_shards(root):
    content = load_checkpoint(root / "pixels_fsdp/last.pt")
    assert content["step"] == 2
    assert set(content["metrics"]) == {"mIoU", "mean_accuracy", "pixel_accuracy"}
