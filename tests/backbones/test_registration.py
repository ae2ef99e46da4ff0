import shutil

import pytest
import timm
import torch

import softline  # noqa: F401
from tests.support import fake_release


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("soft_release_tiny", "weights of soft_release_tiny cannot be downloaded directly: get the file from .*Google"),
        ("inline_swin_base_384", "weights of inline_swin_base_384 cannot be downloaded directly: get the file from"),
        ("softpp_small", "those of the released code are of softpp_release_small"),
        ("inline_micro", "softline's own and has no published weights"),
    ],
)
def test_pretrained_weights_that_cannot_be_downloaded_say_where_they_are(name, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model(name, pretrained=True)
