"""Linear cost, counted rather than timed."""

import itertools

import pytest
import torch

from softline import create_attention
from softline.measure import count_macs, peak_bytes

SIDES = [28, 56, 112]


def costs(name: str, side: int, backward: bool, **options: object) -> tuple[int, int]:
    module = create_attention(name, 64, 2, **options)
    x = torch.randn(1, side * side, 64, requires_grad=backward)

    def run() -> None:
        with torch.set_grad_enabled(backward):
            out = module(x, (side, side))
            if backward:
                out.sum().backward()

    run()
    return count_macs(run), peak_bytes(run)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("soft", {}),
        ("softpp", {}),
        ("inline", {}),
        ("soft", {"ratio": 4, "value_conv": 9}),
        ("softpp", {"ratio": 2, "sampling": "avgpool", "inverse": "cholesky", "ridge": 0.01}),
        ("softpp", {"sampling": "random"}),
    ],
)
def test_four_times_the_tokens_cost_at_most_4_2_times_as_much(name, options, backward):
    measured = [costs(name, side, backward, **options) for side in SIDES]
    for small, large in itertools.pairwise(measured):
        macs, bytes_held = large[0] / small[0], large[1] / small[1]
        assert macs <= 4.2
        assert bytes_held <= 4.2


def test_softmax_and_the_papers_fixed_ratio_are_not_linear():
    """The counting sees what it should: quadratic attention, and landmarks that grow with the image."""
    assert costs("softmax", 56, False)[0] / costs("softmax", 28, False)[0] > 10
    fixed = {"ratio": 4, "max_landmarks": None}
    assert costs("softpp", 112, False, **fixed)[0] / costs("softpp", 56, False, **fixed)[0] > 10


@pytest.mark.parametrize(
    "name", ["soft", "softpp", "inline", "linear", "performer", "linformer", "nystrom", "efficient", "hydra", "focused"]
)
def test_no_linear_attention_holds_a_matrix_of_all_pairs_of_tokens(name):
    tokens = 112 * 112
    assert costs(name, 112, False)[1] < 4 * tokens * tokens / 4
