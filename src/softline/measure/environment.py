"""The machine and the software that a measurement was made with."""

import os
import platform
import shlex
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import timm
import torch

import softline
from softline import process

# prefixes of the environment variables that set threads, memory allocation and compilation
TUNING = ("GLIBC_TUNABLES", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_", "OMP_", "THP_MEM_", "TORCHINDUCTOR_")


def with_settings(command: str) -> str:
    """Put the environment variables that change the speed of a command in front of it."""
    # torch itself sets the cache directory of compiled code
    set_here = sorted(
        name
        for name in os.environ
        if name.startswith(TUNING) and not name.endswith("_CACHE_DIR") and name not in process.chosen
    )
    return " ".join([*(f"{name}={shlex.quote(os.environ[name])}" for name in set_here), command])


def environment(device: str = "cpu") -> dict[str, str | int | bool | None]:
    """Return versions, processor, threads, commit and date, to be stored with every result; for CUDA also the GPU."""
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
    """Return whether the processor has bfloat16 instructions; None where the system does not say."""
    # x86 lists its features as flags, ARM as Features
    features = _cpu_info("flags") or _cpu_info("Features")
    return None if features is None else not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(features.split())


def commit_of(directory: Path) -> str | None:
    """Return the commit that is checked out here, "+changes" if files differ from it; None for an installed package."""
    # an installed package may lie inside another project's checkout, which does not track it
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
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_info(key: str) -> str | None:
    """Return what Linux says about the first processor under this key."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
