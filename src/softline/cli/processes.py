"""Errors of a command that torchrun runs in several processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from softline.errors import UserError


@contextmanager
def told_once() -> Iterator[None]:
    """Let one process report an error that all have; a process that only lost another one ends silently."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return

    from softline.engine.distributed import fails_first, lost_another

    try:
        yield
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
