import pytest
import torch

from softline.heads.masks import ObjectMasks


def test_masks_of_some_objects_are_those_that_were_chosen():
    masks = ObjectMasks(torch.rand(3, 1, 28, 28), torch.tensor([[0, 0, 9, 9], [3, 4, 8, 9], [1, 1, 5, 5.0]]), (10, 12))
    kept = torch.tensor([True, False, True])
    assert torch.equal(masks.select(kept).whole(), masks.whole()[kept])
    assert torch.equal(masks.select(torch.tensor([2, 0])).whole(), masks.whole()[[2, 0]])
    assert torch.equal(masks[-1], masks[2])
    with pytest.raises(IndexError):
        masks[3]
