"""Measure what attentions and models cost: counted operations and bytes, time and memory on this machine."""

from softline.bench.cases import LayerCase, ModelCase, OperatorCase, SequenceCase, Setting, VitCase, parse_model
from softline.bench.cost import count_macs, peak_bytes
from softline.bench.growth import growth_exponent, growths
from softline.bench.measure import Group, Row, measure
from softline.bench.memory import ProcessMeter
from softline.bench.scaling import ScalingRow, measure_scaling

__all__ = [
    "Group",
    "LayerCase",
    "ModelCase",
    "OperatorCase",
    "ProcessMeter",
    "Row",
    "ScalingRow",
    "SequenceCase",
    "Setting",
    "VitCase",
    "count_macs",
    "growth_exponent",
    "growths",
    "measure",
    "measure_scaling",
    "parse_model",
    "peak_bytes",
]
