"""What every trained model on images does with one image, with several, and with a network from elsewhere."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from faster_coco_eval.core.mask import decode
from PIL import Image
from torch import nn

from softline.engine.reading import parse_recipe
from softline.engine.task import definition_of
from softline.errors import UserError
from softline.heads.masks import ObjectMasks
from softline.layers.bands import shrunk_bands
from softline.tasks.detection.metrics import CocoMetrics
from tests.engine.small import RECIPE
from tests.tasks.small_dense import DETECTION, SEGMENTATION, dense_recipe

CLASSES = ["ground", "thing"]
FACTS = {"classes": CLASSES}
KINDS = ("classification", "boxes", "masks", "segmentation", "windows")
every_kind = pytest.mark.parametrize("kind", KINDS)


def recipe_of(kind, root):
    if kind == "classification":
        return parse_recipe(RECIPE.format(root=root))
    if kind in ("boxes", "masks"):
        head = "mask_rcnn" if kind == "masks" else "retinanet"
        # enough objects to compare, not so many that they take seconds
        return dense_recipe(DETECTION, root, f"--head.name={head}", "--head.options.detections_per_image=5")
    inference = "slide" if kind == "windows" else "whole"
    return dense_recipe(SEGMENTATION, root, f"--data.inference={inference}", "--data.mean=[0.4,0.5,0.6]")


def trained_model(recipe, facts=FACTS):
    """A model with random weights and spread logits, as after training."""
    definition = definition_of(recipe)
    torch.manual_seed(1)
    network = definition.network(recipe, facts)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return definition.trained(network, recipe, facts)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {kind: trained_model(recipe_of(kind, root)) for kind in KINDS}


@pytest.fixture(scope="module")
def images():
    """Five images, of which three have one size."""
    numbers = np.random.default_rng(0)
    sizes = [(40, 48), (36, 52), (40, 48), (33, 33), (40, 48)]
    return [Image.fromarray(numbers.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


def numbers_of(kind, result):
    """What was found, as tensors."""
    if kind == "classification":
        return [result.by_label]
    if kind in ("segmentation", "windows"):
        return [result.labels]
    return [result.boxes, result.scores, result.labels, *([result.masks] if kind == "masks" else [])]


def assert_alike(kind, first, second):
    for one, other in zip(numbers_of(kind, first), numbers_of(kind, second), strict=True):
        if one.is_floating_point():
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        else:
            # a pixel on the border of two classes, or of a mask, may be of either
            assert (one != other).float().mean() < 2e-3


def options_of(kind):
    return {"score": 0.0} if kind in ("boxes", "masks") else {}


@every_kind
def test_one_in_one_out_and_a_list_in_a_list_out(kind, models, images, tmp_path):
    model, options = models[kind], options_of(kind)
    images[1].save(tmp_path / "second.png")
    alone = [model.predict(image, **options) for image in images[:2]]
    for several in (images[:2], tuple(images[:2]), [np.asarray(images[0]), tmp_path / "second.png"]):
        found = model.predict(several, **options)
        assert isinstance(found, list)
        for one, other in zip(found, alone, strict=True):
            assert_alike(kind, one, other)
    assert [each.name for each in found] == [None, str(tmp_path / "second.png")]
    (one,) = model.predict(torch.from_numpy(np.array(images[0])).movedim(-1, 0)[None], **options)
    assert_alike(kind, one, alone[0])
    assert model.predict([], **options) == []


@every_kind
def test_results_do_not_depend_on_the_batch(kind, models, images):
    alone = models[kind].predict(images, batch_size=1, **options_of(kind))
    for size in (2, 5):
        for one, other in zip(models[kind].predict(images, batch_size=size, **options_of(kind)), alone, strict=True):
            assert_alike(kind, one, other)


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [
        ("classification", 2, [2, 2, 1]),
        ("classification", 32, [5]),
        ("boxes", 2, [2, 2, 1]),
        # images of equal size run together
        ("segmentation", 5, [3, 1, 1]),
        ("segmentation", 3, [2, 1, 1, 1]),
    ],
)
def test_the_model_is_given_batches(kind, size, expected, models, images):
    seen = []
    hook = models[kind].model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    try:
        models[kind].predict(images, batch_size=size)
    finally:
        hook.remove()
    assert seen == expected


@every_kind
def test_results_are_texts_plain_values_and_pictures(kind, models, images):
    result = models[kind].predict(images[0], **options_of(kind))
    assert json.loads(json.dumps(result.to_dict())) == result.to_dict()
    assert str(result)
    assert repr(result).startswith(f"{type(result).__name__}(")
    assert "\n" not in repr(result)
    drawn = result.draw()
    assert drawn.mode == "RGB"
    assert drawn.width >= images[0].width
    assert list(result.drawings()) == list(models[kind].drawings)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.name = "other"


def test_probabilities_are_sorted_and_known_by_label(models, images):
    result = models["classification"].predict(images[0], top=1)
    assert float(result.by_label.sum()) == pytest.approx(1)
    best = int(result.by_label.argmax())
    assert (result.label, result.probability) == (CLASSES[best], float(result.by_label.max()))
    assert result.classes == [CLASSES[best], CLASSES[1 - best]]
    assert result.probabilities == sorted(result.by_label.tolist(), reverse=True)
    assert result.top(7) == list(zip(result.classes, result.probabilities, strict=True))
    assert len(result.to_dict()["classes"]) == len(str(result).splitlines()) == 1
    with pytest.raises(UserError, match="k must be at least 1, got 0"):
        result.top(0)


def test_objects_have_names_and_masks_of_the_images_size(models, images):
    result = models["masks"].predict(images[1], score=0.0)
    count = len(result.scores)
    assert count > 0
    assert (result.boxes.shape, result.masks.shape, result.masks.dtype) == ((count, 4), (count, 36, 52), torch.bool)
    assert result.names == [CLASSES[label] for label in result.labels.tolist()]
    objects = result.to_dict()["objects"]
    assert [each["class"] for each in objects] == result.names
    assert all(each["mask"]["size"] == [36, 52] for each in objects)
    assert models["boxes"].predict(images[1], score=0.0).masks is None


def test_masks_are_drawn_written_and_counted_one_at_a_time(models, images, monkeypatch):
    result = models["masks"].predict(images[1], score=0.0)
    masks, drawn = result.masks, result.draw()
    monkeypatch.delattr(ObjectMasks, "whole")
    assert drawn.tobytes() == result.draw().tobytes()
    objects = result.to_dict()["objects"]
    assert [decode(each["mask"]).sum() for each in objects] == masks.sum((1, 2)).tolist()
    metrics, crowd = CocoMetrics(masks=True), torch.zeros(len(masks), dtype=torch.int64)
    found = {"boxes": result.boxes, "labels": result.labels, "scores": result.scores, "masks": result.object_masks}
    target = {**found, "masks": masks, "iscrowd": crowd, "area": masks.sum((1, 2)), "image_id": torch.tensor(1)}
    metrics.update([found], [target])
    assert metrics.compute()["mask_AP"] == 1


def test_label_maps_have_the_images_size_and_the_shares_of_the_classes(models, images):
    result = models["segmentation"].predict(images[1])
    assert result.labels.shape == (36, 52)
    counts = {name: float((result.labels == label).float().mean()) for label, name in enumerate(CLASSES)}
    assert result.shares == pytest.approx({name: share for name, share in counts.items() if share})
    assert np.array_equal(np.asarray(result.label_image()), result.labels.numpy())


class Elsewhere(nn.Module):
    """A network without parameters, which runs another one out of torch's sight."""

    def __init__(self, network):
        super().__init__()
        self.run = [network.eval()]

    def forward(self, images):
        return self.run[0](images)


@every_kind
def test_a_network_without_parameters_gives_the_same_results(kind, models, images):
    model = models[kind]
    other = definition_of(model.recipe).trained(Elsewhere(model.model), model.recipe, FACTS)
    assert other.device == torch.device("cpu")
    # a threshold that the network has is as low as that of the recipe
    options = {"score": 0.01} if kind in ("boxes", "masks") else {}
    if options:
        model.model.score_threshold = 0.01
    assert_alike(kind, other.predict(images[1], **options), model.predict(images[1], **options))


def test_a_fixed_threshold_cannot_be_lowered(models, images):
    model = models["boxes"]
    network = Elsewhere(model.model)
    network.score_threshold = 0.25
    other = definition_of(model.recipe).trained(network, model.recipe, FACTS)
    with pytest.raises(UserError, match=r"score must be at least 0\.25, which this detector was made with, got 0\.1"):
        other.predict(images[0], score=0.1)


def test_a_model_says_what_it_is(models):
    assert repr(models["classification"]) == "Classifier softpp_micro, 2 classes, task classification"
    assert repr(models["masks"]) == "TrainedDetector softpp_micro, 2 classes, task detection"
    assert models["masks"].to("cpu") is models["masks"]


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (
            [np.zeros((4, 4, 3), np.uint8), 5],
            {},
            "image 1 must be a path, .* got int",
        ),
        (5, {}, "the image must be a path"),
        ([], {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ([], {"top": 2.5}, "top must be a whole number, got 2.5"),
    ],
)
def test_mistakes_are_named(models, inputs, options, message):
    with pytest.raises(UserError, match=message):
        models["classification"].predict(inputs, **options)


def test_logits_that_are_no_numbers_are_refused(models, images):
    model = models["classification"]
    network = Elsewhere(nn.Identity())
    network.forward = lambda images: torch.full((len(images), 2), torch.nan)
    other = definition_of(model.recipe).trained(network, model.recipe, FACTS)
    with pytest.raises(UserError, match="logits are not finite"):
        other.predict(images[0])


@pytest.mark.parametrize("head", ["semantic_fpn", "segformer"])
def test_large_images_are_normalised_a_few_rows_at_a_time(head, tmp_path, monkeypatch):
    options = [f"--head.name={head}", f"--head.options={{channels: {64 if head == 'semantic_fpn' else 16}}}"]
    recipe = dense_recipe(SEGMENTATION, tmp_path, *options)
    torch.manual_seed(0)
    trained = definition_of(recipe).trained(definition_of(recipe).network(recipe, FACTS), recipe, FACTS)
    nn.init.normal_(trained.model.classifier[-1].weight, std=1)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (100, 140, 3), dtype=np.uint8))
    whole = trained.predict([image, image])
    heights = []
    crop = Image.Image.crop
    monkeypatch.setattr(Image.Image, "crop", lambda self, box: heights.append(box[3] - box[1]) or crop(self, box))
    monkeypatch.setattr("softline.heads.segmenters.WHOLE_NUMBERS", 0)
    with shrunk_bands(2**13 / 2**22):
        banded = trained.predict([image, image])
    assert len(heights) > 4
    assert max(heights) < 100
    for found, expected in zip(banded, whole, strict=True):
        assert found.labels.dtype == torch.int64
        assert 0.02 < expected.labels.float().mean() < 0.98
        # rounding may decide where two classes are equally probable
        assert (found.labels == expected.labels).float().mean() > 0.999


def test_hooks_see_the_whole_image(tmp_path, monkeypatch):
    recipe = dense_recipe(SEGMENTATION, tmp_path)
    trained = definition_of(recipe).trained(definition_of(recipe).network(recipe, FACTS), recipe, FACTS)
    shapes = []
    trained.model.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    trained.model.maps.body.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    monkeypatch.setattr("softline.heads.segmenters.WHOLE_NUMBERS", 0)
    image = Image.new("RGB", (140, 100))
    with shrunk_bands(2**13 / 2**22):
        trained.predict(image)
    assert shapes == 2 * [(1, 3, 100, 140)]
