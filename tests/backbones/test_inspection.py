from dataclasses import replace

import pytest
import timm
import torch

from softline import ATTENTIONS
from softline.backbones.inspection import attention_layers, choose_layers, find_backbone, look, one_of_each_stage

SHALLOW = {"depths": (1, 1, 1, 1)}


def micro(attention="softpp", **options):
    return timm.create_model("softpp_micro", attention=attention, in_chans=1, num_classes=4, **options).eval()


def test_the_input_of_a_layer_is_what_its_attention_saw():
    model, images = micro(), torch.randn(2, 1, 28, 28)
    block = model.stages[0].blocks[0]
    (given,), output = look(model, images, attention_layers(model)[:1])
    tokens, grid_size = model.stages[0].embed(images)
    tokens = tokens if model.stages[0].position is None else model.stages[0].position(tokens, grid_size)
    expected = block.norm1(tokens) if hasattr(block, "pass_context") else tokens
    assert given.grid_size == grid_size
    torch.testing.assert_close(given.x, expected)
    torch.testing.assert_close(output, model(images))


@torch.no_grad()
def test_models_that_hide_their_layers_are_refused():
    model, images = micro("softmax", **SHALLOW), torch.randn(1, 1, 28, 28)
    compiled = torch.compile(model, backend="eager")
    compiled(images)
    with pytest.raises(ValueError, match="stage 1, block 1 did not run where it can be seen: pass the model before"):
        look(compiled, images, attention_layers(model))
    with pytest.raises(ValueError, match="eval mode"):
        look(model.train(), images, attention_layers(model))


@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_rows_in_blocks_are_all_the_weights(attention):
    model = micro(attention).double()
    for given in look(model, torch.randn(2, 1, 32, 24, dtype=torch.float64), attention_layers(model))[0]:
        weights = given.layer.attention.weights(given.x, given.grid_size)
        tokens, blocks = zip(*given.row_blocks(block_bytes=5000), strict=True)
        assert torch.cat(tokens).tolist() == list(range(given.tokens))
        assert len(blocks) > 1 or blocks[0].nbytes <= 5000
        torch.testing.assert_close(torch.cat(blocks, 2), weights)


@torch.no_grad()
def test_an_attention_of_another_package_needs_its_weights_alone():
    class Even(torch.nn.Module):
        num_prefix_tokens = 0

        def forward(self, x, grid_size, key_mask=None):
            return x.mean(1, keepdim=True).expand_as(x)

        def weights(self, x, grid_size, key_mask=None):
            return x.new_full((len(x), 3, x.shape[1], x.shape[1]), 1 / x.shape[1])

    model = micro()
    model.stages[0].blocks[0].attn = Even()
    (given, *_), _ = look(model, torch.randn(1, 1, 28, 28), attention_layers(model))
    assert given.layer.operator == "Even"
    assert torch.equal(given.rows()(torch.tensor([3, 5])), torch.full((1, 3, 2, 49), 1 / 49))


def test_layers_of_a_pyramid_have_stages_and_those_of_a_flat_network_blocks():
    assert [layer.name for layer in attention_layers(micro())][:2] == ["stage 1, block 1", "stage 2, block 1"]
    flat = timm.create_model("inline_deit_tiny", img_size=32, depth=6)
    layers = attention_layers(flat)
    assert [layer.name for layer in layers] == [f"block {place}" for place in range(1, 7)]
    assert [layer.name for layer in one_of_each_stage(layers)] == ["block 1", "block 3", "block 4", "block 6"]


@pytest.mark.parametrize("name", ["inline_swin_tiny", "inline_cswin_tiny", "inline_pvt_tiny"])
def test_every_block_of_every_family_can_show_its_weights(name):
    model = timm.create_model(name, num_classes=2, device="meta")
    assert len(attention_layers(model)) == sum(len(stage.blocks) for stage in model.stages)


def test_layers_are_chosen_by_place_from_either_end():
    layers = attention_layers(micro())
    assert choose_layers(layers, [0, -1]) == [layers[0], layers[-1]]
    with pytest.raises(ValueError, match=r"layer must be from -5 to 4 \(0: stage 1, block 1 \(softpp\), .*got 5"):
        choose_layers(layers, [5])


def test_the_backbone_of_a_larger_model_is_found():
    model = micro()
    assert find_backbone(torch.nn.Sequential(torch.nn.Identity(), model)) is model
    with pytest.raises(ValueError, match=r"x\.pt \(Linear\) has no attention to show"):
        find_backbone(torch.nn.Linear(1, 1), "x.pt")


def test_tokens_outside_the_grid_are_refused():
    model = micro()
    (given,), _ = look(model, torch.randn(1, 1, 28, 20), attention_layers(model)[:1])
    assert given.token(6, 4) == 34
    with pytest.raises(ValueError, match="query column must be at least 0 and below 5, got 5"):
        given.token(0, 5)


@pytest.mark.parametrize("attention", ["inline", "softpp", "softmax"])
@torch.no_grad()
def test_padding_inside_windows_is_masked(attention):
    # 64 / 4 = 16 rows in windows of 7 are padded to 21
    side = {"softmax_windows": 7} if attention == "softmax" else {"window_size": 7}
    options = {**side, "num_classes": 2, "stage_types": "IIII", **SHALLOW}
    model = timm.create_model("inline_swin_tiny", attention=attention, **options).eval()
    layers = [replace(layer, attention=layer.inner) for layer in attention_layers(model)[:1]]
    if attention == "softmax":
        layers = attention_layers(model)[:1]
    (given,), _ = look(model, torch.randn(1, 3, 64, 64), layers)
    if attention == "softmax":
        assert given.key_mask is None
        assert not given.sees_all
        return
    assert given.key_mask.shape == (9, 49)
    assert 0 < int((~given.key_mask).sum()) == 21**2 - 16**2
    rows = given.rows()(torch.arange(49))
    assert (
        rows.transpose(2, 3).flatten(1, 2)[(~given.key_mask)[:, None].expand(-1, rows.shape[1], -1).flatten(1)] == 0
    ).all()


def test_windows_and_strips_do_not_see_all():
    swin = timm.create_model("inline_swin_tiny", num_classes=2, **SHALLOW).eval()
    seen, _ = look(swin, torch.randn(1, 3, 224, 224), attention_layers(swin))
    # windows of 56 are the whole map; softmax's of the last stage as well
    assert all(given.sees_all for given in seen)
    cswin = timm.create_model("inline_cswin_tiny", num_classes=2, **SHALLOW).eval()
    seen, _ = look(cswin, torch.randn(1, 3, 64, 64), attention_layers(cswin))
    assert {given.sees_all for given in seen if given.layer.stage == 2} == {False}
    assert {given.sees_all for given in seen if given.layer.stage == 0} == {True}


@pytest.mark.parametrize("attention", ["softmax", "inline"])
@torch.no_grad()
def test_every_layer_of_a_pvt_reads_single_rows(attention):
    model = timm.create_model("inline_pvt_tiny", attention=attention, num_classes=2, **SHALLOW).eval()
    for given in look(model, torch.randn(1, 3, 96, 64), attention_layers(model))[0]:
        assert hasattr(given.layer.attention, "rows")
        chosen = torch.tensor([given.tokens - 1, 0])
        weights = given.layer.attention.weights(given.x, given.grid_size)
        torch.testing.assert_close(given.rows()(chosen), weights[:, :, chosen])
