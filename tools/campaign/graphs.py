"""Hostile ONNX files, made of a sound one: all of them must be refused."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tools.campaign.grammar import CONTROL, Described, malicious_pickle, zip_of

# of tensors that lie in other files; the last one is how ONNX Runtime marks a place in its own memory
LOCATIONS = ("weights.bin", "../weights.bin", "/etc/passwd", "/dev/zero", "", "missing", "*/_ORT_MEM_ADDR_/*")
HUGE_SHAPES = ((2**20, 2**20), (2**40,), (2**62, 4), (-1, 4), (2**31, 2**31, 4), (1, 2**33))


def hostile_onnx(random: Random, sound: bytes, canary: Path) -> Described:
    """Return a file that must be refused, and what is wrong with it."""
    import onnx

    changes: dict[str, Callable[[Any, Random], None]] = {
        "a tensor in another file": _elsewhere,
        "a tensor that claims more than it has": _huge,
        "a sparse tensor": _sparse,
        "a loop without end": _endless,
        "a foreign operator": _foreign,
        "operators that unfold": _unfolding,
        "an unknown operator": lambda model, _: _behind(model, "Nothing" + CONTROL[:5]),
        "an unknown version of the operators": _version,
        "a second input": _second_input,
        "an input of another type": _input_type,
        "an output of another shape": lambda model, _: _reshaped(model),
        "an output of another type": _output_type,
        "a sequence as output": lambda model, _: _listed(model),
        "a further output": _further_output,
        "no graph": lambda model, _: model.ClearField("graph"),
        "no metadata": lambda model, _: model.ClearField("metadata_props"),
        "metadata twice": _metadata_twice,
    }
    others: dict[str, Callable[[], bytes]] = {
        "an empty file": lambda: b"",
        "zeros": lambda: bytes(random.choice([1, 1000, 10**6])),
        "a page": lambda: b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
        "a pickle": lambda: malicious_pickle(random, canary)[1],
        "a zip of a pickle": lambda: zip_of(malicious_pickle(random, canary)[1]),
        "ONNX Runtime's own format": lambda: b"\x20\0\0\0ORTM" + random.randbytes(random.choice([0, 24, 4000])),
    }
    what = random.choice([*changes, *others])
    if what in others:
        return what, others[what]()
    model = onnx.load_from_string(sound)
    changes[what](model, random)
    return what, model.SerializeToString()


def altered_metadata(random: Random, sound: bytes, alter: Callable[[bytes], Described]) -> Described:
    """Return a file whose entry for softline has been altered, as JSON."""
    import onnx

    model = onnx.load_from_string(sound)
    (entry,) = (entry for entry in model.metadata_props if entry.key == "softline")
    what, content = alter(entry.value.encode())
    # a text in an ONNX file is UTF-8
    entry.value = content.decode(errors="replace")
    return what, model.SerializeToString()


def _behind(model: Any, operator: str, *, inputs: tuple[str, ...] = (), domain: str = "", **attributes: Any) -> None:
    """Put an operator between the last one and the output."""
    from onnx import helper

    name = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["before" if output == name else output for output in node.output]
    given = [*inputs, "before"] if operator == "Loop" else ["before", *inputs]
    model.graph.node.append(helper.make_node(operator, given, [name], domain=domain, **attributes))


def _elsewhere(model: Any, random: Random) -> None:
    from onnx import StringStringEntryProto, TensorProto

    tensor = random.choice(model.graph.initializer)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": random.choice(LOCATIONS), "offset": random.choice(["0", "4096", "-1", str(2**63)])}
    tensor.external_data.extend(StringStringEntryProto(key=key, value=value) for key, value in entries.items())


def _huge(model: Any, random: Random) -> None:
    tensor = random.choice(model.graph.initializer)
    tensor.dims[:] = random.choice(HUGE_SHAPES)
    if random.random() < 0.5:
        tensor.ClearField("raw_data")


def _sparse(model: Any, random: Random) -> None:
    from onnx import TensorProto, helper

    values = helper.make_tensor("sparse", TensorProto.FLOAT, [1], [1.0])
    places = helper.make_tensor("places", TensorProto.INT64, [1], [0])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [2 ** random.choice([2, 40])]))


def _endless(model: Any, random: Random) -> None:
    from onnx import TensorProto, helper

    information = helper.make_tensor_value_info
    nodes = [helper.make_node("Identity", ["on"], ["go_on"]), helper.make_node("Identity", ["x"], ["y"])]
    ends = [information("step", TensorProto.INT64, []), information("on", TensorProto.BOOL, [])]
    body = helper.make_graph(
        nodes,
        "body",
        [*ends, information("x", TensorProto.FLOAT, None)],
        [information("go_on", TensorProto.BOOL, []), information("y", TensorProto.FLOAT, None)],
    )
    model.graph.initializer.append(helper.make_tensor("true", TensorProto.BOOL, [], [True]))
    _behind(model, "Loop", inputs=("", "true"), body=body)


def _foreign(model: Any, random: Random) -> None:
    from onnx import helper

    domain, operator = random.choice([("evil", "Run"), ("com.microsoft", "Gelu"), ("ai.onnx.contrib", "PyOp")])
    model.opset_import.append(helper.make_opsetid(domain, 1))
    _behind(model, operator, domain=domain)


def _unfolding(model: Any, random: Random) -> None:
    """Define operators each of which uses the next one twice."""
    from onnx import helper

    versions = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    levels = random.choice([1, 12, 30])
    for level in range(levels):
        steps = [
            helper.make_node(f"F{level + 1}", [given], [made], domain="own") for given, made in (("x", "z"), ("z", "y"))
        ]
        model.functions.append(helper.make_function("own", f"F{level}", ["x"], ["y"], steps, versions))
    last = [helper.make_node("Identity", ["x"], ["y"])]
    model.functions.append(helper.make_function("own", f"F{levels}", ["x"], ["y"], last, versions))
    model.opset_import.append(versions[1])
    _behind(model, "F0", domain="own")


def _version(model: Any, random: Random) -> None:
    model.opset_import[0].version = random.choice([-1, 0, 2**40])


def _second_input(model: Any, random: Random) -> None:
    model.graph.input.append(model.graph.input[0])
    model.graph.input[-1].name = "further"


def _input_type(model: Any, random: Random) -> None:
    """Let it take another type, and convert that to the one that its operators take."""
    from onnx import TensorProto, helper

    given = model.graph.input[0]
    taken = given.type.tensor_type.elem_type
    for node in model.graph.node:
        node.input[:] = ["converted" if name == given.name else name for name in node.input]
    model.graph.node.insert(0, helper.make_node("Cast", [given.name], ["converted"], to=taken))
    kinds = {TensorProto.DOUBLE, TensorProto.STRING, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.FLOAT}
    given.type.tensor_type.elem_type = random.choice(sorted(kinds - {taken}))


def _reshaped(model: Any) -> None:
    from onnx import TensorProto, helper

    model.graph.initializer.append(helper.make_tensor("flat", TensorProto.INT64, [1], [-1]))
    _behind(model, "Reshape", inputs=("flat",))
    model.graph.output[0].type.tensor_type.ClearField("shape")


def _output_type(model: Any, random: Random) -> None:
    from onnx import TensorProto

    kind = random.choice([TensorProto.INT64, TensorProto.STRING, TensorProto.DOUBLE, TensorProto.BOOL])
    _behind(model, "Cast", to=kind)
    model.graph.output[0].type.tensor_type.elem_type = kind


def _listed(model: Any) -> None:
    from onnx import TensorProto, helper

    _behind(model, "SequenceConstruct")
    name = model.graph.output[0].name
    model.graph.output[0].CopyFrom(helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None))


def _further_output(model: Any, random: Random) -> None:
    from onnx import TensorProto, helper

    made = random.choice(model.graph.node).output[0]
    model.graph.node.append(helper.make_node("Shape", [made], ["further"]))
    model.graph.output.append(helper.make_tensor_value_info("further", TensorProto.INT64, None))


def _metadata_twice(model: Any, random: Random) -> None:
    model.metadata_props.append(next(entry for entry in model.metadata_props if entry.key == "softline"))
