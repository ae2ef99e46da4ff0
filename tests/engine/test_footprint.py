import pytest
import timm
import torch

import softline  # noqa: F401
from softline.engine import footprint as footprint_module
from softline.engine.footprint import check_image_memory, footprint
from softline.errors import UserError
from softline.measure.counting import peak_bytes


@pytest.mark.parametrize("name", ["softpp_micro", "inline_micro", "resnet10t"])
@pytest.mark.parametrize("size", [(256, 384), (1200, 1900)])
def test_the_estimate_is_what_a_run_holds(name, size):
    model = timm.create_model(name).eval()
    image = torch.randn(1, 3, *size)
    with torch.no_grad():
        held = peak_bytes(lambda: model(image)) + 4 * image.numel()
    assert footprint(model, size) == pytest.approx(held, rel=0.25)


def test_nothing_is_allocated_for_an_image_larger_than_any_memory():
    model = timm.create_model("softpp_micro").eval()
    # a terabyte and more
    assert footprint(model, (200_000, 400_000)) > 10**12


def test_an_image_that_does_not_fit_is_refused_with_its_size_the_estimate_and_the_limit(monkeypatch):
    model = timm.create_model("softpp_micro").eval()
    monkeypatch.setattr(footprint_module, "available_memory", lambda: 10**9)
    check_image_memory(model, model, (512, 512), what="an image", instead="choose another")
    with pytest.raises(UserError) as caught:
        check_image_memory(model, model, (8000, 9000), what="an image", instead="choose another")
    needed = footprint(model, (8000, 9000)) / 1e9
    assert str(caught.value) == (
        f"an image of 9000 x 8000 pixels needs about {needed:.1f} GB of memory, and 1.0 GB are available: "
        "choose another"
    )


def test_where_the_system_does_not_tell_its_memory_nothing_is_refused(monkeypatch):
    model = timm.create_model("softpp_micro").eval()
    monkeypatch.setattr(footprint_module, "available_memory", lambda: None)
    check_image_memory(model, model, (80_000, 90_000), what="an image", instead="choose another")
