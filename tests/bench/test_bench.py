import pytest
import torch

from softline import ATTENTIONS
from softline.bench import count_macs, growth_exponent, measure_scaling, peak_bytes


def test_macs_of_a_product_are_counted():
    a, b = torch.randn(10, 20), torch.randn(20, 30)
    assert count_macs(lambda: a @ b) == 10 * 20 * 30


def test_peak_bytes_counts_what_is_held_at_once():
    def run() -> torch.Tensor:
        first = torch.empty(1000, 250)  # 1 MB
        second = torch.empty(1000, 500)  # 2 MB, beside the first
        del first
        third = torch.empty(1000, 125)  # 0.5 MB, after the first is gone
        return second[0, 0] + third[0, 0]

    assert 3_000_000 <= peak_bytes(run) < 3_010_000


def test_growth_exponent_recovers_a_power_law():
    tokens = [100, 400, 1600]
    assert growth_exponent(tokens, [3 * t**1.5 for t in tokens]) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="at least 2 sizes, got 1"):
        growth_exponent([1], [1])


def test_scaling_measures_every_attention_at_every_size():
    groups = list(measure_scaling(["softmax", "inline"], [64, 32], rounds=1))
    assert [[(row.image_size, row.tokens, row.attention) for row in group] for group in groups] == [
        [(32, 16, "softmax"), (32, 16, "inline")],
        [(64, 64, "softmax"), (64, 64, "inline")],
    ]
    # projections of queries, keys, values and output, then two products of all pairs
    assert groups[1][0].macs == 4 * 64 * 64 * 64 + 2 * 64 * 64 * 64
    assert all(row.milliseconds > 0 and row.peak_bytes > 0 and row.output_std > 0 for row in groups[1])


def test_every_attention_can_be_measured():
    (rows,) = measure_scaling(list(ATTENTIONS), [32], rounds=1)
    assert [row.attention for row in rows] == list(ATTENTIONS)
    assert all(row.macs > 0 for row in rows)


def test_images_smaller_than_a_patch_are_refused():
    with pytest.raises(ValueError, match="at least one patch of 8 pixels, got 4"):
        list(measure_scaling(["inline"], [4]))
