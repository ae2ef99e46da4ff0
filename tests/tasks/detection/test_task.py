import pytest
import timm
import torch
from accelerate import Accelerator
from accelerate.utils import find_batch_size, send_to_device
from torch import nn
from torch.utils.data import DataLoader, Dataset

import softline  # noqa: F401  registers the backbones
from softline.engine.evaluate import evaluate
from softline.engine.task import Task
from softline.heads.detectors import mask_rcnn, retinanet
from softline.tasks.detection.task import Detection

CLASSES = ("cat", "dog", "cow")


def sample(image_id, *, size=(64, 96), count=2):
    """A target whose objects lie side by side."""
    height, width = size
    left = torch.arange(count) * 30.0 + 2
    boxes = torch.stack([left, torch.full_like(left, 10), left + 25, torch.full_like(left, 40)], 1)
    masks = torch.zeros(count, height, width, dtype=torch.uint8)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
        mask[y1:y2, x1:x2] = 1
    target = {
        "boxes": boxes,
        "labels": torch.arange(count) % len(CLASSES),
        "masks": masks,
        "iscrowd": torch.zeros(count, dtype=torch.long),
        "area": masks.sum((1, 2)).float(),
        "image_id": torch.tensor(image_id),
    }
    return torch.rand(3, height, width), target


class Samples(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class Oracle(nn.Module):
    """Knows the answer to each image, by its sum; where asked to, wrongly."""

    def __init__(self, samples, *, wrong=()):
        super().__init__()
        self.answers = {image.sum().item(): target for image, target in samples}
        self.wrong = wrong

    def forward(self, images):
        return [self.answer(self.answers[image.sum().item()]) for image in images]

    def answer(self, target):
        shift = 1 if int(target["image_id"]) in self.wrong else 0
        return {
            "boxes": target["boxes"],
            "labels": (target["labels"] + shift) % len(CLASSES),
            "scores": torch.ones(len(target["labels"])),
            "masks": target["masks"].bool(),
        }


def detector(build):
    torch.manual_seed(0)
    body = timm.create_model("softpp_micro", features_only=True)
    sizes = {"short_side": 64, "long_side": 96, "width": 32, "anchor_sizes": (8, 16, 32, 64, 128)}
    return build(body, len(CLASSES), **sizes)


def test_detection_is_a_task():
    task: Task = Detection(nn.Identity(), CLASSES, groups=[0, 1], masks=True)
    assert task.monitor == "AP"
    assert task.unit == "images"
    assert task.groups == [0, 1]
    assert task.facts() == {"classes": ["cat", "dog", "cow"], "masks": True}
    assert Detection(nn.Identity(), CLASSES).groups is None


def test_a_batch_begins_with_the_ids_and_keeps_each_images_size():
    samples = [sample(7), sample(3, size=(80, 64), count=0), sample(9)]
    batch = Detection(nn.Identity(), CLASSES, masks=True).collate(samples)
    ids, images, targets = batch
    assert ids.tolist() == [7, 3, 9]
    assert ids.dtype == torch.int64
    assert [tuple(image.shape) for image in images] == [(3, 64, 96), (3, 80, 64), (3, 64, 96)]
    assert [len(target["boxes"]) for target in targets] == [2, 0, 2]
    assert find_batch_size(batch) == 3
    assert find_batch_size(send_to_device(batch, torch.device("cpu"))) == 3


@pytest.mark.parametrize("build", [retinanet, mask_rcnn])
def test_the_loss_is_the_sum_of_what_is_logged(build):
    task = Detection(detector(build), CLASSES, masks=build is mask_rcnn)
    loss = task.loss(task.model, task.collate([sample(1), sample(2, count=0)]))
    assert loss.value.item() == pytest.approx(sum(value.item() for value in loss.logs.values()))
    assert len(loss.logs) == (5 if task.masks else 2)
    assert not any(value.requires_grad for value in loss.logs.values())
    loss.value.backward()
    assert all(parameter.grad is not None for parameter in task.model.parameters())


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_evaluation_counts_every_image_once(masks, batch_size):
    samples = [sample(number, count=number % 3) for number in range(5)]
    task = Detection(Oracle(samples), CLASSES, val_set=Samples(samples), masks=masks)
    result = evaluate(task, task.model, Accelerator(cpu=True), batch_size=batch_size)
    assert result.samples == 5
    assert result.metrics["AP"] == pytest.approx(1)
    assert ("mask_AP" in result.metrics) == masks
    # 25 x 30 pixels
    assert result.metrics["APs"] == pytest.approx(1)
    assert result.metrics["APl"] == -1


def test_only_the_valid_samples_count():
    samples = [sample(1), sample(2)]
    task = Detection(Oracle(samples, wrong=(2,)), CLASSES)
    batch = task.collate(samples)
    values = []
    for valid in (1, 2):
        metrics = task.metrics()
        task.update(metrics, task.model, batch, valid)
        values.append(float(metrics.compute()["AP"]))
    assert values[0] == pytest.approx(1)
    assert values[1] < 0.9
    metrics = task.metrics()
    task.update(metrics, task.model, batch, 0)
    assert float(metrics.compute()["AP"]) == -1


@pytest.mark.parametrize("build", [retinanet, mask_rcnn])
def test_a_real_detector_is_evaluated(build):
    samples = [sample(1), sample(2, size=(100, 60), count=0)]
    task = Detection(detector(build), CLASSES, val_set=Samples(samples), masks=build is mask_rcnn)
    result = evaluate(task, task.model, Accelerator(cpu=True), batch_size=2)
    assert 0 <= result.metrics["AP"] < 0.5
    assert task.model.training


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boxes": torch.tensor([[5.0, 5, 5, 9], [0, 0, 9, 9]])}, r"x1 < x2 and y1 < y2, got \[5.0, 5.0, 5.0, 9.0\]"),
        ({"boxes": torch.tensor([[0.0, 0, 9, 9], [0, 0, torch.nan, 9]])}, r"must be finite .* got \[0.0, 0.0, nan, 9"),
        ({"boxes": torch.rand(2, 5)}, r"boxes must be \[n, 4\] and labels \[n\], got \(2, 5\) and \(2,\)"),
        ({"labels": torch.tensor([1])}, r"boxes must be \[n, 4\] and labels \[n\], got \(2, 4\) and \(1,\)"),
        ({"labels": torch.tensor([1, 3])}, "labels must be 0 to 2, got 3"),
        ({"labels": torch.tensor([-1, 2])}, "labels must be 0 to 2, got -1"),
        ({"masks": torch.zeros(2, 64, 95)}, r"masks must be \(2, 64, 96\), as boxes and image, got \(2, 64, 95\)"),
    ],
)
def test_a_degenerate_target_is_reported_with_its_image(change, message):
    image, target = sample(42)
    task = Detection(nn.Identity(), CLASSES, masks=True)
    with pytest.raises(ValueError, match=f"image 42: .*{message}"):
        task.collate([sample(1), (image, {**target, **change})])


def test_missing_masks_are_reported_where_they_are_needed():
    image, target = sample(42)
    del target["masks"]
    with pytest.raises(ValueError, match="image 42: masks are missing"):
        Detection(nn.Identity(), CLASSES, masks=True).collate([(image, target)])
    assert len(Detection(nn.Identity(), CLASSES).collate([(image, target)])[1]) == 1


def test_loading_processes_hand_batches_over():
    task = Detection(nn.Identity(), CLASSES, train_set=Samples([sample(number) for number in range(4)]))
    loader = DataLoader(task.train_set, batch_size=2, collate_fn=task.collate, num_workers=1)
    assert [batch[0].tolist() for batch in loader] == [[0, 1], [2, 3]]
