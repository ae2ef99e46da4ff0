import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from softline.engine.checkpoint import load_checkpoint, save_checkpoint
from softline.engine.train import train
from softline.files import write_json, write_whole
from tests.engine.small import small_recipe, write_images
from tests.engine.test_train import assert_equal_weights, weights

CONTENT = {
    **{"arch": "small", "state_dict": {"weight": torch.arange(6.0)}, "state_dict_ema": None, "optimizer": {}},
    **{"scaler": None, "step": 3, "epoch": 0, "metrics": {}, "evaluated_step": None, "best": {}},
    **{"recipe": {}, "facts": {}},
}


def start(root, script, *, new_group=False):
    """Run python code in another process."""
    code = f"from pathlib import Path\nroot = Path({str(root)!r})\n" + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=new_group,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )


TRAIN = """
import sys
from softline.engine.train import train
from softline.engine.events import Stepped
from tests.engine.small import small_recipe

def tell(event):
    if isinstance(event, Stepped):
        print(event.step, flush=True)

recipe = small_recipe(root, "--output", f"{root}/part", "--save_every", "1")
print(train(recipe, resume=True, listeners=[tell]).finished)
"""


def test_content_comes_back(tmp_path):
    path = tmp_path / "last.pt"
    save_checkpoint(path, CONTENT)
    loaded = load_checkpoint(path)
    assert torch.equal(loaded["state_dict"]["weight"], torch.arange(6.0))
    assert loaded["step"] == 3
    assert loaded["format"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_broken_weights_do_not_replace_good_ones(tmp_path):
    path = tmp_path / "last.pt"
    save_checkpoint(path, CONTENT)
    before = path.read_bytes()
    with pytest.raises(FloatingPointError, match="weight is not finite"):
        save_checkpoint(path, {**CONTENT, "state_dict": {"weight": torch.tensor([1.0, float("nan")])}, "step": 9})
    assert path.read_bytes() == before


def test_full_disk_keeps_the_previous_checkpoint_and_says_why(tmp_path):
    """The system refuses to let a file grow beyond 64 kB, as a full disk would."""
    process = start(
        tmp_path,
        """
        import resource, signal, torch
        from softline.engine.checkpoint import save_checkpoint
        from tests.engine.test_checkpoint import CONTENT
        save_checkpoint(root / "last.pt", CONTENT)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        try:
            save_checkpoint(root / "last.pt", {**CONTENT, "state_dict": {"weight": torch.randn(100_000)}, "step": 4})
        except OSError as error:
            print(error)
        """,
    )
    printed, errors = process.communicate(timeout=120)
    assert f"could not write {tmp_path}/last.pt: File too large" in printed, errors
    assert load_checkpoint(tmp_path / "last.pt")["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("fails", ["save_checkpoint", "evaluate"])
def test_a_run_with_loading_processes_ends_when_it_fails(tmp_path, fails):
    """Loading processes ignore SIGTERM, by which Python ends them at its exit and then waits for them."""
    write_images(tmp_path)
    process = start(
        tmp_path,
        f"""
        import errno, sys
        import softline.engine.train as training
        from tests.engine.small import small_recipe
        def fail(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")
        training.{fails} = fail
        training.train(small_recipe(root, "--workers", "1", "--save_every", "1"))
        """,
    )
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "No space left on device" in errors


def test_kill_while_saving_keeps_the_previous_checkpoint(tmp_path):
    process = start(
        tmp_path,
        """
        import os, signal, torch
        from softline.engine.checkpoint import save_checkpoint
        from tests.engine.test_checkpoint import CONTENT
        save_checkpoint(root / "last.pt", CONTENT)
        import softline.engine.checkpoint as checkpoint
        written = checkpoint._Remembering.write
        def write_some_and_die(self, data):
            written(self, data)
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        checkpoint._Remembering.write = write_some_and_die
        save_checkpoint(root / "last.pt", {**CONTENT, "state_dict": {"weight": torch.randn(100_000)}, "step": 4})
        """,
    )
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert load_checkpoint(tmp_path / "last.pt")["step"] == 3
    assert len(list(tmp_path.iterdir())) == 2, "the partial file lies beside it"


@pytest.mark.parametrize("kill_after", [1, 4, 7])
def test_run_killed_at_any_step_ends_bitwise_equal(tmp_path, kill_after):
    write_images(tmp_path)
    whole = train(small_recipe(tmp_path, "--output", f"{tmp_path}/whole"))
    process = start(tmp_path, TRAIN)
    for line in process.stdout:
        if int(line) == kill_after:
            # somewhere between this step and the next one's checkpoint
            time.sleep(0.01 * kill_after)
            process.kill()
            break
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    resumed = start(tmp_path, TRAIN)
    printed, errors = resumed.communicate(timeout=120)
    assert printed.splitlines()[-1] == "True", errors
    assert int(printed.splitlines()[0]) >= kill_after, "it went on from a checkpoint"
    assert_equal_weights(weights(tmp_path / "part" / "last.pt"), weights(whole.output / "last.pt"))
    assert not list((tmp_path / "part").glob(".*")), "what the kill left is gone"


def test_sigterm_saves_and_ends_cleanly(tmp_path):
    write_images(tmp_path)
    process = start(tmp_path, TRAIN.replace('"--save_every", "1"', '"--schedule.epochs", "400"'))
    assert process.stdout.readline().strip() == "1"
    process.send_signal(signal.SIGTERM)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    steps = printed.splitlines()
    assert steps[-1] == "False"
    assert load_checkpoint(tmp_path / "part" / "last.pt")["step"] == int(steps[-2] if len(steps) > 1 else 1)


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")])
def test_signal_to_the_whole_group_is_for_the_run_and_not_for_its_loaders(tmp_path, number, name):
    """As torchrun, systemd and a terminal send it."""
    write_images(tmp_path)
    script = TRAIN.replace('"--save_every", "1"', '"--schedule.epochs", "400", "--workers", "1"')
    process = start(tmp_path, script.replace(".finished", ".stopped_by"), new_group=True)
    assert process.stdout.readline().strip() == "1"
    os.killpg(process.pid, number)
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert printed.splitlines()[-1] == name
    assert load_checkpoint(tmp_path / "part" / "last.pt")["step"] >= 1


def test_truncated_and_damaged_files_are_refused(tmp_path):
    path = tmp_path / "last.pt"
    save_checkpoint(path, CONTENT)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"last\.pt is truncated or not a checkpoint"):
        load_checkpoint(path)
    place = whole.index(torch.arange(6.0).numpy().tobytes())
    path.write_bytes(whole[:place] + b"\xff" + whole[place + 1 :])
    with pytest.raises(ValueError, match=r"last\.pt is corrupt: the checksum of .* is wrong"):
        load_checkpoint(path)


class Harmful:
    def __reduce__(self):
        return os.system, ("echo harm",)


def test_code_in_a_file_is_not_run(tmp_path, capfd):
    path = tmp_path / "last.pt"
    torch.save({"recipe": {}, "format": 1, "state_dict": Harmful()}, path)
    with pytest.raises(ValueError, match=r"last\.pt is refused: it asks to run"):
        load_checkpoint(path)
    path.write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ValueError, match=r"truncated or not a checkpoint"):
        load_checkpoint(path)
    assert "harm" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state_dict": {}}, "it has no recipe"),
        ({"format": 99, "recipe": {}}, "has format 99; this softline reads format 1"),
    ],
)
def test_other_files_are_told_apart(tmp_path, content, message):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "other.pt")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no such file: .*nowhere\.pt"):
        load_checkpoint(tmp_path / "nowhere.pt")


def test_file_is_replaced_at_once_or_not_at_all(tmp_path):
    path = tmp_path / "numbers.json"
    write_json(path, [1])

    def fail(file):
        file.write(b"[2")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(path, fail)
    assert path.read_text() == "[\n  1\n]\n"
    assert list(tmp_path.iterdir()) == [path]


def test_written_files_have_the_usual_permissions(tmp_path):
    mask = os.umask(0o022)
    try:
        write_json(tmp_path / "numbers.json", [1])
    finally:
        os.umask(mask)
    assert (tmp_path / "numbers.json").stat().st_mode & 0o777 == 0o644
