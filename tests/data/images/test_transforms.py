import random

import numpy as np
import pytest
import timm
import torch
from packaging.version import Version
from PIL import Image

from softline.data.images import IMAGENET_MEAN, IMAGENET_STD, eval_transform, train_transform
from softline.data.images.transforms import posterize

GREY = {"mean": (0.286,), "std": (0.353,)}
POLICIES = [None, "rand-m9-mstd0.5-inc1", "rand-m15-n4", "augmix-m3-w3", "original", "originalr", "v0", "v0r", "3a"]


@pytest.fixture(scope="module")
def image() -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_takes_colour_and_grey(image, policy, mode):
    if policy == "augmix-m3-w3" and Version(timm.__version__) < Version("1.0.30"):
        pytest.skip("timm before 1.0.30 mixes square images only")
    options = GREY if mode == "L" else {}
    transform = train_transform(
        (24, 32), color_jitter=0.4, auto_augment=policy, erase_prob=0.5, erase_count=2, **options
    )
    random.seed(0)
    np.random.seed(0)
    picture = image.convert(mode)
    for _ in range(150):
        out = transform(picture)
        assert (out.shape, out.dtype) == ((len(mode), 24, 32) if mode == "RGB" else (1, 24, 32), torch.float32)
        assert out.isfinite().all()


def test_no_bits_left_are_black(image):
    assert not np.asarray(posterize(image, 0)).any()
    assert not np.asarray(posterize(image, -2)).any()
    assert np.array_equal(np.asarray(posterize(image, 3)), np.asarray(image) & 0b11100000)
    assert posterize(image, 8) is image


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("image_size", [24, (24, 40)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_evaluation_yields_the_size_asked_for(image, image_size, crop_mode, mode):
    options = GREY if mode == "L" else {}
    out = eval_transform(image_size, crop_mode=crop_mode, crop_pct=0.9, **options)(image.convert(mode))
    assert out.shape[1:] == ((24, 24) if image_size == 24 else (24, 40))
    assert out.dtype == torch.float32


def test_evaluation_normalises(image):
    out = eval_transform((40, 56), crop_pct=1.0)(image)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    expected = (pixels - torch.tensor(IMAGENET_MEAN)[:, None, None]) / torch.tensor(IMAGENET_STD)[:, None, None]
    torch.testing.assert_close(out, expected)


def test_interpolation_is_used_at_every_size(image):
    for image_size in (24, (24, 40)):
        results = [eval_transform(image_size, interpolation=kind)(image) for kind in ("bilinear", "bicubic")]
        assert not torch.equal(*results)


def test_training_without_randomness_keeps_the_image(image):
    transform = train_transform((40, 56), scale=(1, 1), ratio=(1.4, 1.4), hflip=0)
    assert torch.equal(transform(image), eval_transform((40, 56), crop_pct=1.0)(image))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": 0}, "image_size must be at least 1, got 0"),
        ({"image_size": (3, 8, 8)}, r"image_size must be a number or \(height, width\), got \(3, 8, 8\)"),
        ({"mean": (0.5,)}, "mean and std must both have 3 numbers, or 1 for greyscale images"),
        ({"std": (0.5, 0.0, 0.5)}, "std must be positive"),
        ({"interpolation": "cubic"}, "interpolation must be one of .*; got 'cubic'; did you mean 'bicubic'?"),
        ({"scale": (1.0, 0.5)}, r"scale must be \(least, greatest\) with 0 < least <= greatest, got \(1.0, 0.5\)"),
        ({"ratio": (0.0, 1.0)}, "ratio must be"),
        ({"hflip": 1.5}, "hflip must be at least 0 and at most 1, got 1.5"),
        ({"color_jitter": -1.0}, "color_jitter must be at least 0"),
        ({"auto_augment": "rnd-m9"}, "auto_augment must be a policy such as rand-m9-mstd0.5-inc1, got 'rnd-m9'"),
        ({"auto_augment": "rand-m"}, "auto_augment must be a policy"),
        ({"auto_augment": "rand-x9"}, "auto_augment must be a policy of timm, got 'rand-x9'"),
        ({"erase_prob": 2.0}, "erase_prob must be at least 0 and at most 1"),
        ({"erase_mode": "black"}, "erase_mode must be one of const, pixel, rand; got 'black'"),
        ({"erase_count": 0}, "erase_count must be at least 1"),
    ],
)
def test_impossible_training_transforms_are_refused(change, message):
    options = {"image_size": 8} | change
    with pytest.raises(ValueError, match=message):
        train_transform(options.pop("image_size"), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"crop_pct": 0}, "crop_pct must be above 0 and at most 1, got 0"),
        ({"crop_pct": 1.1}, "crop_pct must be above 0 and at most 1, got 1.1"),
        (
            {"crop_mode": "centre"},
            "crop_mode must be one of border, center, squash; got 'centre'; did you mean 'center'?",
        ),
        ({"interpolation": "random"}, "interpolation must be one of"),
    ],
)
def test_impossible_evaluation_transforms_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        eval_transform(8, **change)
