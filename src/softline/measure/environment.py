"""What a measurement was made on."""

import os
import platform
import shlex
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import timm
import torch

import softline

# variables by which users set threads, memory allocation and compilation, by their beginnings
TUNING = ("GLIBC_TUNABLES", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_", "OMP_", "THP_MEM_", "TORCHINDUCTOR_")


def with_settings(command: str) -> str:
    """The command preceded by the environment variables that change its speed."""
    # torch sets the folder of compiled code itself
    set_here = sorted(name for name in os.environ if name.startswith(TUNING) and not name.endswith("_CACHE_DIR"))
    return " ".join([*(f"{name}={shlex.quote(os.environ[name])}" for name in set_here), command])


def environment(device: str = "cpu") -> dict[str, str | int | bool | None]:
    """Versions, processor, threads, commit and date, to be stored beside every result; for cuda the GPU as well."""
    gpu = {"gpu": torch.cuda.get_device_name(device)} if torch.device(device).type == "cuda" else {}
    return {
        "softline": softline.__version__,
        "commit": commit_of(Path(softline.__file__).parent),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        **gpu,
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "native_bfloat16": native_bfloat16(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def native_bfloat16() -> bool | None:
    """Whether the processor computes in bfloat16 rather than emulating it; None if torch does not tell."""
    # torch names it as private, and builds without oneDNN lack it
    ask: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return None if ask is None else bool(ask())


def commit_of(directory: Path) -> str | None:
    """The commit that git has checked out here, "+changes" if files differ from it; None for an installed package."""
    # an installed package may lie inside somebody else's checkout, which does not track it
    if not _git(directory, "ls-files", "--", "."):
        return None
    commit = _git(directory, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    return commit + ("+changes" if _git(directory, "status", "--porcelain", "--", ".") else "")


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        # git is not installed
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
