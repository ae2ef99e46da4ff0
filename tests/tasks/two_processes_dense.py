"""What two processes do for test_dense_distributed.py: `torchrun --nproc-per-node 2 -m tests.tasks.two_processes_dense
ROOT`."""

import faulthandler
import sys
from pathlib import Path

from softline.cli import main
from softline.engine.train import train
from tests.tasks.small_dense import DETECTION, SEGMENTATION, dense_recipe

# without batch norm, whose statistics are of each process's images, and without padding, which counts in the loss
PLAIN = ("--model.name=inline_micro", "--data.train_short_sides=[64]")


def two_processes(root: Path) -> int:
    # rather than hang
    faulthandler.dump_traceback_later(200, exit=True)
    train(dense_recipe(DETECTION, root, *PLAIN, f"--output={root}/boxes_ddp"))
    # two crops for each process: batch norm needs several
    train(dense_recipe(SEGMENTATION, root, f"--output={root}/pixels_fsdp", "--strategy=fsdp", "--batch_size=4"))
    for name in ("boxes", "pixels"):
        assert main(["evaluate", f"{root}/{name}_one/last.pt", "--json", f"{root}/{name}.json"]) == 0
    return 0


if __name__ == "__main__":
    sys.exit(two_processes(Path(sys.argv[1])))
