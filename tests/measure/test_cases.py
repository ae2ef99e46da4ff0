import pytest
import torch
from torch import nn

from softline import ATTENTIONS, ops
from softline.backbones.creation import use_grad_checkpointing
from softline.measure import LayerCase, OperatorCase, SequenceCase, Setting, VitCase, count_macs, parse_model
from softline.measure.cases import MATH, OPERATORS, Workload, check_device, prepare
from softline.measure.counting import peak_bytes


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
def test_cost_on_sequences_is_linear_once_there_are_64_landmarks(name):
    def work(length):
        function, inputs, _ = SequenceCase(name).build(length, Setting())
        return count_macs(lambda: function(*inputs))

    assert work(2048) - work(1024) == 2 * (work(1024) - work(512)) > 0


def test_a_training_step_computes_gradients_of_weights_and_inputs_and_keeps_none():
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            x.register_hook(lambda grad: seen.append("input"))
            self.weight.register_hook(lambda grad: seen.append("weight"))
            return super().forward(x)

    module = Watched(4, 4)

    class Fake(LayerCase):
        def build(self, size, setting):
            return Workload(module, (torch.randn(1, 4).requires_grad_(),), module)

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


def test_a_model_computes_its_blocks_twice_if_asked_to():
    def peak(text):
        runs = prepare(parse_model(text), 256, "train", Setting())
        runs.run()
        return peak_bytes(runs.run)

    assert peak("softpp_micro:grad_checkpointing=true") < 0.8 * peak("softpp_micro")
    with pytest.raises(ValueError, match=r"grad_checkpointing must be true or false, got 3"):
        prepare(parse_model("softpp_micro:grad_checkpointing=3"), 64, "train", Setting())
    with pytest.raises(ValueError, match=r"grad_checkpointing: lenet does not offer it"):
        use_grad_checkpointing(nn.Linear(2, 2), "lenet")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("softpp_tyny", r"no model 'softpp_tyny'; did you mean softpp_tiny"),
        ("softpp_tyny:attention=soft", r"did you mean softpp_tiny"),
        ("softpp_tiny:attention", r"KEY=VALUE,\.\.\. as in"),
        ("softpp_tiny:=3", r"KEY=VALUE"),
        ("softpp_tiny:attention=[soft", r"attention=\[soft of softpp_tiny is not YAML: while parsing"),
    ],
)
def test_mistakes_in_model_names_are_explained(text, message):
    with pytest.raises(ValueError, match=message):
        parse_model(text)


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
