"""Heads that are as light as a linear backbone train, predict and are exported for any size."""

import pytest

import softline
from softline.deploy.export import export
from softline.engine.train import train
from tests.tasks.small_dense import DETECTION, SEGMENTATION, dense_recipe, write_coco, write_scenes

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

HEADS = {
    "retinanet_lite": (DETECTION, write_coco, "coco/val/0.png"),
    "segformer": (SEGMENTATION, write_scenes, "scenes/val/0.png"),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_light_head_trains_predicts_and_is_exported(name, tmp_path):
    text, write, picture = HEADS[name]
    write(tmp_path)
    checkpoint = train(dense_recipe(text, tmp_path, f"--head.name={name}")).output / "last.pt"
    trained = softline.load(checkpoint)
    assert str(trained.predict(tmp_path / picture))
    report = export(trained, tmp_path / "model.onnx", rounds=1)
    assert len({(row.sizes["height"], row.sizes["width"]) for row in report.rows}) == 5
    assert str(softline.load(tmp_path / "model.onnx").predict(tmp_path / picture))
