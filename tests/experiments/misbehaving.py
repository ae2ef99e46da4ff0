"""Tasks for other processes, in a file of its own that is quick to import there."""

import time
from typing import Any

from softline.errors import UserError


def misbehave(task: str, tell: Any) -> None:
    if task == "fail":
        raise UserError("a mistake in the data")
    if task == "die":
        raise SystemExit(3)
    tell("begun")
    time.sleep(600)
