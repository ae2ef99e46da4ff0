import random
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from softline.data.images import (
    CorruptImageError,
    LabelledImages,
    StreamImages,
    eval_transform,
    open_source,
    train_transform,
)
from softline.data.sampler import TrainBatches

GREY = {"mean": (0.286,), "std": (0.353,)}


def augmented(seed: int = 0) -> LabelledImages:
    transform = train_transform(28, auto_augment="rand-m9-mstd0.5-inc1", erase_prob=0.5, **GREY)
    return LabelledImages(open_source("embedded", "val"), transform, seed=seed, mode="L")


def batches(workers: int, start_step: int = 0) -> list[Tensor]:
    sampler = TrainBatches(1000, batch_size=8, seed=3, start_step=start_step, total_steps=6)
    return [images for images, _ in DataLoader(augmented(), batch_sampler=sampler, num_workers=workers)]


def test_augmentation_does_not_depend_on_workers_or_interruption():
    alone = batches(0)
    for step, (one, other) in enumerate(zip(alone, batches(2), strict=True)):
        assert torch.equal(one, other), step
    for one, other in zip(alone[4:], batches(0, start_step=4), strict=True):
        assert torch.equal(one, other)


def test_seed_epoch_and_index_each_change_the_augmentation():
    first = augmented()
    assert torch.equal(first[1, 5][0], augmented()[1, 5][0])
    assert torch.equal(first[5][0], first[0, 5][0])
    images = [first[0, 5][0], first[1, 5][0], augmented(seed=1)[0, 5][0]]
    assert all(not torch.equal(images[i], images[j]) for i, j in [(0, 1), (0, 2), (1, 2)])


def test_reading_leaves_the_global_generators_alone():
    dataset = augmented()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    dataset[0, 1]
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1)])
def test_images_are_converted_to_the_mode(folder, mode, channels):
    mean = {"mean": (0.5,) * channels, "std": (0.5,) * channels}
    for source in (open_source("embedded", "val"), open_source(str(folder), "val")):
        image, label = LabelledImages(source, eval_transform(16, **mean), mode=mode)[0]
        assert (image.shape, image.dtype, label) == ((channels, 16, 16), torch.float32, 0)


def test_images_of_more_than_8_bits_are_refused(folder):
    Image.fromarray(np.full((8, 8), 3000, np.uint16)).save(folder / "val" / "ant" / "0.png")
    dataset = LabelledImages(open_source(str(folder), "val"), eval_transform(8))
    with pytest.raises(ValueError, match=r"ant/0\.png cannot .*8 bits for each colour are needed, its mode is I;16"):
        [dataset[index] for index in range(len(dataset))]


def test_a_corrupt_image_stops_a_worker_with_its_name(folder):
    (folder / "train" / "ant" / "0.jpg").write_bytes(b"")
    dataset = LabelledImages(open_source(str(folder), "train"), eval_transform(8))
    with pytest.raises(CorruptImageError, match=r"train/ant/0\.jpg cannot be decoded") as error:
        list(DataLoader(dataset, num_workers=1))
    # otherwise torch waits 5 seconds for the worker once the iterator in the traceback is collected
    traceback.clear_frames(error.tb)


def test_unknown_modes_are_refused():
    with pytest.raises(ValueError, match="mode must be one of L, RGB; got 'rgb'"):
        LabelledImages(open_source("embedded", "val"), eval_transform(8), mode="rgb")


class Repeated:
    """One picture again and again, whose order does not change."""

    classes = ("only",)

    def __len__(self) -> int:
        return 4

    def __iter__(self):
        picture = Image.fromarray(np.arange(28 * 28, dtype=np.uint16).reshape(28, 28).astype(np.uint8))
        yield from [(picture, 0)] * 4

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_augmented_by_epoch_and_position(workers):
    stream = StreamImages(Repeated(), train_transform(16, **GREY), mode="L")
    loader = DataLoader(stream, num_workers=workers, persistent_workers=workers > 0)
    passes = []
    for epoch in (0, 1, 0):
        stream.set_epoch(epoch)
        passes.append(torch.cat([image for image, _ in loader]))
    assert torch.equal(passes[0], passes[2])
    assert not torch.equal(passes[0], passes[1])
    assert not torch.equal(passes[0][0], passes[0][1])


def test_processes_augment_a_stream_differently():
    first, second = (
        torch.stack([image for image, _ in StreamImages(Repeated(), train_transform(16, **GREY), rank=rank, mode="L")])
        for rank in (0, 1)
    )
    assert not torch.equal(first, second)


def test_paths_may_hold_any_character(tmp_path: Path, picture):
    directory = tmp_path / "val" / "Ähre ☂"
    directory.mkdir(parents=True)
    (directory / "1 ☂.jpg").write_bytes(picture())
    source = open_source(str(tmp_path), "val")
    assert source.classes == ("Ähre ☂",)
    assert source.load(0)[0].size == (9, 7)
