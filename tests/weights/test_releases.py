import argparse
import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open
from torch import Tensor, nn

from softline.attention.soft import SoftCore
from softline.cli import main
from softline.weights.reading import load_official
from softline.weights.releases import RELEASES, from_official

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


class RunsCode:
    def __reduce__(self):
        return (exec, ("raise SystemError('code of a checkpoint ran')",))


def test_a_file_that_wants_to_run_code_is_refused(tmp_path):
    torch.save({"model": RunsCode()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=r"evil\.pth is refused: it asks to run .*exec"):
        load_official(tmp_path / "evil.pth")


def test_damaged_files_are_named(tmp_path):
    torch.save({"model": {"w": torch.ones(1000)}}, tmp_path / "whole.pth")
    whole = (tmp_path / "whole.pth").read_bytes()
    for name, content in {"half.pth": whole[: len(whole) // 2], "empty.pth": b"", "text.pth": b"hello" * 99}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match="truncated or not a checkpoint"):
            load_official(tmp_path / name)
    (tmp_path / "junk.safetensors").write_bytes(b"junk" * 50)
    with pytest.raises(ValueError, match="truncated or not a checkpoint"):
        load_official(tmp_path / "junk.safetensors")
    with pytest.raises(ValueError, match="no such file"):
        load_official(tmp_path / "absent.pth")
    torch.save(torch.ones(3), tmp_path / "tensor.pth")
    with pytest.raises(ValueError, match="holds no state dict"):
        load_official(tmp_path / "tensor.pth")


def test_weights_are_found_among_what_training_scripts_store(tmp_path):
    settings = argparse.Namespace(lr=0.1)
    weights = {"module.w": torch.ones(2)}
    average = {"module.w": torch.zeros(2)}
    torch.save({"state_dict": weights, "args": settings, "metric": np.float64(79.3)}, tmp_path / "plain.pth")
    torch.save({"state_dict": weights, "state_dict_ema": average}, tmp_path / "average.pth")
    assert torch.equal(load_official(tmp_path / "plain.pth")["w"], torch.ones(2))
    assert torch.equal(load_official(tmp_path / "average.pth")["w"], torch.zeros(2))


def fake_release(name: str, path: Path) -> nn.Module:
    """A checkpoint as InLine's authors would store this model, and the model."""
    model = timm.create_model(name).eval()
    state = {}
    for key, value in model.state_dict().items():
        key = re.sub(r"^stages\.(\d+)\.blocks\.0\.", r"blocks.\1.", key)
        key = key.replace("stages.0.embed.", "patch_embed.").replace("stages.0.position.weight", "pos_embed")
        key = key.replace("stages.0.cls_token", "cls_token")
        state[key.replace("local.hidden", "residual.0").replace("local.kernel", "residual.2")] = value
    torch.save({"model": state}, path)
    return model


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


def test_convert_does_not_overwrite_and_asks_when_unsure(tmp_path, capsys):
    model = timm.create_model("soft_release_tiny")
    torch.save(model.state_dict(), tmp_path / "ours.pth")
    (tmp_path / "there").mkdir()
    assert main(["convert", str(tmp_path / "ours.pth"), str(tmp_path / "there")]) == 2
    assert "exists already; choose another directory" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "ours.pth"), str(tmp_path / "new")]) == 2
    assert "could be any of soft_release_tiny, softpp_release_tiny: choose one" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "ours.pth"), str(tmp_path / "new"), "--model", "soft_release_tiny"]) == 0
    assert main(["convert", str(tmp_path / "ours.pth"), str(tmp_path / "new2"), "--model", "inline_deit_tiny"]) == 2
    assert "not a state dict of inline_deit_tiny" in capsys.readouterr().err
    assert not (tmp_path / "new2").exists()


def test_pretrained_downloads_the_authors_file_once_and_adapts_it(tmp_path, monkeypatch):
    model = fake_release("inline_deit_tiny", tmp_path / "official.pth")
    asked = []

    def download(url, path, **options):
        asked.append(url)
        shutil.copy(tmp_path / "official.pth", path)

    monkeypatch.setattr("torch.hub.download_url_to_file", download)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    again = timm.create_model("inline_deit_tiny", pretrained=True).eval()
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(again(x), model(x))
    assert timm.create_model("inline_deit_tiny", pretrained=True, num_classes=3, in_chans=1)(x[:, :1]).shape == (1, 3)
    assert len(asked) == 1
    assert asked[0].startswith("https://")
    torch.save({"model": {"w": torch.ones(2)}}, tmp_path / "official.pth")
    with pytest.raises(ValueError, match="not a state dict of inline_deit_tiny"):
        timm.create_model("inline_deit_tiny", pretrained=True, cache_dir=str(tmp_path / "other"))


def test_pretrained_models_are_saved_and_reloaded_at_another_image_size(tmp_path, monkeypatch):
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    fake_release("inline_deit_tiny", tmp_path / "hub" / "checkpoints" / "inline_deit_tiny.pth")
    overlay = {"crop_pct": 1.0}
    model = timm.create_model("inline_deit_tiny", pretrained=True, pretrained_cfg_overlay=overlay).eval()
    assert model.pretrained_cfg["crop_pct"] == 1.0
    timm.models.save_for_hf(model, str(tmp_path / "saved"), safe_serialization=True)
    x = torch.randn(1, 3, 96, 96)
    for source in ("inline_deit_tiny", f"local-dir:{tmp_path / 'saved'}"):
        resized = timm.create_model(source, pretrained=True, img_size=96).eval()
        assert resized.stages[0].position.grid_size == (6, 6)
        torch.testing.assert_close(resized(x), model(x), rtol=1e-4, atol=1e-5)
    features = timm.create_model("inline_deit_tiny", pretrained=True, features_only=True)
    assert "state_dict" not in features.pretrained_cfg


def test_a_corrupt_byte_is_noticed(tmp_path):
    torch.save({"model": {"w": torch.ones(1000)}}, tmp_path / "good.pth")
    content = bytearray((tmp_path / "good.pth").read_bytes())
    content[content.index(torch.ones(4).numpy().tobytes())] ^= 0xFF
    (tmp_path / "bad.pth").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.pth is corrupt: the checksum of .* is wrong"):
        load_official(tmp_path / "bad.pth")


@pytest.mark.parametrize("family", list(RELEASES))
def test_settings_that_a_release_needs_are_named(family):
    with pytest.raises(ValueError, match=f"config of {family} must have .*; got nothing"):
        from_official(family, {}, {})


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
