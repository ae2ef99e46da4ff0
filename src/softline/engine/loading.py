"""Batches for training and evaluation, identical for every number of processes and workers."""

import itertools
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils import find_batch_size
from torch.utils.data import DataLoader, Dataset, IterableDataset

from softline.data.sampler import EvalShard, TrainBatches
from softline.engine import distributed
from softline.engine.recipe import Recipe
from softline.engine.task import Task
from softline.errors import UserError


def steps_per_epoch(task: Task, recipe: Recipe, *, processes: int = 1) -> int:
    """Return the number of whole batches in one pass over the training data."""
    return _sampler(task, recipe, start_step=0, total_steps=1, processes=processes).steps_per_epoch


def train_batches(
    task: Task, recipe: Recipe, *, start_step: int, total_steps: int, rank: int = 0, processes: int = 1
) -> Generator[list[Any]]:
    """Yield this process's micro-batches from ``start_step`` on, one list for each step.

    Close the generator after use, also after an error: loading processes ignore the signal by which Python would end
    them at its exit.
    """
    micro = recipe.batch_size // processes // recipe.accumulate
    if isinstance(task.train_set, IterableDataset):
        batches = _stream(task, recipe, micro, start_step, steps_per_epoch(task, recipe, processes=processes))
        batches = itertools.islice(batches, (total_steps - start_step) * recipe.accumulate)
    else:
        sampler = _sampler(task, recipe, start_step=start_step, total_steps=total_steps, rank=rank, processes=processes)
        batches = _load(task, recipe.workers, batch_sampler=sampler)
    while step := list(itertools.islice(batches, recipe.accumulate)):
        yield step


def _sampler(task: Task, recipe: Recipe, *, processes: int, **options: Any) -> TrainBatches:
    length = _length(task.train_set)
    if isinstance(task.train_set, IterableDataset):
        # a stream counts the share of one process
        length *= processes
    return TrainBatches(
        length,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        processes=processes,
        accumulate=recipe.accumulate,
        groups=task.groups,
        **options,
    )


def eval_batches(
    task: Task, *, batch_size: int, workers: int = 0, rank: int = 0, processes: int = 1, in_step: bool = False
) -> Generator[tuple[Any, int]]:
    """Yield this process's share of the validation data: batches, and how many samples of each one count.

    Close the generator after use, as that of `train_batches`.

    in_step: give all processes equally many batches, which data that can be indexed always does.
    """
    if isinstance(task.val_set, IterableDataset):
        counted = ((batch, _samples(batch)) for batch in _load(task, workers, val=True, batch_size=batch_size))
        yield from _in_step(counted) if in_step else counted
        return
    shard = EvalShard(_length(task.val_set), rank=rank, processes=processes)
    left = shard.valid
    for batch in _load(task, workers, val=True, sampler=shard, batch_size=batch_size):
        yield batch, min(left, _samples(batch))
        left = max(left - _samples(batch), 0)


def eval_samples(task: Task, *, rank: int = 0, processes: int = 1) -> int | None:
    """Return how many samples of `eval_batches` count; None if that is not known beforehand."""
    if isinstance(task.val_set, IterableDataset):
        return None
    return EvalShard(_length(task.val_set), rank=rank, processes=processes).valid


def _in_step(batches: Iterator[tuple[Any, int]]) -> Iterator[tuple[Any, int]]:
    """Continue until all processes are done; one that ends early repeats its last batch, which then does not count."""
    last = None
    while True:
        batch, valid = next(batches, (last, 0))
        if not distributed.any_of(valid > 0):
            return
        if batch is None:
            raise UserError("a process has no validation images: fsdp needs as many shards of them as processes")
        last = batch
        yield batch, valid


def _stream(task: Task, recipe: Recipe, micro: int, start_step: int, per_epoch: int) -> Iterator[Any]:
    """Read a stream in order; a resumed run reads the batches it has seen again and drops them."""
    skip = start_step % per_epoch * recipe.accumulate
    for epoch in itertools.count(start_step // per_epoch):
        task.train_set.set_epoch(epoch)  # type: ignore[union-attr]
        batches = _load(task, recipe.workers, batch_size=micro, drop_last=True)
        taken = 0
        for batch in itertools.islice(batches, skip, per_epoch * recipe.accumulate):
            taken += 1
            yield batch
        if not taken and not skip:
            raise UserError(f"the training data yields no batch of {micro}: it is shorter than it says")
        skip = 0


def _load(task: Task, workers: int, *, val: bool = False, **options: Any) -> Iterator[Any]:
    dataset = task.val_set if val else task.train_set
    guarded: Any = _GuardedStream(dataset) if isinstance(dataset, IterableDataset) else _Guarded(dataset)
    loader = DataLoader(
        guarded,
        num_workers=workers,
        collate_fn=_Collate(task.collate),
        worker_init_fn=_leave_signals,
        pin_memory=torch.cuda.is_available(),
        **options,
    )
    iterator = iter(loader)
    try:
        for batch in iterator:
            if isinstance(batch, _Failure):
                raise batch.error from batch.cause
            yield batch
    finally:
        # the traceback of an error keeps this frame, and the loading processes live as long as their iterator
        del iterator


def _leave_signals(_: int) -> None:
    """Ignore signals to the whole group: the training process needs its loading processes until it has saved."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class LoadingTraceback(Exception):
    """Where an error was raised in a loading process, as text; the cause of the error in the training process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Failure(NamedTuple):
    """An error about the data on its way out of a loading process.

    A DataLoader would raise it with its traceback in the text, which is not for users.
    """

    error: UserError | OSError
    cause: LoadingTraceback

    @classmethod
    def now(cls, error: UserError | OSError) -> "_Failure":
        return cls(error, LoadingTraceback(traceback.format_exc()))


class _Guarded(Dataset[Any]):
    """A dataset that returns errors about the data as failures; other errors are raised."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.dataset[key]
        except (UserError, OSError) as error:
            return _Failure.now(error)


class _GuardedStream(IterableDataset[Any]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.dataset
        except (UserError, OSError) as error:
            yield _Failure.now(error)


class _Collate:
    def __init__(self, collate: Callable[[Sequence[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Sequence[Any]) -> Any:
        for sample in samples:
            if isinstance(sample, _Failure):
                return sample
        try:
            return self.collate(samples)
        except UserError as error:
            return _Failure.now(error)


def _length(dataset: Any) -> int:
    return len(dataset.stream) if isinstance(dataset, IterableDataset) and hasattr(dataset, "stream") else len(dataset)


def _samples(batch: Any) -> int:
    size = find_batch_size(batch)
    assert size is not None, "a batch has a tensor"
    return int(size)
