"""Run a function on many tasks in a few processes, which can all be stopped at once."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

import torch

from softline.errors import UserError
from softline.measure.processes import starting_processes

Send: TypeAlias = Callable[[Any], None]
# for a run that is stopped to finish its step and write its checkpoint
SECONDS_TO_STOP = 60.0


def run_in_processes(
    function: Callable[[Any, Send], Any], tasks: Sequence[Any], *, processes: int, threads: int, hear: Send
) -> list[Any]:
    """Return the results of ``function(task, send)`` for all tasks, in their order.

    function: must be at the top level of a module, because new processes import it. It must end soon after SIGTERM, by
        KeyboardInterrupt if it catches the signal. A UserError or OSError that it raises is raised here and ends all
        processes, as do Ctrl-C and a process that dies.
    threads: number of torch's threads in each process.
    hear: receives here what the function sends.
    """
    with _interrupted_by_sigterm():
        results: dict[int, Any] = {}
        waiting = list(enumerate(tasks))[::-1]
        crew = [_Worker(function, threads) for _ in range(min(processes, len(tasks)))]
        try:
            for worker in crew:
                worker.give(*waiting.pop())
            while len(results) < len(tasks):
                for worker in _that_have_news(crew):
                    kind, content = worker.receive()
                    if kind == "told":
                        hear(content)
                        continue
                    if kind == "failed":
                        raise content
                    assert worker.index is not None, "only who has a task finishes one"
                    results[worker.index] = content
                    worker.index = None
                    if waiting:
                        worker.give(*waiting.pop())
        finally:
            for worker in crew:
                worker.process.terminate()
            for worker in crew:
                worker.end()
        return [results[index] for index in range(len(tasks))]


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM stops everything as Ctrl-C does; only the main thread may ask for it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _: Any) -> None:
        raise KeyboardInterrupt(number)

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class _Worker:
    """A process and our end of the pipe to it."""

    def __init__(self, function: Callable[[Any, Send], Any], threads: int) -> None:
        # a forked process would inherit torch's threads in an unknown state
        context = get_context("spawn")
        self.index: int | None = None
        self.connection, theirs = context.Pipe()
        # no daemon: those may not start the processes that load data
        self.process = context.Process(target=_work, args=(theirs, function, threads))
        with starting_processes():
            self.process.start()
        # only theirs is left, so that its death ends the pipe
        theirs.close()

    def give(self, index: int, task: Any) -> None:
        self.index = index
        self.connection.send(task)

    def receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise UserError(f"a training process ended unexpectedly (exit code {self.process.exitcode})") from None

    def end(self) -> None:
        # a process that waits for a task, or reports its last one, ends when nobody is at the other end
        self.connection.close()
        self.process.join(SECONDS_TO_STOP)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _that_have_news(crew: Sequence[_Worker]) -> list[_Worker]:
    ready = wait([worker.connection for worker in crew if worker.index is not None])
    return [worker for worker in crew if worker.connection in ready]


def _work(connection: "Connection[Any, Any]", function: Callable[[Any, Send], Any], threads: int) -> None:
    # Ctrl-C reaches every process of a terminal: the one that started us decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    try:
        while True:
            task = connection.recv()
            try:
                result = function(task, lambda message: connection.send(("told", message)))
            except (BrokenPipeError, EOFError):
                raise
            except (UserError, OSError) as error:
                connection.send(("failed", error))
            except KeyboardInterrupt as error:
                # there will be no further task
                connection.send(("failed", KeyboardInterrupt(*error.args)))
                return
            else:
                connection.send(("finished", result))
    except (BrokenPipeError, EOFError, KeyboardInterrupt):
        # whoever started us is gone, or has stopped the task
        return
