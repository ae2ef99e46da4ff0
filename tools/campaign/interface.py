"""What the campaign requires of a kind of case."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class Verdict(StrEnum):
    """How softline took a case. Everything but `SURVIVED` is a failure."""

    SURVIVED = "survived"
    EXECUTION = "execution"  # started a program or executed foreign code
    REQUEST = "request"  # used the network
    HANG = "hang"  # exceeded the time or memory limit
    TRACEBACK = "traceback"  # ended in a traceback, by a signal or with an undocumented exit code
    WRONG = "wrong"  # silently wrong result, leftover files, wrong exit code


@dataclass(frozen=True)
class Outcome:
    """The result of one case."""

    verdict: Verdict
    what: str  # one line: what was done
    detail: str = ""  # output and traceback
    tried: int = 1  # how many things of the kind's `unit` the case tried


class Kind(Protocol):
    """A kind of adversarial case."""

    name: str
    unit: str  # what `tried` counts, plural
    target: int  # how many of them a full campaign tries
    share: float  # weight in the time budget once every kind has reached its target

    def prepare(self, work: Path) -> None:
        """Make the fixtures under `work/<name>` unless they are there.

        Called once per campaign, before the first case, and possibly in another process than `run`.
        """

    def run(self, seed: int, work: Path) -> Outcome:
        """Run one case. Everything random comes from `case_random(name, seed)`; temporary files go below `work`."""


def case_random(name: str, seed: int) -> random.Random:
    """Return the random numbers of one case."""
    return random.Random(f"{name}:{seed}")


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the most severe of several verdicts; executions are worst."""
    severity = [Verdict.EXECUTION, Verdict.REQUEST, Verdict.WRONG, Verdict.HANG, Verdict.TRACEBACK, Verdict.SURVIVED]
    return min(verdicts, key=severity.index, default=Verdict.SURVIVED)
