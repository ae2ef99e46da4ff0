"""Low-rank changes of weights (LoRA), as parametrizations of torch, which can be merged into the weights."""

import math

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, register_parametrization, remove_parametrizations

from softline.replacing.hosted import HostedAttention
from softline.replacing.replace import replaced_attention

SCALE = 2.0
"""Of the product of both factors, whatever the rank."""


class LowRank(nn.Module):
    """weight -> weight + SCALE up down, for a weight [out, in] that is not trained itself; up [out, rank] starts at 0.

    Equations of LoRA (Hu et al. 2022), with its alpha at twice the rank.
    """

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(torch.empty(rank, columns, device=weight.device, dtype=weight.dtype))
        self.up = nn.Parameter(torch.zeros(rows, rank, device=weight.device, dtype=weight.dtype))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + SCALE * self.up @ self.down


def add_adapters(network: nn.Module, rank: int) -> nn.Module:
    """Freeze a network except for its new attentions, whose projections get adapters; their other parts are trained."""
    network.requires_grad_(False)
    for hosted in replaced_attention(network).values():
        hosted.requires_grad_(True)
        for projection in _projections(hosted):
            projection.requires_grad_(False)
            register_parametrization(projection, "weight", LowRank(projection.weight, rank), unsafe=True)
    return network


def merge_adapters(network: nn.Module) -> nn.Module:
    """Put the changes into the weights, and remove the adapters."""
    for module in network.modules():
        if is_parametrized(module, "weight"):
            remove_parametrizations(module, "weight", leave_parametrized=True)
    return network


def _projections(hosted: HostedAttention) -> list[nn.Linear]:
    attention = hosted.attention
    return [attention.qkv, *(module for module in attention.proj.modules() if isinstance(module, nn.Linear))]
