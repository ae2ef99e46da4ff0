"""Create timm's optimizers and learning-rate schedules from a recipe."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from softline.checks import check_option
from softline.engine.recipe import OptimizerRecipe, ScheduleRecipe
from softline.errors import UserError

# raised by timm and torch for names and options of optimizers, which they check in different ways and places
UNBUILDABLE = (
    *(TypeError, ValueError, RuntimeError, AssertionError, LookupError, AttributeError),
    *(ArithmeticError, ImportError),
)
# position embeddings by their names in softline and in timm
POSITIONS = re.compile(r"(^|\.)(position\.weight|\w*pos_embed\w*)$")


def check_optimizer(recipe: OptimizerRecipe, *, with_step: bool = True) -> None:
    """Build the optimizer for two parameters, so that mistakes are found before any data is read.

    with_step: take a step on the CPU as well, which some optimizers can on a GPU only.
    """
    layer = nn.Linear(2, 2)
    optimizer = _create(layer, recipe, lr=recipe.lr, weight_decay=recipe.weight_decay)
    if not with_step:
        return
    with _naming_options(recipe), torch.random.fork_rng(devices=[]):
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@contextmanager
def _naming_options(recipe: OptimizerRecipe) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except UNBUILDABLE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"optimizer.name {recipe.name} with optimizer.options {recipe.options}: {reason}") from error


def _create(parameters: Any, recipe: OptimizerRecipe, **options: Any) -> torch.optim.Optimizer:
    check_option("optimizer.name", recipe.name, [str(name) for name in list_optimizers()])
    with _naming_options(recipe):
        return create_optimizer_v2(parameters, opt=recipe.name, **options, **recipe.options)


def create_optimizer(model: nn.Module, recipe: OptimizerRecipe, *, lr_scale: float = 1.0) -> torch.optim.Optimizer:
    """Create an optimizer; biases, norms and the parameters in the model's ``no_weight_decay()`` do not decay."""
    ordered = hasattr(model, "group_matcher") or hasattr(model, "no_weight_decay")
    if recipe.layer_decay is not None and not ordered:
        raise UserError("optimizer.layer_decay needs a model that tells the order of its layers, as classifiers do")
    # timm asks only the model itself, not the backbone inside a model with a head
    asked = hasattr(model, "no_weight_decay") and not recipe.decay_positions
    return _create(
        model if asked else _parameter_groups(model, recipe),
        recipe,
        lr=recipe.lr * lr_scale,
        weight_decay=recipe.weight_decay,
        layer_decay=recipe.layer_decay if asked else None,
    )


def _parameter_groups(model: nn.Module, recipe: OptimizerRecipe) -> Any:
    exempt = undecayed(model)
    if recipe.decay_positions:
        positions = {name for name in exempt if POSITIONS.search(name)}
        if positions.isdisjoint(name for name, _ in model.named_parameters()):
            raise UserError(
                "optimizer.decay_positions: true has no effect on a model without position embeddings that are exempt "
                "from weight decay; set it to false"
            )
        exempt -= positions
    if recipe.layer_decay is None:
        return param_groups_weight_decay(model, recipe.weight_decay, no_weight_decay_list=exempt)
    return param_groups_layer_decay(
        model, recipe.weight_decay, no_weight_decay_list=exempt, layer_decay=recipe.layer_decay
    )


def undecayed(model: nn.Module) -> set[str]:
    """Return the parameters that a model or the networks inside it list in ``no_weight_decay()``."""
    names = set()
    for path, module in model.named_modules():
        if hasattr(module, "no_weight_decay"):
            names |= {f"{path}.{name}".removeprefix(".") for name in module.no_weight_decay()}
    return names


def create_schedule(
    optimizer: torch.optim.Optimizer, recipe: ScheduleRecipe, *, steps_per_epoch: int, lr_scale: float = 1.0
) -> "Schedule":
    """Create a schedule whose ``step_update(step)`` sets the learning rate as a function of the step alone."""

    def steps(epochs: float) -> int:
        return round(epochs * steps_per_epoch)

    # linear counts from the end of the warm-up, the others from the first step
    linear = recipe.name == "linear"
    warmup = steps(recipe.warmup_epochs)
    decays: dict[str, Any] = {
        "decay_epochs": max(steps(recipe.decay_epochs), 1),
        "decay_milestones": [steps(milestone) for milestone in recipe.milestones],
        # timm's poly takes its power by this name
        "decay_rate": {"linear": 1.0, "poly": recipe.power}.get(recipe.name, recipe.decay_rate),
    }
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched="poly" if linear else recipe.name,
        num_epochs=max(steps(recipe.epochs) - (warmup if linear else 0), 1),
        warmup_epochs=warmup,
        warmup_prefix=linear,
        warmup_lr=recipe.warmup_lr * lr_scale,
        min_lr=recipe.min_lr * lr_scale,
        step_on_epochs=False,
        updates_per_epoch=1,
        **decays,
    )
    assert schedule is not None, "the recipe's schedules are all timm's"
    rates = Schedule(schedule, hold=steps_per_epoch if recipe.per_epoch else 1)
    rates.step_update(0)
    return rates


class Schedule:
    """A schedule of timm that counts steps.

    hold: number of steps, counted from the first, that share the learning rate of the first among them.
    """

    def __init__(self, schedule: Scheduler, *, hold: int) -> None:
        self.schedule, self.hold = schedule, hold

    def step_update(self, step: int) -> None:
        """Set the learning rates for a step."""
        self.schedule.step_update(step - step % self.hold)


def total_steps(recipe: ScheduleRecipe, steps_per_epoch: int) -> int:
    return max(round((recipe.epochs + recipe.cooldown_epochs) * steps_per_epoch), 1)
