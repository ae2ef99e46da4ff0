"""What a command says when torchrun runs it in several processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told_once() -> Iterator[None]:
    """Let one process tell an error that several have; one that only lost another process ends without a word."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return

    from softline.engine.distributed import fails_first, lost_another

    try:
        yield
    except (ValueError, OSError):
        if fails_first():
            raise
        raise SystemExit(2) from None
    except RuntimeError as error:
        if not lost_another(error):
            raise
        if fails_first():
            raise OSError(f"another process ended without saying why; {error}") from None
        raise SystemExit(2) from None
