"""Random numbers that depend only on given numbers, such as a seed, an epoch and an index."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info


def mix(*numbers: int) -> int:
    """Hash the numbers and their order to 64 bits."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")


@contextmanager
def repeatable(*numbers: int) -> Iterator[None]:
    """Seed the global generators of Python, numpy and torch's CPU with ``numbers``, and restore them afterwards."""
    # in a worker only the dataset uses the generators; restoring them takes ten times as long as seeding
    states = _states() if get_worker_info() is None else None
    seed = mix(*numbers)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        if states is not None:
            _restore(*states)


def _states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _restore(python: Any, numpy: Any, cpu: torch.Tensor) -> None:
    random.setstate(python)
    np.random.set_state(numpy)
    torch.default_generator.set_state(cpu)
