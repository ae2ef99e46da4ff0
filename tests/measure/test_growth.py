from dataclasses import replace

import pytest

from softline.measure import Row, growth_exponent, growths
from softline.measure.failures import OUT_OF_MEMORY


def row(tokens: int, milliseconds: float | None = None, peak: int | None = None, **changes) -> Row:
    return Row("a", "infer", tokens, f"{tokens} tokens", tokens, milliseconds, peak_bytes=peak, **changes)


def test_the_exponent_of_a_power_law_is_found():
    tokens = [100, 400, 1600]
    assert growth_exponent(tokens, [3 * t**1.5 for t in tokens]) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="at least 2 different sizes, got 1"):
        growth_exponent([5, 5], [1, 2])


def test_growth_is_fitted_over_the_large_sizes():
    (growth,) = growths([row(10, 5.0, 7), *(row(t, t**2, 100 + 8 * t) for t in (100, 200, 400, 800))])
    assert growth.time is not None
    assert (growth.time.exponent, growth.time.first, growth.time.last) == (pytest.approx(2), 100, 800)
    assert [step.tokens for step in growth.steps] == [10, 2, 2, 2]
    assert growth.steps[-1].time == pytest.approx(4)


def test_the_slope_is_in_bytes_per_token():
    (growth,) = growths([row(t, peak=100 + 8 * t) for t in (100, 200, 400)])
    assert growth.bytes_per_token == pytest.approx(8)
    assert growth.time is None


def test_sizes_with_the_same_number_of_tokens_have_no_slope():
    (growth,) = growths([row(64, 1.0, 100), row(64, 2.0, 200)])
    assert (growth.time, growth.memory, growth.bytes_per_token) == (None, None, None)


def test_failed_sizes_are_left_out_of_the_fit():
    (growth,) = growths([row(100, 1.0), row(200, 2.0), row(400, failure=OUT_OF_MEMORY)])
    assert growth.time is not None
    assert growth.time.last == 200
    assert growth.steps[-1].time is None


def test_a_slowdown_of_the_machine_between_sizes_is_not_taken_for_growth():
    """Twice the milliseconds at half the speed of the matrix product are the same work."""
    rows = [
        replace(row(tokens, milliseconds), macs=10 * tokens, share=0.5)
        for tokens, milliseconds in ((100, 1.0), (400, 8.0))
    ]
    (growth,) = growths(rows)
    assert growth.time is not None
    assert growth.time.exponent == pytest.approx(1)
    assert growth.steps[0].time == pytest.approx(4)
