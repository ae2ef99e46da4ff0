"""Average precision against pycocotools, on the same predictions and the same truth."""

import multiprocessing

import numpy as np
import pytest
import torch
from torchmetrics import MetricCollection
from torchmetrics.detection import MeanAveragePrecision

from softline.tasks.detection.metrics import NAMES, CocoMetrics

CLASSES = 4


def scene(seed, *, images=24, side=180):
    """Targets and detections of images: crowds, ties, doubles, and images that lack objects, detections or both."""
    generator = np.random.default_rng(seed)
    targets, found = [], []
    for number in range(images):
        height, width = generator.integers(side // 2, side, 2)
        count = 0 if number % 6 in (0, 1) else int(generator.integers(1, 7))
        boxes = random_boxes(generator, count, height, width)
        masks = ellipses(boxes, height, width)
        labels = generator.integers(0, CLASSES - 1, count)
        targets.append(
            {
                "boxes": torch.tensor(boxes),
                "labels": torch.tensor(labels),
                "masks": torch.tensor(masks),
                "iscrowd": torch.tensor(generator.random(count) < 0.2).long(),
                # of the annotation: neither that of the box nor of the mask
                "area": torch.tensor(masks.sum((1, 2)) * generator.uniform(0.5, 1.5, count), dtype=torch.float32),
                "image_id": torch.tensor(1000 - 7 * number),
            }
        )
        found.append(detections(generator, boxes, labels, height, width, nothing=number % 6 in (0, 2)))
    return targets, found


def random_boxes(generator, count, height, width):
    sizes = 4 + generator.random((count, 2)) ** 2 * (np.array([width, height]) - 6)
    corners = generator.random((count, 2)) * (np.array([width, height]) - sizes)
    return np.concatenate([corners, corners + sizes], 1).astype(np.float32)


def detections(generator, boxes, labels, height, width, *, nothing):
    """Objects found once or twice, moved a little, some with a wrong label, and some where nothing is."""
    often = generator.integers(0, 3, len(boxes))
    moved = np.repeat(boxes, often, 0)
    moved = moved + generator.normal(0, 2, moved.shape)
    named = np.repeat(labels, often)
    wrong = random_boxes(generator, 5, height, width)
    moved = np.concatenate([moved, wrong])
    named = np.concatenate([named, generator.integers(0, CLASSES, 5)])
    moved[:, 0::2] = moved[:, 0::2].clip(0, width)
    moved[:, 1::2] = moved[:, 1::2].clip(0, height)
    keep = (moved[:, 2:] - moved[:, :2] > 2).all(1) & (not nothing)
    moved, named = moved[keep].astype(np.float32), named[keep]
    return {
        "boxes": torch.tensor(moved),
        "labels": torch.tensor(named),
        # tenths: many are equal
        "scores": torch.tensor(generator.integers(1, 10, len(moved)) / 10, dtype=torch.float32),
        "masks": torch.tensor(ellipses(moved, height, width)).bool(),
    }


def ellipses(boxes, height, width):
    y, x = np.mgrid[:height, :width] + 0.5
    x1, y1, x2, y2 = boxes.T[..., None, None] if len(boxes) else np.ones((4, 0, 1, 1))
    inside = ((2 * x - x1 - x2) / (x2 - x1)) ** 2 + ((2 * y - y1 - y2) / (y2 - y1)) ** 2 <= 1
    return inside.astype(np.uint8)


def by_pycocotools(targets, found, kind):
    """The first six numbers of COCO's summary."""
    coco = pytest.importorskip("pycocotools.coco")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")
    truth, guess = coco.COCO(), coco.COCO()
    sizes = {int(t["image_id"]): t["masks"].shape[1:] for t in targets}
    images = [{"id": i, "height": int(h), "width": int(w)} for i, (h, w) in sizes.items()]
    categories = [{"id": label} for label in range(CLASSES)]
    for part, annotations in ((truth, true_annotations(targets)), (guess, found_annotations(targets, found, kind))):
        part.dataset = {"images": images, "categories": categories, "annotations": annotations, "info": {}}
        part.createIndex()
    evaluation = cocoeval.COCOeval(truth, guess, kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation.stats[:6]


def true_annotations(targets):
    annotations = []
    for target in targets:
        for row in range(len(target["boxes"])):
            annotations.append(
                annotation(len(annotations) + 1, target, target, row)
                | {"area": target["area"][row].item(), "iscrowd": target["iscrowd"][row].item()}
            )
    return annotations


def found_annotations(targets, found, kind):
    annotations = []
    for target, image in zip(targets, found, strict=True):
        for row in range(len(image["boxes"])):
            new = annotation(len(annotations) + 1, target, image, row) | {"score": image["scores"][row].item()}
            # COCO's own rule for results
            width, height = new["bbox"][2:]
            new |= {"iscrowd": 0, "area": width * height if kind == "bbox" else image["masks"][row].sum().item()}
            annotations.append(new)
    return annotations


def annotation(number, target, image, row):
    mask = pytest.importorskip("pycocotools.mask")
    x1, y1, x2, y2 = image["boxes"][row].tolist()
    return {
        "id": number,
        "image_id": int(target["image_id"]),
        "category_id": image["labels"][row].item(),
        "bbox": [x1, y1, x2 - x1, y2 - y1],
        "segmentation": mask.encode(np.asfortranarray(image["masks"][row].byte().numpy())),
    }


def count(metrics, targets, found, *, batch=5):
    for first in range(0, len(targets), batch):
        metrics.update(found[first : first + batch], targets[first : first + batch])
    return {name: float(value) for name, value in metrics.compute().items()}


def assert_equal_pycocotools(values, targets, found):
    for prefix, kind in (("", "bbox"), ("mask_", "segm")):
        expected = by_pycocotools(targets, found, kind)
        actual = [values[prefix + name] for name in NAMES]
        assert actual == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_boxes_and_masks_equal_pycocotools(seed):
    targets, found = scene(seed)
    assert any(target["iscrowd"].any() for target in targets)
    values = count(CocoMetrics(masks=True), targets, found)
    assert_equal_pycocotools(values, targets, found)
    assert 0.01 < values["AP"] < 0.9
    assert 0.01 < values["mask_AP"] < 0.9


def test_boxes_alone_are_counted_alike():
    targets, found = scene(0)
    values = count(CocoMetrics(), targets, found)
    assert list(values) == ["AP", "AP50", "AP75", "APs", "APm", "APl"]
    both = count(CocoMetrics(masks=True), targets, found)
    assert values == {name: both[name] for name in values}


def test_crowds_excuse_what_is_found_in_them():
    targets, found = scene(1)
    excused = count(CocoMetrics(), targets, found)
    blamed = count(CocoMetrics(), [{**t, "iscrowd": torch.zeros_like(t["iscrowd"])} for t in targets], found)
    assert excused["AP"] != pytest.approx(blamed["AP"], abs=1e-3)


def test_the_annotations_area_tells_small_from_large():
    targets, found = scene(2)
    for target in targets:
        target["area"] = torch.full_like(target["area"], 50.0**2)
    values = count(CocoMetrics(masks=True), targets, found)
    assert_equal_pycocotools(values, targets, found)
    assert values["APs"] == values["APl"] == -1
    assert values["APm"] >= values["AP"]


def test_an_area_of_zero_is_small():
    targets, found = scene(3)
    for target in targets:
        target["area"] = torch.zeros_like(target["area"])
    values = count(CocoMetrics(masks=True), targets, found)
    assert_equal_pycocotools(values, targets, found)
    assert values["APm"] == values["mask_APl"] == -1


def test_a_hundred_detections_of_each_class_count():
    targets, found = scene(4, images=8)
    generator = np.random.default_rng(0)
    image = next(place for place, target in enumerate(targets) if len(target["boxes"]))
    boxes = random_boxes(generator, 300, *targets[image]["masks"].shape[1:])
    more = {
        "boxes": torch.tensor(boxes),
        "labels": torch.arange(300) % 2,
        "scores": torch.linspace(0.99, 0.3, 300),
        "masks": torch.tensor(ellipses(boxes, *targets[image]["masks"].shape[1:])).bool(),
    }
    found[image] = {name: torch.cat([more[name], found[image][name]]) for name in more}
    assert_equal_pycocotools(count(CocoMetrics(masks=True), targets, found), targets, found)


def test_overlaps_and_recalls_on_a_threshold_count_as_in_coco():
    """10 objects, 3 found with an overlap of exactly 0.6: both 0.6 and the recall 0.3 are thresholds."""
    boxes = torch.tensor([[20.0 * i, 0.0, 20.0 * i + 10, 10.0] for i in range(10)])
    target = {
        "boxes": boxes,
        "labels": torch.zeros(10, dtype=torch.long),
        "masks": torch.zeros(10, 12, 200, dtype=torch.uint8),
        "iscrowd": torch.zeros(10, dtype=torch.long),
        "area": torch.full((10,), 100.0),
        "image_id": torch.tensor(1),
    }
    for mask, box in zip(target["masks"], boxes.int().tolist(), strict=True):
        mask[box[1] : box[3], box[0] : box[2]] = 1
    found = {
        "boxes": boxes[:3] * torch.tensor([1, 1, 1, 0.6]),
        "labels": torch.zeros(3, dtype=torch.long),
        "scores": torch.tensor([0.9, 0.8, 0.7]),
        "masks": target["masks"][:3].bool(),
    }
    found["masks"][:, 6:] = False
    values = count(CocoMetrics(masks=True), [target], [found])
    assert_equal_pycocotools(values, [target], [found])
    # 31 of 101 recalls, at 3 of 10 overlaps
    assert values["AP"] == pytest.approx(0.3 * 31 / 101, abs=1e-6)
    plain = MeanAveragePrecision(backend="faster_coco_eval")
    plain.update([found], [target])
    assert float(plain.compute()["map"]) < values["AP"] - 1e-3


def test_what_is_found_in_empty_images_is_a_mistake():
    targets, found = scene(5)
    with_empty = count(CocoMetrics(masks=True), targets, found)
    full = [place for place, target in enumerate(targets) if len(target["boxes"])]
    without = count(CocoMetrics(masks=True), [targets[i] for i in full], [found[i] for i in full])
    assert with_empty["AP"] < without["AP"]
    assert with_empty["mask_AP"] < without["mask_AP"]


@pytest.mark.parametrize("empty", ["found", "targets", "both"])
def test_nothing_found_is_0_and_nothing_to_find_is_minus_1(empty):
    targets, found = scene(0, images=6)
    if empty != "targets":
        found = [{name: value[:0] for name, value in image.items()} for image in found]
    if empty != "found":
        targets = [{name: value if value.ndim == 0 else value[:0] for name, value in t.items()} for t in targets]
    values = count(CocoMetrics(masks=True), targets, found)
    assert values["AP"] == values["mask_AP"] == (0 if empty == "found" else -1)


def test_the_order_of_images_does_not_matter():
    targets, found = scene(0)
    order = torch.randperm(len(targets)).tolist()
    values = count(CocoMetrics(masks=True), targets, found)
    assert count(CocoMetrics(masks=True), [targets[i] for i in order], [found[i] for i in order]) == values


def test_a_collection_gives_the_names_alone():
    targets, found = scene(0, images=6)
    metrics = MetricCollection({"coco": CocoMetrics(masks=True)}, compute_groups=False).to("cpu")
    metrics["coco"].update(found, targets)
    assert list(metrics.compute()) == [*NAMES, *(f"mask_{name}" for name in NAMES)]


def test_an_image_counted_twice_is_an_error():
    targets, found = scene(0, images=6)
    metrics = CocoMetrics()
    metrics.update(found[:1], targets[:1])
    metrics.update(found[:1], targets[:1])
    with pytest.raises(ValueError, match="image_id must be different for each image, got 1000 twice"):
        metrics.compute()


def test_targets_without_area_or_with_a_negative_one_are_errors():
    targets, found = scene(0, images=6)
    with pytest.raises(ValueError, match="area is missing"):
        CocoMetrics().update(found[2:3], [{name: v for name, v in targets[2].items() if name != "area"}])
    with pytest.raises(ValueError, match=r"area must not be negative, got -\d+.* in image 986"):
        CocoMetrics().update(found[2:3], [{**targets[2], "area": -targets[2]["area"]}])


def share_of_a_process(rank, store):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    targets, found = scene(0, images=13)
    # 12 images and 1: torchmetrics' own way would wait forever
    mine = [place for place in range(13) if (place == 7) == bool(rank)]
    values = count(CocoMetrics(masks=True), [targets[i] for i in mine], [found[i] for i in mine])
    torch.distributed.destroy_process_group()
    return values


def put_share_of_a_process(rank, store, results):
    torch.set_num_threads(1)
    results.put(share_of_a_process(rank, store))


def test_processes_with_unequally_many_images_agree_with_one(tmp_path):
    expected = count(CocoMetrics(masks=True), *scene(0, images=13))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    other = context.Process(target=put_share_of_a_process, args=(1, tmp_path / "store", results), daemon=True)
    other.start()
    assert share_of_a_process(0, tmp_path / "store") == expected
    assert results.get(timeout=60) == expected
    other.join()
