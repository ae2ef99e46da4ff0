"""Training from data that can only be read in order."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from softline.engine.events import Evaluated, Started, Stepped
from softline.engine.train import train
from tests.engine.small import small_recipe
from tests.engine.test_train import Interrupted, stop_at

pytest.importorskip("webdataset")
# webdataset leaves its shards open
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


@pytest.fixture
def recipe(tmp_path):
    """20 training images in two shards, 9 for validation in one."""
    numbers = np.random.default_rng(0)
    splits = {}
    for split, counts in (("train", (10, 10)), ("validation", (9,))):
        names = []
        for shard, count in enumerate(counts):
            names.append(f"{split}-{shard}.tar")
            with tarfile.open(tmp_path / names[-1], "w") as tar:
                for index in range(count):
                    label = index % 2
                    pixels = np.clip(numbers.normal(60 + 120 * label, 40, (16, 16, 3)), 0, 255).astype(np.uint8)
                    buffer = io.BytesIO()
                    Image.fromarray(pixels).save(buffer, "jpeg")
                    for suffix, content in (("jpg", buffer.getvalue()), ("cls", str(label).encode())):
                        member = tarfile.TarInfo(f"{shard}{index:03}.{suffix}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
        splits[split] = {
            "name": split,
            "num_samples": sum(counts),
            "filenames": names,
            "shard_lengths": list(counts),
        }
    (tmp_path / "_info.json").write_text(json.dumps({"splits": splits}))
    return small_recipe(
        tmp_path,
        *("--data.source", "wds/images", "--data.root", str(tmp_path), "--batch_size", "4"),
        *("--model.options.num_classes", "2", "--save_every", "1"),
    )


def test_shards_train_and_evaluate(recipe):
    events = []
    result = train(recipe, listeners=[events.append])
    assert events[0].steps_per_epoch == 5
    assert result.step == 10
    assert [event.step for event in events if isinstance(event, Evaluated)] == [5, 10]
    assert result.metrics["top1"] * 9 == pytest.approx(round(result.metrics["top1"] * 9))


def test_interrupted_run_goes_on_in_the_middle_of_an_epoch(recipe):
    with pytest.raises(Interrupted):
        train(recipe, listeners=[stop_at(7)])
    events = []
    result = train(recipe, resume=True, listeners=[events.append])
    assert next(event for event in events if isinstance(event, Started)).start_step == 6
    assert [event.step for event in events if isinstance(event, Stepped)] == [7, 8, 9, 10]
    assert result.finished
