"""Every family, through both formats, for fixed sizes and for any: minutes for each."""

import pytest
import timm
import torch

from softline.backbones.creation import MODEL_NAMES
from softline.deploy.export import export
from softline.tasks.classification.trained import Classifier
from softline.tasks.images import image_settings

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

SMALL = sorted(name for name in MODEL_NAMES if name.endswith(("_tiny", "_micro")))


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [False, True], ids=["any", "fixed"])
@pytest.mark.parametrize("ending", [".onnx", ".pt2"])
@pytest.mark.parametrize("name", SMALL)
def test_the_exported_model_is_the_model(name, ending, fixed, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).eval()
    trained = Classifier(name, model, (), image_settings(model))
    size = trained.settings["image_size"]
    sizes = {"size": (size, size), "batch": 1} if fixed else {}
    report = export(trained, tmp_path / f"model{ending}", rounds=1, **sizes)
    assert max(row.difference for row in report.rows) <= 1e-4
    if not fixed:
        assert len({(row.sizes["height"], row.sizes["width"]) for row in report.rows}) == 5
        assert {row.sizes["batch"] for row in report.rows} == {1, 3}
