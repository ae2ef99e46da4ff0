import pytest

from softline import ATTENTIONS
from softline.measure import measure_scaling


def test_every_attention_is_measured_at_every_size():
    groups = list(measure_scaling(list(ATTENTIONS), [64, 32], rounds=1))
    for group, (size, tokens) in zip(groups, [(32, 16), (64, 64)], strict=True):
        assert [(row.image_size, row.tokens, row.attention) for row in group] == [(size, tokens, n) for n in ATTENTIONS]
        assert all(row.milliseconds > 0 and row.macs > 0 and row.peak_bytes > 0 for row in group)


def test_images_smaller_than_a_patch_are_refused():
    with pytest.raises(ValueError, match="at least one patch of 8 pixels, got 4"):
        list(measure_scaling(["inline"], [4]))
