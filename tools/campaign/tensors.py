"""Adversarial tensors for every operator of `softline.ops` and every registered attention module.

A case draws a batch of trials. Each trial is one set of input tensors for one subject, an operator or a module, in one
dtype: zeros, subnormal and huge numbers, a single huge entry, equal, orthogonal and alternating tokens, single tokens,
heads of one channel, grids of one row, masks that leave one key or none, and NaN or infinity in masked keys. The
result must

- have the shape and dtype of the values, with zero rows for masked tokens,
- be finite wherever docs/concepts/masks.md promises it, gradients included,
- not depend on what masked tokens hold, bit by bit,
- agree with the definition, the explicit weights in float64, within the rounding budget of `tests/support.py`. In
  float16 the definition's result saturates at 65,504, as documented.

Numbers of extreme size can make the definition itself ill-conditioned: the softmax of scores of 1e9 depends on the
rounding of each score. The budget therefore includes the largest change of the definition's float64 result when the
inputs change by a few units in the last place.
"""

import copy
import math
import random
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from softline import ops
from softline.attention import ATTENTIONS, create_attention
from softline.attention.multihead import apply_weights
from softline.errors import UserError
from softline.ops.inputs import narrow
from tests.attention.test_every_attention import UNNORMALISED, VARIANTS
from tests.support import prefix_mask, value_and_gradients
from tools.campaign.interface import Outcome, Verdict, case_random, worst

Inputs = dict[str, Tensor]
Attend = Callable[[Inputs, Tensor | None], Tensor]

TRIALS = 25
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# the largest input for which docs/concepts/masks.md promises finite results
LARGEST = {torch.float16: 65504.0, torch.bfloat16: 1e6, torch.float32: 1e6, torch.float64: 1e6}
# the weights of InLine with exp are not normalised; in float16 they saturate
LARGEST_UNNORMALISED = 10.0
# torch's fused softmax has NaN for gradients at scores beyond 1e9, and its layers overflow in float16
LARGEST_FUSED = 1e3
# error <= MARGIN * (reference_error + eps * size + conditioning). The tests' factor is 2; among thousands of small
# tensors some references are exact by chance
MARGIN = 8
# float64 has no wider dtype for an exact result: both forms have rounding errors of many operations
EPS = {dtype: torch.finfo(dtype).eps * (64 if dtype == torch.float64 else 1) for dtype in DTYPES}
# sizes of inputs whose gradients are compared with those of the definition; elsewhere large terms may cancel
ORDINARY = (1e-3, 10)
# units in the last place by which inputs are changed to find out how well-conditioned a trial is
ULPS = 8
PERTURBATIONS = 2

OPERATORS = sorted(
    name.removesuffix("_attention")
    for name in ops.__all__
    if name.endswith("_attention") and name.replace("_attention", "_weights") in ops.__all__
)
MODULES = [*ATTENTIONS, *VARIANTS]
# operands besides queries, keys and values
OPERANDS = {
    "soft": ("q", "landmarks", "v"),
    "reformer": ("q", "v"),
    "nystrom": ("q", "k", "v", "q_landmarks", "k_landmarks"),
}
LANDMARKS = 3
# attended by torch's fused kernel
FUSED = ("softmax", "linformer")


@dataclass(frozen=True)
class Subject:
    """What is tried: the fast form and the definition of one attention.

    fast, definition: the inputs by name and the mask -> the attended values.
    exact: the definition in float64, for inputs that are float64.
    working: dtype in which the fast form computes.
    continuous: whether a small change of the inputs changes the result little; Reformer's buckets jump, so that only
        the definition in the same precision has the same ones.
    compared: whether the fast form and the definition are comparable; the inverse of a nearly singular kernel is
        decided by rounding, and the released start leaves no room for a ridge.
    largest: largest input, if it is smaller than `LARGEST` says.
    largest_differentiated: largest input for which gradients are promised to be finite.
    """

    name: str
    fast: Attend
    definition: Attend
    exact: Attend
    working: torch.dtype
    continuous: bool = True
    compared: bool = True
    largest: float = math.inf
    largest_differentiated: float = math.inf


@dataclass(frozen=True)
class Trial:
    """One set of inputs; ``mask`` is bool [B, N], None for no mask."""

    subject: Subject
    inputs: Inputs
    mask: Tensor | None
    what: str

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.inputs.values())).dtype

    @property
    def size(self) -> float:
        """The largest number of the inputs."""
        return max(tensor.abs().max().item() for tensor in self.inputs.values())

    @property
    def ordinary(self) -> bool:
        """Whether all numbers of the inputs are zero or of an ordinary size."""
        low, high = ORDINARY
        numbers = torch.cat([tensor.flatten().abs().double() for tensor in self.inputs.values()])
        return bool(((numbers == 0) | ((numbers >= low) & (numbers <= high))).all())


class Tensors:
    """Kind "tensors"."""

    name = "tensors"
    unit = "adversarial tensors"
    target = 5000
    share = 1.0

    def prepare(self, work: Path) -> None:
        """There is nothing to prepare: tensors are drawn."""

    def run(self, seed: int, work: Path) -> Outcome:
        numbers = case_random(self.name, seed)
        names = [numbers.choice([*OPERATORS, *(f"module {name}" for name in MODULES)]) for _ in range(TRIALS)]
        return judge_all(names, numbers)


KIND = Tensors()


def judge_all(names: Sequence[str], numbers: random.Random) -> Outcome:
    """Draw and judge one trial for each of the named subjects."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    verdicts, details = [], []
    try:
        for name in names:
            trial = draw(name, numbers)
            verdict, reason = judge(trial)
            verdicts.append(verdict)
            if verdict is not Verdict.SURVIVED:
                details.append(f"{trial.what}: {verdict}: {reason}")
    finally:
        torch.set_num_threads(threads)
    what = f"{len(names)} trials: {', '.join(sorted(set(names)))}"
    return Outcome(worst(verdicts), what, "\n".join(details), tried=len(names))


# judging


def judge(trial: Trial) -> tuple[Verdict, str]:
    """Return the verdict over one trial, and the reason if it is a failure."""
    try:
        with torch.random.fork_rng(devices=[]):
            reason = fault(trial)
    except UserError as error:
        return Verdict.WRONG, f"valid input is refused: {error}"
    except Exception:
        return Verdict.TRACEBACK, traceback.format_exc()
    return (Verdict.SURVIVED, "") if reason is None else (Verdict.WRONG, reason)


def fault(trial: Trial) -> str | None:
    """Describe what is wrong with the result for a trial; None if nothing is."""
    subject, inputs, mask = trial.subject, trial.inputs, trial.mask
    fast = differentiated(subject.fast, inputs, mask)
    value = fast[0]
    like = inputs.get("v", next(iter(inputs.values())))
    if value.dtype != like.dtype or value.shape != like.shape:
        return f"the result is {tuple(value.shape)} {value.dtype}, expected {tuple(like.shape)} {like.dtype}"
    if not value.isfinite().all():
        return "the result is not finite"
    if mask is not None:
        if (_tokens_first(value)[~mask] != 0).any():
            return "rows of masked tokens are not 0"
        if not torch.equal(value, subject.fast(spoiled(inputs, mask), mask)):
            return "what masked tokens hold changes the result"
    return _inexact(trial, fast) if subject.compared else None


def _inexact(trial: Trial, fast: Sequence[Tensor]) -> str | None:
    """Describe where the value or a gradient exceeds the rounding budget, or a gradient is not finite."""
    subject, inputs, mask = trial.subject, trial.inputs, trial.mask
    wide = {name: tensor.to(subject.working) for name, tensor in inputs.items()}
    reference = [narrow(tensor, trial.dtype).double() for tensor in differentiated(subject.definition, wide, mask)]
    exact, changes = reference, [0.0] * len(reference)
    if subject.continuous:
        double = {name: tensor.double() for name, tensor in inputs.items()}
        exact = differentiated(subject.exact, double, mask)
        changes = conditioning(subject, double, mask, exact)
    limit, eps = torch.finfo(trial.dtype).max, EPS[trial.dtype]
    saturated = bool((exact[0].abs() > limit).any())
    exact = [exact[0].clamp(-limit, limit), *exact[1:]]
    # the results, and what they are computed from, have no digits below these
    underflow = max(eps * torch.finfo(trial.dtype).smallest_normal, torch.finfo(subject.working).smallest_normal)
    # what is summed: values, and in gradients products of values and keys; the sums themselves may cancel
    summed = trial.size, max(trial.size, 1.0) ** 2
    for index, (f, r, e, change) in enumerate(zip(fast, reference, exact, changes, strict=True)):
        what = f"gradient of {list(inputs)[index - 1]}" if index else "value"
        size = e.abs().max().item()
        # gradients may overflow visibly, and saturated values have none
        if index and (saturated or not size <= limit / 4 or trial.size > subject.largest_differentiated):
            continue
        if not f.isfinite().all():
            return f"the {what} is not finite; the exact one is at most {size:.3g}"
        if index and not trial.ordinary:
            continue
        budget = underflow + MARGIN * ((r - e).abs().max().item() + eps * max(size, summed[min(index, 1)]) + change)
        error = (f.double() - e).abs().max().item()
        # not true of a budget that is not finite: then the definition overflows or jumps
        if error > budget:
            return f"the {what} differs from the definition by {error:.3g}, which exceeds the budget {budget:.3g}"
    return None


def differentiated(attend: Attend, inputs: Inputs, mask: Tensor | None) -> list[Tensor]:
    """Return the value of ``attend`` and its gradients with respect to all inputs."""
    names = list(inputs)
    return value_and_gradients(lambda *given: attend(dict(zip(names, given, strict=True)), mask), *inputs.values())


def conditioning(subject: Subject, double: Inputs, mask: Tensor | None, exact: Sequence[Tensor]) -> list[float]:
    """Return by how much value and gradients change at most if the inputs change in the last places."""
    generator = torch.Generator().manual_seed(0)
    changes = [0.0] * len(exact)
    step = ULPS * torch.finfo(subject.working).eps
    for _ in range(PERTURBATIONS):
        moved = {
            name: tensor * (1 + step * (2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 1))
            for name, tensor in double.items()
        }
        for index, (one, other) in enumerate(zip(differentiated(subject.exact, moved, mask), exact, strict=True)):
            change = (one - other).abs().max().item()
            changes[index] = max(changes[index], change)
    return changes


def spoiled(inputs: Inputs, mask: Tensor) -> Inputs:
    """Fill the masked tokens of all inputs that have tokens with NaN."""
    changed = dict(inputs)
    for name, tensor in inputs.items():
        if not name.endswith("landmarks"):
            hidden = ~mask[..., None] if tensor.ndim == 3 else ~mask[:, None, :, None]
            changed[name] = tensor.masked_fill(hidden, float("nan"))
    return changed


def _tokens_first(x: Tensor) -> Tensor:
    """[B, H, N, D] or [B, N, C] -> [B, N, ...], which a mask [B, N] can index."""
    return x.transpose(1, 2) if x.ndim == 4 else x


# subjects


def operator(name: str, numbers: random.Random, *, head_dim: int, tokens: int, dtype: torch.dtype) -> Subject:
    """Return an operator of `softline.ops` with random options."""
    attention, weights = getattr(ops, f"{name}_attention"), getattr(ops, f"{name}_weights")
    options = operator_options(name, numbers, head_dim=head_dim, tokens=tokens)

    def fast(inputs: Inputs, mask: Tensor | None) -> Tensor:
        return attention(**inputs, **options, key_mask=mask)

    def definition(inputs: Inputs, mask: Tensor | None) -> Tensor:
        operands = {key: tensor for key, tensor in inputs.items() if key != "v"}
        v = inputs["v"] if mask is None else inputs["v"].masked_fill(~mask[:, None, :, None], 0)
        return apply_weights(weights(**operands, **options, key_mask=mask), v)

    shown = ", ".join(f"{key}={value}" for key, value in options.items() if not isinstance(value, Tensor))
    return Subject(
        f"{name}({shown})",
        fast,
        definition,
        lambda inputs, mask: without_masked(definition, inputs, mask),
        # torch's fused softmax keeps the precision of its inputs, the others widen half precision
        working=dtype if name == "softmax" or dtype.itemsize > 2 else torch.float32,
        continuous=name != "reformer",
        largest_differentiated=LARGEST_FUSED if name in FUSED else math.inf,
    )


def operator_options(name: str, numbers: random.Random, *, head_dim: int, tokens: int) -> dict[str, Any]:
    """Draw what an operator takes besides its tensors."""
    seed = numbers.randrange(2**31)
    generator = torch.Generator().manual_seed(seed)
    if name == "performer":
        return {"features": ops.performer_features(numbers.choice((1, 20)), head_dim, seed=seed)}
    if name == "linformer":
        projections = torch.randn(2, 6, tokens + 3, generator=generator) / 16
        return {"key_projection": projections[0], "value_projection": projections[1]}
    if name == "reformer":
        rotations = ops.reformer_rotations(head_dim, num_buckets=6, rounds=2, seed=seed)
        return {"rotations": rotations, "bucket_size": numbers.choice((1, 8))}
    if name == "linear":
        # denominators of the other feature maps may vanish
        return {"feature_map": numbers.choice(("elu", "relu", "exp"))}
    if name == "soft":
        # a ridge, because the inverse of a nearly singular kernel is decided by rounding
        return {"normalize": numbers.random() < 0.5, "ridge": 1.0, "inverse": numbers.choice(("newton", "cholesky"))}
    return {}


def without_masked(definition: Attend, inputs: Inputs, mask: Tensor | None) -> Tensor:
    """Apply the definition to the real tokens of each sample alone; masked tokens are rows of zeros."""
    if mask is None:
        return definition(inputs, None)
    v = inputs["v"]
    samples = []
    for sample, real in enumerate(mask):
        alone = {
            name: tensor[sample : sample + 1] if name.endswith("landmarks") else tensor[sample : sample + 1, :, real]
            for name, tensor in inputs.items()
        }
        places = real.nonzero().flatten()
        # zeros that a gradient passes through
        rows = 0 * v[sample]
        samples.append(rows.index_copy(1, places, definition(alone, None)[0]) if len(places) else rows)
    return torch.stack(samples)


def module(
    name: str,
    numbers: random.Random,
    *,
    dim: int,
    heads: int,
    grid_size: tuple[int, int],
    prefix: int,
    dtype: torch.dtype,
) -> Subject:
    """Return a registered attention, or a variant of one, with random weights."""
    base, given = VARIANTS.get(name, (name, {}))
    options: dict[str, Any] = dict(cast(Mapping[str, Any], given))
    if base in ("soft", "softpp") and "released" not in name:
        options["ridge"] = 1.0
    torch.manual_seed(numbers.randrange(2**31))
    single = create_attention(base, dim, heads, num_prefix_tokens=prefix, **options).eval().requires_grad_(False)
    own = single.to(dtype)
    double = copy.deepcopy(own).double()

    def explicit(used: Any, inputs: Inputs, mask: Tensor | None) -> Tensor:
        x = inputs["x"]
        return used.mix(used.weights(x, grid_size, mask), x, grid_size, mask)

    return Subject(
        f"module {name}",
        lambda inputs, mask: own(inputs["x"], grid_size, mask),
        lambda inputs, mask: explicit(own, inputs, mask),
        lambda inputs, mask: explicit(double, inputs, mask),
        working=dtype,
        continuous=base != "reformer",
        compared="released" not in name,
        largest=LARGEST_UNNORMALISED if name == UNNORMALISED and dtype != torch.float16 else math.inf,
        largest_differentiated=LARGEST_FUSED if base in FUSED or dtype == torch.float16 else math.inf,
    )


# drawing


def draw(name: str, numbers: random.Random) -> Trial:
    """Draw a trial for a named operator, or for a module if the name begins with "module "."""
    dtype = numbers.choice(DTYPES)
    batch, heads, head_dim = numbers.randint(1, 3), numbers.randint(1, 3), numbers.choice((1, 2, 4, 8))
    grid_size = numbers.choice(((1, 1), (1, 9), (9, 1), (2, 2), (3, 5), (7, 5)))
    prefix = numbers.choice((0, 1)) if name.startswith("module ") else 0
    tokens = prefix + grid_size[0] * grid_size[1]
    shapes: dict[str, tuple[int, ...]]
    if name.startswith("module "):
        subject = module(
            name.removeprefix("module "),
            numbers,
            dim=heads * head_dim,
            heads=heads,
            grid_size=grid_size,
            prefix=prefix,
            dtype=dtype,
        )
        shapes = {"x": (batch, tokens, heads * head_dim)}
    else:
        subject = operator(name, numbers, head_dim=head_dim, tokens=tokens, dtype=dtype)
        shapes = {
            operand: (batch, heads, LANDMARKS if operand.endswith("landmarks") else tokens, head_dim)
            for operand in OPERANDS.get(name, ("q", "k", "v"))
        }
    mask_name = numbers.choice(list(MASKS))
    mask = MASKS[mask_name](numbers, batch, tokens)
    # operands of one kind together reach the extremes of products and distances
    usual = numbers.choice(list(PATTERNS))
    patterns = {operand: usual if numbers.random() < 0.6 else numbers.choice(list(PATTERNS)) for operand in shapes}
    size = min(draw_size(numbers, dtype), subject.largest)
    inputs = {operand: PATTERNS[patterns[operand]](numbers, shape, size).to(dtype) for operand, shape in shapes.items()}
    shown = ", ".join(f"{operand} {pattern}" for operand, pattern in patterns.items())
    shape = next(iter(shapes.values()))
    return Trial(
        subject, inputs, mask, f"{subject.name}, {dtype}, {shape}, grid {grid_size}, {shown}, {size:.3g}, {mask_name}"
    )


def draw_size(numbers: random.Random, dtype: torch.dtype) -> float:
    """Draw a magnitude: 0, subnormal, as large as is promised, ordinary, or anything between them."""
    info, largest = torch.finfo(dtype), LARGEST[dtype]
    anything = 10 ** numbers.uniform(-8, math.log10(largest))
    return numbers.choice((0.0, info.smallest_normal / 4, info.smallest_normal, 1.0, 1.0, largest, anything, anything))


def normal(numbers: random.Random, shape: tuple[int, ...], size: float) -> Tensor:
    """Normal numbers of which none exceeds ``size``."""
    drawn = torch.randn(shape, generator=_generator(numbers), dtype=torch.float64)
    return size * drawn / drawn.abs().max()


def one_huge(numbers: random.Random, shape: tuple[int, ...], size: float) -> Tensor:
    """Ordinary numbers and one of ``size``."""
    drawn = normal(numbers, shape, min(1.0, size))
    drawn.view(-1)[numbers.randrange(drawn.numel())] = numbers.choice((-size, size))
    return drawn


def equal_tokens(numbers: random.Random, shape: tuple[int, ...], size: float) -> Tensor:
    return normal(numbers, (*shape[:-2], 1, shape[-1]), size).expand(shape).clone()


def orthogonal_tokens(numbers: random.Random, shape: tuple[int, ...], size: float) -> Tensor:
    """Unit vectors times ``size``; they repeat if there are more tokens than channels."""
    return size * torch.eye(shape[-1], dtype=torch.float64)[torch.arange(shape[-2]) % shape[-1]].expand(shape).clone()


def alternating(numbers: random.Random, shape: tuple[int, ...], size: float) -> Tensor:
    """Numbers of one magnitude whose sign alternates with the token, the channel or both."""
    signs = [1 - 2 * (torch.arange(length, dtype=torch.float64) % 2) for length in shape[-2:]]
    by_token, by_channel = numbers.choice(((True, False), (False, True), (True, True)))
    pattern = (signs[0][:, None] if by_token else 1.0) * (signs[1] if by_channel else torch.ones(shape[-1]))
    return (size * pattern).expand(shape).clone()


def all_magnitudes(numbers: random.Random, shape: tuple[int, ...], size: float) -> Tensor:
    """Signed powers of ten up to ``size``."""
    drawn = torch.rand(shape, generator=_generator(numbers), dtype=torch.float64)
    signs = torch.randn(shape, generator=_generator(numbers), dtype=torch.float64).sign()
    return size * signs * 10 ** (-10 * drawn)


def few_values(numbers: random.Random, shape: tuple[int, ...], size: float) -> Tensor:
    """-size, 0 and size, so that many scores are tied."""
    return size * torch.randint(-1, 2, shape, generator=_generator(numbers), dtype=torch.float64)


def constant(numbers: random.Random, shape: tuple[int, ...], size: float) -> Tensor:
    return torch.full(shape, numbers.choice((-size, size)), dtype=torch.float64)


PATTERNS: Mapping[str, Callable[[random.Random, tuple[int, ...], float], Tensor]] = {
    "normal": normal,
    "one huge": one_huge,
    "equal tokens": equal_tokens,
    "orthogonal tokens": orthogonal_tokens,
    "alternating": alternating,
    "all magnitudes": all_magnitudes,
    "few values": few_values,
    "constant": constant,
}


def _one_real(numbers: random.Random, batch: int, tokens: int) -> Tensor:
    mask = torch.zeros(batch, tokens, dtype=torch.bool)
    for sample in mask:
        sample[numbers.randrange(tokens)] = True
    return mask


MASKS: Mapping[str, Callable[[random.Random, int, int], Tensor | None]] = {
    "no mask": lambda numbers, batch, tokens: None,
    "nothing masked": lambda numbers, batch, tokens: torch.ones(batch, tokens, dtype=torch.bool),
    "one real token": _one_real,
    "all masked": lambda numbers, batch, tokens: torch.zeros(batch, tokens, dtype=torch.bool),
    "masked at random": lambda numbers, batch, tokens: (
        torch.rand(batch, tokens, generator=_generator(numbers)) < numbers.random()
    ),
    "padded at the end": lambda numbers, batch, tokens: prefix_mask(
        [numbers.randint(0, tokens) for _ in range(batch)], tokens
    ),
}


def _generator(numbers: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(numbers.randrange(2**31))
