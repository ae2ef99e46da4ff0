import random

import numpy as np
import torch

from softline.data.randomness import mix, repeatable


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.normal()), float(torch.rand(()))


def test_numbers_repeat_and_differ():
    def within(*numbers: int) -> tuple[float, float, float]:
        with repeatable(*numbers):
            return draw()

    assert within(1, 2, 3) == within(1, 2, 3)
    assert len({within(*numbers) for numbers in [(1, 2, 3), (1, 3, 2), (1, 2, 4), (12, 3), (1, 23)]}) == 5


def test_the_generators_go_on_as_if_nothing_had_happened():
    for generators in (random, np.random):
        generators.seed(0)
    torch.manual_seed(0)
    # numpy keeps the second of each pair of normal numbers
    expected = [draw() for _ in range(4)]
    for generators in (random, np.random):
        generators.seed(0)
    torch.manual_seed(0)
    interrupted = []
    for _ in range(4):
        interrupted.append(draw())
        with repeatable(5):
            draw()
    assert interrupted == expected


def test_mixing_spreads_over_64_bits():
    values = np.array([mix(0, 0, index) for index in range(2000)], dtype=np.uint64)
    assert len(set(values.tolist())) == 2000
    bits = (values[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(0) - 0.5).max() < 0.06
