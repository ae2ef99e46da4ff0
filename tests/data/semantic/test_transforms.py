import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from softline.data.randomness import repeatable
from softline.data.semantic.classes import IGNORE
from softline.data.semantic.transforms import (
    TRIES,
    MixedCrop,
    RandomScale,
    colour_distortion,
    normalization,
    semantic_eval_transform,
    semantic_train_transform,
    share_of_largest,
)

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
STEP = 20
"""Of the colours that encode labels."""


def encoded(labels: np.ndarray) -> Image.Image:
    """An image whose red is 20 times its label."""
    return Image.fromarray(np.stack([labels * STEP, labels * 0, labels * 0], -1).astype(np.uint8))


def blocks(height: int = 48, width: int = 64, side: int = 16) -> np.ndarray:
    """Labels in squares, all different along rows and columns."""
    rows, columns = np.indices((height, width)) // side
    return ((rows * 5 + columns) % 12).astype(np.uint8)


def inside(labels: Tensor) -> Tensor:
    """Pixels whose neighbours, two steps around, all have their label: there a resized image has one colour."""
    same = torch.ones_like(labels, dtype=torch.bool)
    for shift in (-2, -1, 1, 2):
        for axis in (0, 1):
            same &= labels == labels.roll(shift, axis)
    same[:2], same[-2:], same[:, :2], same[:, -2:] = False, False, False, False
    return same


def drawn(transform, labels: np.ndarray, seed: int = 0) -> tuple[Tensor, Tensor]:
    with repeatable(seed):
        return transform(encoded(labels), labels)


@pytest.mark.parametrize("seed", range(8))
def test_image_and_labels_move_together(seed):
    transform = semantic_train_transform((40, 56), distort=False, **PLAIN)
    image, labels = drawn(transform, blocks(), seed)
    assert (image.shape, image.dtype) == ((3, 40, 56), torch.float32)
    assert (labels.shape, labels.dtype) == ((40, 56), torch.int64)
    assert type(image) is Tensor
    assert type(labels) is Tensor
    certain = inside(labels) & (labels != IGNORE)
    assert certain.sum() > 50
    torch.testing.assert_close(image[0][certain], labels[certain] * STEP / 255, rtol=0, atol=0.5 / 255)


def test_nearest_neighbours_keep_labels_valid():
    labels = np.where(np.random.default_rng(0).random((31, 45)) < 0.5, 3, 149).astype(np.uint8)
    labels[::7] = IGNORE
    transform = semantic_train_transform((64, 64), largest_share=1.0, **PLAIN)
    for seed in range(10):
        assert set(drawn(transform, labels, seed)[1].unique().tolist()) <= {3, 149, IGNORE}


def test_labels_stay_in_place_where_images_shrink():
    ramp = np.tile(np.arange(0, 240, dtype=np.uint8), (6, 1))
    grey = torch.from_numpy(ramp)[None]
    image, labels = RandomScale((1 / 3, 1 / 3), None)(grey, grey)
    # the middle pixel of each three, in the image its mean with the neighbours
    assert labels[0, 0].tolist() == list(range(1, 240, 3))
    assert (image[0, 0, 1:-1].int() - labels[0, 0, 1:-1].int()).abs().max() <= 1


@pytest.mark.parametrize(
    ("base_size", "scale", "size"),
    [
        (None, (0.5, 0.5), (24, 32)),
        (None, (2.0, 2.0), (96, 128)),
        ((24, 1000), (1.0, 1.0), (24, 32)),
        ((1000, 32), (2.0, 2.0), (48, 64)),
    ],
)
def test_scale_is_of_the_image_or_of_the_base_size(base_size, scale, size):
    image, labels = RandomScale(scale, base_size)(torch.zeros(3, 48, 64), torch.zeros(1, 48, 64, dtype=torch.uint8))
    assert image.shape[-2:] == labels.shape[-2:] == size


def test_scales_are_spread_between_their_bounds():
    image, labels = torch.zeros(3, 100, 100), torch.zeros(1, 100, 100, dtype=torch.uint8)
    sides = [RandomScale((0.5, 2.0), None)(image, labels)[0].shape[-1] for _ in range(200)]
    assert min(sides) >= 50
    assert max(sides) <= 200
    assert min(sides) < 60
    assert max(sides) > 190


def test_a_strip_of_one_pixel_can_be_scaled():
    labels = np.zeros((1, 9), np.uint8)
    _, labels = drawn(semantic_train_transform((4, 4), scale=(0.3, 0.3), **PLAIN), labels)
    assert (labels != IGNORE).sum() == 3


def test_padding_is_ignored_and_has_the_mean_colour():
    labels = np.full((10, 12), 7, np.uint8)
    transform = semantic_train_transform(
        (16, 20), scale=(1.0, 1.0), hflip=0.0, distort=False, mean=(0.2, 0.3, 0.4), std=(0.1, 0.2, 0.3)
    )
    image, padded = drawn(transform, labels)
    assert torch.equal(padded != IGNORE, torch.arange(16)[:, None].lt(10) & torch.arange(20).lt(12))
    assert image[:, padded == IGNORE].count_nonzero() == 0
    expected = torch.tensor([(7 * STEP / 255 - 0.2) / 0.1, -0.3 / 0.2, -0.4 / 0.3])
    torch.testing.assert_close(image[:, 0, 0], expected)


def test_crops_of_one_class_are_drawn_again():
    labels = torch.zeros(1, 32, 320, dtype=torch.uint8)
    labels[..., :80] = 1
    # a crop of 32 columns is mixed enough in 17 of 289 places
    shares = {
        share: [share_of_largest(MixedCrop((32, 32), share)(labels, labels)[1]) for _ in range(300)]
        for share in (0.75, 1.0)
    }
    mixed = {share: np.mean(np.array(values) <= 0.75) for share, values in shares.items()}
    assert mixed[1.0] == pytest.approx(17 / 289, abs=0.04)
    assert mixed[0.75] == pytest.approx(1 - (1 - 17 / 289) ** (1 + TRIES), abs=0.09)


def test_a_crop_without_mixed_places_is_taken_all_the_same():
    labels = torch.full((1, 20, 20), 4, dtype=torch.uint8)
    assert MixedCrop((8, 8), 0.75)(labels, labels)[1].shape == (1, 8, 8)


def test_ignored_pixels_do_not_count_in_the_share():
    labels = torch.tensor([[0, 0, 0, 1, IGNORE, IGNORE, IGNORE, IGNORE]], dtype=torch.uint8)
    assert share_of_largest(labels) == 0.75
    assert share_of_largest(torch.full((3, 3), IGNORE, dtype=torch.uint8)) == 1.0


def test_crops_reach_every_border():
    labels = torch.arange(30, dtype=torch.uint8).expand(1, 30, 30)
    parts = [MixedCrop((8, 8), 1.0)(labels, labels)[1] for _ in range(300)]
    assert min(int(part.min()) for part in parts) == 0
    assert max(int(part.max()) for part in parts) == 29


def test_flips_follow_their_probability():
    labels = blocks()
    for hflip, expected in ((0.0, labels), (1.0, labels[:, ::-1])):
        transform = semantic_train_transform((48, 64), scale=(1.0, 1.0), hflip=hflip, distort=False, **PLAIN)
        assert np.array_equal(drawn(transform, labels)[1].numpy(), expected)


def test_colours_are_distorted_and_labels_are_not():
    labels = blocks()
    options = {"scale": (1.0, 1.0), "hflip": 0.0, **PLAIN}
    plain, distorted = (semantic_train_transform((48, 64), distort=distort, **options) for distort in (False, True))
    images = [drawn(distorted, labels, seed)[0] for seed in range(12)]
    assert all(torch.equal(drawn(distorted, labels, seed)[1], torch.from_numpy(labels).long()) for seed in range(12))
    assert sum(not torch.equal(image, drawn(plain, labels)[0]) for image in images) > 8
    assert all(image.min() >= 0 and image.max() <= 1 for image in images)


def test_channels_are_not_swapped():
    red = torch.zeros(3, 4, 4, dtype=torch.uint8)
    red[0] = 200
    for _ in range(50):
        image = colour_distortion()(red)
        assert image[0].float().mean() >= image[1:].float().mean()


def test_the_same_numbers_give_the_same_sample():
    transform = semantic_train_transform((32, 32))
    first, again, other = (drawn(transform, blocks(), seed) for seed in (3, 3, 4))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize(
    ("sides", "size"),
    [({}, (48, 64)), ({"short_side": 24}, (24, 32)), ({"short_side": 96, "long_side": 100}, (75, 100))],
)
def test_evaluation_resizes_the_image_alone(sides, size):
    labels = blocks()
    image, kept = semantic_eval_transform(**sides)(encoded(labels), labels)
    assert (image.shape, image.dtype) == ((3, *size), torch.uint8)
    assert (kept.dtype, kept.tolist()) == (torch.uint8, labels.tolist())


def test_evaluation_without_resizing_changes_no_pixel():
    labels = blocks()
    image, _ = semantic_eval_transform()(encoded(labels), labels)
    assert torch.equal(image[0], torch.from_numpy(labels) * STEP)
    normalised = normalization((0.5, 0.4, 0.5), (0.25, 0.5, 0.25))(image)
    torch.testing.assert_close(normalised[0] * 0.25 + 0.5, image[0] / 255)
    torch.testing.assert_close(normalised[1] * 0.5 + 0.4, image[1] / 255)
    with pytest.raises(ValueError, match="mean and std must have 3 numbers each, std positive"):
        normalization((0.5,), (0.25, 0.25, 0.25))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": 32}, "crop must be two sizes in pixels, got 32"),
        ({"crop": (0, 8)}, "crop must be at least 1, got 0"),
        ({"scale": (2.0, 0.5)}, r"scale must be \(least, greatest\) with 0 < least <= greatest, got \(2.0, 0.5\)"),
        ({"base_size": (2048, 512)}, r"base_size must be \(short side, long side\), got \(2048, 512\)"),
        ({"largest_share": 1.5}, "largest_share must be at least 0 and at most 1, got 1.5"),
        ({"hflip": -0.1}, "hflip must be at least 0 and at most 1, got -0.1"),
        ({"mean": (0.5,)}, r"mean and std must have 3 numbers each, std positive; got \(0.5,\)"),
        ({"std": (1, 0, 1)}, "mean and std must have 3 numbers each, std positive"),
    ],
)
def test_options_of_training_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        semantic_train_transform(**{"crop": (8, 8), **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"long_side": 9}, "long_side needs short_side, which is None; got 9"),
        ({"short_side": 8, "long_side": 7}, "long_side must be at least 8, got 7"),
        ({"short_side": 0}, "short_side must be at least 1, got 0"),
    ],
)
def test_options_of_evaluation_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        semantic_eval_transform(**options)
