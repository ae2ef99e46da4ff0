"""Exported files do what the trained model does, say what they are, and are refused if they are something else."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

import softline
from softline.cli import main
from softline.data.images.photographs import open_photograph
from softline.deploy import parity
from softline.deploy.export import export
from softline.deploy.onnx_files import open_onnx
from softline.errors import UserError
from tests.deploy.small import SMALL, saved_classifier, small_classifier

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

QUICK = {"rounds": 1}


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    return small_classifier()


@pytest.fixture(scope="module")
def exported(classifier, tmp_path_factory) -> tuple[Path, dict]:
    """The classifier as an ONNX file for any size, and the report."""
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    return path, export(classifier, path, **QUICK).to_dict()


def test_an_onnx_file_predicts_what_the_model_predicts(classifier, exported):
    photographs = [open_photograph("cat"), open_photograph("coffee"), open_photograph("cat").rotate(90)]
    reopened = softline.load(exported[0])
    assert reopened.classes == classifier.classes
    assert reopened.task == "classification"
    for ours, theirs in zip(reopened.predict(photographs), classifier.predict(photographs), strict=True):
        assert ours.label == theirs.label
        torch.testing.assert_close(ours.by_label, theirs.by_label, rtol=1e-4, atol=1e-5)


def test_the_report_covers_sizes_and_batches_and_is_plain(exported):
    _, report = exported
    assert {row["sizes"]["batch"] for row in report["rows"]} == {1, 3}
    assert len({(row["sizes"]["height"], row["sizes"]["width"]) for row in report["rows"]}) >= 5
    assert all(row["difference"] <= 1e-4 and row["agreement"] == 1 for row in report["rows"])
    assert report["bytes"] == exported[0].stat().st_size
    assert report["operators"]["MatMul"] > 10
    json.dumps(report)


def test_the_metadata_is_readable_without_softline(exported):
    session = onnxruntime.InferenceSession(exported[0], providers=["CPUExecutionProvider"])
    found = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
    assert found["classes"] == ["cat", "cup", "shoe", "bag", "tree"]
    assert found["size"] == {"height": 48, "width": 48}
    assert len(found["mean"]) == len(found["std"]) == 3
    (given,), (out,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.shape) == ("images", ["batch", 3, "height", "width"])
    assert (out.name, out.shape) == ("logits", ["batch", 5])


def test_a_torch_file_serves_any_size(classifier, tmp_path):
    path = tmp_path / "model.pt2"
    report = export(classifier, path, **QUICK)
    assert max(row.difference for row in report.rows) <= 1e-4
    extra = {"softline.json": ""}
    run = torch.export.load(path, extra_files=extra).module()
    assert json.loads(extra["softline.json"])["classes"] == list(classifier.classes)
    images = torch.randn(1, 3, 37, 90)
    with torch.no_grad():
        torch.testing.assert_close(run(images), classifier.model(images), rtol=1e-4, atol=1e-4)


def test_fixed_sizes_are_kept_and_others_refused(classifier, tmp_path):
    path = tmp_path / "model.onnx"
    report = export(classifier, path, size=(40, 56), batch=2, **QUICK)
    assert [row.sizes for row in report.rows] == [{"batch": 2, "height": 40, "width": 56}]
    network, _ = open_onnx(path)
    images = torch.randn(5, 3, 40, 56)
    with torch.no_grad():
        # in runs of two, the last one filled up
        torch.testing.assert_close(network(images), classifier.model(images), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="exported for height 40, got 48"):
        network(torch.randn(2, 3, 48, 56))


def test_bytes_are_normalised_by_the_file(classifier, tmp_path):
    path = tmp_path / "model.onnx"
    export(classifier, path, size=(48, 48), preprocess=True, **QUICK)
    image = open_photograph("cat").resize((48, 48))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"pixels": np.asarray(image)[None]})
    settings = classifier.settings
    pixels = (torch.from_numpy(np.array(image)).float() / 255 - torch.tensor(settings["mean"])) / torch.tensor(
        settings["std"]
    )
    with torch.no_grad():
        expected = classifier.model(pixels.permute(2, 0, 1)[None])
    torch.testing.assert_close(torch.from_numpy(logits), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="normalises images itself"):
        softline.load(path)


def test_features_are_the_maps_of_the_stages(classifier, tmp_path):
    path = tmp_path / "features.onnx"
    export(classifier, path, size=(64, 48), batch=1, features=True, **QUICK)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [out.shape for out in session.get_outputs()] == [[1, 8, 16, 12], [1, 8, 8, 6], [1, 16, 4, 3], [1, 16, 2, 2]]
    with pytest.raises(UserError, match="features"):
        softline.load(path)


def test_half_precision_halves_the_file(classifier, exported, tmp_path):
    path = tmp_path / "half.onnx"
    whole = export(classifier, tmp_path / "whole.onnx", size=(48, 48), batch=1, **QUICK)
    half = export(classifier, path, size=(48, 48), batch=1, precision="fp16", **QUICK)
    assert 0 < max(row.difference for row in half.rows) <= half.tolerance
    assert half.bytes < whole.bytes
    # inverses stay in float32: no MatMul of Newton's method has half-precision operands
    assert half.operators["Cast"] > whole.operators.get("Cast", 0)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_eight_bits(classifier, tmp_path, kind):
    pytest.importorskip("onnx")
    path = tmp_path / "int8.onnx"
    images = [open_photograph("cat"), open_photograph("coffee")] if kind == "static" else None
    report = export(classifier, path, size=(48, 48), batch=1, int8=kind, calibration=images, **QUICK)
    assert 1e-6 < max(row.difference for row in report.rows) <= report.tolerance
    # those of the file that is written, not those it was made of
    assert {"dynamic": "DynamicQuantizeLinear", "static": "QuantizeLinear"}[kind] in report.operators
    assert softline.load(path).predict(open_photograph("cat")).class_names == classifier.classes


def test_calibration_fills_a_batch(classifier, tmp_path):
    with pytest.raises(UserError, match="at least 3 images, as many as a batch has, got 2"):
        export(
            classifier,
            tmp_path / "int8.onnx",
            size=(48, 48),
            batch=3,
            int8="static",
            calibration=[open_photograph("cat"), open_photograph("coffee")],
            **QUICK,
        )
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_differs_is_not_written(classifier, tmp_path, monkeypatch):
    monkeypatch.setitem(parity.TOLERANCES, "fp32", 1e-12)
    path = tmp_path / "model.onnx"
    with pytest.raises(UserError, match=r"differs from the original by .*Nothing was written"):
        export(classifier, path, size=(48, 48), batch=1, **QUICK)
    assert list(tmp_path.iterdir()) == []


def run_command(capsys, *arguments: str) -> str:
    """The one line that a refused command prints."""
    assert main(["export", *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("softline export: error: ")
    assert "\n" not in said
    return said


def test_mistakes_end_in_one_line_and_leave_nothing(capsys, tmp_path):
    directory, _ = saved_classifier(tmp_path / "timm")
    out = tmp_path / "out"
    out.mkdir()
    source, onnx = str(directory), str(out / "m.onnx")
    mistakes = {
        ("--to", str(out / "m.tflite")): "must end in .onnx",
        ("--to", onnx, "--size", "12x"): "--size must be",
        ("--to", onnx, "--size", "0"): "--size must be",
        ("--to", onnx, "--batch", "0"): "--batch must be",
        ("--to", onnx, "--length", "5"): "length cannot be chosen",
        ("--to", onnx, "--calibrate", "embedded"): "--calibrate is for --int8 static",
        ("--to", str(out / "m.pt2"), "--int8", "dynamic"): "int8 is for .onnx",
        ("--to", onnx, "--compile"): "ends in .pt2",
        ("--to", onnx, "--int8", "static", "--precision", "fp16"): "int8 starts from fp32",
        ("--to", onnx, "--int8", "static", "--calibrate", str(out)): str(out),
    }
    for options, message in mistakes.items():
        assert message in run_command(capsys, source, *options), options
    assert message in run_command(capsys, source, *options)
    assert list(out.iterdir()) == []


def test_other_files_are_refused(exported, tmp_path):
    content = exported[0].read_bytes()
    truncated, foreign = tmp_path / "truncated.onnx", tmp_path / "foreign.onnx"
    truncated.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match="no ONNX file, or a damaged one"):
        softline.load(truncated)
    onnx = pytest.importorskip("onnx")
    model = onnx.load(exported[0])
    del model.metadata_props[:]
    onnx.save(model, foreign)
    with pytest.raises(UserError, match="was not exported by softline"):
        softline.load(foreign)
    for damage in ("{}", "[", '{"format": 1, "task": "classification", "input": {}, "description": {}}'):
        model.metadata_props.append(onnx.StringStringEntryProto(key="softline", value=damage))
        onnx.save(model, foreign)
        with pytest.raises(UserError):
            softline.load(foreign)
        del model.metadata_props[:]
    with pytest.raises(UserError, match="no such file"):
        softline.load(tmp_path / "none.onnx")
    with pytest.raises(UserError, match=r"torch\.export\.load"):
        softline.load(tmp_path / "model.pt2")


def test_the_command_writes_file_and_report(capsys, tmp_path):
    directory, trained = saved_classifier(tmp_path / "timm")
    path, report = tmp_path / "model.onnx", tmp_path / "report.json"
    options = ["--size", "48", "--batch", "1", "--no-compiled", "--json", str(report)]
    assert main(["export", str(directory), "--to", str(path), *options]) == 0
    said = capsys.readouterr().out
    assert "1x48x48" in said
    assert "allowed 0.0001" in said
    assert json.loads(report.read_text())["input"]["ranges"] == {"batch": [1, 1], "height": [48, 48], "width": [48, 48]}
    image = tmp_path / "cat.png"
    open_photograph("cat").save(image)
    assert main(["predict", str(path), str(image)]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert trained.predict(Image.open(image)).label in line


def test_the_small_models_options_are_those_of_the_saved_one(tmp_path):
    directory, trained = saved_classifier(tmp_path / "timm")
    assert json.loads((directory / "config.json").read_text())["model_args"] == SMALL
    assert trained.model.stages[0].dim == SMALL["embed_dims"][0]


def test_a_vision_transformer_of_timm_with_linear_attention_is_exported_for_any_size(tmp_path):
    options = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": 16}
    free = {"dynamic_img_size": True, "dynamic_img_pad": True}
    for name, given in (
        ("fixed", options),
        ("whole", {**options, "dynamic_img_size": True}),
        ("any", {**options, **free}),
    ):
        model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **given)
        save_for_hf(model, tmp_path / name, model_args=given, safe_serialization=True)
    loaded = {name: softline.load(tmp_path / name) for name in ("fixed", "whole", "any")}
    for trained in loaded.values():
        softline.replace_attention(trained.model, "inline")
    report = export(loaded["any"], tmp_path / "any.onnx", **QUICK)
    assert len({(row.sizes["height"], row.sizes["width"]) for row in report.rows}) == 5
    with pytest.raises(UserError, match="fix the size if it takes images of one size only"):
        export(loaded["fixed"], tmp_path / "fixed.onnx")
    with pytest.raises(UserError, match=r"cannot take an input of .*divisible by patch size.*fix the size"):
        export(loaded["whole"], tmp_path / "whole.onnx")
    assert not (tmp_path / "whole.onnx").exists()
    export(loaded["fixed"], tmp_path / "fixed.onnx", size=(16, 16), **QUICK)
