"""Kinds of cases for test_campaign.py, whose processes import them."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from tools.campaign.interface import Kind, Outcome, Verdict, case_random


class Scripted:
    """A kind whose cases do what their seed says."""

    unit = "cases"
    share = 1.0

    def __init__(self, name: str, script: Sequence[str] = ("fine",), *, target: int = 10, share: float = 1.0) -> None:
        self.name, self.script, self.target, self.share = name, script, target, share

    def prepare(self, work: Path) -> None:
        if "unprepared" in self.script:
            raise RuntimeError("there is nothing")
        (work / self.name).touch()

    def run(self, seed: int, work: Path) -> Outcome:
        way = self.script[seed % len(self.script)]
        if way == "raise":
            raise ValueError("a fault of the kind")
        if way == "die":
            os._exit(3)
        if way == "sleep":
            time.sleep(1000)
        verdict = Verdict.WRONG if way == "wrong" else Verdict.SURVIVED
        return Outcome(verdict, f"{way} {case_random(self.name, seed).random()}", "all of it", tried=2)


SCRIPTED = {
    "steady": Scripted("steady"),
    "faulty": Scripted("faulty", ("fine", "wrong", "raise", "die")),
    "sleepy": Scripted("sleepy", ("sleep", "fine")),
    "unprepared": Scripted("unprepared", ("unprepared",)),
}


def load(names: Sequence[str]) -> dict[str, Kind]:
    return {name: SCRIPTED[name] for name in names}
