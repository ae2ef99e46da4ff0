"""Errors of a command that torchrun runs in several processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from softline.cli.signals import signal_of
from softline.cli.startup import exit_code
from softline.errors import UserError


@contextmanager
def told_once() -> Iterator[None]:
    """Let one process report an error or a signal that all have; one that only lost another one ends silently."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return

    from softline.engine.distributed import fails_first, lost_another

    try:
        yield
    except KeyboardInterrupt as error:
        if os.environ.get("RANK", "0") == "0":
            raise
        raise SystemExit(exit_code(signal_of(error))) from None
    except (UserError, OSError):
        if fails_first():
            raise
        raise SystemExit(2) from None
    except RuntimeError as error:
        if not lost_another(error):
            raise
        if fails_first():
            raise UserError(f"another process ended without a message; {error}") from error
        raise SystemExit(2) from None
