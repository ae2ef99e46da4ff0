"""Two measurements are compared by what was timed in the same rounds."""

import json
from dataclasses import asdict

import pytest

from softline.errors import UserError
from softline.measure.checking import changes, read_bench_file
from softline.measure.measuring import Row

MACS = 10**9
SOFT, SWIN = "softpp_tiny", "swin_tiny_patch4_window7_224"


def row(case, times, *, machine=1.0, memory=10 * 2**20, **changed):
    """A row whose machine takes ``machine`` milliseconds for a billion multiply-adds of the matrix product."""
    rounds = tuple(machine * time for time in times)
    middle = sorted(rounds)[len(rounds) // 2]
    known = {"milliseconds": middle, "macs": MACS, "share": machine / middle, "peak_bytes": memory, "rounds": rounds}
    return Row(case, "infer", 224, "224x224", 196, **{**known, **changed})


def write(path, *rows, kind="models", finished=True, threads=2, **options):
    shared = {"batch": 1, "dtype": "float32", "device": "cpu", "compile": False, **options}
    content = {"kind": kind, "command": "softline bench models", "finished": finished, "options": shared}
    content |= {"environment": {"threads": threads}, "rows": [asdict(each) for each in rows]}
    path.write_text(json.dumps(content))
    return read_bench_file(path)


STEADY = (10, 10.1, 9.9, 10, 10.05)
NOISY = (10, 13, 7, 9, 16)


def scaled(times, factor):
    return tuple(factor * time for time in times)


def test_a_slower_machine_is_no_change(tmp_path):
    before = write(tmp_path / "a.json", row(SOFT, STEADY), row(SWIN, STEADY))
    after = write(tmp_path / "b.json", row(SOFT, STEADY, machine=3.0), row(SWIN, STEADY, machine=3.0))
    (change,) = changes(before, after)
    assert change.time == pytest.approx(1)
    assert not change.is_worse()


def test_a_slower_case_is_found_and_the_models_of_timm_are_not_judged(tmp_path):
    before = write(tmp_path / "a.json", row(SOFT, STEADY), row(SWIN, STEADY))
    after = write(tmp_path / "b.json", row(SOFT, scaled(STEADY, 1.2)), row(SWIN, STEADY))
    (change,) = changes(before, after)
    assert change.case == SOFT
    assert change.time == pytest.approx(1.2)
    assert change.is_slower()
    assert not change.is_slower(0.25)
    (back,) = changes(after, before)
    assert back.time == pytest.approx(1 / 1.2)
    assert not back.is_worse()


def test_all_references_have_to_agree(tmp_path):
    before = write(tmp_path / "a.json", row(SOFT, STEADY), row(SWIN, STEADY))
    # the model of timm has slowed down as much: so has everything but the matrix product
    after = write(tmp_path / "b.json", row(SOFT, scaled(STEADY, 1.3)), row(SWIN, scaled(STEADY, 1.3)))
    assert not changes(before, after)[0].is_worse()


def test_noise_of_the_rounds_is_no_change(tmp_path):
    before = write(tmp_path / "a.json", row(SOFT, NOISY))
    after = write(tmp_path / "b.json", row(SOFT, scaled(NOISY, 1.2)))
    (change,) = changes(before, after)
    assert change.time == pytest.approx(1.2)
    assert change.noise > 0.2
    assert not change.is_slower()


def test_more_memory_and_new_failures_are_found(tmp_path):
    before = write(tmp_path / "a.json", row(SOFT, STEADY), row("soft_tiny", STEADY))
    nothing = {"milliseconds": None, "macs": None, "share": None, "peak_bytes": None, "rounds": ()}
    after = write(
        tmp_path / "b.json",
        row(SOFT, STEADY, memory=12 * 2**20),
        row("soft_tiny", (1,), failure="out of memory", **nothing),
    )
    larger, failing = changes(before, after)
    assert larger.is_larger()
    assert not larger.is_slower()
    assert failing.failure == "out of memory"
    assert failing.is_worse()
    # what failed before is not new
    assert not changes(after, after)[1].is_worse()


def test_some_pages_more_are_within_the_noise_of_the_kernels_record(tmp_path):
    before = write(tmp_path / "a.json", row(SOFT, STEADY, memory=2**20))
    (change,) = changes(before, write(tmp_path / "b.json", row(SOFT, STEADY, memory=2**20 + 2**19)))
    assert change.memory == pytest.approx(1.5)
    assert not change.is_worse()


@pytest.mark.parametrize(
    ("changed", "named"), [({"batch": 8}, "batch"), ({"threads": 1}, "threads"), ({"kind": "ops"}, "kind")]
)
def test_other_settings_cannot_be_compared(tmp_path, changed, named):
    before = write(tmp_path / "a.json", row(SOFT, STEADY))
    with pytest.raises(UserError, match=f"the same {named}: .* has .* has"):
        changes(before, write(tmp_path / "b.json", row(SOFT, STEADY), **changed))


def test_results_of_other_cases_and_unfinished_ones_are_refused(tmp_path):
    before = write(tmp_path / "a.json", row(SOFT, STEADY))
    with pytest.raises(UserError, match="no case in common"):
        changes(before, write(tmp_path / "b.json", row("soft_tiny", STEADY)))
    with pytest.raises(UserError, match="interrupted"):
        write(tmp_path / "c.json", row(SOFT, STEADY), finished=False)
