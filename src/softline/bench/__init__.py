"""Measure what attentions cost: counted operations and bytes, and time on this machine."""

from softline.bench.cost import count_macs, peak_bytes
from softline.bench.scaling import ScalingRow, growth_exponent, measure_scaling

__all__ = ["ScalingRow", "count_macs", "growth_exponent", "measure_scaling", "peak_bytes"]
