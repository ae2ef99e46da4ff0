"""ONNX files: writing a recorded graph, and running it in ONNX Runtime.

What softline needs to use a file again, and what others need to use it at all (class names, sizes, mean and standard
deviation), is in its metadata, as JSON.

A file from outside is parsed and checked first, and ONNX Runtime is given what was parsed. The file must hold its
weights, use no operators but ONNX's own and run no steps without end, and its input must be the one that its metadata
describes. What it returns is compared with what it declares.
"""

import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import softline
from softline.deploy.onnx_checks import parse_onnx
from softline.engine.graph import BATCH, Graph
from softline.engine.shipping import End
from softline.errors import UserError
from softline.files import read_bytes
from softline.plain import check_entries, check_plain, read_json, short

# read when onnxruntime is imported, which everything in `softline.deploy` does after this module; otherwise its builds
# with telemetry keep an identifier in the user's cache and send events to their maker
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

FORMAT = 1
KEY = "softline"
# protobuf's
MOST_BYTES = 2**31 - 1
INPUTS = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(uint8)": np.uint8}


def write_onnx(program: ExportedProgram, graph: Graph, metadata: Mapping[str, Any]) -> bytes:
    """Translate a recorded graph into the content of an ONNX file."""
    import onnx_ir
    from onnx_ir.passes import common
    from onnxscript import optimizer

    with torch.no_grad(), warnings.catch_warnings():
        # about torch's own modules
        warnings.simplefilter("ignore")
        translated = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
    assert translated is not None, "the dynamo exporter returns a program"
    model = translated.model
    # torch's own optimisation also looks for patterns, in vain and for most of the time
    optimizer.fold_constants(model)
    for simplify in (
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    ):
        simplify(model)
    _name_ends(model, graph)
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
    model.producer_name, model.producer_version = "softline", softline.__version__
    model.metadata_props.clear()
    model.metadata_props.update({key: json.dumps(value) for key, value in metadata.items()})
    proto = onnx_ir.to_proto(model)
    # formulas of the sizes, which runtimes find out themselves, and notes about torch's graph
    del proto.graph.value_info[:]
    content = proto.SerializeToString()
    if len(content) > MOST_BYTES:
        raise UserError(f"an ONNX file has at most 2 GB, the network needs {len(content) / 2**30:.1f}")
    return content


def count_operators(content: bytes) -> dict[str, int]:
    """Return how often each operator occurs in an ONNX file, the most frequent first."""
    import onnx
    import onnx_ir

    model = onnx_ir.from_proto(onnx.load_from_string(content))
    return dict(Counter(node.op_type for node in model.graph.all_nodes()).most_common())


def _name_ends(model: Any, graph: Graph) -> None:
    """Give inputs, outputs and their free axes the names that users see."""
    import onnx_ir

    ends = [(graph.input, graph.axes), *graph.outputs.items()]
    for value, (name, axes) in zip([*model.graph.inputs, *model.graph.outputs], ends, strict=True):
        value.name = name
        known = list(value.shape)
        value.shape = onnx_ir.Shape(
            [length if isinstance(length, int) else axis or length for length, axis in zip(known, axes, strict=True)]
        )


def open_onnx(path: str | Path) -> tuple["OnnxNetwork", dict[str, Any]]:
    """Open a file that softline exported: its network, and what `Trained.describe` says about it with its task."""
    if not Path(path).exists():
        raise UserError(f"no such file: {path}")
    content = read_bytes(path)
    try:
        model = parse_onnx(content)
        about = _read_about(model)
        # not the content: what another parser makes of it has not been checked
        session = start_session(model.SerializeToString())
        _check_input(session.get_inputs(), about["input"]["axes"], about["input"]["ranges"])
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return OnnxNetwork(session, about["input"]["axes"], about["input"]["ranges"], str(path)), about


def _read_about(model: Any) -> dict[str, Any]:
    """Return softline's entry in the metadata."""
    stored = [entry.value for entry in model.metadata_props if entry.key == KEY]
    if not stored:
        raise UserError(f"it was not exported by softline: its metadata has no {KEY}")
    if len(stored) > 1:
        raise UserError(f"its metadata has {KEY} {len(stored)} times")
    about = read_json(stored[0], "its metadata")
    check_plain(about, "its metadata")
    entries = {"format": int, "task": str, "features": bool, "preprocess": bool, "input": dict, "description": dict}
    check_entries(about, entries, "its metadata")
    if about["format"] != FORMAT:
        raise UserError(f"it has format {about['format']}; this softline reads format {FORMAT}")
    check_entries(about["input"], {"axes": list[str | None], "ranges": dict[str, list[int | None]]}, "its metadata")
    return dict(about)


def _check_input(inputs: Any, axes: list[str | None], ranges: Mapping[str, list[int | None]]) -> None:
    """Check that a file takes the one input that its metadata describes."""
    named = {axis for axis in axes if axis is not None}
    if named != set(ranges):
        raise UserError(f"its metadata has ranges for {short(sorted(ranges))}, the input's axes are {short(axes)}")
    for axis, limits in ranges.items():
        if len(limits) != 2 or limits[0] is None or not 1 <= limits[0] <= (limits[1] or limits[0]):
            raise UserError(f"the range of {short(axis)} must be two lengths from 1 on, got {short(limits)}")
    shapes = [given.shape for given in inputs]
    if [len(shape) for shape in shapes] != [len(axes)] or not all(
        _fits(length, axis, ranges) for length, axis in zip(shapes[0], axes, strict=True)
    ):
        raise UserError(f"its metadata describes another input than {short(shapes)}: {short(axes)} in {short(ranges)}")
    if inputs[0].type not in INPUTS:
        raise UserError(f"its input must be one of {', '.join(INPUTS)}; got {inputs[0].type}")


def _fits(length: int | str | None, axis: str | None, ranges: Mapping[str, list[int | None]]) -> bool:
    """Return whether a file may declare this length for an axis: its name, or the one length that it can have."""
    if axis is None:
        return isinstance(length, int)
    return length == axis or ranges[axis] == [length, length]


def start_session(content: bytes) -> Any:
    """Start ONNX Runtime on the content of a file, on the CPU with torch's number of threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # its threads would otherwise wait for more work in a loop, and take the cores from torch
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # only errors, which are raised as well
    options.log_severity_level = 4
    # otherwise it looks for a sign of its own format, which the text in an ONNX file can imitate
    options.add_session_config_entry("session.load_model_format", "ONNX")
    with _runtime_errors("open it"):
        # without a second attempt, about which it would print
        return onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"], enable_fallback=False)


class OnnxNetwork(nn.Module):
    """An exported network, run by ONNX Runtime on the CPU.

    ranges: smallest and largest length of each named axis of the input, None for no limit.
    """

    def __init__(
        self, session: Any, axes: list[str | None], ranges: Mapping[str, list[int | None]], name: str = "the file"
    ) -> None:
        super().__init__()
        self.session, self.axes, self.ranges, self.name = session, axes, ranges, name
        (self.input,) = session.get_inputs()
        self.dtype = INPUTS[self.input.type]
        # what tasks compare with what they need, see `softline.engine.shipping.check_ends`
        self.takes = End(self.input.type, tuple(axes))
        self.outputs = {out.name: End(out.type, tuple(out.shape)) for out in session.get_outputs()}

    def forward(self, x: Tensor) -> Any:
        given = x.detach().cpu().numpy().astype(self.dtype, copy=False)
        least, most = self.ranges.get(BATCH, [1, None])
        if most is None or least != most or len(given) == least:
            return self._run(given)
        # a fixed batch: as many runs as needed, the last one filled up
        if most * given[:1].nbytes > MOST_BYTES:
            raise UserError(f"{self.name} takes {most:,} samples at once, which do not fit into 2 GB")
        parts = []
        for first in range(0, len(given), most):
            part = given[first : first + most]
            filled = np.concatenate([part, *[part[-1:]] * (most - len(part))])
            parts.append(self._run(filled)[: len(part)])
        return torch.cat(parts)

    def _run(self, given: Any) -> Any:
        self._check(given.shape)
        with _runtime_errors(f"run {self.name} on {list(given.shape)}"):
            found = self.session.run(None, {self.input.name: given})
        self._check_found(given, found)
        tensors = tuple(torch.from_numpy(part) for part in found)
        return tensors[0] if len(tensors) == 1 else tensors

    def _check(self, shape: tuple[int, ...]) -> None:
        if len(shape) != len(self.axes):
            raise UserError(f"{self.name} takes {self.input.name} with {len(self.axes)} axes, got {list(shape)}")
        for length, axis in zip(shape, self.axes, strict=True):
            least, most = self.ranges.get(axis or "", [None, None])
            if (least is not None and length < least) or (most is not None and length > most):
                wanted = f"{least}" if least == most else f"{least or 1} to {'any' if most is None else most}"
                raise UserError(f"{self.name} was exported for {axis} {wanted}, got {length}")

    def _check_found(self, given: Any, found: list[Any]) -> None:
        """Check the outputs of a run, which ONNX Runtime does not compare with those that the file declares."""
        lengths = dict(zip(self.axes, given.shape, strict=True))
        for (name, end), values in zip(self.outputs.items(), found, strict=True):
            # axes of other names have any length
            shape = [lengths.get(length) if isinstance(length, str) else length for length in end.shape]
            alike = values.ndim == len(shape) and all(
                wanted in (None, length) for wanted, length in zip(shape, values.shape, strict=True)
            )
            if not alike:
                raise UserError(f"{self.name} declares {name} as {list(end.shape)}, and returned {list(values.shape)}")
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                raise UserError(f"{self.name} returned {name} that are not finite numbers")

    def __deepcopy__(self, memo: dict[int, Any]) -> "OnnxNetwork":
        # it has no state that could change
        return self


@contextmanager
def _runtime_errors(task: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # the errors of ONNX Runtime have no class in common but this one
        raise UserError(f"ONNX Runtime cannot {task}: {' '.join(str(error).split())[:300]}") from error
