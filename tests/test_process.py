"""Settings of the whole process, made in real processes."""

import json
import os
import subprocess
import sys

import pytest

from softline import process
from softline.cli import main
from softline.errors import UserError
from softline.layers.bands import CPU_BAND_NUMBERS
from softline.measure.environment import with_settings

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
FAULTS = """
import ctypes, resource, softline
if {keep}:
    assert softline.process.keep_memory()
import torch
torch.set_num_threads(1)
libc = ctypes.CDLL(None)
libc.malloc.argtypes, libc.malloc.restype, libc.free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]
def tensors():
    for _ in range(8):
        torch.ones(2**24) + 1
# glibc has no threshold of more than 2 GB; small objects may take the beginning of a free block
sizes = iter(range(2**31 + 2**24, 2**31, -(2**20)))
def huge_block():
    block = libc.malloc(next(sizes))
    for place in range(0, 2**31, 2**20):
        ctypes.memset(block + place, 1, 1)
    libc.free(block)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    {work}()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
# the first fills the heap, and the kernel may take pages of an idle process away
print(min(faults() for _ in range(6)))
"""
POLICY = """
import json, os, sys
from pathlib import Path
from softline import process
process.LOAD = Path({load!r})
process.settle(largest=None)
print(json.dumps([os.environ.get("GOMP_SPINCOUNT"), process.chosen, "torch" in sys.modules]))
"""


def python(code, **variables):
    theirs = (*process.ALLOCATING, process.HUGE_PAGES, "OMP_", "GOMP_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    done = subprocess.run([sys.executable, "-c", code], env={**clean, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@LINUX
@pytest.mark.parametrize(
    ("work", "pages"),
    [
        ("tensors", 16 * 2**26 // os.sysconf("SC_PAGE_SIZE")),
        ("huge_block", 2**11),
    ],
)
def test_kept_memory_is_not_faulted_in_again(work, pages):
    assert python(FAULTS.format(keep=False, work=work)) > pages / 2
    assert python(FAULTS.format(keep=True, work=work)) < pages / 100


def test_threads_spin_briefly_unless_the_user_has_decided(tmp_path):
    def policy(running, average):
        load = tmp_path / f"{running} {average}"
        load.write_text(f"{average} 0.00 0.00 {running}/345 6789\n")
        return POLICY.format(load=str(load))

    # the load average is that of what ran in the last minute
    idle, busy = policy(1, 99.0), policy(1 + os.cpu_count(), 0.0)
    assert python(idle) == ["3000", {"GOMP_SPINCOUNT": "3000"}, False]
    assert python(busy) == ["300", {"GOMP_SPINCOUNT": "300"}, False]
    assert python(POLICY.format(load=str(tmp_path / "missing")))[0] == "3000"
    assert python(idle, OMP_WAIT_POLICY="active") == [None, {}, False]
    assert python(idle, GOMP_SPINCOUNT="100") == ["100", {}, False]


def test_a_setting_that_would_come_too_late_is_refused(monkeypatch, tmp_path):
    with pytest.raises(UserError, match="before torch is imported, which reads GOMP_SPINCOUNT only once"):
        process.spin_briefly()
    monkeypatch.delenv(process.HUGE_PAGES, raising=False)
    monkeypatch.setattr(process, "PAGES_OFFERED", tmp_path / "enabled")
    process.PAGES_OFFERED.write_text("always [madvise] never\n")
    with pytest.raises(UserError, match="set THP_MEM_ALLOC_ENABLE=1 in the environment"):
        process.use_huge_pages()


HUGE = """
import softline
asked = softline.process.use_huge_pages()
import torch
held = torch.ones(2**24)
rollup = open("/proc/self/smaps_rollup").read().split()
print([int(asked), int(rollup[rollup.index("AnonHugePages:") + 1]) * 1024])
"""


@pytest.mark.skipif(not process._offers_huge_pages(), reason="a system without huge pages")
def test_large_tensors_get_huge_pages():
    asked, huge = python(HUGE)
    # all of the 64 MB but the ends
    assert asked
    assert huge > 2**26 - 2**23
    asked, huge = python(HUGE, THP_MEM_ALLOC_ENABLE="0")
    assert not asked
    assert huge < 2**23


SETTLED = """
import json, os
from pathlib import Path
from softline import process
process.PAGES_OFFERED = Path({pages!r})
made = []
process.keep_memory = lambda *, largest: made.append(largest)
process.settle(largest={largest})
print(json.dumps([*made, os.environ.get(process.HUGE_PAGES)]))
"""


def test_commands_that_keep_everything_ask_for_huge_pages_unless_the_user_has_decided(tmp_path):
    def settled(offered, largest=process.LARGEST_INT, **variables):
        pages = tmp_path / "enabled"
        pages.write_text(offered)
        return python(SETTLED.format(pages=str(pages), largest=largest), **variables)

    everything = process.LARGEST_INT
    assert settled("always [madvise] never") == settled("[always] madvise never") == [everything, "1"]
    assert settled("always madvise [never]") == [everything, None]
    assert settled("always [madvise] never", THP_MEM_ALLOC_ENABLE="0") == [everything, "0"]
    assert settled("always [madvise] never", MALLOC_TRIM_THRESHOLD_="1") == [None]
    assert settled("always [madvise] never", process.INFERENCE_BLOCK) == [process.INFERENCE_BLOCK, None]


def test_commands_make_the_settings_and_main_with_arguments_does_not(monkeypatch, capsys):
    made = []
    monkeypatch.setattr(process, "settle", lambda *, largest: made.append(largest))
    assert main(["models", "softpp_micro"]) == 0
    assert made == []
    monkeypatch.setattr(sys, "argv", ["softline", "models", "softpp_micro"])
    assert main() == 0
    assert made == [process.LARGEST_INT]
    monkeypatch.setattr(sys, "argv", ["softline", "predict", "no.pt", "no.png"])
    assert main() == 2
    # what is larger than a band is returned
    assert made[1:] == [process.INFERENCE_BLOCK]
    assert 4 * CPU_BAND_NUMBERS < process.INFERENCE_BLOCK


def test_own_settings_are_no_part_of_a_recorded_command(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "3000")
    assert "GOMP_SPINCOUNT=3000 " in with_settings("softline bench")
    monkeypatch.setitem(process.chosen, "GOMP_SPINCOUNT", "3000")
    assert "GOMP_SPINCOUNT" not in with_settings("softline bench")


SCARCE = """
import time
import softline
from softline import process
def resident():
    return int(process.STATM.read_text().split()[1]) * 4096
{keep}
blocks = [bytearray(b"1") * 2**24 for _ in range(8)]
del blocks[:-1]
before = resident()
process.available_memory = lambda: {left}
end = time.monotonic() + {seconds}
while time.monotonic() < end and before - resident() < 2**24:
    time.sleep(0.02)
print(before - resident())
"""


@LINUX
def test_a_process_that_has_most_of_the_memory_returns_what_it_keeps_by_itself():
    def returned(keep, left, seconds):
        return python(SCARCE.format(keep=keep, left=left, seconds=seconds))

    # twice: another thread is not started
    keep, most = "process.keep_memory(); process.keep_memory()", 4 * 2**24
    assert returned(keep, f"before // {process.MOST_OF_AVAILABLE + 1}", 60) > most
    enough = f"before // {process.MOST_OF_AVAILABLE - 1}"
    for given, left in ((keep, enough), (keep, "None"), ("process.set_allocator(-1, -1)", "0")):
        assert returned(given, left, 5 * process.SECONDS_BETWEEN_LOOKS) < most


RETURNING = """
import softline
from softline import process
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
assert not process.return_memory()
process.keep_memory(largest={largest})
blocks = [bytearray(2**24) for _ in range(8)]
for block in blocks:
    block[:] = bytes(2**24)
# the last one lies above the others in memory
del blocks[:-1], block
before = resident()
print(process.return_memory(), before - resident())
"""


@LINUX
@pytest.mark.parametrize("bound", [True, False])
def test_what_was_kept_is_returned_if_there_is_a_bound(bound):
    code = RETURNING.format(largest=process.INFERENCE_BLOCK if bound else process.LARGEST_INT)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(process.ALLOCATING)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    asked, returned = run.stdout.split()
    assert asked == str(bound)
    assert (int(returned) > 4 * 2**24) == bound
