import numpy as np
import pytest
from torchvision.datasets import Cityscapes

from softline.data.semantic.classes import ADE20K, CITYSCAPES, palette


def test_cityscapes_classes_are_those_of_the_set():
    trained = sorted((known for known in Cityscapes.classes if 0 <= known.train_id < 19), key=lambda k: k.train_id)
    assert [(known.name, known.id, known.color) for known in trained] == [tuple(known) for known in CITYSCAPES]
    assert palette("cityscapes").tolist() == [list(known.color) for known in trained]


def test_ade20k_has_150_different_classes():
    assert len(ADE20K) == len(set(ADE20K)) == 150
    assert (ADE20K[12], ADE20K[89], ADE20K[126]) == ("person", "television receiver", "animal")


@pytest.mark.parametrize(("count", "least"), [(2, 200), (11, 100), (150, 30), (255, 20)])
def test_a_palette_has_colours_far_from_each_other_and_from_black_and_white(count, least):
    colours = palette(count)
    assert (colours.shape, colours.dtype) == ((count, 3), np.uint8)
    others = np.concatenate([colours.astype(float), [[0, 0, 0], [255, 255, 255]]])
    distances = np.linalg.norm(others[:, None] - others, axis=-1) + 1000 * np.eye(count + 2)
    assert distances.min() >= least


def test_a_label_keeps_its_colour_however_many_follow():
    assert np.array_equal(palette("ade20k")[:11], palette(11))
    palette(11)[:] = 0
    assert palette(11).any()
    with pytest.raises(ValueError, match="classes must be one of ade20k, cityscapes; got 'folder'"):
        palette("folder")
