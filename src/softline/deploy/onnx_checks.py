"""Checks of an ONNX file from outside, before anything in it is executed."""

import math
from collections.abc import Iterator
from typing import Any

from softline.errors import UserError
from softline.plain import short

# bytes of a number, by ONNX's name of its type; softline writes no others
WIDTHS = {"FLOAT": 4, "UINT8": 1, "INT8": 1, "INT32": 4, "INT64": 8, "BOOL": 1, "FLOAT16": 2, "DOUBLE": 8}


def parse_onnx(content: bytes) -> Any:
    """Parse a file from outside, and check that it is whole in itself and has no steps without end.

    It must hold all its tensors, which may claim no more numbers than there are, and use operators of ONNX alone. How
    long these take and how much memory they need is left to them.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        model = onnx.load_from_string(content)
        # of later versions of ONNX, which the checks would not see
        model.DiscardUnknownFields()
        for part in _parts(model):
            _check_part(part)
    except (DecodeError, UnicodeDecodeError) as error:
        raise UserError("no ONNX file, or a damaged one") from error
    return model


def _parts(model: Any) -> Iterator[Any]:
    """Yield a model and all that is in it, graphs within graphs too; of tensors not the numbers."""
    left = [model]
    while left:
        part = left.pop()
        yield part
        if part.DESCRIPTOR.name == "TensorProto":
            continue
        for field, value in part.ListFields():
            if field.message_type is not None:
                left += [value] if hasattr(value, "DESCRIPTOR") else value


def _check_part(part: Any) -> None:
    kind = part.DESCRIPTOR.name
    if kind == "TensorProto":
        _check_tensor(part)
    elif kind == "NodeProto":
        if part.domain not in ("", "ai.onnx"):
            raise UserError(f"the operator {short(part.op_type)} of {short(part.domain)} is none of ONNX's own")
        if part.op_type == "Loop":
            raise UserError("the operator Loop may run for ever; softline's files have none")
    elif kind in ("FunctionProto", "SparseTensorProto"):
        what = "operators of its own" if kind == "FunctionProto" else "sparse tensors"
        raise UserError(f"it has {what}, which no file of softline's has")


def _check_tensor(tensor: Any) -> None:
    """Check that a tensor has the numbers that it claims to have, in the file."""
    name = short(tensor.name)
    if tensor.data_location or tensor.external_data:
        raise UserError(f"the tensor {name} is in another file, which is not read")
    kinds = {tensor.DataType.Value(kind): width for kind, width in WIDTHS.items()}
    if tensor.data_type not in kinds:
        raise UserError(f"the tensor {name} has numbers of type {tensor.data_type}, which softline does not write")
    listed = max(len(tensor.float_data), len(tensor.int32_data), len(tensor.int64_data), len(tensor.double_data))
    held = len(tensor.raw_data) / kinds[tensor.data_type] if tensor.HasField("raw_data") else listed
    if any(length < 0 for length in tensor.dims) or math.prod(tensor.dims) != held:
        raise UserError(f"the tensor {name} claims the shape {short(list(tensor.dims))}, and has {held:g} numbers")
