"""Long use of one process: what it needs must not grow.

A case is a process of its own that repeats rounds of ordinary use: it trains, loads checkpoints, evaluates and
predicts, creates models and drops them, opens sources of images, and answers questions of the explorer's page. After
each round it writes down what it has: resident memory, open files, threads, temporary files. The first rounds warm it
up, since modules are imported, caches filled and memory pools grown. From then on only memory may grow, and that by a
bound that one leaked model per round would exceed.

``python -m tools.campaign.soak SEED ROUNDS DIRECTORY`` is that process.
"""

import gc
import json
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.campaign import running
from tools.campaign.explorer import usage
from tools.campaign.interface import Outcome, Verdict, case_random

WARM_UP = 6
ROUNDS = 16
"""Measured rounds of a case."""
TIME_LIMIT = 600.0
MORE = {"bytes": 16 * 2**20, "descriptors": 0, "threads": 0, "temporary files": 0}
"""How much more the last rounds may have than the first ones after the warm-up."""


class Soak:
    """Kind "soak"."""

    name = "soak"
    unit = "rounds of use"
    target = 160
    share = 0.5

    def prepare(self, work: Path) -> None:
        """Each case writes its own data."""

    def run(self, seed: int, work: Path) -> Outcome:
        return soak(seed, ROUNDS, work)


KIND = Soak()


def soak(seed: int, rounds: int, work: Path, *, warm_up: int = WARM_UP) -> Outcome:
    """Run a process for the rounds after a warm-up, and judge what it needed."""
    with running.case_directory(work, "soak", seed) as directory:
        command = [sys.executable, "-m", "tools.campaign.soak", str(seed), str(warm_up + rounds), str(directory)]
        finished = running.launch_program(command, directory).wait(time_limit=TIME_LIMIT)
    what = f"{rounds} rounds of use in one process"
    verdict = running.judge(finished, codes=(0,))
    if verdict is not Verdict.SURVIVED:
        return Outcome(verdict, what, finished.detail())
    measured = [json.loads(line) for line in finished.output.splitlines() if line.startswith('{"round"')]
    reason = growth([measurement["usage"] for measurement in measured[warm_up:]])
    if reason is not None:
        return Outcome(Verdict.WRONG, f"{what}: {reason}", finished.detail(), tried=rounds)
    return Outcome(Verdict.SURVIVED, what, tried=rounds)


def growth(measured: list[dict[str, int]]) -> str | None:
    """Describe what has grown over the rounds by more than `MORE`; None if nothing has.

    The least of several rounds counts, because what a round needs varies with what it draws.
    """
    part = max(len(measured) // 3, 1)
    for name, more in MORE.items():
        first = min(usage[name] for usage in measured[:part])
        last = min(usage[name] for usage in measured[-part:])
        if last > first + more:
            return f"{name} grew from {first:,} to {last:,}"
    return None


# the process


def main(seed: int, rounds: int, directory: Path) -> None:
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    numbers = case_random("soak", seed)
    used = Use(directory)
    for number in range(rounds):
        for use in numbers.sample(used.kinds, len(used.kinds)):
            use(numbers)
        gc.collect()
        sys.stdout.write(json.dumps({"round": number, "usage": used.measure()}) + "\n")
        sys.stdout.flush()


class Use:
    """Ways to use softline, all in this process."""

    def __init__(self, root: Path) -> None:
        from softline.engine.train import train
        from softline.explorer.catalog import find_choices
        from softline.explorer.view import Explorer
        from tests.engine.small import small_recipe, write_images

        self.root = root
        self.data = write_images(root)
        train(small_recipe(root, "--schedule.epochs=1"))
        self.checkpoint = str(root / "run" / "best.pt")
        self.explorer = Explorer(find_choices([self.checkpoint]))
        self.kinds: list[Callable[[random.Random], Any]] = [
            self.train,
            self.evaluate,
            self.predict,
            self.create,
            self.open,
            self.explore,
        ]

    def measure(self) -> dict[str, int]:
        return {**usage(os.getpid()), "temporary files": len(os.listdir(tempfile.gettempdir()))}

    def train(self, numbers: random.Random) -> None:
        from softline.engine.train import train
        from tests.engine.small import small_recipe

        output = self.root / "again"
        average = ["--ema.decay=0.9"] if numbers.random() < 0.5 else []
        workers = f"--workers={numbers.randint(0, 1)}"
        train(small_recipe(self.root, "--schedule.epochs=1", f"--output={output}", workers, *average))
        shutil.rmtree(output)

    def evaluate(self, numbers: random.Random) -> None:
        from softline.tasks.loading import load_trained
        from tests.engine.small import evaluated

        evaluated(load_trained(self.checkpoint), str(self.data))

    def predict(self, numbers: random.Random) -> None:
        from softline.tasks.loading import load_trained

        images = [str(path) for path in sorted(self.data.rglob("*.png"))]
        for _ in load_trained(self.checkpoint).predict(numbers.sample(images, 5)):
            pass

    def create(self, numbers: random.Random) -> None:
        import timm
        import torch

        from softline import ATTENTIONS

        for name in ("softpp_micro", "inline_micro"):
            attention = numbers.choice(list(ATTENTIONS))
            model = timm.create_model(name, attention=attention, img_size=32, num_classes=3).eval()
            model(torch.zeros(1, 3, 32, 32)).sum().backward()

    def open(self, numbers: random.Random) -> None:
        from softline.data.images.sources import open_source

        for split in ("train", "val"):
            source: Any = open_source(str(self.data), split)
            source.load(numbers.randrange(len(source)))
        open_source("embedded", "val")

    def explore(self, numbers: random.Random) -> None:
        from softline.data.images.photographs import PHOTOGRAPHS, open_photograph
        from softline.explorer.catalog import OWN
        from softline.explorer.view import Asked, square_photo

        fresh = [label for label in self.explorer.choices if "micro" in label]
        for label in (*numbers.sample(fresh, 2), next(iter(self.explorer.choices))):
            name = numbers.choice(list(PHOTOGRAPHS))
            photo = square_photo(name, open_photograph(name))
            query = (numbers.random(), numbers.random())
            self.explorer.answer(Asked(label, OWN, 0, None), photo, numbers.choice((32, 64, 96)), query)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
