"""Linear cost, counted rather than timed."""

import itertools
from collections.abc import Callable

import pytest
import torch

from softline import ATTENTIONS, create_attention
from softline.measure.counting import count_macs, peak_bytes

SIDES = [28, 56, 112]
OPTIONS = [
    ("soft", {"ratio": 4, "value_conv": 9}),
    ("softpp", {"ratio": 2, "sampling": "avgpool", "inverse": "cholesky", "ridge": 0.01}),
    ("softpp", {"sampling": "random"}),
]


def runner(name: str, side: int, backward: bool, **options: object) -> Callable[[], None]:
    module = create_attention(name, 64, 2, **options)
    x = torch.randn(1, side * side, 64, requires_grad=backward)

    def run() -> None:
        with torch.set_grad_enabled(backward):
            out = module(x, (side, side))
            if backward:
                out.sum().backward()

    return run


def macs(name: str, side: int, **options: object) -> int:
    return count_macs(runner(name, side, False, **options))


@pytest.mark.parametrize(
    ("name", "options", "backward"),
    [
        *((name, {}, backward) for name in ("soft", "softpp", "inline") for backward in (False, True)),
        *((name, options, True) for name, options in OPTIONS),
    ],
)
def test_four_times_the_tokens_cost_at_most_4_2_times_as_much(name, options, backward):
    runs = [runner(name, side, backward, **options) for side in SIDES]
    # the first run also allocates gradients, which are kept
    for run in runs:
        run()
    for measure in (count_macs, peak_bytes):
        costs = [measure(run) for run in runs]
        for small, large in itertools.pairwise(costs):
            assert large <= 4.2 * small, f"{measure.__name__}: {costs}"


def test_softmax_and_the_papers_fixed_ratio_are_not_linear():
    """The counting sees what it should: quadratic attention, and landmarks that grow with the image."""
    assert macs("softmax", 56) / macs("softmax", 28) > 10
    fixed = {"ratio": 4, "max_landmarks": None, "iterations": 1}
    assert macs("softpp", 112, **fixed) / macs("softpp", 56, **fixed) > 10


# Reformer holds each token's scores of two chunks, in every round
@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name not in ("softmax", "gaussian", "reformer")])
def test_no_linear_attention_holds_a_matrix_of_all_pairs_of_tokens(name):
    tokens = 112 * 112
    assert peak_bytes(runner(name, 112, False)) < 4 * tokens * tokens / 4
