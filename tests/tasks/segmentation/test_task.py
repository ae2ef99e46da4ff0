import copy
import math
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchvision.transforms.functional import to_tensor

import softline  # noqa: F401
from softline.data.semantic.transforms import normalization
from softline.engine import distributed, footprint
from softline.engine.evaluate import evaluate
from softline.engine.footprint import check_image_memory
from softline.heads.segmenters import segformer, upernet
from softline.layers.bands import ImageRows
from softline.measure.counting import peak_bytes
from softline.tasks.segmentation import task as segmentation
from softline.tasks.segmentation import task as task_module
from softline.tasks.segmentation.task import Segmentation, cross_entropy, image_logits, predict_labels
from softline.tasks.segmentation.windows import SlidingWindows

CAMVID = Path(__file__).parents[4] / "shared" / "data" / "camvid_small"


class Context(nn.Module):
    """Logits [B, 3, H, W] that depend on the mean of what is seen, as those of attention do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.calls = []

    def forward(self, images):
        self.calls.append(tuple(images.shape))
        return self.conv(images) * (1 + images.mean((1, 2, 3), keepdim=True)) + images.std((2, 3), keepdim=True)


class Scenes(Dataset):
    """Images of the given sizes; labels are sometimes larger, as where images are resized for the model."""

    def __init__(self, sizes, *, enlarged=()):
        numbers = torch.Generator().manual_seed(0)
        self.images = [torch.randn(3, *size, generator=numbers) for size in sizes]
        shapes = [tuple(2 * side + 1 for side in size) if i in enlarged else size for i, size in enumerate(sizes)]
        self.labels = [torch.randint(3, shape, generator=numbers) for shape in shapes]
        for labels in self.labels:
            labels[0, : labels.shape[1] // 3] = 255

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def naive_mean(model, image, crop, stride):
    """Each pixel's logits, averaged over the windows that hold it."""
    height, width = image.shape[-2:]
    heads = [[0], [0]]
    for axis, length in enumerate((height, width)):
        while heads[axis][-1] + crop[axis] < length:
            heads[axis].append(min(heads[axis][-1] + stride[axis], length - crop[axis]))
    found = [[[] for _ in range(width)] for _ in range(height)]
    for top in heads[0]:
        for left in heads[1]:
            part = image[:, top : top + crop[0], left : left + crop[1]]
            logits = model(part[None])[0]
            for row in range(part.shape[1]):
                for column in range(part.shape[2]):
                    found[top + row][left + column].append(logits[:, row, column])
    rows = [torch.stack([torch.stack(pixel).mean(0) for pixel in row], 1) for row in found]
    return torch.stack(rows, 1)


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize(
    ("size", "crop", "stride"),
    [
        ((17, 23), (8, 8), (5, 3)),
        ((9, 30), (12, 10), (12, 7)),
        ((5, 6), (8, 8), (4, 4)),
        ((13, 13), (13, 4), (1, 4)),
        ((1, 1), (1, 1), (1, 1)),
    ],
)
@torch.no_grad()
def test_overlapping_windows_are_averaged(size, crop, stride, batch):
    model = Context().double()
    model.conv.weight.data.normal_()
    image = torch.rand(3, *size, dtype=torch.float64) * torch.arange(1, size[1] + 1)
    if size == (1, 1):
        model.forward = lambda images: model.conv(images)
    windows = SlidingWindows(crop=crop, stride=stride, batch=batch)
    actual = image_logits(model, image, windows=windows)
    assert actual.shape == (3, *size)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), naive_mean(model, image, crop, stride), rtol=1e-6, atol=1e-4)


@torch.no_grad()
def test_one_window_that_covers_the_image_is_the_whole_image():
    model, image = Context(), torch.randn(3, 14, 19)
    whole = image_logits(model, image)
    assert torch.equal(image_logits(model, image, windows=SlidingWindows(crop=(14, 19), stride=(5, 5))), whole)
    assert torch.equal(image_logits(model, image, windows=SlidingWindows(crop=(99, 99), stride=(5, 5))), whole)
    assert model.calls == [(1, 3, 14, 19)] * 3


@pytest.mark.parametrize("length", [1, 7, 8, 9, 63, 64, 65, 101])
@pytest.mark.parametrize(("crop", "stride"), [(8, 8), (8, 5), (7, 1), (64, 43)])
def test_windows_cover_every_pixel_with_one_size(length, crop, stride):
    places = SlidingWindows(crop=(crop, 3), stride=(stride, 3)).places(length, 5)
    rows = sorted({(place.start, place.stop) for place, _ in places})
    assert {stop - start for start, stop in rows} == {min(crop, length)}
    assert set().union(*(range(*row) for row in rows)) == set(range(length))
    # no window more than are needed
    assert len(rows) == max(math.ceil((length - crop) / stride), 0) + 1


def test_windows_run_in_batches():
    model = Context()
    image_logits(model, torch.randn(3, 20, 20), windows=SlidingWindows(crop=(8, 8), stride=(4, 4), batch=5))
    assert model.calls == [(5, 3, 8, 8)] * 3 + [(1, 3, 8, 8)]


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_logits_of_a_large_image_are_reduced_to_classes_in_bands(monkeypatch, batch):
    model, image = nn.Conv2d(3, 40, 3, padding=1).eval(), torch.randn(3, 100, 21)
    windows = SlidingWindows(crop=(16, 16), stride=(10, 10), batch=batch)
    rows = []
    reduce = task_module.likeliest
    monkeypatch.setattr(task_module, "likeliest", lambda logits, size: rows.append(size[0]) or reduce(logits, size))
    expected = image_logits(model, image, windows=windows).argmax(0)
    assert torch.equal(predict_labels(model, image, windows=windows), expected)
    assert sum(rows) == 100
    # the rows of the windows in a batch
    assert max(rows) <= 16 + 10 * math.ceil(batch / 2)


@pytest.mark.parametrize("windows", [None, SlidingWindows(crop=(8, 8), stride=(5, 5))], ids=["whole", "slide"])
def test_prediction_at_another_size_is_that_of_resized_logits(windows):
    model = nn.Sequential(nn.Conv2d(3, 40, 3, padding=1)).eval()
    image = torch.randn(3, 11, 13)
    logits = image_logits(model, image, windows=windows).detach()
    resized = F.interpolate(logits[None], size=(25, 30), mode="bilinear", align_corners=False)
    labels = predict_labels(model, image, (25, 30), windows=windows)
    assert labels.dtype == torch.int64
    assert torch.equal(labels, resized[0].argmax(0))
    assert torch.equal(predict_labels(model, image, windows=windows), logits.argmax(0))
    assert len(labels.unique()) > 16


@pytest.mark.parametrize("windows", [None, SlidingWindows(crop=(8, 8), stride=(5, 5))], ids=["whole", "slide"])
def test_result_of_an_image_does_not_depend_on_its_neighbours(windows):
    model = Context()
    for sizes in ([(12, 9), (15, 21), (12, 9)], [(12, 9)] * 3):
        scenes = Scenes(sizes)
        task = Segmentation(model, "abc", windows=windows)
        together = task.metrics()
        task.update(together, model, task.collate([scenes[index] for index in range(3)]), 3)
        matrices = []
        for sample in scenes:
            alone = task.metrics()
            task.update(alone, model, task.collate([sample]), 1)
            matrices.append(alone["pixels"].confusion)
        assert torch.equal(together["pixels"].confusion, sum(matrices))


@pytest.mark.parametrize("windows", [None, SlidingWindows(crop=(8, 8), stride=(5, 5))], ids=["whole", "slide"])
@pytest.mark.parametrize("sizes", [[(12, 9), (15, 21), (12, 9)], [(12, 9)] * 3])
def test_only_valid_samples_are_run_and_counted(windows, sizes):
    scenes, model = Scenes(sizes, enlarged=(1,)), Context()
    task = Segmentation(model, "abc", windows=windows)
    batch = task.collate([scenes[index] for index in range(3)])
    for valid in range(4):
        metrics, model.calls = task.metrics(), []
        task.update(metrics, model, batch, valid)
        labelled = sum(int((labels != 255).sum()) for labels in scenes.labels[:valid])
        assert int(metrics["pixels"].confusion.sum()) == labelled
        assert len(model.calls) == task._passes(batch[1][:valid])
        assert bool(model.calls) == bool(valid)


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_evaluation_counts_the_pixels_of_the_labels(batch_size):
    scenes = Scenes([(12, 9), (12, 9), (7, 16), (12, 9), (20, 8)], enlarged=(1, 4))
    model = Context()
    task = Segmentation(model, "abc", val_set=scenes)
    result = evaluate(task, model, distributed.start(), batch_size=batch_size)
    right = total = 0
    model.eval()
    for image, labels in scenes:
        predicted = predict_labels(model, image, tuple(labels.shape))
        right += int(((predicted == labels) & (labels != 255)).sum())
        total += int((labels != 255).sum())
    assert result.samples == 5
    assert result.metrics["pixel_accuracy"] == pytest.approx(right / total, rel=1e-12)
    assert set(result.metrics) == {"mIoU", "mean_accuracy", "pixel_accuracy"}
    assert task.monitor in result.metrics


@pytest.mark.parametrize("windows", [None, SlidingWindows(crop=(40, 40), stride=(24, 24))], ids=["whole", "slide"])
def test_pixels_that_the_task_normalises_are_evaluated_as_normalised_images(windows):
    torch.manual_seed(0)
    model = segformer(timm.create_model("softpp_micro", features_only=True), 3, channels=16).eval()
    pixels = [torch.randint(256, (3, *size), dtype=torch.uint8) for size in ((64, 96), (64, 96), (48, 80))]
    labels = [torch.randint(3, image.shape[1:], dtype=torch.uint8) for image in pixels]
    normalize = normalization((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    task = Segmentation(model, "abc", windows=windows, normalize=normalize)
    plain = Segmentation(model, "abc", windows=windows)
    for chosen in ((0,), (0, 1), (0, 1, 2)):
        found, expected = task.metrics(), plain.metrics()
        with torch.no_grad():
            task.update(found, model, task.collate([(pixels[i], labels[i]) for i in chosen]), len(chosen))
            normal = [(normalize(pixels[i]), labels[i].long()) for i in chosen]
            plain.update(expected, model, plain.collate(normal), len(chosen))
        assert torch.equal(found["pixels"].confusion, expected["pixels"].confusion)
        assert found["pixels"].confusion.sum() == sum(labels[i].numel() for i in chosen)


def test_a_single_image_is_not_copied_to_make_a_batch():
    task, (image, labels) = Segmentation(Context(), "abc"), Scenes([(4, 5)])[0]
    _, images, truths = task.collate([(image, labels)])
    assert (images.shape, images.data_ptr()) == ((1, 3, 4, 5), image.data_ptr())
    assert (truths.shape, truths.data_ptr()) == ((1, 4, 5), labels.data_ptr())


def test_details_are_a_row_for_each_class():
    task, labels = Segmentation(Context(), ["sky", "road", "tree"]), torch.tensor([[0, 0, 1, 255]])
    metrics = task.metrics()
    metrics["pixels"].update(torch.tensor([[0, 1, 1, 1]]), labels)
    sky, road, tree = task.details(metrics)["classes"]
    assert sky == {"name": "sky", "iou": 0.5, "accuracy": 0.5, "pixels": 2}
    assert road == {"name": "road", "iou": 0.5, "accuracy": 1.0, "pixels": 1}
    assert tree == {"name": "tree", "iou": None, "accuracy": None, "pixels": 0}


def test_sharded_model_runs_as_often_as_in_the_process_that_runs_it_most(monkeypatch):
    class Sharded(Context):
        pass

    monkeypatch.setattr(segmentation, "FSDPModule", Sharded)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda passes, _: passes.fill_(7))
    scenes, model = Scenes([(12, 9), (15, 21)]), Sharded()
    for windows in (None, SlidingWindows(crop=(8, 8), stride=(5, 5))):
        task = Segmentation(model, "abc", windows=windows)
        batch = task.collate([scenes[0], scenes[1]])
        for valid in range(3):
            model.calls, metrics = [], task.metrics()
            task.update(metrics, model, batch, valid)
            assert len(model.calls) == 7
            assert int(metrics["pixels"].confusion.sum()) == sum(int((x != 255).sum()) for x in scenes.labels[:valid])


def test_pixels_without_a_label_do_not_count_in_the_loss():
    task = Segmentation(Context(), "abc")
    images = torch.randn(2, 3, 6, 8)
    labels = torch.randint(3, (2, 6, 8))
    labels[:, :, 5:] = 255
    result = task.loss(task.model, [torch.arange(2), images, labels])
    logits = task.model(images)
    # 5 of 8 columns have labels
    expected = -logits.log_softmax(1).gather(1, labels.clamp(max=2)[:, None])[:, 0, :, :5].mean() * 5 / 8
    assert result.value.item() == pytest.approx(expected.item(), rel=1e-6)
    right = (logits.argmax(1) == labels)[:, :, :5].float().mean()
    assert result.logs["pixel_accuracy"].item() == pytest.approx(right.item(), rel=1e-6)


def test_loss_without_any_label_is_zero_and_moves_nothing():
    task = Segmentation(Context(), "abc")
    result = task.loss(task.model, [torch.arange(2), torch.randn(2, 3, 6, 8), torch.full((2, 6, 8), 255)])
    result.value.backward()
    assert result.value.item() == 0
    assert result.logs["pixel_accuracy"].item() == 0
    assert all((parameter.grad == 0).all() for parameter in task.model.parameters())


def test_auxiliary_logits_count_by_a_part():
    class Both(Context):
        def forward(self, images):
            logits = super().forward(images)
            return logits, 3 * logits

    torch.manual_seed(1)
    model = Both()
    task = Segmentation(model, "abc")
    images, labels = torch.randn(2, 3, 6, 8), torch.randint(3, (2, 6, 8))
    main, auxiliary = model(images)
    expected = cross_entropy(main, labels) + 0.4 * cross_entropy(auxiliary, labels)
    assert torch.equal(task.loss(model, [torch.arange(2), images, labels]).value, expected)


def test_the_loss_of_a_batch_is_the_mean_of_its_parts_whatever_is_labelled():
    """As in a step that is divided among processes."""
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 3, 8, 8), torch.randint(3, (2, 8, 8))
    labels[0, 1:] = 255
    parts = [cross_entropy(logits[place, None], labels[place, None]) for place in range(2)]
    torch.testing.assert_close(cross_entropy(logits, labels), torch.stack(parts).mean())
    expected = nn.functional.cross_entropy(logits, labels, ignore_index=255, reduction="none").mean()
    torch.testing.assert_close(cross_entropy(logits, labels), expected)


def test_batches_are_stacked_where_sizes_agree():
    task = Segmentation(Context(), "abc")
    numbers, images, labels = task.collate([*Scenes([(4, 5)] * 3)])
    assert (numbers.shape, images.shape, labels.shape) == ((3,), (3, 3, 4, 5), (3, 4, 5))
    numbers, images, labels = task.collate([*Scenes([(4, 5), (4, 5), (7, 5)])])
    assert [tuple(image.shape) for image in images] == [(3, 4, 5), (3, 4, 5), (3, 7, 5)]
    assert [tuple(label.shape) for label in labels] == [(4, 5), (4, 5), (7, 5)]
    assert len(numbers) == 3


def test_facts_are_enough_to_predict():
    assert Segmentation(Context(), ["sky", "road"]).facts() == {"classes": ["sky", "road"], "inference": "whole"}
    windows = SlidingWindows(crop=(64, 96), stride=(43, 64))
    assert Segmentation(Context(), ["sky"], windows=windows).facts() == {
        "classes": ["sky"],
        "inference": "slide",
        "crop": [64, 96],
        "stride": [43, 64],
    }


def test_bad_input_is_named():
    task = Segmentation(Context(), "abc")
    with pytest.raises(ValueError, match=r"images and labels of one size, such as crops, got \[\(4, 5\), \(7, 5\)\]"):
        task.loss(task.model, task.collate([*Scenes([(4, 5), (7, 5)])]))
    with pytest.raises(ValueError, match=r"got \[\(4, 5\), \(9, 11\)\]"):
        task.loss(task.model, task.collate([*Scenes([(4, 5)] * 2, enlarged=(0, 1))]))
    with pytest.raises(ValueError, match=r"stride \(9, 4\) must not exceed crop \(8, 8\): it would leave gaps"):
        SlidingWindows(crop=(8, 8), stride=(9, 4))
    with pytest.raises(ValueError, match="stride must be at least 1, got 0"):
        SlidingWindows(crop=(8, 8), stride=(4, 0))
    with pytest.raises(ValueError, match="needs a model in evaluation mode"):
        predict_labels(task.model, torch.randn(3, 8, 8))
    with pytest.raises(ValueError, match=r"image must have shape \[3, H, W\], got \(1, 3, 8, 8\)"):
        predict_labels(task.model.eval(), torch.randn(1, 3, 8, 8))
    with pytest.raises(ValueError, match=r"logits are not numbers \(NaN\)"):
        predict_labels(task.model, torch.full((3, 8, 8), torch.nan))


def test_training_lowers_the_loss():
    """Bright discs on a dark ground; the upper rows have no label."""
    model = upernet(timm.create_model("softpp_micro", features_only=True), 2, channels=32)
    task = Segmentation(model, ["ground", "disc"])
    rows, columns = torch.meshgrid(torch.arange(48), torch.arange(64), indexing="ij")
    centres = [(12, 16), (20, 40), (30, 30), (34, 50)]
    labels = torch.stack([((rows - y) ** 2 + (columns - x) ** 2 < 150).long() for y, x in centres])
    images = labels[:, None] * 2.0 - 1 + 0.3 * torch.randn(4, 3, 48, 64)
    labels[:, :4] = 255
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        result = task.loss(model.train(), [torch.arange(4), images, labels])
        optimizer.zero_grad()
        result.value.backward()
        optimizer.step()
        losses.append(result.value.item())
    # both heads begin near even odds
    assert losses[0] == pytest.approx(1.4 * math.log(2), abs=0.4)
    assert losses[-1] < 0.75 * losses[0]
    # more than all ground would give
    assert result.logs["pixel_accuracy"] > 1.05 * (labels == 0).sum() / (labels != 255).sum()


@pytest.mark.skipif(not CAMVID.is_dir(), reason="needs ../shared/data/camvid_small")
def test_windows_and_whole_images_agree_on_a_photograph_they_cover():
    image = to_tensor(Image.open(min((CAMVID / "val").glob("*.jpg"))))
    model = upernet(timm.create_model("softpp_micro", features_only=True), 11, channels=32).eval()
    whole = predict_labels(model, image)
    assert whole.shape == image.shape[1:]
    windows = SlidingWindows(crop=tuple(image.shape[1:]), stride=(60, 80))
    assert torch.equal(predict_labels(copy.deepcopy(model), image, windows=windows), whole)


def test_the_memory_that_an_image_is_said_to_need_is_what_a_prediction_holds(monkeypatch):
    """The photograph in float32 does not count: it never exists as a whole."""
    network = segformer(timm.create_model("softpp_micro", features_only=True), 4).eval()
    size, said = (1216, 1888), []
    monkeypatch.setattr(footprint, "available_memory", lambda: 1)
    monkeypatch.setattr(segmentation, "check_image_memory", lambda *args, **options: said.append((args, options)))
    segmentation.check_whole_image(network, size)
    ((args, options),) = said
    with pytest.raises(ValueError, match=r"1888 x 1216 pixels needs about .*--inference slide"):
        check_image_memory(*args, **options)
    needed = footprint.footprint(args[1], size, exists=options["exists"])
    rows = ImageRows((1, 3, *size), torch.device("cpu"), lambda first, last: torch.rand(1, 3, last - first, size[1]))
    with torch.no_grad():
        held = peak_bytes(lambda: network.maps.rows(rows))
    assert needed == pytest.approx(held, rel=0.25)
