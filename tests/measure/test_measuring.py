import pytest

from softline.errors import UserError
from softline.measure import LayerCase, ModelCase, Setting, measure, parse_model
from softline.measure.failures import OUT_OF_MEMORY
from softline.measure.memory import Memory
from softline.measure.turns import Timing


def test_all_cases_are_measured_at_every_size_in_every_mode():
    heard = []
    groups = list(
        measure(
            [LayerCase("softmax"), LayerCase("inline")],
            [64, 32],
            modes=("infer", "train"),
            rounds=2,
            baseline="inline",
            hear=heard.append,
        )
    )
    assert [(group.size, group.mode) for group in groups] == [
        (32, "infer"),
        (32, "train"),
        (64, "infer"),
        (64, "train"),
    ]
    infer, train = groups[2].rows[0], groups[3].rows[0]
    # projections of queries, keys, values and output, then two products of all pairs
    assert infer.macs == 4 * 64 * 64 * 64 + 2 * 64 * 64 * 64
    assert train.macs > 2.5 * infer.macs
    assert groups[0].rows[1].speedup == 1
    assert all(r.milliseconds > 0 and r.gflops > 0 and r.share > 0 and len(r.rounds) == 2 for r in groups[0].rows)
    assert all(group.peak_gflops > 0 for group in groups)
    # once when it is begun, once when it is timed
    assert len(heard) == 2 * 2 * 2 * 2


def test_a_size_that_a_model_cannot_take_is_a_row_and_the_others_are_measured():
    cases = [ModelCase("swin", "swin_tiny_patch4_window7_224", {"depths": [1, 1, 1, 1]}), parse_model("inline_micro")]
    (group,) = measure(cases, [3], rounds=1)
    assert "cannot take images of 3 x 3" in group.rows[0].failure
    assert group.rows[0].milliseconds is None


def failure_of(text, size):
    ((only,),) = (group.rows for group in measure([parse_model(text)], [size], rounds=1))
    return only.failure


def test_a_wrong_option_of_a_model_is_not_taken_for_a_wrong_size():
    failure = failure_of("soft_micro:attention=inlin", 64)
    assert failure.startswith("attention must be one of ")
    assert failure.endswith("did you mean 'inline'?")
    assert failure_of("inline_micro:colour=red", 64).startswith("model.options of inline_micro: ")
    assert failure_of("resnet10t:colour=red", 64).startswith("model.options of resnet10t: ")
    assert failure_of("vit_tiny_patch16_224:depth=1", 8).startswith("vit_tiny_patch16_224 cannot take images of 8 x 8")
    assert failure_of("vit_tiny_patch16_224:num_heads=5", 64).startswith("vit_tiny_patch16_224 cannot be built: ")


def test_convolutional_networks_take_any_size():
    assert failure_of("resnet10t", 40) is None


@pytest.mark.parametrize("slow", ["float32", "bfloat16"])
def test_the_peak_is_that_of_the_faster_product(monkeypatch, slow):
    def fake_turns(runs, rounds, **_):
        return {key: Timing((2.0 if key[0] == slow else 1.0,) * rounds) for key in runs}

    monkeypatch.setattr("softline.measure.measuring.take_turns", fake_turns)
    (group,) = measure([LayerCase("inline")], [32], setting=Setting(dtype="bfloat16"), rounds=2)
    assert group.peak_gflops == pytest.approx(2e-9 * 1024**3)
    assert group.rows[0].share == pytest.approx(group.rows[0].macs / 1024**3)


def test_the_product_of_float32_is_timed_once_after_each_case(monkeypatch):
    timed = []

    def fake_turns(runs, rounds, **_):
        timed.append(list(runs))
        return {name: Timing((1.0,) * rounds) for name in runs}

    monkeypatch.setattr("softline.measure.measuring.take_turns", fake_turns)
    list(measure([LayerCase("inline"), LayerCase("softmax")], [32], rounds=1))
    inline, softmax = ("inline", 32, "infer"), ("softmax", 32, "infer")
    assert timed == [[inline, ("float32", *inline), softmax, ("float32", *softmax)]]


def test_interleaved_sizes_take_turns_in_the_same_rounds(monkeypatch):
    timed = []

    def fake_turns(runs, rounds, **_):
        timed.append([key for key in runs if len(key) == 3])
        return {key: Timing((key[1] / 32 if len(key) == 3 else 1.0,) * rounds) for key in runs}

    monkeypatch.setattr("softline.measure.measuring.take_turns", fake_turns)
    groups = list(measure([LayerCase("softmax"), LayerCase("inline")], [64, 32], rounds=2, interleave=True))
    assert timed == [[(name, size, "infer") for size in (32, 64) for name in ("softmax", "inline")]]
    assert [(group.size, [row.case for row in group.rows]) for group in groups] == [
        (32, ["softmax", "inline"]),
        (64, ["softmax", "inline"]),
    ]
    assert [row.milliseconds for group in groups for row in group.rows] == [1e3, 1e3, 2e3, 2e3]
    times = [group.rows[1].relative_time for group in groups]
    assert times[1] == pytest.approx(2 * times[0])


def test_compiled_sizes_are_not_interleaved():
    with pytest.raises(UserError, match="cannot be interleaved if models are compiled"):
        list(measure([LayerCase("inline")], [32], setting=Setting(compiled=True), interleave=True))


def test_memory_is_returned_between_sizes_but_not_within_their_rounds(monkeypatch):
    calls = []
    monkeypatch.setattr("softline.measure.measuring.trim", lambda: calls.append("trim"))

    def fake_turns(runs, rounds, **_):
        calls.append("turns")
        return {key: Timing((1.0,) * rounds) for key in runs}

    monkeypatch.setattr("softline.measure.measuring.take_turns", fake_turns)
    list(measure([LayerCase("inline")], [32, 64], rounds=1))
    assert calls == ["turns", "trim", "turns", "trim"]


def test_a_case_that_does_not_fit_into_memory_is_not_timed():
    def meter(case, size, mode, setting):
        return OUT_OF_MEMORY if case.name == "softmax" else Memory(2**20, 2**30)

    (group,) = measure([LayerCase("softmax"), LayerCase("inline")], [32], rounds=1, meter=meter)
    assert (group.rows[0].failure, group.rows[0].milliseconds) == (OUT_OF_MEMORY, None)
    # and the baseline is missing
    assert (group.rows[1].peak_bytes, group.rows[1].speedup) == (2**20, None)
    assert group.rows[1].milliseconds > 0
