"""The kinds of cases by name."""

import importlib
from collections.abc import Sequence

from tools.campaign.interface import Kind

NAMES = ("files", "texts", "commands", "kills", "exported", "exporting", "tensors", "explorer", "soak")


def load_kinds(names: Sequence[str]) -> dict[str, Kind]:
    """Import kinds; each is the `KIND` of the module of its name."""
    return {name: importlib.import_module(f"tools.campaign.{name}").KIND for name in names}
