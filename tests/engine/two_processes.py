"""What two processes do for test_distributed.py: `torchrun --nproc-per-node 2 -m tests.engine.two_processes ROOT`."""

import faulthandler
import json
import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch.utils.data import Subset

from softline.cli import main
from softline.engine import distributed
from softline.engine.evaluate import evaluate
from softline.engine.events import Saved
from softline.engine.task import build_task
from softline.engine.train import train
from tests.engine.small import small_recipe

# without drop path and mixup, whose random numbers each process draws for itself, and without batch norm, whose
# statistics are of each process's images
PLAIN = (
    "--model.name=inline_micro",
    "--model.options={embed_dims: [8, 8, 16, 16], num_heads: [1, 1, 2, 2], depths: [1, 1, 1, 1]}",
    "--ema.decay=0.9",
)
LENGTHS = (19, 5, 1)


def two_processes(root: Path) -> int:
    # rather than hang
    faulthandler.dump_traceback_later(200, exit=True)
    recipe = str(root / "recipe.yaml")
    fail("1", ["train", "no_such_recipe"])
    assert main(["train", recipe, *PLAIN, "--output", f"{root}/ddp"]) == 0
    train_and_keep_half(root)
    for strategy in ("ddp", "fsdp"):
        resumed = ["--output", f"{root}/{strategy}_from_one", "--strategy", strategy, "--resume"]
        assert main(["train", recipe, *PLAIN, *resumed]) == 0
    assert main(["train", recipe, "--output", f"{root}/batch_norm", "--schedule.epochs", "1"]) == 0
    stream = ["--data.source", "wds/images", "--data.root", f"{root}/shards", "--model.options.num_classes", "7"]
    stream += ["--output", f"{root}/stream", "--strategy", "fsdp", "--schedule.epochs", "1"]
    assert main(["train", recipe, *PLAIN, *stream]) == 0
    data = ["--batch-size", "4", "--sizes", "16,24", "--json", f"{root}/evaluate.json"]
    assert main(["evaluate", f"{root}/one/last.pt", f"{root}/data", *data]) == 0
    evaluate_lengths(root)
    diverging = ["--output", f"{root}/diverging", "--optimizer.lr", "1e30", "--optimizer.clip_norm", "null"]
    fail("2", ["train", recipe, *PLAIN, *diverging])
    # the process that started the two holds it
    fail("4", ["train", recipe, *PLAIN, "--output", f"{root}/held"])
    (root / f"failing{os.environ['RANK']}").write_text(str(time.time()))
    corrupt = ["--data.source", f"{root}/corrupt/data", "--output", f"{root}/failing"]
    return fail("3", ["train", recipe, *PLAIN, *corrupt])


def train_and_keep_half(root: Path) -> None:
    """Train by FSDP; its checkpoint of step 5 goes to another directory as well."""

    def keep(event: object) -> None:
        if isinstance(event, Saved) and event.step == 5:
            (root / "one_from_fsdp").mkdir()
            shutil.copy(event.path, root / "one_from_fsdp")

    train(small_recipe(root, *PLAIN, f"--output={root}/fsdp", "--strategy=fsdp"), listeners=[keep])


def evaluate_lengths(root: Path) -> None:
    """The first images of the validation data, counted by copies and by shards of a model."""
    accelerator = distributed.start()
    results = {}
    for strategy in ("ddp", "fsdp"):
        torch.manual_seed(0)
        task = build_task(small_recipe(root, *PLAIN))
        images = task.val_set
        model = distributed.shard(accelerator, task.model) if strategy == "fsdp" else task.model
        for length in LENGTHS:
            task.val_set = Subset(images, range(length))
            results[f"{strategy} {length}"] = asdict(evaluate(task, model, accelerator, batch_size=4, workers=0))
    if accelerator.is_main_process:
        (root / "lengths.json").write_text(json.dumps(results))


def fail(attempt: str, arguments: list[str]) -> int:
    """Run what fails. The attempt is what torchrun counts where it starts processes anew: each tells its own error."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 2
    return code


if __name__ == "__main__":
    sys.exit(two_processes(Path(sys.argv[1])))
