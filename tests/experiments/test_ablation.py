import timm
import torch

import softline  # noqa: F401
from softline.experiments.ablation import attention_off


def test_without_attention_tokens_meet_only_in_convolutions():
    model = timm.create_model("inline_deit_tiny", attention="softmax", img_size=32, num_classes=4).eval()
    images = torch.randn(1, 3, 32, 32)
    changed = images.clone()
    changed[..., 16:, 16:] += 1
    before = model.forward_features(images)
    with attention_off(model):
        tokens, other = model.forward_features(images), model.forward_features(changed)
    moved = (tokens != other).any(-1)[0].tolist()
    assert moved == [False, False, False, False, True], "only the token of the changed patch"
    assert torch.equal(model.forward_features(images), before), "the attention is back"
