import pytest
import timm
import torch

from softline.backbones.building import block_attentions
from softline.backbones.swin import swin_backbone

SMALL = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}


@pytest.mark.parametrize(("size", "patch_size"), [((64, 64), 4), ((64, 96), 4), ((48, 48), 3)])
def test_softmax_stages_are_timms_swin(size, patch_size):
    """Several windows, shifted in every second block, relative position biases, patch merging, patches of any size."""
    options = {"patch_size": patch_size, "num_classes": 3, **SMALL}
    theirs = timm.models.SwinTransformer(img_size=size, window_size=4, strict_img_size=False, **options)
    ours = timm.create_model("inline_swin_tiny", softmax_windows=4, stage_types="SS", **options)
    names = {}
    for key in theirs.state_dict():
        new = key.replace("layers.", "stages.").replace("patch_embed.", "stages.0.embed.")
        new = new.replace(".downsample.", ".embed.").replace(".attn.", ".attn.attention.")
        names[key] = new.replace("relative_position_bias_table", "position_bias").replace("head.fc", "head")
    state = {names[key]: value for key, value in theirs.state_dict().items() if names[key] in ours.state_dict()}
    ours.load_state_dict(state)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    ours, theirs = ours.double().eval(), theirs.double().eval()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-9, atol=1e-10)


def test_types_of_stages_name_the_attention_of_each_block():
    depths = (1, 2, 3)
    expected = [["inline"], ["inline", "softmax"], ["softmax"] * 3]
    for types in ("IM1S", "IMS1", "IMS, M=1"):
        assert block_attentions("inline", types, depths, "IIS") == expected
    assert block_attentions("inline", None, depths, "IM1S") == expected
    assert block_attentions(("linear", "softmax", "softpp"), None, depths, "IIS")[2] == ["softpp"] * 3
    for types in ("IIM", "II", "IIX", ""):
        with pytest.raises(ValueError, match="stage_types must have I, S or M"):
            block_attentions("inline", types, depths, "IIS")
    with pytest.raises(ValueError, match="stage_types='IIS' has no effect: attention="):
        block_attentions(("linear", "softmax", "softpp"), "IIS", depths, "IIS")


def test_parameters_do_not_depend_on_the_image_size():
    first, second = (swin_backbone(img_size=size, stage_types="IS", **SMALL) for size in (224, 384))
    second.load_state_dict(first.state_dict())
    x = torch.randn(1, 3, 100, 70)
    torch.testing.assert_close(first(x), second(x))
