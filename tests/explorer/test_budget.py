import pytest
import timm
import torch

from softline.attention import ATTENTIONS
from softline.explorer.budget import MAX_MACS, Need, check_need, duration, need
from softline.measure.counting import count_macs


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_counts_are_those_of_a_real_run(attention):
    model = timm.create_model("softpp_micro", attention=attention, img_size=64).eval()
    with torch.no_grad():
        counted = count_macs(lambda: model(torch.zeros(1, 3, 64, 64)))
    assert need(model, (3, 64, 64)).macs == counted


def test_the_largest_tensor_shows_what_materialises_all_weights():
    tokens = (256 // 4) ** 2
    least = {}
    for attention in ("softmax", "gaussian", "softpp"):
        model = timm.create_model("softpp_micro", attention=attention).eval()
        least[attention] = need(model, (3, 256, 256)).largest
    assert least["gaussian"] >= 4 * tokens**2
    assert max(least["softmax"], least["softpp"]) < 4 * tokens**2 / 4


def test_the_model_stays_as_it_is():
    model = timm.create_model("softpp_micro").eval()
    need(model, (3, 64, 64))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_what_would_take_too_long_or_too_much_memory_is_refused_with_its_numbers():
    check_need(Need(MAX_MACS, 2**30), name="model", size=512)
    with pytest.raises(ValueError, match="model needs 761 billion multiply-adds for 1024 x 1024 pixels"):
        check_need(Need(761 * 10**9, 0), name="model", size=1024)
    with pytest.raises(ValueError, match=r"model needs a tensor of 3\.0 GiB"):
        check_need(Need(1, 3 * 2**30), name="model", size=1024)


def test_a_short_run_is_repeated_and_a_long_one_is_not(monkeypatch):
    model = torch.nn.Identity()
    assert duration(model, torch.zeros(1)).runs == 3
    ticks = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    once = duration(model, torch.zeros(1))
    assert (once.runs, once.seconds) == (1, 1)
