"""Attention operators as pure functions of tensors [B, H, N, D]: batch, heads, tokens, head dimension.

Each file holds one operator: its definition as explicit weights, its fast form and, for low-rank operators, the factors
whose product is the weights.
"""

from softline.ops.angular import angular_attention, angular_factors, angular_weights
from softline.ops.efficient import efficient_attention, efficient_factors, efficient_weights
from softline.ops.focused import focused_attention, focused_factors, focused_weights
from softline.ops.gaussian import gaussian_attention, gaussian_kernel, gaussian_weights
from softline.ops.hydra import hydra_attention, hydra_factors, hydra_weights
from softline.ops.inline import InlineSums, inline_attention, inline_factors, inline_weights
from softline.ops.linear import FEATURE_MAPS, linear_attention, linear_factors, linear_weights
from softline.ops.linformer import linformer_attention, linformer_factors, linformer_weights
from softline.ops.newton import NewtonResult, newton_inverse, newton_residuals
from softline.ops.nystrom import nystrom_attention, nystrom_factors, nystrom_weights
from softline.ops.performer import performer_attention, performer_factors, performer_features, performer_weights
from softline.ops.reformer import reformer_attention, reformer_rotations, reformer_weights
from softline.ops.soft import (
    soft_attention,
    soft_factors,
    soft_kernel,
    soft_residual,
    soft_residuals,
    soft_sums,
    soft_weights,
)
from softline.ops.soft_linear import SoftSums
from softline.ops.softmax import softmax_attention, softmax_weights

__all__ = [
    "FEATURE_MAPS",
    "InlineSums",
    "NewtonResult",
    "SoftSums",
    "angular_attention",
    "angular_factors",
    "angular_weights",
    "efficient_attention",
    "efficient_factors",
    "efficient_weights",
    "focused_attention",
    "focused_factors",
    "focused_weights",
    "gaussian_attention",
    "gaussian_kernel",
    "gaussian_weights",
    "hydra_attention",
    "hydra_factors",
    "hydra_weights",
    "inline_attention",
    "inline_factors",
    "inline_weights",
    "linear_attention",
    "linear_factors",
    "linear_weights",
    "linformer_attention",
    "linformer_factors",
    "linformer_weights",
    "newton_inverse",
    "newton_residuals",
    "nystrom_attention",
    "nystrom_factors",
    "nystrom_weights",
    "performer_attention",
    "performer_factors",
    "performer_features",
    "performer_weights",
    "reformer_attention",
    "reformer_rotations",
    "reformer_weights",
    "soft_attention",
    "soft_factors",
    "soft_kernel",
    "soft_residual",
    "soft_residuals",
    "soft_sums",
    "soft_weights",
    "softmax_attention",
    "softmax_weights",
]
