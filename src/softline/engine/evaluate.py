"""Evaluate a model on a task's validation data, on one process or many."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from softline.engine.distributed import is_sharded
from softline.engine.loading import eval_batches, eval_samples
from softline.engine.task import Task
from softline.errors import UserError


@dataclass(frozen=True)
class Evaluation:
    metrics: dict[str, float]
    samples: int
    """Number of samples over all processes."""
    per_second: float
    details: dict[str, Any]
    """What the task reports beside the metrics, such as a row for each class."""


def evaluate(
    task: Task,
    model: nn.Module,
    accelerator: Accelerator,
    *,
    batch_size: int,
    workers: int = 0,
    progress: Callable[[int, int | None], None] = lambda *_: None,
    stop: Callable[[], bool] | None = None,
) -> Evaluation | None:
    """Count every validation sample exactly once, however the samples are divided among processes and batches.

    model: must not be wrapped in DDP; a sharded model runs in step on all processes.
    progress: receives about once a second how many of this process's samples are done, and how many there are.
    stop: called after each batch; if it returns True, the evaluation ends and its result is None.
    """
    training = model.training
    model.eval()
    metrics = task.metrics().to(accelerator.device)
    counted, begin = 0, time.perf_counter()
    told, total = begin, eval_samples(task, rank=accelerator.process_index, processes=accelerator.num_processes)
    batches = eval_batches(
        task,
        batch_size=batch_size,
        workers=workers,
        rank=accelerator.process_index,
        processes=accelerator.num_processes,
        in_step=is_sharded(model),
    )
    with torch.no_grad(), closing(batches):
        for batch, valid in batches:
            with accelerator.autocast():
                task.update(metrics, model, send_to_device(batch, accelerator.device), valid)
            counted += valid
            if stop is not None and stop():
                model.train(training)
                return None
            if time.perf_counter() - told > 1:
                told = time.perf_counter()
                progress(counted, total)
    # over all processes
    values = {name: float(value) for name, value in metrics.compute().items()}
    details = task.details(metrics)
    seconds = time.perf_counter() - begin
    model.train(training)
    samples = int(accelerator.reduce(torch.tensor(counted, device=accelerator.device), "sum"))
    if samples == 0:
        raise UserError("the validation data is empty")
    return Evaluation(values, samples, samples / seconds, details)
