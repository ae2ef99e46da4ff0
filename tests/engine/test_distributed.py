"""Two real processes, joined by gloo and started by torchrun as users start them.

How close they come to one process: a gradient is a mean over 8 images, here of two means over 4, which rounds each
differently by about one unit in the last place of float32. Losses near 2 have units of 1.2e-7: one of them is what the
losses of 10 steps differ by at most, two after 40 steps, as measured. TOLERANCE is eight, for AdamW lets the rounding
of small gradients count as much as that of large ones; from one step to the next the loss changes by 1e-2.
"""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import Subset

from softline.cli import main
from softline.engine import distributed
from softline.engine.evaluate import evaluate
from softline.engine.events import Saved, read_log
from softline.engine.task import build_task
from softline.engine.train import train
from softline.locks import hold_directory
from softline.tasks.loading import load_trained
from tests.engine.small import RECIPE, evaluated, small_recipe, write_images
from tests.engine.two_processes import LENGTHS, PLAIN

TOLERANCE = 8 * 2**-23
CLASSES = tuple("abcdefg")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


def environment(**changes):
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **changes}


def write_shards(root):
    """The images of ``root/data`` as webdatasets whose shards are of different lengths."""
    (root / "shards").mkdir()
    splits = {}
    for split in ("train", "val"):
        images = sorted((root / "data" / split).glob("*/*.png"))
        portions = images[: len(images) // 2], images[len(images) // 2 : -4], images[-4:]
        for number, portion in enumerate(portions):
            with tarfile.open(root / "shards" / f"{split}{number}.tar", "w") as tar:
                for path in portion:
                    key = f"{path.parent.name}{path.stem}"
                    tar.add(path, f"{key}.png")
                    label = str(CLASSES.index(path.parent.name)).encode()
                    entry = tarfile.TarInfo(f"{key}.cls")
                    entry.size = len(label)
                    tar.addfile(entry, io.BytesIO(label))
        names = [f"{split}{number}.tar" for number in range(3)]
        lengths = [len(portion) for portion in portions]
        splits[split] = {"name": split, "num_samples": len(images), "filenames": names, "shard_lengths": lengths}
    (root / "shards/_info.json").write_text(json.dumps({"splits": splits}))


def losses(output, *, after=0):
    return [
        line["loss"] for line in read_log(output / "log.jsonl") if line["event"] == "stepped" and line["step"] > after
    ]


def evaluations(output):
    return [line["metrics"] for line in read_log(output / "log.jsonl") if line["event"] == "evaluated"]


def assert_same_course(output, reference):
    assert losses(output) == pytest.approx(losses(reference), abs=TOLERANCE)
    for actual, expected in zip(evaluations(output), evaluations(reference), strict=True):
        assert actual["loss"] == pytest.approx(expected["loss"], abs=TOLERANCE)
        assert (actual["top1"], actual["top5"]) == (expected["top1"], expected["top5"])


def train_alone(root, output, *overrides, resume=False, listeners=()):
    return train(
        small_recipe(root, *PLAIN, f"--output={root}/{output}", *overrides), resume=resume, listeners=listeners
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Data, and a run of one process with the checkpoint of its fifth step."""
    root = tmp_path_factory.mktemp("distributed")
    write_images(root, train=6, val=3, classes=CLASSES)
    (root / "recipe.yaml").write_text(RECIPE.format(root=root))
    write_shards(root)
    write_images(root / "corrupt", train=6, val=3, classes=CLASSES)
    (root / "corrupt/data/train/c/003.png").write_bytes(b"no image")

    def keep(event):
        if isinstance(event, Saved) and event.step == 5:
            for strategy in ("ddp", "fsdp"):
                (root / f"{strategy}_from_one").mkdir()
                shutil.copy(event.path, root / f"{strategy}_from_one")

    train_alone(root, "one", listeners=[keep])
    return root


@pytest.fixture(scope="module")
def refused(root):
    """A port that is taken, and a process told to use it; it starts while the others run."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        command = [sys.executable, "-m", "softline.cli", "train", f"{root}/recipe.yaml", "--output", f"{root}/port"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, env=environment(**address), **pipes) as run:
            yield port, run
            run.kill()


@pytest.fixture(scope="module")
def printed(root, refused):
    """What two processes print that train, resume, evaluate, diverge and fail."""
    command = [*TORCHRUN, "tests.engine.two_processes", str(root)]
    with hold_directory(root / "held"):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=environment(), cwd=Path(__file__).parents[2]
        )
    (root / "ended").write_text(str(time.time()))
    assert (root / "failing0").exists(), done.stdout + done.stderr
    assert done.returncode != 0
    return done


@pytest.mark.usefixtures("printed")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_learn_what_one_does(root, strategy):
    """The losses of each step and both evaluations of the averaged weights.

    Without drop path and mixup: each process draws its own random numbers for them. Without batch norm: it sees the
    images of its own process only.
    """
    assert_same_course(root / strategy, root / "one")


def test_two_backward_passes_learn_what_one_does(root):
    train_alone(root, "accumulate", "--accumulate=2")
    assert_same_course(root / "accumulate", root / "one")


@pytest.mark.usefixtures("printed")
@pytest.mark.parametrize("output", ["ddp_from_one", "fsdp_from_one"])
def test_two_processes_continue_what_one_began(root, output):
    assert losses(root / output) == pytest.approx(losses(root / "one", after=5), abs=TOLERANCE)


@pytest.mark.usefixtures("printed")
def test_one_process_continues_what_two_began_by_fsdp(root):
    train_alone(root, "one_from_fsdp", resume=True)
    assert losses(root / "one_from_fsdp") == pytest.approx(losses(root / "one", after=5), abs=TOLERANCE)


@pytest.mark.usefixtures("printed")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_image_counts_once_however_they_divide(root, strategy, length):
    """19 images in batches of 4 leave 3 and 1 over; 5 give one process less than a batch; 1 gives one process none."""
    torch.manual_seed(0)
    task = build_task(small_recipe(root, *PLAIN))
    task.val_set = Subset(task.val_set, range(length))
    expected = evaluate(task, task.model, distributed.start(), batch_size=4)
    actual = json.loads((root / "lengths.json").read_text())[f"{strategy} {length}"]
    assert actual["samples"] == expected.samples == length
    assert (actual["metrics"]["top1"], actual["metrics"]["top5"]) == (
        expected.metrics["top1"],
        expected.metrics["top5"],
    )
    assert actual["metrics"]["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-6)


@pytest.mark.usefixtures("printed")
def test_evaluate_counts_the_same_on_two_processes(root):
    trained = load_trained(str(root / "one/last.pt"))
    rows = json.loads((root / "evaluate.json").read_text())["rows"]
    alone = evaluated(trained, str(root / "data"), sizes=[16, 24], batch_size=4)
    for row, (on, expected) in zip(rows, alone, strict=True):
        assert (row["size"], row["samples"]) == (on["size"], 21)
        assert row["metrics"] == pytest.approx(expected.metrics, rel=1e-6)


@pytest.mark.usefixtures("printed")
def test_checkpoint_with_batch_norm_scores_what_the_two_processes_logged(root):
    """Their running statistics differ until they are averaged."""
    trained = load_trained(str(root / "batch_norm/last.pt"))
    [(_, alone)] = evaluated(trained, str(root / "data"))
    assert evaluations(root / "batch_norm")[-1] == pytest.approx(alone.metrics, rel=1e-6)


@pytest.mark.usefixtures("printed")
def test_streams_divide_among_processes(root):
    """An epoch has all images; every validation image counts once, though one process has more than the other."""
    assert len(losses(root / "stream")) == 42 // 8
    trained = load_trained(str(root / "stream/last.pt"))
    trained.classes = CLASSES
    [(_, alone)] = evaluated(trained, str(root / "data"))
    assert evaluations(root / "stream")[-1] == pytest.approx(alone.metrics, rel=1e-6)


def test_each_line_is_printed_and_logged_once(root, printed):
    assert printed.stdout.count(f"to {root}/ddp\n") == 1
    assert printed.stdout.count(f"checkpoints and logs: {root}/ddp\n") == 1
    lines = read_log(root / "ddp/log.jsonl")
    assert [line["step"] for line in lines if line["event"] == "stepped"] == list(range(1, 11))
    assert [line["processes"] for line in lines if line["event"] == "started"] == [2]
    assert len(list((root / "ddp/tensorboard").iterdir())) == 1
    assert "Warning" not in printed.stderr


def test_recipe_that_does_not_exist_is_told_once(printed):
    """Before the processes have joined each other."""
    assert printed.stderr.count("softline train: error: no recipe is named 'no_such_recipe'") == 1


def test_loss_that_is_not_finite_is_told_once(printed):
    message = r"softline train: error: the loss is nan, first not finite in \S+ \(\w+\) at step \d+, learning rate \S+;"
    assert len(re.findall(message, printed.stderr)) == 1


def test_corrupt_image_of_one_process_ends_all(root, printed):
    """One message, no waiting for the process that ended, and no traceback but torchrun's own."""
    message = f"softline train: error: {root}/corrupt/data/train/c/003.png cannot be decoded (not an image)"
    assert printed.stderr.count(message) == 1
    assert printed.stderr.count("softline train: error") == 4
    assert float((root / "ended").read_text()) - float((root / "failing0").read_text()) < 30
    assert "softline/cli" not in printed.stderr
    assert printed.stderr.count("Traceback") == printed.stderr.count("ChildFailedError:") == 1


def test_directory_in_use_is_told_once(root, printed):
    message = rf"softline train: error: {root}/held is in use by process {os.getpid()} on \S+ since "
    assert len(re.findall(message, printed.stderr)) == 1
    assert not (root / "held").exists()


def test_stopped_processes_save_and_one_continues(root):
    train_alone(root, "long", "--schedule.epochs=8")
    output = root / "stopped"
    command = [*TORCHRUN, "softline.cli", "train", f"{root}/recipe.yaml", *PLAIN, "--schedule.epochs", "8"]
    with subprocess.Popen(
        [*command, "--output", str(output), "--save_every", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as run:
        try:
            wait_for(lambda: (output / "log.jsonl").exists() and len(losses(output)) > 2, run)
            for worker in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
                os.kill(int(worker), signal.SIGTERM)
            out, errors = run.communicate(timeout=60)
        finally:
            run.kill()
    # torchrun's own code for processes that failed, each of which it reports with its code
    assert run.returncode == 1, errors
    assert re.search(r"exitcode\s*: 143 ", errors)
    assert len(re.findall(r"stopped by SIGTERM after step \d+; continue with --resume", out)) == 1
    assert 2 < len(losses(output)) < 40
    result = train_alone(root, "stopped", "--schedule.epochs=8", resume=True)
    assert result.finished
    assert losses(output) == pytest.approx(losses(root / "long"), abs=TOLERANCE)


def wait_for(condition, run):
    begin = time.monotonic()
    while not condition():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() - begin < 120
        time.sleep(0.005)


def test_port_in_use_is_named(root, refused):
    port, run = refused
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 2
    assert f"softline train: error: port {port} is in use by another program" in errors
    assert "Traceback" not in errors
    assert not (root / "port").exists()


@pytest.mark.parametrize("precision", ["fp16"])
def test_half_precision_on_a_cpu_is_refused(root, capsys, precision):
    arguments = [
        "train",
        f"{root}/recipe.yaml",
        "--precision",
        precision,
        "--device",
        "cpu",
        "--output",
        f"{root}/half",
    ]
    assert main(arguments) == 2
    assert "precision fp16 needs a GPU: use bf16 or fp32 on the CPU" in capsys.readouterr().err


@pytest.mark.parametrize(("processes", "kind"), [(1, nn.BatchNorm2d), (4, nn.SyncBatchNorm)])
def test_batch_norms_of_several_gpus_are_synchronised(processes, kind):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gpus = SimpleNamespace(num_processes=processes, device=torch.device("cuda"))
    synchronised = distributed.sync_batch_norms(gpus, model)
    assert isinstance(synchronised[1], kind)
    assert all(torch.equal(value, before[name]) for name, value in synchronised.state_dict().items())


def test_batch_norms_cannot_be_synchronised_on_the_cpu():
    processes = SimpleNamespace(num_processes=2, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"needs a GPU for each of the 2 processes.*--model.sync_batch_norm false"):
        distributed.sync_batch_norms(processes, nn.BatchNorm2d(4))
