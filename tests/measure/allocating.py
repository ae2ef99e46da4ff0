"""What processes that measure memory run in tests."""

import os
import signal

import torch

from softline.measure.memory import measure_peak


def allocate(mib: int):
    """Hold so much at once, after twice as much was held and freed."""

    def hold(amount: int) -> None:
        parts = [torch.ones(2**18) for _ in range(amount)]  # 1 MiB each
        del parts

    return measure_peak(lambda: hold(mib), lambda: hold(2 * mib))


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(3)
