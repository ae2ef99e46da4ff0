from collections import Counter

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental import _config as symbolic_shapes
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.ops.poolers import LevelMapper

import softline  # noqa: F401  registers the backbones
from softline.data.images.photographs import open_photograph
from softline.heads.detection_graph import detection_graph
from softline.heads.detectors import Detector, cascade_mask_rcnn, mask_rcnn, retinanet

BUILDERS = [retinanet, mask_rcnn, cascade_mask_rcnn]
SIZES = [(96, 128), (97, 203), (200, 61)]
NAMES = ("boxes", "scores", "labels")
# torchvision calls a function of torch that torch would rather have called by its new name
EXPORTING = pytest.mark.filterwarnings("ignore:`create_unbacked_symint` is deprecated:FutureWarning")


def small(build, **options) -> Detector:
    """A detector whose scores differ, as after training; those of fresh heads are all alike."""
    torch.manual_seed(0)
    narrow = {"embed_dims": (8, 8, 16, 16), "num_heads": (1, 1, 2, 2), "depths": (1, 1, 1, 1)}
    options = {"width": 16, "anchor_sizes": (8, 16, 32, 64, 128)} | options
    detector = build(timm.create_model("inline_micro", features_only=True, **narrow), 3, **options)
    if build is retinanet:
        # one of four convolutions: exporting takes long
        for head in (detector.detector.head.classification_head, detector.detector.head.regression_head):
            head.conv = head.conv[:1]
    for name, parameter in detector.named_parameters():
        if "backbone" not in name and parameter.dim() > 1:
            size = 0.3 if "bbox" in name else 1.2
            nn.init.normal_(parameter, std=size * parameter.shape[1:].numel() ** -0.5)
    if detector.masks:
        # regions of small images come from all levels too
        for pooling in (detector.detector.roi_heads.box_roi_pool, detector.detector.roi_heads.mask_roi_pool):
            pooling.map_levels = LevelMapper(2, 5, canonical_scale=24)
    return detector.eval()


def photograph(size, name="cat"):
    pixels = np.asarray(open_photograph(name).resize(size[::-1]))
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 255


@torch.no_grad()
def detections(detector: Detector, image: Tensor) -> dict[str, Tensor]:
    """What the detector finds in an image that it leaves at its size."""
    transform = detector.detector.transform
    transform.short_side, transform.long_side = sorted(image.shape[1:])
    return detector([image])[0]


def assert_same(found: tuple[Tensor, ...], expected: dict[str, Tensor], size: tuple[int, int]) -> None:
    """Rounding makes a difference of 6e-5 pixels, 6e-7 in scores and 5e-5 in masks, as measured in ONNX Runtime."""
    assert [part.dtype for part in found[:3]] == [torch.float32, torch.float32, torch.int64]
    boxes, scores, labels = (expected[name] for name in NAMES)
    torch.testing.assert_close(found[0], boxes, rtol=0, atol=3e-4)
    torch.testing.assert_close(found[1], scores, rtol=0, atol=3e-6)
    assert torch.equal(found[2], labels)
    assert (len(found) == 4) == ("masks" in expected)
    if "masks" in expected:
        assert found[3].shape == (len(boxes), 28, 28)
        pairs = zip(found[3][:, None, None], boxes[:, None], strict=True)
        pasted = [paste_masks_in_image(*pair, size)[0, 0] >= 0.5 for pair in pairs]
        masks = expected["masks"].whole()
        wrong = sum((a != b).sum().item() for a, b in zip(pasted, masks, strict=True))
        assert wrong <= 1e-3 * masks.sum()


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("size", SIZES)
def test_the_graph_finds_what_the_detector_finds(build, size):
    # with all candidates, of which there are more than 1000, torchvision suppresses boxes class by class
    for threshold in (0.0, 0.15):
        detector = small(build, score_threshold=threshold)
        image = photograph(size)
        expected = detections(detector, image)
        with torch.no_grad():
            found = detection_graph(detector)(image[None])
        assert len(expected["boxes"]) > 5
        assert_same(found, expected, size)


@pytest.mark.parametrize("build", BUILDERS)
def test_the_limits_are_the_detectors(build):
    detector = small(build, score_threshold=0.0, detections_per_image=7)
    graph = detection_graph(detector)
    image = photograph((96, 128))[None]
    with torch.no_grad():
        assert graph(image)[0].shape == (7, 4)
        detector.score_threshold = 0.999
        boxes, scores, labels, *masks = graph(image)
    assert (boxes.shape, scores.shape, labels.shape) == ((0, 4), (0,), (0,))
    assert labels.dtype == torch.int64
    assert [part.shape for part in masks] == [(0, 28, 28)] * detector.masks


@pytest.mark.parametrize("build", [mask_rcnn, cascade_mask_rcnn])
def test_the_regions_of_small_images_come_from_every_level(build):
    """Otherwise the comparisons of this file would say little."""
    detector = small(build, score_threshold=0.0)
    levels: Counter[int] = Counter()
    pooling = detector.detector.roi_heads.box_roi_pool
    pooling.register_forward_hook(lambda module, inputs, out: levels.update(module.map_levels(inputs[1]).tolist()))
    detections(detector, photograph((97, 203)))
    assert set(levels) == {0, 1, 2, 3}


@pytest.fixture(scope="module", params=[pytest.param(retinanet, marks=pytest.mark.slow), cascade_mask_rcnn])
def exported(request):
    """A detector that finds nothing in the dark, and its graph for images of any size."""
    detector = small(request.param, score_threshold=0.0, detections_per_image=300)
    detector.score_threshold = 1.01 * detections(detector, dark())["scores"].max().item()
    free = {"images": {2: Dim.DYNAMIC, 3: Dim.DYNAMIC}}
    with torch.no_grad(), symbolic_shapes.patch(backed_size_oblivious=True):
        example = (torch.zeros(1, 3, 672, 704),)
        return detector, torch.export.export(detection_graph(detector), example, dynamic_shapes=free, strict=False)


def dark():
    return torch.zeros(3, 160, 160)


@pytest.fixture(scope="module")
def session(exported):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    # the optimisation takes longer than all the rest, and ONNX Runtime has its own
    translated = torch.onnx.export(exported[1], dynamo=True, optimize=False, verbose=False)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    return runtime.InferenceSession(translated.model_proto.SerializeToString(), options)


@EXPORTING
def test_the_exported_graph_finds_the_same_and_nothing_in_the_dark(exported):
    detector, program = exported
    run = program.module(check_guards=False)
    image = photograph((200, 161))
    assert_same(run(image[None]), detections(detector, image), (200, 161))
    assert [len(part) for part in run(dark()[None])] == [0] * (3 + detector.masks)


@EXPORTING
def test_onnx_runtime_finds_the_same_at_any_size(exported, session):
    detector, _ = exported
    counts = set()
    for image in (*(photograph(size, name) for size in SIZES for name in ("cat", "coffee")), dark()):
        found = tuple(torch.from_numpy(part) for part in session.run(None, {"images": image[None].numpy()}))
        expected = detections(detector, image)
        assert_same(found, expected, tuple(image.shape[1:]))
        counts.add(len(expected["boxes"]))
    assert len(counts) > 2
    assert min(counts) == 0


@pytest.mark.parametrize("build", BUILDERS)
def test_a_graph_takes_one_image_in_evaluation(build):
    graph = detection_graph(small(build))
    with pytest.raises(ValueError, match=r"one image \[1, 3, H, W\], got \[2, 3, 32, 32\]"):
        graph(torch.zeros(2, 3, 32, 32))
    with pytest.raises(ValueError, match=r"one image \[1, 3, H, W\], got \[3, 32, 32\]"):
        graph(torch.zeros(3, 32, 32))
    with pytest.raises(ValueError, match="for evaluation only"):
        graph.train()(torch.zeros(1, 3, 32, 32))


def test_other_detectors_are_refused():
    with pytest.raises(ValueError, match="only RetinaNet and Mask R-CNN can be a graph, got Identity"):
        detection_graph(Detector(nn.Identity(), 3))
