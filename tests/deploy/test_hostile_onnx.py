"""ONNX files from people nobody knows: refused in one line unless they are what softline writes."""

import copy
import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import softline
from softline.cli import main
from softline.data.images.photographs import open_photograph
from softline.deploy.export import export
from softline.engine.reading import parse_recipe
from softline.engine.shipping import describe_recipe
from softline.errors import UserError
from tests.deploy.small import small_classifier
from tests.tasks.small_dense import DETECTION, MODEL

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper  # noqa: E402

WEIGHTS = np.arange(15, dtype=np.float32).reshape(3, 5) / 10
MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
ABOUT = {
    "format": 1,
    "task": "classification",
    "features": False,
    "preprocess": False,
    "input": {
        "axes": ["batch", None, "height", "width"],
        "ranges": {"batch": [1, None], "height": [1, None], "width": [1, None]},
    },
    "description": {
        "model": "small",
        "classes": ["cat", "cup", "shoe", "bag", "tree"],
        "count": 5,
        "settings": {
            "image_size": 16,
            "mean": MEAN,
            "std": STD,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "squash",
            "mode": "RGB",
        },
    },
}
info = helper.make_tensor_value_info


def small_model(*further: Any, about: Any = ABOUT) -> Any:
    """A classifier: the mean of each channel, times the weights; ``further`` nodes make ``logits`` of ``product``."""
    nodes = [
        helper.make_node("ReduceMean", ["images", "axes"], ["means"], keepdims=0),
        helper.make_node("MatMul", ["means", "weights"], ["product" if further else "logits"]),
        *further,
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [info("images", TensorProto.FLOAT, ["batch", 3, "height", "width"])],
        [info("logits", TensorProto.FLOAT, ["batch", 5])],
        [onnx.numpy_helper.from_array(WEIGHTS, "weights"), helper.make_tensor("axes", TensorProto.INT64, [2], [2, 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    helper.set_model_props(model, {"softline": about if isinstance(about, str) else json.dumps(about)})
    return model


def saved(model: Any, directory: Path) -> Path:
    path = directory / "model.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return path


def test_a_small_file_by_hand_predicts_what_it_computes(tmp_path):
    image = open_photograph("cat").resize((16, 16))
    pixels = (np.asarray(image) / 255 - MEAN) / STD
    expected = torch.from_numpy(pixels.mean((0, 1)) @ WEIGHTS).softmax(0).float()
    found = softline.load(saved(small_model(), tmp_path)).predict(image)
    torch.testing.assert_close(found.by_label, expected, rtol=1e-4, atol=1e-5)


def tensor(**changes: Any) -> Any:
    made = onnx.numpy_helper.from_array(WEIGHTS, "weights")
    for name, value in changes.items():
        if isinstance(value, list):
            getattr(made, name)[:] = value
        elif value is None:
            made.ClearField(name)
        else:
            setattr(made, name, value)
    return made


def with_weights(**changes: Any) -> Any:
    model = small_model()
    model.graph.initializer[0].CopyFrom(tensor(**changes))
    return model


def external(location: str) -> Any:
    model = with_weights(raw_data=None, data_location=TensorProto.EXTERNAL)
    entry = onnx.StringStringEntryProto(key="location", value=location)
    model.graph.initializer[0].external_data.append(entry)
    return model


def sparse() -> Any:
    model = small_model()
    values, places = tensor(name="sparse", dims=[15]), helper.make_tensor("places", TensorProto.INT64, [15], range(15))
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [2**40]))
    return model


def endless() -> Any:
    """A loop whose condition stays true."""
    same = [helper.make_node("Identity", [given], [made]) for given, made in (("on", "go_on"), ("x", "y"))]
    body = helper.make_graph(
        same,
        "body",
        [info("step", TensorProto.INT64, []), info("on", TensorProto.BOOL, []), info("x", TensorProto.FLOAT, None)],
        [info("go_on", TensorProto.BOOL, []), info("y", TensorProto.FLOAT, None)],
    )
    model = small_model(helper.make_node("Loop", ["", "true", "product"], ["logits"], body=body))
    model.graph.initializer.append(helper.make_tensor("true", TensorProto.BOOL, [], [True]))
    return model


def hidden_loop() -> Any:
    """The same, inside a branch."""
    branch = helper.make_graph(list(endless().graph.node)[2:], "branch", [], [info("logits", TensorProto.FLOAT, None)])
    node = helper.make_node("If", ["true"], ["logits"], then_branch=branch, else_branch=branch)
    model = small_model(node)
    model.graph.initializer.append(helper.make_tensor("true", TensorProto.BOOL, [], [True]))
    return model


def foreign(domain: str) -> Any:
    model = small_model(helper.make_node("Gelu", ["product"], ["logits"], domain=domain))
    model.opset_import.append(helper.make_opsetid(domain, 1))
    return model


def unfolding() -> Any:
    """Thirty operators, each of which uses the next one twice."""
    versions = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    model = small_model(helper.make_node("F0", ["product"], ["logits"], domain="own"))
    for level in range(30):
        inner = f"F{level + 1}" if level < 29 else "Identity"
        steps = [helper.make_node(inner, [a], [b], domain="own" * (level < 29)) for a, b in ("xz", "zy")]
        model.functions.append(helper.make_function("own", f"F{level}", ["x"], ["y"], steps, versions))
    model.opset_import.append(versions[1])
    return model


def second_input() -> Any:
    model = small_model()
    model.graph.input.append(info("more", TensorProto.FLOAT, [1]))
    return model


def typed(kind: int) -> Any:
    """A network that takes another type."""
    model = small_model()
    model.graph.input[0].type.tensor_type.elem_type = kind
    model.graph.node[0].input[0] = "converted"
    model.graph.node.insert(0, helper.make_node("Cast", ["images"], ["converted"], to=TensorProto.FLOAT))
    return model


def returning(node: Any, *ends: Any) -> Any:
    model = small_model(node)
    del model.graph.output[:]
    model.graph.output.extend(ends)
    return model


def cast(kind: int) -> Any:
    return returning(helper.make_node("Cast", ["product"], ["logits"], to=kind), info("logits", kind, ["batch", 5]))


def listed() -> Any:
    ends = helper.make_tensor_sequence_value_info("logits", TensorProto.FLOAT, None)
    return returning(helper.make_node("SequenceConstruct", ["product"], ["logits"]), ends)


def two_outputs() -> Any:
    model = small_model()
    model.graph.output.append(info("means", TensorProto.FLOAT, ["batch", 3]))
    return model


def deeper() -> Any:
    node = helper.make_node("Unsqueeze", ["product", "axes"], ["logits"])
    return returning(node, info("logits", TensorProto.FLOAT, ["batch", 5, 1, 1]))


HOSTILE = {
    "a file beside it": (lambda: external("weights.bin"), "in another file"),
    "a file above it": (lambda: external("../weights.bin"), "in another file"),
    "any file": (lambda: external("/etc/passwd"), "in another file"),
    "memory": (lambda: external("*/_ORT_MEM_ADDR_/*"), "in another file"),
    "huge": (lambda: with_weights(raw_data=None, dims=[2**20, 2**20]), r"claims the shape \[1048576, 1048576\]"),
    "huge with data": (lambda: with_weights(dims=[2**62, 4]), "and has 15 numbers"),
    "negative": (lambda: with_weights(dims=[-3, -5]), r"claims the shape \[-3, -5\]"),
    "odd numbers": (lambda: with_weights(data_type=TensorProto.BFLOAT16), "softline does not write"),
    "sparse": (sparse, "sparse tensors"),
    "endless": (endless, "Loop may run for ever"),
    "endless inside": (hidden_loop, "Loop may run for ever"),
    "foreign": (lambda: foreign("evil"), "'Gelu' of 'evil' is none of ONNX's own"),
    "ONNX Runtime's": (lambda: foreign("com.microsoft"), "none of ONNX's own"),
    "unfolding": (unfolding, "operators of its own"),
    "unknown operator": (
        lambda: small_model(helper.make_node("Nothing", ["product"], ["logits"])),
        "ONNX Runtime cannot open it",
    ),
    "two inputs": (second_input, "describes another input"),
    "double": (lambda: typed(TensorProto.DOUBLE), "its input must be one of"),
    "strings": (lambda: typed(TensorProto.STRING), "its input must be one of"),
    "integers": (lambda: typed(TensorProto.INT64), r"the input must be tensor\(float\)"),
    "integers out": (lambda: cast(TensorProto.INT64), r"logits must be tensor\(float\)"),
    "strings out": (lambda: cast(TensorProto.STRING), r"logits must be tensor\(float\)"),
    "a list out": (listed, r"got seq\(tensor\(float\)\)"),
    "two outputs": (two_outputs, "the outputs must be logits"),
    "maps out": (deeper, r"logits must be tensor\(float\) \['batch', 5\]"),
    "metadata twice": (
        lambda: (model := small_model(), model.metadata_props.append(model.metadata_props[0]))[0],
        "its metadata has softline 2 times",
    ),
    "empty": (lambda: b"", "not exported by softline"),
    "a page": (lambda: b"<!DOCTYPE html><html></html>", "no ONNX file"),
    "a pickle": (lambda: b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R.", "no ONNX file"),
    "a zip": (lambda: b"PK\3\4" + bytes(200), "no ONNX file"),
    "another format": (lambda: b"\x20\0\0\0ORTM" + bytes(200), "no ONNX file"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_before_it_runs(kind, tmp_path, monkeypatch):
    make, message = HOSTILE[kind]
    inner = tmp_path / "inner"
    inner.mkdir()
    # if it were read, the file would be accepted
    for folder in (tmp_path, inner):
        (folder / "weights.bin").write_bytes(WEIGHTS.tobytes())
    monkeypatch.chdir(inner)
    with pytest.raises(UserError, match=message):
        softline.load(saved(make(), inner))


def test_a_directory_is_named(tmp_path):
    (tmp_path / "model.onnx").mkdir()
    with pytest.raises(UserError, match="must be a regular file, it is a directory"):
        softline.load(tmp_path / "model.onnx")


def test_what_was_parsed_is_what_runs(tmp_path):
    """ONNX Runtime takes a file for its own format by the fifth to eighth byte, which may be those of a name."""
    model = small_model()
    model.producer_name = "ORTM, or so"
    path = saved(model, tmp_path)
    assert path.read_bytes()[4:8] == b"ORTM"
    assert softline.load(path).classes[0] == "cat"


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("format", 2, "has format 2"),
        ("task", "\x1b[31m", "task must be one of"),
        ("task", "detection", "the description has no recipe"),
        ("features", "no", "features in its metadata must be bool"),
        ("input.axes", [None, None, "height", "width"], "the input's axes are"),
        ("input.axes", ["height", None, "batch", "width"], "describes another input"),
        ("input.ranges.batch", [], "two lengths"),
        ("input.ranges.batch", [0, 0], "two lengths"),
        ("input.ranges.height", [9, 3], "two lengths"),
        ("description.count", 6, "names 5 of 6 classes"),
        ("description.classes", ["a", "b"], "names 2 of 5 classes"),
        ("description.settings.image_size", 10**9, "at most 8192"),
        ("description.settings.crop_pct", 1e-9, "at most 8192"),
        ("description.settings.mean", [float("nan")] * 3, "mean must be"),
        ("description.settings.std", [float("inf")] * 3, "std must be"),
        ("description.settings.mode", "CMYK", "mode must be one of L, RGB"),
        ("description.settings.mode", "L", "channels"),
        ("description.settings.interpolation", "x", "interpolation must be one of"),
        ("description", [[[]] * 3], "description in its metadata must be dict"),
    ],
)
def test_metadata_that_lies_is_refused(where, value, message, tmp_path):
    about = copy.deepcopy(ABOUT)
    *sections, key = where.split(".")
    part: Any = about
    for section in sections:
        part = part[section]
    part[key] = value
    with pytest.raises(UserError, match=message):
        softline.load(saved(small_model(about=about), tmp_path)).predict(open_photograph("cat"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":' * 50_000 + "1" + "}" * 50_000, "nested too deeply"),
        (json.dumps({**ABOUT, "more": [[[]]]})[:-5] + "[" * 500 + "]" * 500 + "]]}", "more than 64 deep"),
        (json.dumps({**ABOUT, "more": 10**100}), "333 bits"),
        ('{"format": 1, "format": 1}', "there twice"),
        ("[]", "must be a dictionary"),
        ("", "not JSON"),
    ],
)
def test_metadata_out_of_proportion_is_refused(text, message, tmp_path):
    with pytest.raises(UserError, match=message):
        softline.load(saved(small_model(about=text), tmp_path))


def test_classes_are_those_of_the_logits(tmp_path):
    about = copy.deepcopy(ABOUT)
    about["description"] |= {"classes": ["a", "b"], "count": 2}
    with pytest.raises(UserError, match=r"logits must be tensor\(float\) \['batch', 2\], got .* \['batch', 5\]"):
        softline.load(saved(small_model(about=about), tmp_path))


def test_a_huge_fixed_batch_is_not_filled_up(tmp_path):
    about = copy.deepcopy(ABOUT)
    about["input"]["ranges"]["batch"] = [10**12, 10**12]
    model = small_model(about=about)
    for end in (model.graph.input[0], model.graph.output[0]):
        end.type.tensor_type.shape.dim[0].dim_value = 10**12
    with pytest.raises(UserError, match="takes 1,000,000,000,000 samples at once"):
        softline.load(saved(model, tmp_path)).predict(open_photograph("cat"))


def test_what_is_returned_is_what_is_declared(tmp_path):
    """Rows that depend on the numbers: no runtime can tell their count before."""
    rows = [
        helper.make_node("ReduceSum", ["product"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "large"], ["keep"]),
        helper.make_node("Reshape", ["keep", "one"], ["kept"]),
        helper.make_node("Compress", ["product", "kept"], ["logits"], axis=0),
    ]
    model = small_model(*rows)
    large = helper.make_tensor("large", TensorProto.FLOAT, [], [1e30])
    model.graph.initializer.extend([large, helper.make_tensor("one", TensorProto.INT64, [1], [1])])
    with pytest.raises(UserError, match=r"declares logits as \['batch', 5\], and returned \[0, 5\]"):
        softline.load(saved(model, tmp_path)).predict(open_photograph("cat"))


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    model = small_model(helper.make_node("Div", ["product", "zero"], ["logits"]))
    model.graph.initializer.append(helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0]))
    with pytest.raises(UserError, match="returned logits that are not finite numbers"):
        softline.load(saved(model, tmp_path)).predict(open_photograph("cat"))


def detection_recipe() -> Any:
    return parse_recipe((DETECTION + MODEL).replace("ROOT", "/home/me/data"))


def detector(labels: list[int], boxes: int = 1, **changes: Any) -> Any:
    """A detector that finds the same in every image."""
    described = describe_recipe(detection_recipe(), {"classes": ["brick", "leaf"], "score_threshold": 0.1})
    described["recipe"]["data"] |= changes
    about = {**ABOUT, "task": "detection", "description": described}
    about["input"] = {"axes": [None, None, "height", "width"], "ranges": {"height": [32, None], "width": [32, None]}}
    found = {
        "boxes": helper.make_tensor("b", TensorProto.FLOAT, [boxes, 4], [1.0, 1.0, 9.0, 9.0] * boxes),
        "scores": helper.make_tensor("s", TensorProto.FLOAT, [len(labels)], [0.9] * len(labels)),
        "labels": helper.make_tensor("l", TensorProto.INT64, [len(labels)], labels),
    }
    graph = helper.make_graph(
        [helper.make_node("Constant", [], [name], value=value) for name, value in found.items()],
        "detector",
        [info("images", TensorProto.FLOAT, [1, 3, "height", "width"])],
        [info(name, value.data_type, ["found", *value.dims[1:]]) for name, value in found.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    helper.set_model_props(model, {"softline": json.dumps(about)})
    return model


def test_a_detector_finds_classes_that_there_are(tmp_path):
    pytest.importorskip("torchvision")
    image = Image.new("RGB", (40, 60))
    assert softline.load(saved(detector([1]), tmp_path)).predict(image).labels.tolist() == [1]
    for labels, boxes, message in (([2], 1, "a class beyond its 2"), ([-1], 1, "beyond"), ([0, 1], 1, "as many of")):
        with pytest.raises(UserError, match=message):
            softline.load(saved(detector(labels, boxes), tmp_path)).predict(image)


@pytest.mark.parametrize(
    "changes",
    [{"source": "/etc"}, {"source": ".."}, {"source": "a/b"}, {"val_annotations": "x.json"}, {"long_side": 10**6}],
)
def test_the_recipe_in_a_file_names_no_places(tmp_path, changes):
    with pytest.raises(UserError, match=r"no place|at most 8192"):
        softline.load(saved(detector([1], **changes), tmp_path))


def test_what_is_written_names_no_places():
    recipe = detection_recipe()
    data = dataclasses.replace(recipe.data, val_annotations="/home/me/some.json")
    text = json.dumps(describe_recipe(recipe.replace(data=data), {}))
    assert "/home/me" not in text
    assert '"source": "coco"' in text


def test_the_command_says_so_in_one_line_without_control_characters(capsys, tmp_path):
    image = tmp_path / "cat.png"
    open_photograph("cat").save(image)
    about = copy.deepcopy(ABOUT)
    about["description"]["classes"][0] = "\x1b[31mred"
    assert main(["predict", str(saved(small_model(about=about), tmp_path)), str(image)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    model = small_model(helper.make_node("\x1b[31mred", ["product"], ["logits"]))
    for hostile in (model, endless(), external("weights.bin")):
        assert main(["predict", str(saved(hostile, tmp_path)), str(image)]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("softline predict: error: ")
        assert shown.err.count("\n") == 1
        assert "\x1b" not in shown.err


def test_opening_a_file_sends_nothing_and_leaves_nothing(tmp_path):
    """ONNX Runtime may collect telemetry: in the cache of the user, and a session in the temporary directory."""
    path, home = saved(small_model(), tmp_path), tmp_path / "home"
    home.mkdir()
    hidden = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    load = f"import softline; softline.load({str(path)!r})"
    environment = {**hidden, "HOME": str(home), "XDG_CACHE_HOME": str(home), "TMPDIR": str(home)}
    environment["MPLCONFIGDIR"] = str(tmp_path / "fonts")
    subprocess.run([sys.executable, "-c", load], env=environment, check=True)
    assert [left.name for left in home.rglob("*") if left.is_file()] == []


def test_a_file_that_ends_anywhere_too_early_is_refused(tmp_path):
    content = small_model().SerializeToString()
    for length in range(len(content)):
        with pytest.raises(UserError):
            softline.load(saved(content[:length], tmp_path))


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> bytes:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("exported") / "model.onnx"
    export(small_classifier(), path, size=(32, 32), batch=1, rounds=1)
    return path.read_bytes()


@pytest.mark.parametrize("by_hand", [True, False])
def test_flipped_bits_end_in_a_message_or_a_result(by_hand, request, tmp_path, capfd):
    content = small_model().SerializeToString() if by_hand else request.getfixturevalue("exported")
    numbers, image, refused = random.Random(1), Image.new("RGB", (32, 32)), 0
    capfd.readouterr()
    for _ in range(300 if by_hand else 8):
        damaged = bytearray(content)
        # the ends of the file hold the graph's steps and the metadata
        damaged[int(len(content) * numbers.betavariate(0.3, 0.3)) % len(content)] ^= 1 << numbers.randrange(8)
        try:
            softline.load(saved(bytes(damaged), tmp_path)).predict(image)
        except UserError:
            refused += 1
    assert refused > (100 if by_hand else 1)
    assert capfd.readouterr() == ("", "")
