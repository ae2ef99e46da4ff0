import copy
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


PHOTOGRAPHS = sorted(GOLDEN.glob("photo_*.safetensors"))
every_release = pytest.mark.parametrize(
    "path", [p for p in sorted(GOLDEN.glob("*.safetensors")) if p not in PHOTOGRAPHS], ids=lambda path: path.stem
)


@pytest.mark.parametrize("path", PHOTOGRAPHS, ids=lambda path: path.stem)
def test_released_soft_is_exact_on_photographs_with_weights_that_look_trained(path):
    """The start of Newton's iteration is part of the model, and so is the gradient through it in SOFT++."""
    family, config, state, tensors = golden(path)
    model = from_official(family, state, config).double()
    for index in range(2):
        x = tensors[f"input.{index}"].double().requires_grad_()
        logits, expected = model(x), tensors[f"logits.{index}"]
        assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max()
        (gradient,) = torch.autograd.grad(logits.square().sum(), x)
        # the gradients are stored in float32
        expected = tensors[f"grad_input.{index}"]
        assert (gradient - expected).norm() <= 1e-7 * expected.norm()


def test_a_released_sample_does_not_depend_on_its_batch():
    """The release has one start for a batch; here the heads of each sample have one."""
    family, config, state, tensors = golden(GOLDEN / "photo_softpp.safetensors")
    model = from_official(family, state, config).double()
    with torch.no_grad():
        logits = model(torch.cat([tensors[f"input.{index}"] for index in range(2)]).double())
    for index in range(2):
        torch.testing.assert_close(logits[index], tensors[f"logits.{index}"][0], rtol=1e-11, atol=1e-12)


@every_release
def test_outputs_and_gradients_match_the_release(path):
    family, config, state, tensors = golden(path)
    model = from_official(family, state, config)
    for index in range(2):
        if f"input.{index}" not in tensors:
            continue
        x = tensors[f"input.{index}"].clone().requires_grad_()
        logits = model(x)
        torch.testing.assert_close(logits, tensors[f"logits.{index}"], rtol=0, atol=1e-5)
        with torch.no_grad():
            # another way through: norms folded, tokens in chunks, in place
            torch.testing.assert_close(model(x.detach()), tensors[f"logits.{index}"], rtol=0, atol=1e-5)
        if f"grad_input.{index}" in tensors:
            expected, exact = tensors[f"grad_input.{index}"], x.detach().double().requires_grad_()
            logits = copy.deepcopy(model).double()(exact)
            (gradient,) = torch.autograd.grad(logits.square().sum(), exact)
            assert (gradient - expected).norm() <= 1e-5 * expected.norm()


@every_release
def test_every_weight_of_the_release_is_used(path):
    family, config, state, _ = golden(path)
    model = from_official(family, state, config)
    used = sum(value.numel() for value in model.state_dict().values())
    buffers = sum(v.numel() for k, v in state.items() if k.endswith(("attn_mask", "relative_position_index")))
    assert used == sum(value.numel() for value in state.values()) - buffers


def test_the_direct_solve_gives_the_releases_outputs_where_newton_converges():
    """SOFT's release inverts A + 0.01 I, and noise images have well-conditioned kernels."""
    family, config, state, tensors = golden(GOLDEN / "soft_release.safetensors")
    model = from_official(family, state, config)
    cores = [module for module in model.modules() if isinstance(module, SoftCore)]
    for core in cores:
        assert core.options["ridge"] == 0.01
        core.options |= {"inverse": "cholesky", "start": "norm"}
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


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("soft_release", {"newton_maxiter": 20}, "an argument in the config of soft must be one of .*newton_max_iter"),
        (
            "soft_release",
            {"patch_size": 16},
            "patch_size in the config of soft must be 4 .nothing else is supported.; got 16",
        ),
        ("soft_release", {"mlp_ratios": [8, 8, 4, 8]}, r"mlp_ratios must be 4 in stage 4 .* got \[8, 8, 4, 8\]"),
        ("inline_deit", {"distilled": True}, "distilled in the config of inline_deit must be False"),
        ("inline_pvt", {"la_sr_ratios": "2111"}, "la_sr_ratios in the config of inline_pvt must be '1111'"),
        ("inline_swin", {"ape": True}, "ape in the config of inline_swin must be False"),
        ("inline_cswin", {"qk_scale": 0.1}, "qk_scale in the config of inline_cswin must be None"),
    ],
)
def test_arguments_of_a_release_are_taken_over_or_refused(name, argument, message):
    family, config, state = release(name)
    with pytest.raises(ValueError, match=message):
        from_official(family, state, {**config, **argument})


def test_patches_of_swin_have_the_size_of_the_release():
    _, config, _ = release("inline_swin")
    model = RELEASES["inline_swin"].build("inline_swin", {**config, "patch_size": 2})
    assert [stage.reduction for stage in model.stages] == [2, 4, 8]
    assert model.stages[0].embed.proj.kernel_size == (2, 2)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 7)


def test_the_number_of_newton_steps_is_that_of_the_release():
    family, config, state = release("soft_release")
    model = from_official(family, state, {**config, "newton_max_iter": 7, "kernel_method": "torch"})
    cores = [module for module in model.modules() if isinstance(module, SoftCore)]
    assert {core.options["iterations"] for core in cores} == {7}


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
    torch.save({name: torch.zeros_like(value) for name, value in model.state_dict().items()}, tmp_path / "ours.pth")
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
