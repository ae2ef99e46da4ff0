import copy

import numpy as np
import pytest
import torch
from torchmetrics import MetricCollection

from softline.tasks.segmentation import metrics
from softline.tasks.segmentation.metrics import SegmentationMetrics


def scenes(*, classes, absent=(), seed=0, sizes=((7, 5), (1, 1), (12, 9))):
    """Predictions and labels of images of several sizes; a fifth of the pixels has no label."""
    numbers = np.random.default_rng(seed)
    present = [label for label in range(classes) if label not in absent]
    for size in sizes:
        labels = numbers.choice(present, size)
        predictions = np.where(numbers.random(size) < 0.6, labels, numbers.choice(present, size))
        labels = np.where(numbers.random(size) < 0.2, 255, labels)
        yield predictions, labels


def plain_scores(pairs, classes):
    """mIoU, mean accuracy, pixel accuracy, IoUs and accuracies, pixel by pixel."""
    confusion = np.zeros((classes, classes), dtype=int)
    for predictions, labels in pairs:
        for found, truth in zip(predictions.ravel(), labels.ravel(), strict=True):
            if truth != 255:
                confusion[truth, found] += 1
    ious, accuracies = [], []
    for label in range(classes):
        hits, truth, taken = confusion[label, label], confusion[label].sum(), confusion[:, label].sum()
        ious.append(hits / (truth + taken - hits) if truth + taken else float("nan"))
        accuracies.append(hits / truth if truth else float("nan"))
    return np.nanmean(ious), np.nanmean(accuracies), np.trace(confusion) / confusion.sum(), ious, accuracies


def counted(pairs, classes):
    metric = SegmentationMetrics(classes)
    for predictions, labels in pairs:
        metric.update(torch.from_numpy(predictions), torch.from_numpy(labels))
    return metric


@pytest.mark.parametrize(
    ("classes", "absent"), [(5, ()), (5, (0, 3)), (2, (1,)), (1, ()), (150, (7,))], ids=lambda value: str(value)
)
def test_scores_are_those_of_a_plain_confusion_matrix(classes, absent):
    pairs = list(scenes(classes=classes, absent=absent))
    miou, mean_accuracy, pixel_accuracy, ious, accuracies = plain_scores(pairs, classes)
    metric = counted(pairs, classes)
    values = metric.compute()
    assert values["mIoU"].item() == pytest.approx(miou, rel=1e-12)
    assert values["mean_accuracy"].item() == pytest.approx(mean_accuracy, rel=1e-12)
    assert values["pixel_accuracy"].item() == pytest.approx(pixel_accuracy, rel=1e-12)
    table = metric.per_class([f"class {label}" for label in range(classes)])
    assert [row.name for row in table] == [f"class {label}" for label in range(classes)]
    for found, expected in (([row.iou for row in table], ious), ([row.accuracy for row in table], accuracies)):
        assert [value is None for value in found] == [np.isnan(value) for value in expected]
        assert [value for value in found if value is not None] == pytest.approx(
            [value for value in expected if not np.isnan(value)], rel=1e-12
        )
    assert [row.pixels for row in table] == [sum((labels == c).sum() for _, labels in pairs) for c in range(classes)]


def test_pixels_are_counted_in_parts(monkeypatch):
    pairs = list(scenes(classes=5))
    expected = counted(pairs, 5).confusion
    monkeypatch.setattr(metrics, "PIXELS", 10)
    assert torch.equal(counted(pairs, 5).confusion, expected)


def test_class_that_is_only_predicted_has_an_iou_of_zero_and_no_accuracy():
    metric = counted([(np.array([0, 0, 1, 2]), np.array([0, 0, 0, 255]))], 3)
    one, two = metric.per_class(["zero", "one", "two"])[1:]
    assert one.iou == 0
    assert one.accuracy is None
    # the pixel taken for it has no label
    assert two.iou is None
    values = metric.compute()
    assert values["mIoU"].item() == pytest.approx((2 / 3 + 0) / 2)
    assert values["mean_accuracy"].item() == pytest.approx(2 / 3)


def test_collection_gives_scalars_under_their_own_names():
    metrics = MetricCollection({"pixels": counted(scenes(classes=4), 4)}, compute_groups=False)
    values = {name: float(value) for name, value in metrics.compute().items()}
    assert set(values) == {"mIoU", "mean_accuracy", "pixel_accuracy"}
    assert all(0 < value < 1 for value in values.values())


def test_counts_stay_exact_beyond_what_float32_holds():
    metric = SegmentationMetrics(2)
    metric.update(torch.tensor([0, 1]), torch.tensor([0, 0]))
    metric.confusion[0, 0] = 2**40 - 1
    assert metric.confusion.dtype == torch.int64
    assert metric.compute()["pixel_accuracy"].item() == 1 - 2**-40
    assert metric.per_class(["a", "b"])[0].pixels == 2**40


def test_matrices_of_all_processes_are_summed(monkeypatch):
    """Two processes, one of them this one: gathering gives both matrices."""
    pairs = list(scenes(classes=4, sizes=((7, 5), (6, 6), (9, 2))))
    here, other = counted(pairs[:1], 4), counted(pairs[1:], 4)
    monkeypatch.setattr(here, "distributed_available_fn", lambda: True)
    monkeypatch.setattr(here, "dist_sync_fn", lambda matrix, group: [matrix, other.confusion])
    together = counted(pairs, 4)
    assert here.compute()["mIoU"] == together.compute()["mIoU"]
    assert here.per_class("abcd") == together.per_class("abcd")
    # what this process counted is its own again
    assert (here.confusion == counted(pairs[:1], 4).confusion).all()


def test_metric_can_be_copied_and_reset():
    metric = counted(scenes(classes=4), 4)
    assert copy.deepcopy(metric).compute() == metric.compute()
    metric.reset()
    assert not metric.confusion.any()


def test_without_a_labelled_pixel_there_is_no_score():
    metric = SegmentationMetrics(3)
    metric.update(torch.zeros(4, 4, dtype=torch.int64), torch.full((4, 4), 255))
    with pytest.raises(ValueError, match="no pixel has a label: every one that was counted is 255"):
        metric.compute()


def test_bad_input_is_named():
    metric = SegmentationMetrics(3)
    zeros = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.2 where labelled, got 3"):
        metric.update(zeros, zeros + 3)
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.2 where labelled, got -1"):
        metric.update(zeros, zeros - 1)
    with pytest.raises(ValueError, match=r"predictions must be in 0\.\.2 where labelled, got 5"):
        metric.update(zeros + 5, zeros)
    with pytest.raises(ValueError, match=r"shape of the labels \(2, 2\), got \(2, 3\)"):
        metric.update(torch.zeros(2, 3), zeros)
    with pytest.raises(ValueError, match="one for each of 3 classes, got 2"):
        metric.per_class(["a", "b"])
    with pytest.raises(ValueError, match="num_classes must be at most 255, which is the label of no class, got 256"):
        SegmentationMetrics(256)
