import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from softline.checkpoints import FAMILIES, from_official

GOLDEN = Path(__file__).parent / "golden"


def golden(path: Path) -> tuple[str, dict, dict[str, Tensor], dict[str, Tensor]]:
    """Family, the release's configuration, its state dict, and what it computed."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    state = {key.removeprefix("state."): value for key, value in tensors.items() if key.startswith("state.")}
    return metadata["family"], json.loads(metadata["config"]), state, tensors


every_release = pytest.mark.parametrize(
    "path", [p for p in sorted(GOLDEN.glob("*.safetensors")) if golden(p)[0] in FAMILIES], ids=lambda path: path.stem
)


@every_release
def test_outputs_and_gradients_match_the_release(path):
    family, config, state, tensors = golden(path)
    model = from_official(family, state, config)
    for index in range(2):
        if f"input.{index}" not in tensors:
            continue
        x = tensors[f"input.{index}"].clone().requires_grad_()
        logits = model(x)
        torch.testing.assert_close(logits, tensors[f"logits.{index}"], rtol=0, atol=1e-4)
        if f"grad_input.{index}" in tensors:
            (gradient,) = torch.autograd.grad(logits.square().sum(), x)
            expected = tensors[f"grad_input.{index}"]
            assert (gradient - expected).norm() <= 1e-3 * expected.norm()


@every_release
def test_every_weight_of_the_release_is_used(path):
    family, config, state, _ = golden(path)
    model = from_official(family, state, config)
    used = sum(value.numel() for value in model.state_dict().values())
    buffers = sum(v.numel() for k, v in state.items() if k.endswith(("attn_mask", "relative_position_index")))
    assert used == sum(value.numel() for value in state.values()) - buffers
