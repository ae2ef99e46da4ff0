import pytest
import timm
import torch

from softline import create_attention


def test_enhanced_is_relu_linear_attention_with_a_convolution_of_the_values():
    module = create_attention("enhanced", 32, 2, num_prefix_tokens=1)
    linear = create_attention("linear", 32, 2, num_prefix_tokens=1, feature_map="relu")
    missing, unexpected = linear.load_state_dict(module.state_dict(), strict=False)
    assert (missing, unexpected) == ([], ["local.conv.weight", "local.conv.bias"])
    tokens = torch.randn(2, 36, 32)
    maps = linear.qkv(tokens)[:, 1:, 64:].mT.unflatten(-1, (7, 5))
    # one kernel and one bias for each channel; not for the prefix token
    local = torch.cat([torch.zeros(2, 1, 32), module.local.conv(maps).flatten(2).mT], dim=1)
    difference = module(tokens, (7, 5)) - linear(tokens, (7, 5))
    torch.testing.assert_close(difference, local @ linear.proj.weight.T, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(module.weights(tokens, (7, 5)), linear.weights(tokens, (7, 5)))


def test_it_is_nothing_without_its_convolution():
    with pytest.raises(ValueError, match=r"the kernel of the value convolution must be an int or .*, got None"):
        create_attention("enhanced", 32, 2, value_conv=None)


def test_deit_is_smaller_than_with_the_papers_convolutions_in_the_mlps():
    model = timm.create_model("inline_deit_tiny", attention="enhanced", num_heads=3)
    sizes = [5_717_416 + 12 * channels * (9 + 1) for channels in (192, 4 * 192)]
    assert sum(p.numel() for p in model.parameters()) == sizes[0]
    assert [f"{size / 1e6:.2f}" for size in sizes] == ["5.74", "5.81"]
