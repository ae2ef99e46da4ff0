import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from softline.data.coco.datasets import DetectionImages, detection_eval_transform, detection_train_transform
from softline.data.coco.source import CocoSource
from softline.data.images import CorruptImageError
from softline.data.sampler import TrainBatches

COCO128 = Path(__file__).parents[4] / "shared" / "data" / "coco128"
FIXED = {"short_sides": [12], "long_side": 16, "hflip": 0.0}


def rectangle(left: float, top: float, width: float, height: float) -> dict[str, Any]:
    right, bottom = left + width, top + height
    outline = [left, top, right, top, right, bottom, left, bottom]
    return {"bbox": [left, top, width, height], "segmentation": [outline], "area": width * height, "iscrowd": 0}


OBJECTS = {
    "wide.png": [rectangle(1, 2, 5, 4), rectangle(8, 3, 8, 9), rectangle(0, 0, 3, 12) | {"iscrowd": 1}],
    "empty.png": [],
    "tall.png": [rectangle(2, 4, 6, 10)],
    "crowd.png": [rectangle(2, 2, 4, 4) | {"iscrowd": 1}],
}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., CocoSource]:
    """A source of noise with the given objects in it."""

    def source(objects: dict[str, list[dict[str, Any]]] = OBJECTS) -> CocoSource:
        images, annotations = [], []
        for number, (name, found) in enumerate(objects.items()):
            height, width = (16, 12) if name == "tall.png" else (12, 16)
            noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(noise).save(tmp_path / name)
            images.append({"id": 10 * number, "file_name": name, "height": height, "width": width})
            for each in found:
                number_of = len(annotations)
                annotations.append({"id": number_of, "image_id": 10 * number, "category_id": 3 + number_of % 2} | each)
        categories = [{"id": 3, "name": "ant"}, {"id": 4, "name": "bee"}]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (tmp_path / "objects.json").write_text(json.dumps(content))
        return CocoSource(tmp_path, tmp_path / "objects.json")

    return source


def pixels(source: CocoSource, index: int) -> Tensor:
    image, _ = source.load(index)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def outlines(masks: Tensor) -> list[list[int]]:
    """The box of each mask."""
    found = []
    for mask in masks.numpy():
        rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
        found.append([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
    return found


def as_list(samples: Sequence[Any]) -> list[Any]:
    return list(samples)


def test_evaluation_keeps_pixels_objects_and_crowds(make):
    source = make()
    dataset = DetectionImages(source, detection_eval_transform(), masks=True, training=False)
    assert len(dataset) == 4
    image, target = dataset[0]
    assert image.dtype == torch.uint8
    torch.testing.assert_close(image / 255, pixels(source, 0))
    assert target["boxes"].tolist() == [[1, 2, 6, 6], [8, 3, 16, 12], [0, 0, 3, 12]]
    assert target["labels"].tolist() == [0, 1, 0]
    assert target["iscrowd"].tolist() == [0, 0, 1]
    assert target["area"].tolist() == [20, 72, 36]
    assert outlines(target["masks"]) == target["boxes"].tolist()
    assert dataset[2][1]["image_id"].item() == 20
    assert dataset[1][1]["boxes"].shape == (0, 4)
    assert dataset[1][1]["masks"].shape == (0, 12, 16)


def test_evaluation_does_not_cut_boxes_at_the_border(make):
    source = make({"a.png": [rectangle(-0.5, 2, 17, 4)]})
    _, target = DetectionImages(source, detection_eval_transform(), masks=False, training=False)[0]
    assert target["boxes"].tolist() == [[-0.5, 2, 16.5, 6]]


def test_training_leaves_crowds_and_images_without_objects_out(make):
    dataset = DetectionImages(make(), detection_train_transform(**FIXED), masks=True, training=True)
    targets = [dataset[index][1] for index in range(len(dataset))]
    assert [target["image_id"].item() for target in targets] == [0, 20]
    assert [len(target["boxes"]) for target in targets] == [2, 1]
    assert [len(target["masks"]) for target in targets] == [2, 1]
    assert not any(target["iscrowd"].any() for target in targets)


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_targets_are_plain_tensors_of_known_types(make, masks, training):
    transform = detection_train_transform(**FIXED) if training else detection_eval_transform()
    image, target = DetectionImages(make(), transform, masks=masks, training=training)[0]
    types = {
        "boxes": torch.float32,
        "labels": torch.int64,
        "iscrowd": torch.int64,
        "area": torch.float32,
        "image_id": torch.int64,
    }
    assert {name: tensor.dtype for name, tensor in target.items()} == types | ({"masks": torch.uint8} if masks else {})
    assert {type(tensor) for tensor in (image, *target.values())} == {Tensor}
    dtype = torch.float32 if training else torch.uint8
    assert (image.dtype, image.shape, target["image_id"].shape) == (dtype, (3, 12, 16), ())


def test_mirroring_moves_image_boxes_and_masks_together(make):
    source = make()
    transform = detection_train_transform(**FIXED | {"hflip": 1.0})
    image, target = DetectionImages(source, transform, masks=True, training=True)[0]
    torch.testing.assert_close(image, pixels(source, 0).flip(-1))
    assert target["boxes"].tolist() == [[10, 2, 15, 6], [0, 3, 8, 12]]
    assert outlines(target["masks"]) == target["boxes"].tolist()
    assert target["labels"].tolist() == [0, 1]


def test_resizing_moves_boxes_and_masks_together(make):
    transform = detection_train_transform(short_sides=[36], long_side=48, hflip=0.5)
    dataset = DetectionImages(make(), transform, masks=True, training=True)
    mirrored = set()
    for epoch in range(8):
        image, target = dataset[epoch, 0]
        assert image.shape == (3, 36, 48)
        assert outlines(target["masks"]) == target["boxes"].tolist()
        mirrored.add(target["boxes"][0].tolist() == [30, 6, 45, 18])
    assert mirrored == {False, True}


def test_the_short_side_is_one_of_those_given(make):
    transform = detection_train_transform(short_sides=[24, 30, 36], long_side=60, hflip=0.0)
    dataset = DetectionImages(make(), transform, masks=False, training=True)
    assert {tuple(dataset[epoch, 0][0].shape[1:]) for epoch in range(24)} == {(24, 32), (30, 40), (36, 48)}
    assert {tuple(dataset[epoch, 1][0].shape[1:]) for epoch in range(24)} == {(32, 24), (40, 30), (48, 36)}


def test_the_long_side_is_bounded(make):
    transform = detection_train_transform(short_sides=[24], long_side=24, hflip=0.0)
    image, target = DetectionImages(make(), transform, masks=True, training=True)[0]
    assert image.shape == (3, 18, 24)
    assert target["boxes"].tolist() == [[1.5, 3, 9, 9], [12, 4.5, 24, 18]]
    assert target["masks"].shape == (2, 18, 24)


def test_boxes_that_become_too_small_are_dropped_with_all_that_is_theirs(make):
    source = make({"a.png": [rectangle(1, 2, 5, 4), rectangle(8, 3, 1, 9), rectangle(2, 2, 8, 8)]})
    transform = detection_train_transform(short_sides=[6], long_side=8, hflip=0.0)
    _, target = DetectionImages(source, transform, masks=True, training=True)[0]
    assert target["boxes"].tolist() == [[0.5, 1, 3, 3], [1, 1, 5, 5]]
    assert target["labels"].tolist() == [0, 0]
    assert target["area"].tolist() == [20, 64]
    assert len(target["iscrowd"]) == 2
    assert target["masks"].shape == (2, 6, 8)
    # a box of one pixel is kept
    _, target = DetectionImages(source, detection_train_transform(**FIXED), masks=True, training=True)[0]
    assert target["labels"].tolist() == [0, 1, 0]


def test_nothing_may_be_left_of_an_image(make):
    source = make({"a.png": [rectangle(8, 3, 1, 9)]})
    transform = detection_train_transform(short_sides=[6], long_side=8, hflip=0.0)
    _, target = DetectionImages(source, transform, masks=True, training=True)[0]
    assert (target["boxes"].shape, target["masks"].shape) == ((0, 4), (0, 6, 8))


def test_training_cuts_boxes_at_the_border_and_keeps_them(make):
    source = make({"a.png": [rectangle(-0.5, 2, 17, 4)]})
    _, target = DetectionImages(source, detection_train_transform(**FIXED), masks=False, training=True)[0]
    assert target["boxes"].tolist() == [[0, 2, 16, 6]]


def augmented(source: CocoSource, seed: int = 0) -> DetectionImages:
    transform = detection_train_transform(short_sides=range(12, 60), long_side=80, hflip=0.5)
    return DetectionImages(source, transform, seed=seed, masks=True, training=True)


def test_seed_epoch_and_index_each_change_the_augmentation(make):
    source = make({f"{number}.png": [rectangle(1, 2, 5, 4)] for number in range(4)})
    first = augmented(source)
    assert torch.equal(first[1, 2][0], augmented(source)[1, 2][0])
    assert torch.equal(first[2][0], first[0, 2][0])

    def sizes(dataset: DetectionImages, epoch: int, index: int) -> list[int]:
        return [dataset[epoch + more, index][0].shape[1] for more in range(0, 40, 10)]

    drawn = [sizes(first, 0, 2), sizes(first, 1, 2), sizes(first, 0, 3), sizes(augmented(source, seed=1), 0, 2)]
    assert all(drawn[i] != drawn[j] for i in range(4) for j in range(i))


def test_augmentation_does_not_depend_on_workers(make):
    source = make({f"{number}.png": [rectangle(1, 2, 5, 4), rectangle(7, 1, 3, 8)] for number in range(6)})

    def samples(workers: int) -> list[Any]:
        batches = TrainBatches(6, batch_size=2, seed=3, start_step=0, total_steps=6)
        loader = DataLoader(augmented(source), batch_sampler=batches, num_workers=workers, collate_fn=as_list)
        return [sample for batch in loader for sample in batch]

    for (image, target), (other_image, other_target) in zip(samples(0), samples(2), strict=True):
        assert torch.equal(image, other_image)
        assert all(torch.equal(target[name], other_target[name]) for name in target)


def test_reading_leaves_the_global_generator_alone(make):
    dataset = augmented(make())
    state = torch.get_rng_state()
    dataset[0, 1]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_dataset_can_be_sent_to_another_process(make):
    dataset = augmented(make())
    assert torch.equal(pickle.loads(pickle.dumps(dataset))[5, 0][0], dataset[5, 0][0])


def test_grey_photographs_become_colour_and_16_bits_are_refused(make, tmp_path):
    source = make()
    Image.new("L", (16, 12), 51).save(tmp_path / "wide.png")
    dataset = DetectionImages(source, detection_eval_transform(), masks=False, training=False)
    assert torch.equal(dataset[0][0], torch.full((3, 12, 16), 51, dtype=torch.uint8))
    Image.new("I;16", (16, 12)).save(tmp_path / "wide.png")
    with pytest.raises(CorruptImageError, match=r"wide\.png .*8 bits for each colour are needed"):
        dataset[0]


def test_images_are_grouped_by_aspect(make):
    source = make()
    dataset = DetectionImages(source, detection_eval_transform(), masks=False, training=False)
    assert dataset.aspect_groups() == [0, 0, 1, 0]
    assert augmented(source).aspect_groups() == [0, 1]


def test_impossible_datasets_are_refused(make):
    transform = detection_eval_transform()
    with pytest.raises(ValueError, match=r"none of the 1 images has an object to train on; the first is .*crowd\.png"):
        DetectionImages(make({"crowd.png": OBJECTS["crowd.png"]}), transform, masks=False, training=True)
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        DetectionImages(make(), transform, seed=-1, masks=False, training=False)
    alone = rectangle(1, 2, 5, 4)
    del alone["segmentation"]
    source = make({"a.png": [alone]})
    with pytest.raises(ValueError, match="masks need a segmentation of each object; annotation 0 has none"):
        DetectionImages(source, transform, masks=True, training=False)
    assert len(DetectionImages(source, transform, masks=False, training=True)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"short_sides": []}, "short_sides must be one or more sizes, got none"),
        ({"short_sides": [0]}, "short_sides must be at least 1, got 0"),
        ({"short_sides": [12.5]}, "short_sides must be a whole number, got 12.5"),
        ({"long_side": 11}, "long_side must be at least 12, got 11"),
        ({"hflip": 1.5}, "hflip must be at least 0 and at most 1, got 1.5"),
        ({"hflip": -0.5}, "hflip must be at least 0 and at most 1, got -0.5"),
    ],
)
def test_impossible_transforms_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        detection_train_transform(**FIXED | change)


@pytest.mark.skipif(not COCO128.is_dir(), reason="needs ../shared/data/coco128")
def test_masks_of_real_photographs_stay_in_their_boxes():
    source = CocoSource(COCO128 / "train2017", COCO128 / "annotations" / "instances_train2017.json")
    transform = detection_train_transform(short_sides=[160, 320], long_side=400, hflip=0.5)
    dataset = DetectionImages(source, transform, masks=True, training=True)
    assert len(dataset) == 126
    for index in range(0, 126, 9):
        image, target = dataset[2, index]
        assert max(image.shape[1:]) <= 400
        assert target["masks"].shape == (len(target["boxes"]), *image.shape[1:])
        # nearest pixels: a thin object may lose all of them
        seen = target["masks"].flatten(1).any(1).bool()
        assert seen.float().mean() > 0.9
        inner = torch.tensor(outlines(target["masks"][seen]))
        boxes = target["boxes"][seen]
        assert (inner[:, :2] >= boxes[:, :2] - 1.5).all()
        assert (inner[:, 2:] <= boxes[:, 2:] + 1.5).all()
