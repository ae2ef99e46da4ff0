"""Batches for training and evaluation, the same for every number of processes and workers."""

import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import find_batch_size
from torch.utils.data import DataLoader, Dataset, IterableDataset

from softline.data.images.interface import UNREADABLE
from softline.data.sampler import EvalShard, TrainBatches
from softline.engine import distributed
from softline.engine.recipe import Recipe
from softline.errors import UserError
from softline.tasks import Task


def steps_per_epoch(task: Task, recipe: Recipe, *, processes: int = 1) -> int:
    """Whole batches in one pass over the training data."""
    return _sampler(task, recipe, start_step=0, total_steps=1, processes=processes).steps_per_epoch


def train_batches(
    task: Task, recipe: Recipe, *, start_step: int, total_steps: int, rank: int = 0, processes: int = 1
) -> Iterator[list[Any]]:
    """This process's micro-batches of each step from ``start_step`` on, one list for each step."""
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
) -> Iterator[tuple[Any, int]]:
    """This process's share of the validation data: batches, and how many samples of each count.

    in_step: all processes get equally many batches. Of data that can be indexed they always do.
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
    """How many samples `eval_batches` gives that count; None if that is not known before."""
    if isinstance(task.val_set, IterableDataset):
        return None
    return EvalShard(_length(task.val_set), rank=rank, processes=processes).valid


def _in_step(batches: Iterator[tuple[Any, int]]) -> Iterator[tuple[Any, int]]:
    """Until no process has any left; one that ends early repeats its last batch, which then counts for nothing."""
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
    """Batches of a set that can only be read in order; what a resumed run has seen is read again and dropped."""
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
    for batch in loader:
        if isinstance(batch, Exception):
            raise batch
        yield batch


def _leave_signals(_: int) -> None:
    """A signal to all processes is for the one that trains: it needs its loading processes until it has saved."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Guarded(Dataset[Any]):
    """Hands errors about the data on as they are: a DataLoader worker would wrap them in its traceback."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.dataset[key]
        except UNREADABLE as error:
            return error


class _GuardedStream(IterableDataset[Any]):
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.dataset
        except UNREADABLE as error:
            yield error


class _Collate:
    def __init__(self, collate: Callable[[Sequence[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Sequence[Any]) -> Any:
        for sample in samples:
            if isinstance(sample, Exception):
                return sample
        try:
            return self.collate(samples)
        except ValueError as error:
            return error


def _length(dataset: Any) -> int:
    return len(dataset.stream) if isinstance(dataset, IterableDataset) and hasattr(dataset, "stream") else len(dataset)


def _samples(batch: Any) -> int:
    size = find_batch_size(batch)
    assert size is not None, "a batch has a tensor"
    return int(size)
