"""Measure the cost of attentions and models: operations and bytes by counting, time and memory on this machine."""

from softline.measure.cases import LayerCase, ModelCase, OperatorCase, SequenceCase, Setting, VitCase, parse_model
from softline.measure.counting import count_macs, peak_bytes
from softline.measure.growth import growth_exponent, growths
from softline.measure.measuring import Group, Row, measure
from softline.measure.memory import ProcessMeter
from softline.measure.scaling import ScalingRow, measure_scaling

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
