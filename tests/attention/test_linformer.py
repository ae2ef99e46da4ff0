import pytest
import torch

from softline import create_attention


def test_keys_and_values_are_projected_apart():
    module, tokens = create_attention("linformer", 32, 2, max_tokens=35), torch.randn(2, 35, 32)
    with torch.no_grad():
        module.core.value_projection.zero_()
    torch.testing.assert_close(module(tokens, (7, 5)), module.proj.bias.expand_as(tokens))


def test_more_tokens_than_the_maximum_are_refused():
    module = create_attention("linformer", 32, 2, max_tokens=30, rank=4)
    assert module(torch.randn(2, 30, 32), (6, 5)).shape == (2, 30, 32)
    with pytest.raises(ValueError, match="covers at most 30 tokens, got 35"):
        module(torch.randn(2, 35, 32), (7, 5))
