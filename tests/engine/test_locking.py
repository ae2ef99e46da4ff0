"""One run at a time in an output directory."""

import os
import subprocess
import sys
import threading
import time

import pytest

from softline.cli import main
from softline.engine.checkpoint import load_checkpoint
from softline.engine.events import Stepped, read_log
from softline.engine.train import train
from softline.errors import UserError
from softline.locks import LOCK
from tests.engine.small import RECIPE, small_recipe, write_images


@pytest.fixture
def root(tmp_path):
    write_images(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(root=tmp_path))
    return tmp_path


def test_a_run_of_another_process_is_named_and_continued_after_its_kill(root, capfd):
    options = ["--schedule.epochs", "20", "--save_every", "1", "--workers", "1"]
    command = [sys.executable, "-m", "softline.cli", "train", str(root / "recipe.yaml"), *options]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=one_thread) as run:
        begin = time.monotonic()
        while not (root / "run" / "last.pt").exists():
            assert run.poll() is None
            assert time.monotonic() - begin < 120
            time.sleep(0.01)
        for more in ([], ["--resume"]):
            assert main(["train", str(root / "recipe.yaml"), *options, *more]) == 2
            assert f"error: {root}/run is in use by process {run.pid} on " in capfd.readouterr().err
        run.kill()
    # its loading process may still be there
    assert (root / "run" / LOCK).exists()
    assert main(["train", str(root / "recipe.yaml"), *options, "--resume"]) == 0
    assert load_checkpoint(root / "run" / "last.pt")["step"] == 100
    steps = [line["step"] for line in read_log(root / "run" / "log.jsonl") if line["event"] == "stepped"]
    assert steps == list(range(1, 101))
    assert not (root / "run" / LOCK).exists()


def test_a_run_of_another_thread_is_refused(root):
    refused: list[str] = []

    def run_too():
        try:
            train(small_recipe(root), resume=True)
        except UserError as error:
            refused.append(str(error))

    def listen(event):
        if isinstance(event, Stepped) and event.step == 2:
            thread = threading.Thread(target=run_too)
            thread.start()
            thread.join()

    assert train(small_recipe(root), listeners=[listen]).finished
    assert len(refused) == 1
    assert f"{root}/run is in use by process {os.getpid()} on " in refused[0]


def test_data_is_not_read_in_a_directory_that_is_in_use(root):
    """The data does not exist, and yet the message is about the directory."""
    seen: list[str] = []

    def listen(event):
        if isinstance(event, Stepped) and event.step == 1:
            thread = threading.Thread(target=lambda: seen.append(_refusal(root)))
            thread.start()
            thread.join()

    train(small_recipe(root), listeners=[listen])
    assert "is in use" in seen[0]


def _refusal(root):
    with pytest.raises(UserError) as caught:
        train(small_recipe(root, "--data.source", "/no/such/place"))
    return str(caught.value)
