import torch

from softline.plotting.contrast import contrast


def test_contrast_changes_sign_at_the_mean_and_reaches_one():
    row = torch.tensor([[-1.0, 0.0], [1.0, 4.0]])
    torch.testing.assert_close(contrast(row), torch.tensor([[-2 / 3, -1 / 3], [0.0, 1.0]]))


def test_an_even_row_has_no_contrast():
    assert torch.equal(contrast(torch.full((7, 7), 1 / 49)), torch.zeros(7, 7))
