"""Processes that measure memory: each costs seconds, so a few tests ask much."""

import sys

import pytest

from softline.measure import LayerCase, OperatorCase, Setting
from softline.measure.failures import OUT_OF_MEMORY
from softline.measure.memory import ProcessMeter, in_process
from softline.process import available_memory
from tests.measure.allocating import allocate, be_killed, leave

MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems neither reset a peak nor limit a process")


@linux
def test_a_process_sees_what_is_held_at_once():
    memory = in_process(allocate, 64)
    assert memory.peak_bytes / MIB == pytest.approx(64, abs=2)
    assert memory.process_bytes > memory.peak_bytes


def test_a_process_that_dies_is_a_failure():
    assert in_process(be_killed) == OUT_OF_MEMORY
    assert in_process(leave) == "the process ended unexpectedly (exit code 3)"


@linux
def test_memory_of_cases_and_of_what_does_not_fit():
    meter = ProcessMeter(limit=256 * MIB, threads=1)
    # 16 heads of 4096 x 4096 weights are 1 GiB
    assert meter(OperatorCase("softmax-math"), 4096, "infer", Setting()) == OUT_OF_MEMORY
    # the result and a state, of 16 x 4096 x 32 numbers: 8 MiB
    fits = meter(OperatorCase("inline"), 4096, "infer", Setting())
    assert 8 <= fits.peak_bytes / MIB < 64


def test_a_failure_in_a_process_is_told_in_one_line():
    message = ProcessMeter(None, 1)(LayerCase("inline", dim=65), 32, "infer", Setting())
    assert message.startswith("dim (65) must be divisible by num_heads (2)")


@linux
def test_a_control_group_has_left_what_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr("softline.process.CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("3000\n")
    assert available_memory() == 3000
    (tmp_path / "memory.current").write_text("2500\n")
    assert available_memory() == 500
    # files in the cache give way
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 700\n")
    assert available_memory() == 1200
    (tmp_path / "memory.current").write_text("9000\n")
    assert available_memory() == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory() > 9000
