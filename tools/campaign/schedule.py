"""Worker processes that run cases, and the order of the cases."""

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tools.campaign.interface import Kind, Outcome, Verdict
from tools.campaign.ledger import Entry, Ledger

CASE_LIMIT = 900.0  # seconds; kinds limit their commands themselves, so that this one stops a kind's own process only
SEEDS_PER_CAMPAIGN = 1_000_000

Load = Callable[[Sequence[str]], Mapping[str, Kind]]
"""Returns kinds by their names; called in every worker process."""


@dataclass
class Worker:
    """A process that runs one case at a time."""

    load: Load
    names: Sequence[str]
    work: Path
    doing: tuple[str, int | None] | None = field(default=None, init=False)
    since: float = field(default=0.0, init=False)
    ready: bool = field(default=False, init=False)  # whether the process has imported its kinds

    def __post_init__(self) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, self.load, self.names, self.work))
        self.process.start()
        theirs.close()

    def give(self, name: str, seed: int | None) -> None:
        """Let it run a case, or prepare a kind if there is no seed."""
        self.doing, self.since = (name, seed), time.monotonic()
        self.connection.send(self.doing)

    def result(self) -> Outcome | None:
        """Return the outcome of the case, that of a process that has crashed or hangs, or None while it is running."""
        if self.connection.poll():
            with contextlib.suppress(EOFError, ConnectionResetError):
                answer: Outcome | None = self.connection.recv()
                if not self.ready:
                    self.ready, self.since = True, time.monotonic()
                return answer
            self.process.join()
            return Outcome(Verdict.TRACEBACK, f"the process of the case ended with code {self.process.exitcode}")
        if self.ready and time.monotonic() - self.since > CASE_LIMIT:
            self.stop()
            return Outcome(Verdict.HANG, f"the process of the case did not answer for {CASE_LIMIT:.0f} s")
        return None

    def close(self) -> None:
        """End the process after its case."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(CASE_LIMIT)
        self.stop()

    def stop(self) -> None:
        """Kill the process and what it has started in its session."""
        if self.process.is_alive():
            # there is no session yet while the process is starting
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid or 0, signal.SIGKILL)
            self.process.kill()
        self.process.join()


def _work(connection: Connection, load: Load, names: Sequence[str], work: Path) -> None:
    # Ctrl-C is for the campaign, which ends its workers
    os.setsid()
    kinds = load(names)
    connection.send(None)
    with contextlib.suppress(EOFError):
        while (task := connection.recv()) is not None:
            connection.send(attempt(kinds[task[0]], task[1], work))


def attempt(kind: Kind, seed: int | None, work: Path) -> Outcome:
    """Run a case, or prepare the kind; an exception becomes the outcome."""
    try:
        if seed is None:
            kind.prepare(work)
            return Outcome(Verdict.SURVIVED, "prepared")
        return kind.run(seed, work)
    except Exception as error:
        return Outcome(Verdict.TRACEBACK, f"{type(error).__name__} in the case's own process", traceback.format_exc())


@contextlib.contextmanager
def _workers(count: int, load: Load, names: Sequence[str], work: Path) -> Iterator[list[Worker]]:
    workers = [Worker(load, names, work) for _ in range(count)]
    try:
        yield workers
    finally:
        for worker in workers:
            if worker.doing is None:
                worker.close()
            else:
                worker.stop()


@dataclass
class Campaign:
    """Cases of several kinds, run until a time is over or until each kind has a number of cases."""

    kinds: Mapping[str, Kind]
    ledger: Ledger
    work: Path
    seed: int = 0
    cases: int | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._taken = {(entry.kind, entry.seed) for entry in self.ledger.entries}
        self._running: dict[str, int] = dict.fromkeys(self.kinds, 0)

    def run(self, jobs: int, load: Load, report: Callable[[Entry | None], None]) -> None:
        """Run the cases in `jobs` processes; report each that ends, and None about every second in between."""
        with _workers(jobs, load, list(self.kinds), self.work) as workers:
            self._prepare(workers)
            start = time.monotonic()
            while True:
                over = self.cases is None and time.monotonic() - start > self.seconds
                for worker in workers:
                    if worker.doing is None and not over and (case := self.next_case()):
                        worker.give(*case)
                busy = [worker for worker in workers if worker.doing is not None]
                if not busy:
                    return
                wait([worker.connection for worker in busy], timeout=1.0)
                report(None)
                for worker in busy:
                    if (outcome := worker.result()) is not None:
                        report(self._finished(worker, outcome))
                        if not worker.process.is_alive():
                            workers[workers.index(worker)] = Worker(load, list(self.kinds), self.work)

    def next_case(self) -> tuple[str, int] | None:
        """Choose the kind that needs a case most, and its next seed; None if every kind has its cases.

        First that is the kind which is farthest from its target, then the one with the least time for its share.
        """
        needs = {name: need for name in self.kinds if (need := self._need(name)) is not None}
        if not needs:
            return None
        name = min(needs, key=lambda name: needs[name])
        seed = self.seed * SEEDS_PER_CAMPAIGN
        while (name, seed) in self._taken:
            seed += 1
        self._taken.add((name, seed))
        self._running[name] += 1
        return name, seed

    def _need(self, name: str) -> tuple[bool, float] | None:
        kind, entries = self.kinds[name], self.ledger.of(name)
        first = self.seed * SEEDS_PER_CAMPAIGN
        done = sum(first <= entry.seed < first + SEEDS_PER_CAMPAIGN for entry in entries) + self._running[name]
        if self.cases is not None:
            return (False, done) if done < self.cases else None
        tried = sum(entry.tried for entry in entries) * (1 + self._running[name] / max(len(entries), 1))
        if tried < kind.target:
            return (False, (tried or self._running[name]) / kind.target)
        return (True, sum(entry.seconds for entry in entries) / kind.share)

    def _prepare(self, workers: Sequence[Worker]) -> None:
        """Let the workers prepare the kinds, which takes the longest where models are trained."""
        waiting = list(self.kinds)
        while True:
            for worker in workers:
                if worker.doing is None and waiting:
                    worker.give(waiting.pop(0), None)
            busy = [worker for worker in workers if worker.doing is not None]
            if not busy:
                return
            wait([worker.connection for worker in busy], timeout=1.0)
            for worker in busy:
                outcome = worker.result()
                if outcome is not None and outcome.verdict is not Verdict.SURVIVED:
                    assert worker.doing is not None
                    raise RuntimeError(f"{worker.doing[0]} cannot be prepared: {outcome.what}\n{outcome.detail}")
                if outcome is not None:
                    worker.doing = None

    def _finished(self, worker: Worker, outcome: Outcome) -> Entry:
        assert worker.doing is not None
        name, seed = worker.doing
        assert seed is not None
        worker.doing = None
        self._running[name] -= 1
        return self.ledger.add(name, seed, outcome, time.monotonic() - worker.since)
