"""Samplers: which images each process reads at each step."""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from softline.checks import check_integer
from softline.data.randomness import mix
from softline.errors import UserError


class TrainBatches(Sampler[list[tuple[int, int]]]):
    """The micro-batches of one process over all epochs of a run, as keys (epoch, index).

    Each epoch is a random permutation of all images; those after its last whole batch are not used. A batch is cut into
    ``accumulate * processes`` equal chunks, and this process yields the chunks rank, rank + processes, ...: the batch
    of a step is the same for any number of processes and accumulations.

    length: number of training images.
    batch_size: images per optimizer step, over all processes and accumulations.
    start_step, total_steps: the optimizer steps start_step .. total_steps - 1 are yielded.
    groups: a number per image, such as whether it is wide or tall. All images of a batch are from the same group, and
        those after the last whole batch of each group are not used.
    """

    def __init__(
        self,
        length: int,
        *,
        batch_size: int,
        seed: int,
        start_step: int,
        total_steps: int,
        rank: int = 0,
        processes: int = 1,
        accumulate: int = 1,
        groups: Sequence[int] | None = None,
    ) -> None:
        check_integer("length", length, 1)
        check_integer("batch_size", batch_size, 1)
        check_integer("seed", seed, 0)
        check_integer("start_step", start_step, 0)
        check_integer("total_steps", total_steps, start_step)
        check_integer("accumulate", accumulate, 1)
        check_rank(rank, processes)
        if batch_size > length:
            raise UserError(f"batch_size ({batch_size}) is larger than the number of training images ({length})")
        if batch_size % (processes * accumulate):
            raise UserError(
                f"batch_size ({batch_size}) must be divisible by processes ({processes}) * accumulate ({accumulate})"
            )
        if groups is not None and len(groups) != length:
            raise UserError(f"groups must have one number for each of {length} images, got {len(groups)}")
        self.groups = None if groups is None else torch.as_tensor(groups)
        counts = [length] if groups is None else list(Counter(groups).values())
        self.steps_per_epoch = sum(count // batch_size for count in counts)
        if self.steps_per_epoch == 0:
            raise UserError(f"batch_size ({batch_size}) is larger than each group of training images ({counts})")
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.start_step, self.total_steps = start_step, total_steps
        self.rank, self.processes, self.accumulate = rank, processes, accumulate

    def __len__(self) -> int:
        return (self.total_steps - self.start_step) * self.accumulate

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        step = self.start_step
        while step < self.total_steps:
            epoch, first = divmod(step, self.steps_per_epoch)
            last = min(self.steps_per_epoch, first + self.total_steps - step)
            order = self._order(epoch)
            for batch in range(first, last):
                yield from self._micro_batches(epoch, order[batch * self.batch_size : (batch + 1) * self.batch_size])
            step += last - first

    def _order(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        order = torch.randperm(self.length, generator=generator)
        if self.groups is None:
            return order
        batches = []
        for group in self.groups.unique():
            members = order[self.groups[order] == group]
            batches += members.split(self.batch_size)[: len(members) // self.batch_size]
        return torch.cat([batches[place] for place in torch.randperm(len(batches), generator=generator)])

    def _micro_batches(self, epoch: int, batch: torch.Tensor) -> Iterator[list[tuple[int, int]]]:
        for chunk in batch.chunk(self.accumulate * self.processes)[self.rank :: self.processes]:
            yield [(epoch, index) for index in chunk.tolist()]


class EvalShard(Sampler[int]):
    """The images of one process: rank, rank + processes, ...

    All processes yield the same number of images, so that they run the same number of forward passes; the last ones
    may be repeats, and only the first ``valid`` count.
    """

    def __init__(self, length: int, *, rank: int = 0, processes: int = 1) -> None:
        check_integer("length", length, 1)
        check_rank(rank, processes)
        self.length, self.rank, self.processes = length, rank, processes
        self.valid = len(range(rank, length, processes))

    def __len__(self) -> int:
        return -(-self.length // self.processes)

    def __iter__(self) -> Iterator[int]:
        # past the end it starts again from the beginning
        return (index % self.length for index in range(self.rank, len(self) * self.processes, self.processes))


def check_rank(rank: int, processes: int) -> None:
    check_integer("processes", processes, 1)
    check_integer("rank", rank, 0)
    if rank >= processes:
        raise UserError(f"rank ({rank}) must be less than processes ({processes})")
