"""The released SOFT and SOFT++ at full size on photographs, against their equations written out naively in float64."""

import math

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from softline.data.images.photographs import open_photograph

State = dict[str, Tensor]


def look_trained(model: torch.nn.Module) -> torch.nn.Module:
    """Change every parameter and statistic, so that attention is neither uniform nor far from convergence."""
    generator = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, dtype=like.dtype, generator=generator)

    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("running_var"):
                value.mul_(1 + 0.5 * noise(value).abs())
            elif value.ndim > 1:
                value.add_(0.5 * value.std() * noise(value)).mul_(1.5)
            elif value.is_floating_point():
                value.add_(0.1 * noise(value))
    return model


def photograph(name: str, size: tuple[int, int]) -> Tensor:
    image = open_photograph(name).convert("RGB").resize((size[1], size[0]))
    pixels = torch.tensor(list(image.tobytes()), dtype=torch.float64).reshape(1, *size, 3).permute(0, 3, 1, 2) / 255
    return (pixels - 0.45) / 0.225


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """[N, D], [M, D] -> [N, M], channel by channel."""
    return sum(((x[:, None, c] - y[None, :, c]) ** 2 for c in range(x.shape[1])), torch.zeros(1, dtype=x.dtype))


def newton(A: Tensor, alpha: Tensor) -> Tensor:
    X = alpha * A
    for _ in range(20):
        X = 2 * X - X @ A @ X
    return X


def soft_inverses(kernels: list[Tensor]) -> list[Tensor]:
    """SOFT: each head by itself, start before the ridge, gradient of Eq. 12."""
    inverses = []
    for A in kernels:
        alpha = 0.9 * 2 / A.sum(-1).max() ** 2
        ridged = A + 0.01 * torch.eye(len(A), dtype=A.dtype)
        Y = newton(ridged, alpha).detach()
        # equal to Y, with the derivative -Y dA Y
        inverses.append(Y - Y @ (ridged - ridged.detach()) @ Y)
    return inverses


def softpp_inverses(kernels: list[Tensor]) -> list[Tensor]:
    """SOFT++: one start for all heads, halved until the bound holds; ordinary gradient through the iterations."""
    alpha = 2 / max(A.sum(-1).max() for A in kernels) ** 2
    identity = torch.eye(len(kernels[0]), dtype=torch.float64)
    for _ in range(10):
        if max((identity - A @ (alpha * A)).abs().sum(-2).max() for A in kernels) <= 1.01:
            break
        alpha = alpha / 2
    roots = [A.sum(-1).rsqrt() for A in kernels]
    return [d[:, None] * newton(A, alpha) * d for A, d in zip(kernels, roots, strict=True)]


def soft_attention(x: Tensor, state: State, key: str, grid: tuple[int, int], ratio: int, inverses) -> Tensor:
    """x [N, C] -> [N, C]."""
    dim = x.shape[1]
    qv = x @ state[f"{key}.qkv.weight"].T + state[f"{key}.qkv.bias"]
    heads, norm = dim // 32, f"{key}.core.landmarks.norm"
    queries, values, landmarks = [], [], []
    for head in range(heads):
        q = qv[:, 32 * head : 32 * head + 32] / 32**0.25
        maps = q.T.reshape(1, 32, *grid)
        tokens = F.conv2d(maps, state[f"{key}.core.landmarks.conv.weight"], stride=ratio).flatten(2)[0].T
        tokens = F.gelu(F.layer_norm(tokens, (32,), state[f"{norm}.weight"], state[f"{norm}.bias"]))
        queries.append(q)
        values.append(qv[:, dim + 32 * head : dim + 32 * head + 32])
        landmarks.append(tokens)
    inverted = inverses([torch.exp(-squared_distances(z, z) / 2) for z in landmarks])
    out = []
    for head, (q, v, z, X) in enumerate(zip(queries, values, landmarks, inverted, strict=True)):
        P = torch.exp(-squared_distances(q, z) / 2)
        kernel = state[f"{key}.local.conv.weight"][head : head + 1]
        local = F.conv2d(v.T.reshape(32, 1, *grid), kernel, padding=kernel.shape[-1] // 2).flatten(1).T
        out.append(P @ X @ (P.T @ v) + local)
    return torch.cat(out, 1) @ state[f"{key}.proj.weight"].T + state[f"{key}.proj.bias"]


def softmax_attention(x: Tensor, state: State, key: str) -> Tensor:
    dim = x.shape[1]
    q, k, v = (x @ state[f"{key}.qkv.weight"].T + state[f"{key}.qkv.bias"]).split(dim, 1)
    out = []
    for head in range(dim // 32):
        part = slice(32 * head, 32 * head + 32)
        out.append((q[:, part] @ k[:, part].T / math.sqrt(32)).softmax(-1) @ v[:, part])
    return torch.cat(out, 1) @ state[f"{key}.proj.weight"].T + state[f"{key}.proj.bias"]


def mlp(x: Tensor, state: State, key: str, approximate: str) -> Tensor:
    hidden = F.gelu(x @ state[f"{key}.fc1.weight"].T + state[f"{key}.fc1.bias"], approximate=approximate)
    return hidden @ state[f"{key}.fc2.weight"].T + state[f"{key}.fc2.bias"]


def naive(state: State, image: Tensor, depths: tuple[int, ...], inverses) -> Tensor:
    """Logits of one image [1, 3, H, W]."""

    def norm(x: Tensor, key: str, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{key}.weight"], state[f"{key}.bias"], eps)

    maps = image
    for stage, depth in enumerate(depths):
        for layer, stride in enumerate([2, 1, 2] if stage == 0 else [2]):
            conv, batch_norm = (f"stages.{stage}.embed.layers.{3 * layer + part}" for part in (0, 1))
            maps = F.conv2d(maps, state[f"{conv}.weight"], state[f"{conv}.bias"], stride=stride, padding=1)
            statistics = (state[f"{batch_norm}.{name}"] for name in ("running_mean", "running_var", "weight", "bias"))
            maps = F.relu(F.batch_norm(maps, *statistics))
        grid = (maps.shape[2], maps.shape[3])
        x = maps[0].flatten(1).T
        positions = state[f"stages.{stage}.position.weight"][0]
        side = 56 // 2**stage
        if stage == 3:
            x = torch.cat([state["stages.3.cls_token"][0], x])
            first, positions = positions[:1], positions[1:]
        planes = positions.T.reshape(1, -1, side, side)
        positions = F.interpolate(planes, size=grid, mode="bilinear", align_corners=False)[0].flatten(1).T
        x = x + (torch.cat([first, positions]) if stage == 3 else positions)
        for block in range(depth):
            key = f"stages.{stage}.blocks.{block}"
            if stage == 3:
                x = x + softmax_attention(norm(x, f"{key}.norm1", 1e-6), state, f"{key}.attn")
                x = x + mlp(norm(x, f"{key}.norm2", 1e-6), state, f"{key}.mlp", "none")
            else:
                attended = soft_attention(x, state, f"{key}.attn", grid, (8, 4, 2)[stage], inverses)
                x = norm(x + attended, f"{key}.norm1", 1e-5)
                x = norm(x + mlp(x, state, f"{key}.mlp", "tanh"), f"{key}.norm2", 1e-5)
        maps = x.T.reshape(1, -1, *grid) if stage < 3 else maps
    return norm(x, "norm", 1e-6)[:1] @ state["head.weight"].T + state["head.bias"]


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("name", "inverses"), [("soft_release_tiny", soft_inverses), ("softpp_release_tiny", softpp_inverses)]
)
@pytest.mark.parametrize(("picture", "size"), [("cat", (224, 224)), ("coffee", (256, 192))])
def test_released_models_compute_their_equations(name, inverses, picture, size):
    """Logits and the gradients of all parameters agree to rounding; with softline's own start of Newton they do not."""
    model = look_trained(timm.create_model(name).double().eval())
    image = photograph(picture, size)
    learned = dict(model.named_parameters())
    state = {key: value.clone().requires_grad_(key in learned) for key, value in model.state_dict().items()}
    expected = naive(state, image, (1, 2, 3, 2), inverses)
    expected.square().sum().backward()
    logits = model(image)
    assert relative(logits, expected) < 1e-12
    with torch.no_grad():
        # another way through the network, without gradients
        assert relative(model(image), expected) < 1e-12
    logits.square().sum().backward()
    worst = max(relative(parameter.grad, state[key].grad) for key, parameter in learned.items())
    assert worst < 1e-10
    other = timm.create_model(name, attention_options={"start": "norm"}).double().eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert relative(other(image), expected) > 1e-6
