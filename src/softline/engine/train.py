"""The training loop of all tasks, on one process or many, which can be stopped and resumed at any step."""

import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device, set_seed
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from softline.data.randomness import mix
from softline.engine import distributed
from softline.engine.checkpoint import BEST, LAST, load_checkpoint, save_checkpoint
from softline.engine.evaluate import Evaluation, evaluate
from softline.engine.events import (
    Evaluated,
    Evaluating,
    Event,
    JsonLines,
    Listener,
    Notice,
    Preparing,
    Saved,
    Started,
    Stepped,
    TensorBoard,
)
from softline.engine.loading import steps_per_epoch, train_batches
from softline.engine.machine import check_loaders, naming_memory
from softline.engine.nonfinite import NonFiniteError, first_nonfinite, first_nonfinite_gradient
from softline.engine.optimizer import check_optimizer, create_optimizer, create_schedule, total_steps
from softline.engine.reading import differing_keys, dump_recipe, read_recipe, to_dict
from softline.engine.recipe import Recipe
from softline.engine.task import Setup, Task, build_task
from softline.errors import UserError
from softline.files import remove_partial, write_text
from softline.locks import hold_directory
from softline.weights.renaming import check_keys

# signals that a run saves and stops after; a process that receives both reports the first of these
STOPPING = ("SIGTERM", "SIGINT")
# a signal to the whole group may be passed on by a launcher too, and then counts once
SECONDS_OF_ONE_SIGNAL = 1.0
# states of optimizers that have the shape of their parameter
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")
# a loss scale below which float16 gradients have no range left
SMALLEST_SCALE = 2.0**-10


@dataclass(frozen=True)
class TrainResult:
    output: Path
    step: int
    finished: bool
    """False if a signal stopped the run before its last step."""
    stopped_by: str | None
    """Name of the signal, SIGTERM or SIGINT, that any of the processes received."""
    metrics: dict[str, float]
    """Metrics of the last evaluation."""
    best: dict[str, float]
    """Metrics of the best evaluation."""


def train(recipe: Recipe, *, resume: bool = False, listeners: Sequence[Listener] = ()) -> TrainResult:
    """Train as the recipe says; checkpoints and logs go to its output directory.

    The directory is locked while the run lasts: another run in it, by whichever process or thread, is refused.

    resume: continue from the last checkpoint in the directory, if there is one. Otherwise a directory with a checkpoint
        is refused rather than overwritten.
    """
    check_before_training(recipe)
    accelerator = distributed.start(precision=recipe.precision, device=recipe.device)
    tell = _Broadcast(listeners if accelerator.is_main_process else ())
    held = hold_directory(Path(recipe.output), notify=lambda text: tell(Notice(text)))
    with distributed.in_first_process(held), naming_memory(recipe):
        return _train(recipe, accelerator, tell, resume=resume)


def train_to_the_end(recipe: Recipe, listener: Listener) -> TrainResult:
    """Train, or continue an interrupted training; KeyboardInterrupt with its number if a signal stops it.

    listener: does not hear that there is nothing to continue, which is expected.
    """

    def pass_on(event: Event) -> None:
        if not (isinstance(event, Notice) and event.routine):
            listener(event)

    result = train(recipe, resume=True, listeners=[pass_on])
    if not result.finished:
        assert result.stopped_by is not None, "nothing else stops a run without an error"
        raise KeyboardInterrupt(signal.Signals[result.stopped_by])
    return result


def check_before_training(recipe: Recipe) -> None:
    """Check what depends on the machine and on timm, before any data is read."""
    check_loaders("workers", recipe.workers)
    check_optimizer(recipe.optimizer, with_step=distributed.is_on_cpu(recipe.device))


def _train(recipe: Recipe, accelerator: Accelerator, tell: "_Broadcast", *, resume: bool) -> TrainResult:
    output = Path(recipe.output)
    if not resume and (output / LAST).exists():
        raise UserError(f"{output} holds a checkpoint: continue by --resume, or name another directory by --output")
    set_seed(recipe.seed)
    # a resumed run has its weights, and the file that it started from may be gone
    begun = resume and (output / LAST).exists()
    setup = Setup(
        rank=accelerator.process_index,
        notify=lambda text: tell(Notice(text)),
        preparing=lambda *numbers: tell(Preparing(*numbers)),
    )
    task = build_task(recipe.without_weights() if begun else recipe, setup)
    trainer = Trainer(recipe, task, accelerator, tell)
    if resume:
        trainer.resume(output / LAST)
    if accelerator.is_main_process:
        for name in (LAST, BEST, "recipe.yaml", "log.jsonl"):
            remove_partial(output / name)
        write_text(output / "recipe.yaml", dump_recipe(recipe))
        tell.open_logs(output, after_step=trainer.step)
    try:
        with _stop_signals() as stopped:
            return trainer.run(stopped)
    finally:
        tell.close()


@dataclass
class _Sums:
    """Sums since the last log line."""

    steps: int = 0
    loss: Any = 0.0
    norm: Any = 0.0
    """Sum of the gradient norms that were finite."""
    norms: Any = 0.0
    """Number of finite gradient norms, which is less than the steps only in float16."""
    logs: dict[str, Any] = field(default_factory=dict)
    begin: float = field(default_factory=time.perf_counter)


class Trainer:
    """A training run and its state."""

    def __init__(self, recipe: Recipe, task: Task, accelerator: Accelerator, tell: Listener) -> None:
        self.recipe, self.task, self.accelerator, self.tell = recipe, task, accelerator, tell
        self.output = Path(recipe.output)
        self.per_epoch = steps_per_epoch(task, recipe, processes=accelerator.num_processes)
        self.total = total_steps(recipe.schedule, self.per_epoch)
        self.model = self._on_device()
        self.ema = self._create_ema()
        self.shared = self._share()
        self.optimizer: Any = accelerator.prepare_optimizer(
            create_optimizer(self.model, recipe.optimizer, lr_scale=recipe.lr_scale)
        )
        self.schedule = create_schedule(
            self.optimizer.optimizer, recipe.schedule, steps_per_epoch=self.per_epoch, lr_scale=recipe.lr_scale
        )
        self.step = 0
        self.saved_step: int | None = None
        self.evaluation: dict[str, float] = {}
        self.best: dict[str, float] = {}
        self.evaluated_step: int | None = None
        self.stopped = StopSignal()
        """Set when this process receives a signal."""
        self.stopping: str | None = None
        """Name of the signal that stops the run, which all processes have agreed on."""

    def run(self, stopped: "StopSignal") -> TrainResult:
        """Train from the current step to the last, or until ``stopped`` is set."""
        self.stopped = stopped
        self._announce()
        if self.step:
            # the run may have ended during an evaluation
            self._end_epoch()
        sums = _Sums()
        batches = train_batches(
            self.task,
            self.recipe,
            start_step=self.step,
            total_steps=self.total,
            rank=self.accelerator.process_index,
            processes=self.accelerator.num_processes,
        )
        with closing(batches):
            for micro_batches in batches:
                self._train_step(micro_batches, sums)
                if self.step % self.recipe.log_every == 0 or self.step == self.total:
                    self._log(sums)
                    sums = _Sums()
                pause = time.perf_counter()
                if self._due_for_saving() or self.stopping:
                    self.save()
                self._end_epoch()
                sums.begin += time.perf_counter() - pause
                if self.stopping:
                    break
        return TrainResult(
            output=self.output,
            step=self.step,
            finished=self.step == self.total and self.evaluated_step == self.step,
            stopped_by=self.stopping,
            metrics=self.evaluation,
            best=self.best,
        )

    # one step

    def _train_step(self, micro_batches: Sequence[Any], sums: _Sums) -> None:
        """Take one step of the optimizer; an error leaves the weights as they were before it."""
        self.shared.train()
        self.schedule.step_update(self.step)
        micro_batches = send_to_device(list(micro_batches), self.accelerator.device, non_blocking=True)
        losses = []
        for index, batch in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.shared):
                losses.append(self._backward(batch, index, len(micro_batches), sums))
        norm = self._clip()
        self._check_finite(torch.stack(losses), norm, micro_batches)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.ema is not None:
            self.ema.update(self.model, step=self.step)
        sums.steps += 1
        sums.loss = sums.loss + torch.stack(losses).mean()
        sums.norm = sums.norm + torch.where(norm.isfinite(), norm, 0.0)
        sums.norms = sums.norms + norm.isfinite().float()

    def _backward(self, batch: Any, index: int, count: int, sums: _Sums) -> Tensor:
        set_seed(self._step_seed(index))
        with self.accelerator.autocast():
            loss = self.task.loss(self.shared, batch)
        self.accelerator.backward(loss.value / count)
        for name, value in loss.logs.items():
            sums.logs[name] = sums.logs.get(name, 0.0) + value / count
        return loss.value.detach().float()

    def _step_seed(self, micro_batch: int) -> int:
        """Return a seed for this process and step, which is the same whenever the step is run."""
        return mix(self.recipe.seed, self.step, micro_batch, self.accelerator.process_index) % 2**32

    def _clip(self) -> Tensor:
        limit = self.recipe.optimizer.clip_norm
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), math.inf if limit is None else limit)
        assert isinstance(norm, Tensor)
        return distributed.whole(norm).float()

    def _check_finite(self, losses: Tensor, norm: Tensor, micro_batches: Sequence[Any]) -> None:
        # float16 gradients overflow now and then: the step is skipped and the loss scale lowered
        broken = ~(losses.isfinite().all() & (norm.isfinite() | (self.recipe.precision == "fp16")))
        received = [broken.new_tensor(self.stopped.name == name) for name in STOPPING]
        flags = torch.stack([broken, *received]).float()
        # all processes fail or stop after the same step
        some_broken, *some_received = (self.accelerator.reduce(flags, "sum") > 0).tolist()
        self.stopping = next((name for name, some in zip(STOPPING, some_received, strict=True) if some), None)
        if some_broken:
            self._fail(self._diagnose(losses, micro_batches))

    def _fail(self, reason: str) -> NoReturn:
        kept = self.output / LAST
        last = f"the last good checkpoint is {kept}" if kept.exists() else "there is no checkpoint yet"
        raise NonFiniteError(reason, self.step, f", learning rate {self._lr():.3g}; {last}")

    def _lr(self) -> float:
        """Return the highest learning rate, since layers may have their own."""
        return max(float(group["lr"]) for group in self.optimizer.param_groups)

    def _diagnose(self, losses: Tensor, micro_batches: Sequence[Any]) -> str:
        """Describe what is not finite, as this or another process finds it."""
        found = None
        bad = [index for index, loss in enumerate(losses) if not loss.isfinite()]
        if bad or distributed.is_sharded(self.model):
            index = bad[0] if bad else 0
            module = first_nonfinite(self.model, lambda: self._run_again(micro_batches[index], index))
            if bad:
                value = losses[index].item()
                found = f"the loss is {value}, first not finite in {module}" if module else f"the loss is {value}"
        else:
            parameter = first_nonfinite_gradient(self.model)
            found = f"the gradient is not finite, first that of {parameter}" if parameter else None
        return distributed.first_of(found, prefer="the loss") or "the gradient is not finite"

    def _run_again(self, batch: Any, index: int) -> None:
        set_seed(self._step_seed(index))
        self.model.train()
        with torch.no_grad(), self.accelerator.autocast():
            self.task.loss(self.model, batch)

    # between steps

    def _log(self, sums: _Sums) -> None:
        names = list(sums.logs)
        norm = sums.norm / sums.norms.clamp(min=1) * sums.steps
        totals = torch.stack([torch.as_tensor(value) for value in (sums.loss, norm, *sums.logs.values())])
        means = (self.accelerator.reduce(totals.to(self.accelerator.device), "mean") / sums.steps).tolist()
        scaler = self.accelerator.scaler
        if scaler is not None and scaler.get_scale() < SMALLEST_SCALE:
            self._fail(f"the gradient overflows float16 even at a loss scale of {scaler.get_scale():.3g}")
        seconds = (time.perf_counter() - sums.begin) / sums.steps
        event = Stepped(
            step=self.step,
            epoch=self.step / self.per_epoch,
            loss=means[0],
            logs=dict(zip(names, means[2:], strict=True)),
            grad_norm=means[1],
            lr=self._lr(),
            per_second=self.recipe.batch_size / seconds,
            seconds_left=(self.total - self.step) * seconds,
        )
        self.tell(event)

    def _end_epoch(self) -> None:
        """Save if an epoch ends here or an evaluation is due, and evaluate unless that is done already."""
        epochs, rest = divmod(self.step, self.per_epoch)
        last = self.step == self.total
        steps = self.recipe.eval_steps
        due = last or (rest == 0 and epochs % self.recipe.eval_every == 0 if steps is None else self.step % steps == 0)
        if rest and not due:
            return
        # before the evaluation, which may take long or fail on its data
        self.save()
        if due and self.evaluated_step != self.step and not self.stopping:
            self._evaluate()

    def _due_for_saving(self) -> bool:
        return self.recipe.save_every is not None and self.step % self.recipe.save_every == 0

    def _evaluate(self) -> None:
        """Evaluate and save the result, unless a signal interrupts the evaluation."""
        result = self.evaluate()
        if result is None:
            self.stopping = self.stopped.name
            return
        monitor = self.task.monitor
        better = not self.best or result.metrics[monitor] > self.best[monitor]
        self.evaluation, self.evaluated_step = result.metrics, self.step
        self.tell(Evaluated(self.step, self.step / self.per_epoch, result.metrics, result.per_second, better))
        if better:
            self.best = result.metrics
        self._write(*([BEST] if better else []), LAST)

    def evaluate(self) -> Evaluation | None:
        """Evaluate the averaged weights if there are any; None if a signal interrupted the evaluation."""
        size = self.recipe.eval_batch_size
        if size is None:
            size = max(self.recipe.batch_size // self.recipe.accumulate // self.accelerator.num_processes, 1)
        model = self.model if self.ema is None else self.ema.module
        distributed.average_buffers(model)
        return evaluate(
            self.task,
            model,
            self.accelerator,
            batch_size=size,
            workers=self.recipe.workers,
            progress=lambda done, total: self.tell(Evaluating(done, total)),
            # several processes would have to agree to stop, so they finish
            stop=self.stopped.is_set if self.accelerator.num_processes == 1 else None,
        )

    # checkpoints

    def save(self) -> None:
        """Save a checkpoint, unless this step is saved already."""
        if self.saved_step == self.step:
            return
        self._write(LAST)
        self.saved_step = self.step
        self.tell(Saved(self.step, str(self.output / LAST)))

    def _write(self, *names: str) -> None:
        """Write the current state, gathered once, to files of these names."""
        content = self.state()
        if not self.accelerator.is_main_process:
            return
        for path in (self.output / name for name in names):
            try:
                save_checkpoint(path, content)
            except FloatingPointError as error:
                raise NonFiniteError(str(error), self.step, f"; {path} keeps what it held") from None

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint, on the first process; all processes must call it."""
        for model in (self.model, *([] if self.ema is None else [self.ema.module])):
            distributed.average_buffers(model)
        scaler = self.accelerator.scaler
        return {
            "arch": self.recipe.model.name,
            "state_dict": distributed.gather_model(self.model),
            "state_dict_ema": None if self.ema is None else distributed.gather_model(self.ema.module),
            "optimizer": distributed.gather_optimizer(self.model, self.optimizer.optimizer),
            "scaler": None if scaler is None else scaler.state_dict(),
            "step": self.step,
            "epoch": self.step // self.per_epoch,
            "metrics": self.evaluation,
            "evaluated_step": self.evaluated_step,
            "best": self.best,
            "recipe": to_dict(self.recipe),
            "facts": self.task.facts(),
        }

    def resume(self, path: Path) -> None:
        """Continue after the step at which the checkpoint was written; start at step 0 if there is none."""
        exists = self.accelerator.is_main_process and path.exists()
        content = distributed.broadcast_object(load_checkpoint(path) if exists else None)
        if content is None:
            self.tell(Notice(f"there is no checkpoint in {self.output} yet: starting at step 0", routine=True))
            return
        changed = differing_keys(read_recipe(content["recipe"], where=str(path)), self.recipe)
        if changed:
            raise UserError(f"{path} was trained by another recipe, which differs in {', '.join(changed)}")
        if content["facts"] != self.task.facts():
            raise UserError(f"{path} was trained on other classes than the data has now")
        self._check_state(content, path)
        if not distributed.is_sharded(self.model):
            check_keys(self.model, content["state_dict"], f"{self.recipe.model.name} ({path})")
        distributed.spread_model(self.model, content["state_dict"])
        if self.ema is not None:
            distributed.spread_model(self.ema.module, content["state_dict_ema"])
        try:
            distributed.spread_optimizer(self.model, self.optimizer.optimizer, content["optimizer"])
        except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} does not fit this run: its state of the optimizer is another's: {error}"
            ) from error
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(content["scaler"])
        self.step = self.saved_step = content["step"]
        self.evaluation, self.best = content["metrics"], content["best"]
        self.evaluated_step = content["evaluated_step"]

    def _check_state(self, content: dict[str, Any], path: Path) -> None:
        """Check what a checkpoint says about the run, beside its weights."""
        misfits = {
            f"step {content['step']} of {self.total}": not 0 <= content["step"] <= self.total,
            f"no {self.task.monitor} in best": bool(content["best"]) and self.task.monitor not in content["best"],
            "no averaged weights": self.ema is not None and content["state_dict_ema"] is None,
            "no loss scale": self.accelerator.scaler is not None and content["scaler"] is None,
        }
        for misfit, found in misfits.items():
            if found:
                raise UserError(f"{path} does not fit this run: it has {misfit}")
        shapes = {name: value.shape for name, value in content["state_dict"].items()}
        for name, moments in content["optimizer"].get("state", {}).items():
            for kind in MOMENTS:
                moment = moments.get(kind) if isinstance(moments, dict) else None
                if isinstance(moment, Tensor) and moment.shape != shapes.get(name, moment.shape):
                    raise UserError(
                        f"{path} does not fit this run: {kind} of {name} has the shape {tuple(moment.shape)}"
                    )

    # setting up

    def _on_device(self) -> nn.Module:
        model = self.task.model.to(self.accelerator.device)
        return distributed.sync_batch_norms(self.accelerator, model) if self.recipe.model.sync_batch_norm else model

    def _create_ema(self) -> ModelEmaV3 | None:
        ema = self.recipe.ema
        if ema is None:
            return None
        # buffers and sharded parameters do not mix in one fused operation
        fused = self.recipe.strategy == "ddp"
        return ModelEmaV3(self.model, decay=ema.decay, use_warmup=ema.warmup, foreach=fused)

    def _share(self) -> nn.Module:
        if self.recipe.model.compile:
            self.model.compile()
        if self.recipe.strategy == "fsdp" and self.accelerator.num_processes > 1 and self.ema is not None:
            distributed.shard(self.accelerator, self.ema.module)
        return distributed.share(self.accelerator, self.model, self.recipe.strategy)

    def _announce(self) -> None:
        event = Started(
            output=str(self.output),
            model=self.recipe.model.name,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            device=str(self.accelerator.device),
            processes=self.accelerator.num_processes,
            steps=self.total,
            steps_per_epoch=self.per_epoch,
            start_step=self.step,
            unit=self.task.unit,
        )
        self.tell(event)


class _Broadcast:
    """Sends events to the listeners, which only the first process has, and to the log files once they are open."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.listeners = list(listeners)
        self.board: TensorBoard | None = None
        self.early: list[Event] = []

    def __call__(self, event: Event) -> None:
        if self.board is None and not isinstance(event, Preparing):
            self.early.append(event)
        for listener in self.listeners:
            listener(event)

    def open_logs(self, output: Path, *, after_step: int) -> None:
        self.board = TensorBoard(output / "tensorboard", after_step=after_step)
        logs: list[Listener] = [JsonLines(output / "log.jsonl", after_step=after_step), self.board]
        for event in self.early:
            for log in logs:
                log(event)
        self.listeners += logs

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


class StopSignal:
    """Records whether SIGTERM or Ctrl-C asked the run to stop, and which of them."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.moment = 0.0
        """When it was received."""

    def is_set(self) -> bool:
        return self.name is not None


@contextmanager
def _stop_signals() -> Iterator[StopSignal]:
    """Let the first signal ask the run to save and stop, and a later one end it as usual; only in the main thread."""
    stopped = StopSignal()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def stop(number: int, _: Any) -> None:
        if stopped.name is None:
            stopped.name, stopped.moment = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - stopped.moment > SECONDS_OF_ONE_SIGNAL:
            signal.signal(number, previous[number])
            signal.raise_signal(number)

    # signals that are ignored stay ignored
    wanted = [n for name in STOPPING if signal.getsignal(n := signal.Signals[name]) is not signal.SIG_IGN]
    previous: dict[int, Any] = {number: signal.signal(number, stop) for number in wanted}
    try:
        yield stopped
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
