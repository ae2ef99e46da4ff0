"""Backbones inside other packages' models, without changes there: one training step each."""

from collections import OrderedDict

import pytest
import timm
import torch
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.ops import FeaturePyramidNetwork

import softline  # noqa: F401


class WithPyramid(nn.Module):
    """What torchvision's detectors ask of a backbone: named maps of equal width."""

    def __init__(self, name: str, out_channels: int = 32) -> None:
        super().__init__()
        self.body = timm.create_model(name, features_only=True, out_indices=(1, 2, 3))
        self.fpn = FeaturePyramidNetwork(self.body.feature_info.channels(), out_channels)
        self.out_channels = out_channels

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.fpn(OrderedDict((str(index), feature) for index, feature in enumerate(self.body(x))))


def assert_takes_a_step(model: nn.Module, loss: Tensor) -> None:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert loss.isfinite()
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["softpp_micro", "inline_micro"])
def test_torchvision_retinanet_trains(name):
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    anchors = AnchorGenerator(sizes=((16,), (32,), (64,)), aspect_ratios=((0.5, 1.0, 2.0),) * 3)
    model = RetinaNet(WithPyramid(name), num_classes=3, anchor_generator=anchors, min_size=96, max_size=160)
    images = [torch.rand(3, 96, 120), torch.rand(3, 100, 90)]
    targets = [
        {"boxes": torch.tensor([[10.0, 10.0, 60.0, 50.0]]), "labels": torch.tensor([1])},
        {"boxes": torch.tensor([[20.0, 5.0, 70.0, 80.0]]), "labels": torch.tensor([2])},
    ]
    losses = model(images, targets)
    assert_takes_a_step(model, sum(losses.values()))


@pytest.mark.parametrize("name", ["tu-softpp_tiny", "tu-inline_pvt_tiny"])
def test_segmentation_models_upernet_trains(name):
    smp = pytest.importorskip("segmentation_models_pytorch")
    model = smp.UPerNet(name, encoder_weights=None, classes=5)
    logits = model(torch.randn(2, 3, 64, 96))
    assert logits.shape == (2, 5, 64, 96)
    assert_takes_a_step(model, nn.functional.cross_entropy(logits, torch.randint(5, (2, 64, 96))))
