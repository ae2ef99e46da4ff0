"""What a measurement was made on."""

import os
import platform
from pathlib import Path

import torch

import softline


def environment() -> dict[str, str | int]:
    """Versions, processor and threads, to be stored beside every result."""
    return {
        "softline": softline.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
