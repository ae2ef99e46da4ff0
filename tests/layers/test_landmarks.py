import pytest
import torch
import torch.nn.functional as F

from softline.layers.landmarks import create_landmarks

SAMPLINGS = ["conv", "avgpool", "random", "biased"]
every_sampling = pytest.mark.parametrize("sampling", SAMPLINGS)


def queries(height: int, width: int) -> torch.Tensor:
    return torch.randn(2, 3, height * width, 8, dtype=torch.float64)


def build(sampling: str, **options: object) -> torch.nn.Module:
    return create_landmarks(sampling, 8, **options).double().eval()


@pytest.mark.parametrize(
    ("grid_size", "ratio", "cap", "expected"),
    [
        ((56, 56), 8, 7, 49),
        ((28, 28), 4, 7, 49),
        ((14, 14), 2, 7, 49),
        ((1, 1), 1, 7, 1),
        ((60, 43), 8, 7, 7 * 6),
        ((60, 43), 8, None, 7 * 5),
        ((128, 96), 8, 7, 49),
        ((128, 96), 8, None, 16 * 12),
        ((100, 1), (4, 1), (16, 1), 16),
        ((100, 1), (4, 1), None, 25),
    ],
)
def test_number_of_landmarks(grid_size, ratio, cap, expected):
    for sampling in SAMPLINGS:
        landmarks, mask = build(sampling, ratio=ratio, max_landmarks=cap)(queries(*grid_size), grid_size)
        assert landmarks.shape == (2, 3, expected, 8), sampling
        assert mask is None


@pytest.mark.parametrize(("grid_size", "cap"), [((56, 56), 7), ((56, 56), None), ((60, 43), None)])
def test_conv_landmarks_are_the_released_ones(grid_size, cap):
    """Convolution with kernel = stride = ratio shared by the heads, incomplete cells dropped; LayerNorm; GELU."""
    module, q = build("conv", ratio=8, max_landmarks=cap), queries(*grid_size)
    maps = q.flatten(0, 1).mT.unflatten(-1, grid_size)
    cells = F.conv2d(maps, module.conv.weight, stride=8).flatten(2).mT.unflatten(0, (2, 3))
    expected = F.gelu(F.layer_norm(cells, (8,), module.norm.weight, module.norm.bias))
    torch.testing.assert_close(module(q, grid_size)[0], expected)


def test_capped_conv_landmarks_average_the_cells_of_a_bin():
    module, q = build("conv", ratio=2, max_landmarks=(2, 3)), queries(8, 12)
    maps = q.flatten(0, 1).mT.unflatten(-1, (8, 12))
    cells = F.avg_pool2d(F.conv2d(maps, module.conv.weight, stride=2), 2).flatten(2).mT.unflatten(0, (2, 3))
    expected = F.gelu(F.layer_norm(cells, (8,), module.norm.weight, module.norm.bias))
    torch.testing.assert_close(module(q, (8, 12))[0], expected)


def test_average_landmarks_are_means_of_the_cells():
    q = queries(12, 8)
    maps = q.flatten(0, 1).mT.unflatten(-1, (12, 8))
    for cap, kernel in ((None, 4), (7, 4), ((1, 2), (12, 4))):
        expected = F.avg_pool2d(maps, kernel).flatten(2).mT.unflatten(0, (2, 3))
        torch.testing.assert_close(build("avgpool", ratio=4, max_landmarks=cap)(q, (12, 8))[0], expected)


def test_average_landmarks_weigh_every_token_alike_where_cells_are_incomplete():
    q = queries(5, 1)
    landmarks, _ = build("avgpool", ratio=(2, 1), max_landmarks=(2, 1))(q, (5, 1))
    # three cells of 2, 2 and 1 tokens in two bins
    torch.testing.assert_close(landmarks[:, :, 0], q[:, :, :4].mean(2))
    torch.testing.assert_close(landmarks[:, :, 1], q[:, :, 4])


def test_biased_landmarks_are_the_first_tokens():
    q = queries(8, 8)
    assert torch.equal(build("biased", ratio=2)(q, (8, 8))[0], q[:, :, :16])


def test_random_landmarks_are_different_tokens_fixed_in_evaluation_and_redrawn_in_training():
    module, q = build("random", ratio=2), queries(8, 8)
    first = module(q, (8, 8))[0]
    assert torch.equal(first, module(q, (8, 8))[0])
    for head in range(3):
        matches = (first[0, head][:, None] == q[0, head][None]).all(-1)
        assert (matches.sum(1) == 1).all()
        assert matches.any(0).sum() == 16
    module.train()
    assert not torch.equal(module(q, (8, 8))[0], module(q, (8, 8))[0])


def test_random_landmarks_are_spread_evenly():
    module, tokens = build("random", ratio=2).train(), torch.arange(64.0).reshape(1, 1, 64, 1)
    counts = torch.zeros(64)
    for _ in range(2000):
        chosen, _ = module(tokens, (8, 8))
        counts += torch.bincount(chosen.flatten().long(), minlength=64)
    # 16 of 64 tokens each time: a mean of 500, a deviation of about 19
    assert counts.min() > 400
    assert counts.max() < 600


@every_sampling
@pytest.mark.parametrize(("cap", "ratio"), [(7, 2), (3, 1), (None, 2)])
def test_a_padded_grid_has_the_landmarks_of_the_grid_alone(sampling, cap, ratio):
    """Padding at the bottom and at the right, and a different size for each sample."""
    module, q = build(sampling, ratio=ratio, max_landmarks=cap), queries(11, 13)
    sizes = [(11, 13), (5, 8)]
    mask = torch.stack([(torch.arange(11) < h)[:, None] & (torch.arange(13) < w) for h, w in sizes]).flatten(1)
    landmarks, landmark_mask = module(q, (11, 13), mask)
    for sample, (height, width) in enumerate(sizes):
        cropped = q[sample : sample + 1].unflatten(2, (11, 13))[:, :, :height, :width].flatten(2, 3)
        alone, _ = module(cropped, (height, width))
        torch.testing.assert_close(landmarks[sample][:, landmark_mask[sample]], alone[0])


@every_sampling
def test_holes_in_the_mask_are_left_out(sampling):
    module, q = build(sampling, ratio=2, max_landmarks=3), queries(8, 8)
    mask = torch.rand(2, 64) > 0.5
    mask[:, -1] = True
    other = torch.where(mask[:, None, :, None], q, torch.randn_like(q))
    first, second = module(q, (8, 8), mask), module(other, (8, 8), mask)
    assert torch.equal(first[1], second[1])
    torch.testing.assert_close(first[0], second[0])


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="sampling must be one of avgpool, biased, conv, random; got 'convolution'"):
        build("convolution")
    with pytest.raises(ValueError, match="ratio must be at least 1, got 0"):
        build("conv", ratio=0)
    with pytest.raises(ValueError, match="max_landmarks must be at least 1, got 0"):
        build("conv", max_landmarks=(7, 0))
    with pytest.raises(ValueError, match=r"ratio must be an int or \(rows, columns\), got \(1, 2, 3\)"):
        build("conv", ratio=(1, 2, 3))
    for sampling in SAMPLINGS:
        with pytest.raises(ValueError, match=r"ratio 8x8 must not be larger than the grid \(7x9 tokens\)"):
            build(sampling, ratio=8)(queries(7, 9), (7, 9))
