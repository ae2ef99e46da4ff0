import json
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from softline import ATTENTIONS, ops
from softline.measure import (
    LayerCase,
    ModelCase,
    OperatorCase,
    Row,
    SequenceCase,
    Setting,
    VitCase,
    count_macs,
    growth_exponent,
    growths,
    measure_scaling,
    parse_model,
    peak_bytes,
)
from softline.measure import measuring as measure
from softline.measure.cases import MATH, OPERATORS, Subject, check_device, prepare
from softline.measure.environment import commit_of, environment
from softline.measure.failures import OUT_OF_MEMORY, failure_text
from softline.measure.memory import Memory
from softline.measure.results import Results
from softline.measure.turns import Timing, take_turns

# counted costs


def test_macs_of_a_product_are_counted():
    a, b = torch.randn(10, 20), torch.randn(20, 30)
    assert count_macs(lambda: a @ b) == 10 * 20 * 30


def test_peak_bytes_counts_what_is_held_at_once():
    def run() -> torch.Tensor:
        first = torch.empty(1000, 250)  # 1 MB
        second = torch.empty(1000, 500)  # 2 MB, beside the first
        del first
        third = torch.empty(1000, 125)  # 0.5 MB, after the first is gone
        return second[0, 0] + third[0, 0]

    assert 3_000_000 <= peak_bytes(run) < 3_010_000


# turns


def test_cases_take_turns_and_warm_ups_do_not_count():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = take_turns(runs, 2, warm_ups=3)
    assert order == ["a", "b"] * 5
    assert all(len(timing.seconds) == 2 for timing in timings.values())


def test_short_runs_are_repeated_within_a_turn():
    calls = []
    timings = take_turns({"short": lambda: calls.append(1)}, 2, least_seconds=1e-3)
    assert len(calls) > 3
    assert timings["short"].median < 1e-3


def test_median_and_spread_of_rounds():
    timing = Timing((1.0, 2.0, 3.0, 4.0, 100.0))
    assert (timing.median, timing.spread) == (3, 1)
    assert Timing((5.0,)).spread == 0


def test_ratios_are_those_within_rounds():
    # the machine was ten times slower in the second round, for both
    assert Timing((1.0, 10.0, 1.0)).ratio_to(Timing((4.0, 40.0, 4.0))) == 4


# growth


def row(tokens: int, milliseconds: float | None = None, peak: int | None = None, **changes) -> Row:
    return Row("a", "infer", tokens, f"{tokens} tokens", tokens, milliseconds, peak_bytes=peak, **changes)


def test_growth_exponent_recovers_a_power_law():
    tokens = [100, 400, 1600]
    assert growth_exponent(tokens, [3 * t**1.5 for t in tokens]) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="at least 2 different sizes, got 1"):
        growth_exponent([5, 5], [1, 2])


def test_growth_is_fitted_over_the_large_sizes():
    (growth,) = growths([row(10, 5.0, 7), *(row(t, t**2, 100 + 8 * t) for t in (100, 200, 400, 800))])
    assert growth.time is not None
    assert (growth.time.exponent, growth.time.first, growth.time.last) == (pytest.approx(2), 100, 800)
    assert [step.tokens for step in growth.steps] == [10, 2, 2, 2]
    assert growth.steps[-1].time == pytest.approx(4)


def test_slope_is_bytes_per_token():
    (growth,) = growths([row(t, peak=100 + 8 * t) for t in (100, 200, 400)])
    assert growth.bytes_per_token == pytest.approx(8)
    assert growth.time is None


def test_sizes_of_the_same_number_of_tokens_have_no_slope():
    (growth,) = growths([row(64, 1.0, 100), row(64, 2.0, 200)])
    assert (growth.time, growth.memory, growth.bytes_per_token) == (None, None, None)


def test_failed_sizes_are_left_out_of_the_fit():
    (growth,) = growths([row(100, 1.0), row(200, 2.0), row(400, failure=OUT_OF_MEMORY)])
    assert growth.time is not None
    assert growth.time.last == 200
    assert growth.steps[-1].time is None


# cases


def test_a_machine_that_slows_down_between_sizes_is_not_taken_for_growth():
    """Twice the milliseconds at half the speed of the matrix product are the same work."""
    rows = [
        replace(row(tokens, milliseconds), macs=10 * tokens, share=0.5)
        for tokens, milliseconds in ((100, 1.0), (400, 8.0))
    ]
    (growth,) = growths(rows)
    assert growth.time is not None
    assert growth.time.exponent == pytest.approx(1)
    assert growth.steps[0].time == pytest.approx(4)


def test_every_operator_of_the_package_is_a_case():
    attentions = {name.removesuffix("_attention") for name in ops.__all__ if name.endswith("_attention")}
    assert set(OPERATORS) == attentions | {"softpp", MATH}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_every_operator_runs(name, mode):
    prepare(OperatorCase(name, 2, 8), 60, mode, Setting(batch=2)).run()


@pytest.mark.parametrize("name", [*ATTENTIONS, MATH])
def test_every_attention_runs_in_the_network_of_figure_1b(name):
    case = VitCase(name, depth=1, dim=24, num_heads=2, side=8)
    prepare(case, 2, "train", Setting()).run()
    assert (case.tokens(2), VitCase(name).tokens(2)) == (128, 1568)


@pytest.mark.parametrize("name", [*ATTENTIONS, MATH])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_attention_runs_on_sequences(name, dtype):
    prepare(SequenceCase(name), 70, "train", Setting(batch=2, dtype=dtype)).run()


@pytest.mark.parametrize("name", ["soft", "softpp", "inline"])
def test_cost_on_sequences_grows_with_the_length_alone(name):
    """Beyond the length at which there are 64 landmarks."""

    def work(length):
        function, inputs, _ = SequenceCase(name).build(length, Setting())
        return count_macs(lambda: function(*inputs))

    assert work(2048) - work(1024) == 2 * (work(1024) - work(512)) > 0


def test_a_training_step_has_gradients_of_weights_and_inputs_and_leaves_none():
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            x.register_hook(lambda grad: seen.append("input"))
            self.weight.register_hook(lambda grad: seen.append("weight"))
            return super().forward(x)

    module = Watched(4, 4)

    class Fake(LayerCase):
        def build(self, size, setting):
            return Subject(module, (torch.randn(1, 4).requires_grad_(),), module)

    prepare(Fake("fake"), 8, "train", Setting()).run()
    assert set(seen) == {"input", "weight"}
    assert module.weight.grad is None


def test_the_dtype_is_that_of_weights_and_inputs():
    for case in (OperatorCase("inline"), LayerCase("inline")):
        out = prepare(case, 64, "infer", Setting(dtype="bfloat16")).run()
        assert out.dtype == torch.bfloat16


def test_options_of_models_are_yaml():
    case = parse_model("softpp_micro:attention=[softpp, softmax, inline, inline],drop_rate=5e-1,in_chans=1")
    assert case.model == "softpp_micro"
    assert case.options == {"attention": ["softpp", "softmax", "inline", "inline"], "drop_rate": 0.5, "in_chans": 1}
    prepare(case, 32, "infer", Setting()).run()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("softpp_tyny", r"no model 'softpp_tyny'; did you mean softpp_tiny"),
        ("softpp_tyny:attention=soft", r"did you mean softpp_tiny"),
        ("softpp_tiny:attention", r"KEY=VALUE,\.\.\. as in"),
        ("softpp_tiny:=3", r"KEY=VALUE"),
        ("softpp_tiny:attention=[soft", r"attention of softpp_tiny must be YAML, got '\[soft'"),
    ],
)
def test_mistakes_in_model_names_are_explained(text, message):
    with pytest.raises(ValueError, match=message):
        parse_model(text)


# measuring


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


def test_a_size_that_a_model_cannot_take_is_a_row_and_the_rest_goes_on():
    cases = [ModelCase("swin_tiny_patch4_window7_224", "swin_tiny_patch4_window7_224"), parse_model("inline_micro")]
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
    assert failure_of("resnet18:colour=red", 64).startswith("model.options of resnet18: ")
    assert failure_of("vit_tiny_patch16_224:depth=1", 8).startswith("vit_tiny_patch16_224 cannot take images of 8 x 8")
    assert failure_of("vit_tiny_patch16_224:num_heads=5", 64).startswith("vit_tiny_patch16_224 cannot be built: ")


def test_networks_of_convolutions_take_any_size():
    assert failure_of("resnet18", 40) is None


@pytest.mark.parametrize("slow", ["float32", "bfloat16"])
def test_the_peak_is_that_of_the_faster_product(monkeypatch, slow):
    def fake_turns(runs, rounds, **_):
        return {name: Timing((2.0 if name.endswith(slow) else 1.0,) * rounds) for name in runs}

    monkeypatch.setattr(sys.modules[Row.__module__], "take_turns", fake_turns)
    (group,) = measure([LayerCase("inline")], [32], setting=Setting(dtype="bfloat16"), rounds=2)
    assert group.peak_gflops == pytest.approx(2e-9 * 1024**3)
    assert group.rows[0].share == pytest.approx(group.rows[0].macs / 1024**3)


def test_the_product_of_float32_is_timed_once(monkeypatch):
    timed = []

    def fake_turns(runs, rounds, **_):
        timed.append(list(runs))
        return {name: Timing((1.0,) * rounds) for name in runs}

    monkeypatch.setattr(sys.modules[Row.__module__], "take_turns", fake_turns)
    list(measure([LayerCase("inline")], [32], rounds=1))
    assert timed == [["inline", " matrix product float32"]]


@pytest.mark.parametrize("device", ["cpux", "mps", "meta", "cuda:", "cuda:x", "cudafoo", "cpu:0", ""])
def test_other_devices_are_refused(device):
    with pytest.raises(ValueError, match=rf"device must be cpu, cuda or cuda:N, got '{device}'"):
        check_device(device)


def test_a_gpu_must_be_there(monkeypatch):
    check_device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device cuda:1: torch finds no CUDA device here"):
        check_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda")
    check_device("cuda:1")
    with pytest.raises(ValueError, match="at most cuda:1 here, got 'cuda:2'"):
        check_device("cuda:2")


def test_the_environment_names_the_gpu_that_was_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the GPU {device}")
    assert environment("cuda:1")["gpu"] == "the GPU cuda:1"
    assert "gpu" not in environment()


def test_what_has_no_memory_is_not_timed():
    def meter(case, size, mode, setting):
        return OUT_OF_MEMORY if case.name == "softmax" else Memory(2**20, 2**30)

    (group,) = measure([LayerCase("softmax"), LayerCase("inline")], [32], rounds=1, meter=meter)
    assert (group.rows[0].failure, group.rows[0].milliseconds) == (OUT_OF_MEMORY, None)
    # and the baseline is missing
    assert (group.rows[1].peak_bytes, group.rows[1].speedup) == (2**20, None)
    assert group.rows[1].milliseconds > 0


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"), OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] not enough memory: you tried to allocate 9 bytes"), OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), OUT_OF_MEMORY),
        (ValueError("a size\nand more"), "a size"),
        (AssertionError(), "AssertionError"),
        (ValueError("x" * 500 + "?"), "x" * 148 + " ... " + "x" * 146 + "?"),
    ],
)
def test_failures_are_one_line(error, text):
    assert failure_text(error) == text


# the quick start's


def test_scaling_measures_every_attention_at_every_size():
    groups = list(measure_scaling(["softmax", "inline"], [64, 32], rounds=1))
    assert [[(row.image_size, row.tokens, row.attention) for row in group] for group in groups] == [
        [(32, 16, "softmax"), (32, 16, "inline")],
        [(64, 64, "softmax"), (64, 64, "inline")],
    ]
    assert all(row.milliseconds > 0 and row.peak_bytes > 0 for row in groups[1])


def test_every_attention_can_be_measured():
    (rows,) = measure_scaling(list(ATTENTIONS), [32], rounds=1)
    assert [row.attention for row in rows] == list(ATTENTIONS)
    assert all(row.macs > 0 for row in rows)


def test_images_smaller_than_a_patch_are_refused():
    with pytest.raises(ValueError, match="at least one patch of 8 pixels, got 4"):
        list(measure_scaling(["inline"], [4]))


# results


def test_results_are_plain_data_with_fits():
    results = Results("ops", "softline bench ops", "a", {"batch": 1}, dict(environment()))
    for tokens in (100, 200):
        results.hear(row(tokens))
        results.hear(row(tokens, float(tokens)))
    written = json.loads(json.dumps(results.to_dict()))
    assert [r["milliseconds"] for r in written["rows"]] == [100, 200]
    assert written["growth"][0]["time"]["exponent"] == pytest.approx(1)
    assert (written["command"], written["finished"]) == ("softline bench ops", False)
    assert {"torch", "timm", "commit", "threads", "cpu", "date", "native_bfloat16"} <= set(written["environment"])


def test_a_directory_outside_a_checkout_has_no_commit(tmp_path):
    assert commit_of(tmp_path) is None
