import hashlib
import json
import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from torch import Tensor

from softline.attention.soft import SoftCore
from softline.cli import main
from softline.weights.releases import RELEASES, convert_official, from_official
from tests.support import fake_release

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(path: Path) -> tuple[str, dict, dict[str, Tensor], dict[str, Tensor]]:
    """Family, the release's configuration, its state dict, and what it computed."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    state = {key.removeprefix("state."): value for key, value in tensors.items() if key.startswith("state.")}
    return metadata["family"], json.loads(metadata["config"]), state, tensors


every_release = pytest.mark.parametrize(
    "path", [p for p in sorted(GOLDEN.glob("*.safetensors")) if golden(p)[0] in RELEASES], ids=lambda path: path.stem
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
        with torch.no_grad():
            # another way through: norms folded, tokens in chunks, in place
            torch.testing.assert_close(model(x.detach()), tensors[f"logits.{index}"], rtol=0, atol=1e-4)
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


def test_the_direct_solve_gives_the_releases_outputs():
    """SOFT's release inverts A + 0.01 I: Cholesky needs a fraction of Newton's time and ends at the same logits."""
    family, config, state, tensors = golden(GOLDEN / "soft_release.safetensors")
    model = from_official(family, state, config)
    cores = [module for module in model.modules() if isinstance(module, SoftCore)]
    for core in cores:
        assert core.options["ridge"] == 0.01
        core.options["inverse"] = "cholesky"
    assert len(cores) > 0
    with torch.no_grad():
        torch.testing.assert_close(model(tensors["input.0"]), tensors["logits.0"], rtol=0, atol=1e-4)


def release(name: str) -> tuple[str, dict, dict[str, Tensor]]:
    return golden(GOLDEN / f"{name}.safetensors")[:3]


def test_a_state_dict_of_another_family_is_refused_before_anything_is_loaded():
    _, _, state = release("inline_deit")
    family, config, _ = release("soft_release")
    with pytest.raises(ValueError, match=r"not a state dict of this soft model: \d+ missing: .*; \d+ unexpected: "):
        from_official(family, state, config)


def test_missing_and_misshapen_weights_are_named():
    family, config, state = release("soft_release")
    incomplete = {key: value for key, value in state.items() if not key.startswith("head.")}
    with pytest.raises(ValueError, match=r"2 missing: head.weight, head.bias"):
        from_official(family, incomplete, config)
    with pytest.raises(ValueError, match=r"1 of another shape: head.weight \(7, 16\) \(expected \(7, 32\)\)"):
        from_official(family, {**state, "head.weight": state["head.weight"][:, :16]}, config)
    with pytest.raises(ValueError, match=r"family must be one of .*; got 'sot'; did you mean 'soft'"):
        from_official("sot", state, config)


@pytest.mark.parametrize("family", list(RELEASES))
def test_settings_that_a_release_needs_are_named(family):
    with pytest.raises(ValueError, match=f"config of {family} must have .*; got nothing"):
        from_official(family, {}, {})


def test_convert_writes_what_timm_loads(tmp_path, capsys):
    model = fake_release("inline_deit_tiny", tmp_path / "official.pth")
    assert main(["convert", str(tmp_path / "official.pth"), str(tmp_path / "converted")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"blocks\.0\.attn\.residual\.0\.weight +-> +stages\.0\.blocks\.0\.attn\.local\.hidden", printed)
    digest = hashlib.sha256((tmp_path / "converted" / "model.safetensors").read_bytes()).hexdigest()
    assert digest in printed
    again = timm.create_model(f"local-dir:{tmp_path / 'converted'}", pretrained=True).eval()
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(again(x), model(x))


def test_convert_does_not_overwrite_and_asks_when_unsure(tmp_path):
    model = timm.create_model("soft_release_tiny", device="meta").to_empty(device="cpu")
    torch.save(model.state_dict(), tmp_path / "ours.pth")
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="exists already; choose another directory"):
        convert_official(tmp_path / "ours.pth", tmp_path / "there")
    with pytest.raises(ValueError, match="could be any of soft_release_tiny, softpp_release_tiny: choose one"):
        convert_official(tmp_path / "ours.pth", tmp_path / "new")
    with pytest.raises(ValueError, match="not a state dict of inline_deit_tiny"):
        convert_official(tmp_path / "ours.pth", tmp_path / "new", model="inline_deit_tiny")
    assert not (tmp_path / "new").exists()
    assert convert_official(tmp_path / "ours.pth", tmp_path / "new", model="soft_release_tiny").model == (
        "soft_release_tiny"
    )


def test_a_mistake_in_converting_is_told_on_the_command_line(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "absent.pth"), str(tmp_path / "new")]) == 2
    assert "absent.pth" in capsys.readouterr().err
