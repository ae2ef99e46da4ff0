import pytest
import torch

from softline.attention import create_attention
from softline.measure import count_macs, peak_bytes
from softline.measure.counting import count_operations


def test_macs_of_a_product_are_counted():
    a, b = torch.randn(10, 20), torch.randn(20, 30)
    assert count_macs(lambda: a @ b) == 10 * 20 * 30


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("kind", [torch.nn.Conv2d, torch.nn.ConvTranspose2d])
def test_each_gradient_of_a_convolution_takes_as_many_macs_as_the_convolution(kind, groups):
    convolution = kind(8, 16, 3, stride=2, groups=groups, bias=False)
    images = torch.randn(2, 8, 9, 9)
    forward = count_macs(lambda: convolution(images))
    # a transposed convolution uses its weight once for each pixel of its input, the other for each of its output
    pixels = 9 * 9 if kind is torch.nn.ConvTranspose2d else 4 * 4
    assert forward == 2 * pixels * 8 * 16 * 9 // groups
    assert count_macs(lambda: convolution(images).sum().backward()) == 2 * forward  # of its weight
    images.requires_grad_()
    assert count_macs(lambda: convolution(images).sum().backward()) == 3 * forward


class Grid(torch.nn.Module):
    """One attention layer on an 8 x 8 grid of tokens."""

    def __init__(self, name, **options):
        super().__init__()
        self.attention = create_attention(name, 16, 2, **options)

    def forward(self, x):
        return self.attention(x, (8, 8))


@pytest.mark.parametrize("start", ["norm", "release"])
@pytest.mark.parametrize("name", ["soft", "softpp"])
@pytest.mark.parametrize("iterations", [1, 20])
def test_newtons_part_is_that_of_its_matrix_products(name, start, iterations):
    layer = Grid(name, ratio=2, iterations=iterations, start=start)
    before = str(layer)
    operations = count_operations(layer, torch.randn(1, 64, 16))
    # 16 landmarks; SOFT's released start is a norm, the others need A^2
    squares = 0 if (name, start) == ("soft", "release") else 1
    assert operations.newton == 2 * (2 * iterations + squares) * 16**3
    assert operations.macs == count_macs(lambda: layer(torch.randn(1, 64, 16)))
    assert str(layer) == before


@pytest.mark.parametrize(("name", "options"), [("inline", {}), ("soft", {"inverse": "cholesky", "ridge": 0.1})])
def test_other_layers_have_no_newton(name, options):
    assert count_operations(Grid(name, **options), torch.randn(1, 64, 16)).newton == 0


def test_peak_bytes_are_those_held_at_once():
    def run() -> torch.Tensor:
        first = torch.empty(1000, 250)  # 1 MB
        second = torch.empty(1000, 500)  # 2 MB, beside the first
        del first
        third = torch.empty(1000, 125)  # 0.5 MB, after the first is gone
        return second[0, 0] + third[0, 0]

    assert 3_000_000 <= peak_bytes(run) < 3_010_000
