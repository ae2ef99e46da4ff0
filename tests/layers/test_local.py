import pytest
import torch
import torch.nn.functional as F

from softline.layers.local import LocalResidual, LocalSum, ValueConv
from tests.support import value_and_gradients


@pytest.mark.parametrize("prefix", [0, 1])
def test_local_residual_equals_an_explicit_loop_over_the_neighbourhood(prefix):
    """O_i += sum over the 3x3 neighbours of r_j v_j, r predicted for each channel and sample from the mean token."""
    height, width, heads, head_dim = 4, 5, 2, 3
    residual = LocalResidual(heads * head_dim, heads, num_prefix_tokens=prefix).double()
    x = torch.randn(2, prefix + height * width, 6, dtype=torch.float64)
    v = torch.randn(2, heads, prefix + height * width, head_dim, dtype=torch.float64)
    out = residual(x, v, (height, width))
    assert (out[:, :, :prefix] == 0).all()
    for sample in range(2):
        for head in range(heads):
            channels = slice(head * head_dim, (head + 1) * head_dim)
            rows = slice(9 * head * head_dim, 9 * (head + 1) * head_dim)
            hidden = F.gelu(
                residual.hidden.weight[channels, :, 0] @ x[sample].mean(0)[channels] + residual.hidden.bias[channels]
            )
            r = (residual.kernel.weight[rows, :, 0] @ hidden + residual.kernel.bias[rows]).reshape(head_dim, 3, 3)
            values = v[sample, head, prefix:].reshape(height, width, head_dim)
            for i in range(height):
                for j in range(width):
                    expected = torch.zeros(head_dim, dtype=torch.float64)
                    for di in (-1, 0, 1):
                        for dj in (-1, 0, 1):
                            if 0 <= i + di < height and 0 <= j + dj < width:
                                expected += r[:, di + 1, dj + 1] * values[i + di, j + dj]
                    torch.testing.assert_close(out[sample, head, prefix + i * width + j], expected)


@pytest.mark.parametrize("size", [(1, 3), (3, 5), (5, 1)])
def test_local_residual_of_other_kernels_equals_a_convolution_by_its_prediction(size):
    rows, columns = size
    residual = LocalResidual(6, 2, kernel_size=size).double()
    x, v = torch.randn(2, 28, 6, dtype=torch.float64), torch.randn(2, 2, 28, 3, dtype=torch.float64)
    kernels = residual.kernel(F.gelu(residual.hidden(x.mean(1)[..., None])))
    maps = v.mT.flatten(1, 2).unflatten(-1, (4, 7))  # [2, 6, 4, 7]
    for sample in range(2):
        weight = kernels[sample].reshape(6, 1, rows, columns)
        expected = F.conv2d(maps[sample], weight, padding=(rows // 2, columns // 2), groups=6)
        found = residual(x, v, (4, 7))[sample].mT.flatten(0, 1).unflatten(-1, (4, 7))
        torch.testing.assert_close(found, expected)


def test_kernels_must_be_odd():
    with pytest.raises(ValueError, match=r"the kernel of the local residual must be odd, got \(1, 4\)"):
        LocalResidual(6, 2, kernel_size=(1, 4))


def test_a_kernel_of_one_row_mixes_no_rows():
    conv = ValueConv(1, 2, (1, 3)).double()
    assert conv.conv.weight.shape == (1, 1, 1, 3)
    v = torch.zeros(1, 1, 20, 2, dtype=torch.float64)
    v[:, :, 10:15] = 1
    out = conv(torch.empty(0), v, (4, 5)).unflatten(2, (4, 5))
    assert out[:, :, 2].all()
    assert not out[:, :, [0, 1, 3]].any()


def test_local_residual_has_the_papers_parameter_count():
    """10 C d_h + 10 C for each layer: 330 C with heads of 32."""
    assert sum(p.numel() for p in LocalResidual(192, 6).parameters()) == 330 * 192


@pytest.mark.parametrize("prefix", [0, 1])
def test_value_conv_shares_a_kernel_among_the_channels_of_a_head(prefix):
    conv = ValueConv(2, 3, 5, num_prefix_tokens=prefix).double()
    v = torch.randn(2, 2, prefix + 20, 3, dtype=torch.float64)
    out = conv(torch.empty(0), v, (4, 5))
    assert conv.conv.weight.shape == (2, 1, 5, 5)
    assert conv.conv.bias is None
    assert (out[:, :, :prefix] == 0).all()
    for head in range(2):
        maps = v[:, head, prefix:].mT.unflatten(-1, (4, 5)).flatten(0, 1)[:, None]
        expected = F.conv2d(maps, conv.conv.weight[head : head + 1], padding=2)
        torch.testing.assert_close(out[:, head, prefix:], expected[:, 0].flatten(1).unflatten(0, (2, 3)).mT)


def test_value_conv_can_share_kernels_among_the_heads():
    conv = ValueConv(2, 3, 5, shared="heads").double()
    v = torch.randn(2, 2, 20, 3, dtype=torch.float64)
    maps = v.mT.unflatten(-1, (4, 5)).flatten(0, 1)
    expected = conv.conv(maps).flatten(2).mT.unflatten(0, (2, 2))
    torch.testing.assert_close(conv(torch.empty(0), v, (4, 5)), expected)


def test_even_kernels_are_refused():
    with pytest.raises(ValueError, match="the kernel of the value convolution must be odd, got 4"):
        ValueConv(2, 3, 4)


@pytest.mark.parametrize(
    ("grid_size", "kernel_size"),
    [((1, 1), 3), ((5, 3), (1, 3)), ((16, 16), 3)],
    ids=["one token", "kernels of one row", "sample by sample"],
)
def test_a_graph_computes_what_eager_execution_does(grid_size, kernel_size):
    """Sums of shifted maps there, a grouped convolution here, which takes large maps sample by sample."""
    residual = LocalResidual(64, 2, kernel_size=kernel_size).double()
    tokens = grid_size[0] * grid_size[1]
    x, v = torch.randn(3, tokens, 64).double(), torch.randn(3, 2, tokens, 32).double()
    torch.compiler.reset()
    compiled = torch.compile(residual, fullgraph=True, backend="eager")
    eager = value_and_gradients(lambda x, v: residual(x, v, grid_size), x, v)
    graph = value_and_gradients(lambda x, v: compiled(x, v, grid_size), x, v)
    for one, other in zip(graph, eager, strict=True):
        torch.testing.assert_close(one, other)


def test_hooks_see_each_term_of_a_sum():
    terms = LocalSum([ValueConv(2, 4, 3), ValueConv(2, 4, 5)])
    seen = []
    for term in terms:
        term.register_forward_hook(lambda module, *_: seen.append(module))
    terms(torch.randn(1, 12, 8), torch.randn(1, 2, 12, 4), (3, 4))
    assert seen == list(terms)
