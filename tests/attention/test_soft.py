import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softline import create_attention


def released_block(module: nn.Module, x: Tensor, grid_size: tuple[int, int], ratio: int, normalize: bool) -> Tensor:
    """The attention as the released SOFT code computes it, step by step (Newton as an exact inverse)."""
    heads, dim = module.num_heads, x.shape[-1]
    head_dim = dim // heads
    qv = x @ module.qkv.weight.T + module.qkv.bias
    q, v = (part.unflatten(-1, (heads, head_dim)).transpose(1, 2) for part in qv.split(dim, dim=-1))
    q = q / head_dim**0.25
    maps = q.mT.unflatten(-1, grid_size).flatten(0, 1)
    landmarks = module.core.landmarks
    cells = F.conv2d(maps, landmarks.conv.weight, stride=ratio).flatten(2).mT.unflatten(0, (-1, heads))
    z = F.gelu(F.layer_norm(cells, (head_dim,), landmarks.norm.weight, landmarks.norm.bias, 1e-5))
    A = torch.exp(-torch.cdist(z, z).square() / 2)
    P = torch.exp(-torch.cdist(z, q).square() / 2)
    inverse = torch.linalg.inv(A)
    if normalize:
        root = A.sum(-1, keepdim=True).rsqrt()
        inverse = root * inverse * root.mT
    attended = P.mT @ inverse @ (P @ v)
    kernel = module.local.conv.weight
    planes = v.mT.unflatten(-1, grid_size)
    for head in range(heads):
        one = planes[:, head].flatten(0, 1)[:, None]
        conv = F.conv2d(one, kernel[head : head + 1], padding=kernel.shape[-1] // 2)
        attended[:, head] += conv.flatten(1).unflatten(0, (x.shape[0], head_dim)).mT
    return attended.transpose(1, 2).flatten(2) @ module.proj.weight.T + module.proj.bias


@pytest.mark.parametrize("name", ["soft", "softpp"])
@pytest.mark.parametrize(("grid_size", "ratio", "cap"), [((12, 12), 4, 7), ((9, 14), 4, None)])
def test_module_computes_what_the_release_computes(name, grid_size, ratio, cap):
    module = create_attention(name, 64, 2, ratio=ratio, max_landmarks=cap, value_conv=5).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, grid_size[0] * grid_size[1], 64, dtype=torch.float64)
    expected = released_block(module, x, grid_size, ratio, normalize=name == "softpp")
    torch.testing.assert_close(module(x, grid_size), expected, rtol=1e-6, atol=1e-7)


def test_parameter_count_is_the_released_one():
    """A SOFT block holds 11 d^2 + 12 d + 1024 r^2 + 64 + h k^2; its MLP and norms 8 d^2 + 9 d of these."""
    dim, heads, ratio, kernel = 320, 10, 2, 3
    module = create_attention("softpp", dim, heads, ratio=ratio, value_conv=kernel)
    attention = 3 * dim**2 + 3 * dim + 1024 * ratio**2 + 64 + heads * kernel**2
    assert sum(p.numel() for p in module.parameters()) == attention


@pytest.mark.parametrize("name", ["soft", "softpp"])
def test_a_flat_image_is_finite_in_value_and_gradient(name):
    module, x = create_attention(name, 64, 2, ratio=4), torch.ones(1, 784, 64, requires_grad=True)
    module(x, (28, 28)).square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


def test_capping_the_landmarks_changes_nothing_at_the_papers_resolution():
    for side, ratio in ((56, 8), (28, 4), (14, 2)):
        capped = create_attention("softpp", 64, 2, ratio=ratio)
        fixed = create_attention("softpp", 64, 2, ratio=ratio, max_landmarks=None)
        fixed.load_state_dict(capped.state_dict())
        x = torch.randn(1, side * side, 64)
        assert torch.equal(capped(x, (side, side)), fixed(x, (side, side)))


def test_prefix_tokens_attend_and_leave_the_landmarks_alone():
    module = create_attention("softpp", 64, 2, num_prefix_tokens=1).double()
    x = torch.randn(1, 50, 64, dtype=torch.float64)
    other = x.clone()
    other[:, 0] += 1
    first, second = module.factors(x, (7, 7)), module.factors(other, (7, 7))
    torch.testing.assert_close(first[1], second[1])
    assert not torch.allclose(module(x, (7, 7))[:, 1:], module(other, (7, 7))[:, 1:])
    assert not torch.allclose(module(x, (7, 7))[:, :1], module(other, (7, 7))[:, :1])


def test_bad_options_are_named_when_the_module_is_built():
    with pytest.raises(ValueError, match=r'inverse="cholesky" needs ridge > 0'):
        create_attention("softpp", 64, 2, inverse="cholesky")
    with pytest.raises(ValueError, match="iterations must be at least 1, got 0"):
        create_attention("softpp", 64, 2, iterations=0)
    with pytest.raises(ValueError, match="impl must be one of auto, explicit, linear; got 'cuda'"):
        create_attention("softpp", 64, 2, impl="cuda")
    with pytest.raises(ValueError, match="the kernel of the value convolution must be odd, got 4"):
        create_attention("softpp", 64, 2, value_conv=4)
    with pytest.raises(ValueError, match=r"ratio 8x8 must not be larger than the grid \(7x7 tokens\)"):
        create_attention("softpp", 64, 2, ratio=8)(torch.randn(1, 49, 64), (7, 7))


def test_weights_do_not_grow_with_the_image_when_landmarks_are_merged():
    """Smooth images: SOFT++ with merged landmarks weighs as it does with all of them."""
    attention = create_attention("softpp", 32, 1, sampling="avgpool", ratio=2, max_landmarks=4).eval()
    every = create_attention("softpp", 32, 1, sampling="avgpool", ratio=2, max_landmarks=None).eval()
    every.load_state_dict(attention.state_dict())
    small = torch.randn(1, 32, 4, 4)
    for side in (8, 16, 24):
        x = torch.nn.functional.interpolate(small, size=(side, side), mode="nearest").flatten(2).mT
        sums = [module.weights(x, (side, side)).sum(-1).mean().item() for module in (attention, every)]
        assert sums[0] == pytest.approx(sums[1], rel=0.05), side
