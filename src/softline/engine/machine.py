"""What the machine has: cores for processes, memory for batches; and what to say when that was not enough."""

import math
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from softline.engine.recipe import Recipe
from softline.errors import UserError
from softline.process import available_memory

GIB = 2**30
BYTES_OF_FLOAT = 4
MOST_WORKERS = 16
"""Processes or threads for each core; more than these only wait for each other."""


MOST_OF_TMPDIR = 70
"""Characters; a socket's name has at most 107, and multiprocessing adds up to 33."""


def check_workers(name: str, workers: int) -> None:
    """Check a number of processes or threads."""
    cores = os.cpu_count() or 1
    if workers > MOST_WORKERS * cores:
        raise UserError(
            f"{name} must be at most {MOST_WORKERS * cores}, {MOST_WORKERS} for each of the {cores} cores of this "
            f"machine, got {workers}"
        )


def check_loaders(name: str, workers: int) -> None:
    """Check a number of loading processes.

    They talk through sockets in the directory for temporary files, and wait for ever if its name is too long for one.
    """
    check_workers(name, workers)
    folder = tempfile.gettempdir()
    if workers and len(folder) > MOST_OF_TMPDIR:
        raise UserError(
            f"{name} {workers}: the directory for temporary files must have a name of at most {MOST_OF_TMPDIR} "
            f"characters, choose another by TMPDIR: {folder}"
        )


def check_batch_memory(recipe: Recipe, shape: Sequence[int], *, processes: int = 1) -> None:
    """Refuse inputs of which a single batch is larger than the available memory, before any data is read.

    shape: size of one input, which the recipe's ``size_keys`` decide.
    """
    samples = max(recipe.batch_size // recipe.accumulate // processes, 1)
    check_input_memory(_named(recipe), samples, shape)


def check_input_memory(name: str, samples: int, shape: Sequence[int]) -> None:
    """Refuse a batch of inputs, in float32, that is larger than the available memory.

    name: what decides its size.
    """
    # whole numbers, which may be larger than any float
    needed, available = samples * math.prod(shape) * BYTES_OF_FLOAT // 2**20, available_memory()
    if available is not None and needed > available // 2**20:
        raise UserError(
            f"{name}: a batch of {samples:,} inputs takes {needed:,} MiB, and {available // 2**20:,} MiB of memory are "
            "available"
        )


@contextmanager
def naming_memory(recipe: Recipe) -> Iterator[None]:
    """Turn errors of allocators into a `UserError` that names the keys which decide how much memory a run takes."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"out of memory with {_named(recipe)}: lower one of them, raise accumulate "
            f"({recipe.accumulate}), or choose a smaller model than {recipe.model.name}"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator raised the error; torch's on the CPU raises a plain RuntimeError."""
    found = re.search(r"(can't allocate|not enough|out of) memory|Storage size calculation overflowed", str(error))
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and found is not None)


def _named(recipe: Recipe) -> str:
    """Return the keys that decide the size of a batch, with their values."""
    return " and ".join(f"{key} {_value(recipe, key)}" for key in ("batch_size", *recipe.size_keys))


def _value(recipe: Recipe, key: str) -> str:
    value: object = recipe
    for name in key.split("."):
        value = getattr(value, name)
    return " x ".join(map(str, value)) if isinstance(value, tuple) else "by the model" if value is None else str(value)
