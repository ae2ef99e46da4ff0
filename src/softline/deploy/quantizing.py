"""ONNX files with 8-bit weights and, for static quantisation, 8-bit activations of convolutions and linear layers.

Attention itself keeps float32: sums over tokens, distances and inverses do not survive 8 bits.
"""

import logging
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from softline.errors import UserError

Int8 = Literal["dynamic", "static"]
LINEAR = ("Gemm", "MatMul")
# channels that each output of a convolution reads; narrower ones are no faster in 8 bits
WIDE = 64


def quantize(content: bytes, kind: Int8, *, calibration: Iterable[Tensor] = ()) -> bytes:
    """Quantise the layers of an ONNX model that have constant weights.

    kind: "dynamic" finds the range of the activations in every run, "static" once, from the calibration inputs.
    calibration: inputs of the model.
    """
    import onnx
    from onnxruntime import quantization

    model = onnx.load_from_string(content)
    layers = _layers(model)
    if not layers:
        raise UserError("the network has no convolution or linear layer with constant weights to quantise")
    with tempfile.TemporaryDirectory() as directory, _quiet():
        target = Path(directory) / "quantised.onnx"
        if kind == "dynamic":
            # ONNX Runtime has no dynamic convolution that is faster than that of float32
            linear = [name for name, operator in layers.items() if operator in LINEAR]
            quantization.quantize_dynamic(model, target, nodes_to_quantize=linear, per_channel=True)
        else:
            reader = _Reader(model.graph.input[0].name, calibration)
            quantization.quantize_static(
                model,
                target,
                reader,
                nodes_to_quantize=list(layers),
                per_channel=True,
                quant_format=quantization.QuantFormat.QDQ,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                # what follows a linear layer takes float32: rounding its output would cost time and accuracy
                extra_options={"OpTypesToExcludeOutputQuantization": list(LINEAR)},
            )
            if not reader.seen:
                raise UserError("static quantisation needs at least one calibration image")
        written = onnx.load(target)
    del written.metadata_props[:]
    written.metadata_props.extend(model.metadata_props)
    return bytes(written.SerializeToString())


def _layers(model: Any) -> dict[str, str]:
    """Return the layers with constant weights that are worth 8 bits, by name, with their operator."""
    weights = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    found = {}
    for node in model.graph.node:
        shape = weights.get(node.input[1]) if len(node.input) > 1 else None
        if shape is not None and (node.op_type in LINEAR or (node.op_type == "Conv" and shape[1] >= WIDE)):
            found[node.name] = node.op_type
    return found


class _Reader:
    """Calibration inputs in the form that ONNX Runtime asks for."""

    def __init__(self, name: str, inputs: Iterable[Tensor]) -> None:
        self.name, self.inputs, self.seen = name, iter(inputs), 0

    def get_next(self) -> dict[str, Any] | None:
        given = next(self.inputs, None)
        if given is None:
            return None
        self.seen += 1
        return {self.name: given.numpy()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (given := self.get_next()) is not None:
            yield given


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep ONNX Runtime's advice to preprocess the model, which softline has done, out of the log."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
