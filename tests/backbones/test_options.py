"""Options of the backbones: they do what they say, and those without effect are refused."""

import pytest
import timm
import torch
from torch import nn

from softline.attention.hooks import uncapped_landmarks
from softline.attention.soft import SoftCore
from softline.backbones import MODEL_NAMES
from softline.backbones.cswin import StripAttention
from softline.backbones.swin import PositionBiasAttention
from softline.layers.local import LocalResidual
from softline.layers.windows import WindowedAttention

# one model of each family, small, with all blocks of the attention that is asked for
FAMILIES = {
    "softpp_micro": {},
    "inline_micro": {},
    "inline_deit_tiny": {"depth": 2},
    "inline_swin_tiny": {"depths": (2, 2), "num_heads": (3, 6), "stage_types": "II", "window_size": 8},
    "inline_cswin_tiny": {"depths": (1, 1), "num_heads": (2, 4), "stage_types": "II", "strips": (2, 2)},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def build(name: str, **options) -> nn.Module:
    known = dict(FAMILIES.get(name, {}))
    # only softmax blocks have strips, and their windows have a name of their own
    known.pop("window_size" if options.get("attention", "inline") == "softmax" else "strips", None)
    return timm.create_model(name, num_classes=3, **{**known, **options}).eval()


def landmark_counts(model: nn.Module, size: tuple[int, int]) -> list[int]:
    """The number of landmarks in each attention that has them, for an image of this size."""
    counts = []

    def note(core: nn.Module, inputs, output) -> None:
        counts.append(output["landmarks"].shape[2])

    handles = [core.register_forward_hook(note) for core in model.modules() if isinstance(core, SoftCore)]
    with torch.no_grad():
        model(torch.randn(1, 3, *size))
    for handle in handles:
        handle.remove()
    return counts


@pytest.mark.parametrize("name", ["soft_tiny", "softpp_tiny"])
def test_the_fixed_ratio_survives_timm(name):
    """56 x 88 tokens in stage 1 of a 224 x 352 image, cells of 8 x 8."""
    capped, fixed = build(name), build(name, max_landmarks="ratio")
    assert landmark_counts(capped, (224, 352)) == [49] * 6
    assert landmark_counts(fixed, (224, 352)) == [7 * 11] * 6
    assert landmark_counts(build(name, max_landmarks=None), (224, 352)) == [49] * 6  # timm drops it
    fixed.load_state_dict(capped.state_dict())
    image = torch.randn(1, 3, 224, 352)
    with torch.no_grad():
        with uncapped_landmarks(capped):
            expected = capped(image)
        torch.testing.assert_close(fixed(image), expected)
        assert (capped(image) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["soft_release_tiny", "softpp_release_tiny"])
def test_released_models_have_the_fixed_ratio_of_the_release(name):
    assert landmark_counts(build(name), (256, 224)) == [8 * 7] * 6


@pytest.mark.parametrize("count", [36, 49, 64, 81])
def test_every_stage_has_as_many_landmarks_as_asked_for(count):
    """Table 9 of the SOFT paper."""
    assert landmark_counts(build("softpp_tiny", landmarks=count), (224, 224)) == [count] * 6
    # and no more of them for larger images
    assert landmark_counts(build("softpp_tiny", landmarks=count), (288, 352)) == [count] * 6


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("softpp_tiny", {"landmarks": 50}, r"landmarks must be a square number \(the nearest are 49 and 64\), got 50"),
        ("softpp_tiny", {"landmarks": 225}, "landmarks=225 cannot be taken in stage 3: its grid has 14 x 14 tokens"),
        ("softpp_small", {"landmarks": 64}, "landmarks=64 cannot be taken in stage 4: its grid has 7 x 7 tokens"),
        ("softpp_tiny", {"landmarks": 36, "max_landmarks": 6}, "landmarks=36 already determines max_landmarks"),
        ("softpp_tiny", {"max_landmarks": 8}, "max_landmarks=8 has no effect at this image size: .* 7 x 7 landmarks"),
        ("inline_deit_tiny", {"attention": "softpp", "attention_options": {"max_landmarks": 9}}, "=9 has no effect"),
        ("inline_micro", {"attention": "nystrom", "attention_options": {"max_landmarks": 9}}, "=9 has no effect"),
        ("inline_swin_tiny", {"attention": "soft", "attention_options": {"max_landmarks": 9}}, "=9 has no effect"),
        ("inline_cswin_tiny", {"attention": "soft", "attention_options": {"max_landmarks": 40}}, "=40 has no effect"),
        ("softpp_tiny", {"max_landmarks": "ration"}, "max_landmarks must be a number, .* or \"ratio\", got 'ration'"),
        ("softpp_micro", {"attention": "inline", "sampling": "random"}, "sampling='random' has no effect: inline"),
        (
            "softpp_tiny",
            {"attention": "linear", "max_landmarks": 5},
            "max_landmarks=5 has no effect: linear and softmax",
        ),
        ("softpp_micro", {"attention": "inline", "ratios": (1, 1, 1, 1)}, "ratios=.* has no effect: inline"),
        ("softpp_micro", {"attention": "inline", "value_convs": (3, 3, 3, 3)}, "value_convs=.* has no effect"),
        ("inline_micro", {"sr_ratios": (2, 2, 2, 2)}, "sr_ratios=.* has no effect: inline attention"),
        (
            "inline_swin_tiny",
            {"softmax_windows": 7},
            "softmax_windows=7 has no effect: there is no",
        ),
        ("inline_cswin_tiny", {"stage_types": "II", "strips": (1, 2)}, "strips=.* has no effect: there is no softmax"),
        ("inline_swin_tiny", {"attention": ("inline", "soft"), "stage_types": "II"}, "stage_types='II' has no effect"),
        ("soft_release_tiny", {"attention_options": {"inverse": "cholesky", "gradient": "autograd"}}, "needs inverse="),
        (
            "softpp_micro",
            {"attention_options": {"inverse": "pinv", "start": "halving"}},
            "start='halving' needs inverse=",
        ),
        ("softpp_release_tiny", {"attention_options": {"ridge": 0.1}}, 'start="release" .* ridge <= 0 for SOFT'),
        ("soft_release_tiny", {"attention_options": {"ridge": 0.1}}, 'start="release" .* ridge <= 0.05 for SOFT '),
        ("softpp_tiny", {"landmarks": 36, "attention_options": {"max_landmarks": 5}}, "landmarks=36 has no effect"),
        ("softpp_tiny", {"landmarks": 36, "attention_options": {"ratio": 8}}, "landmarks=36 already determines ratio"),
        ("softpp_tiny", {"ratios": (4, 4, 2, 1), "attention_options": {"ratio": 8}}, "attention_options sets ratio=8"),
        ("softpp_micro", {"sampling": "conv", "attention_options": {"sampling": "random"}}, "sampling='conv' has no"),
        ("inline_swin_small", {"attention": "softpp", "stage_types": "SSSS"}, "attention='softpp' has no effect"),
        ("inline_cswin_small", {"attention": "softpp", "stage_types": "SSSS"}, "attention='softpp' has no effect"),
        ("inline_swin_small", {"attention": "softmax", "window_size": 28}, "window_size=28 has no effect"),
        ("inline_micro", {"attention_options": {"local_residual": False, "local_kernel": 5}}, "local_kernel=5 has no"),
        (
            "soft_release_tiny",
            {"attention": ["soft", "softpp", "soft", "softmax"]},
            "as one of soft and softpp",
        ),
        ("soft_release_tiny", {"attention_options": {"normalize": True}}, "normalize=True would make soft another"),
    ],
)
def test_settings_without_effect_and_landmarks_that_cannot_be_had_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model(name, **{**{k: v for k, v in FAMILIES.get(name, {}).items() if k != "strips"}, **options})


@every_family
@pytest.mark.parametrize("attention", ["softmax", "inline", "softpp"])
def test_unknown_options_are_refused_by_every_family(family, attention):
    with pytest.raises(ValueError, match=r"must be one of .*; got 'nonsense'"):
        build(family, attention=attention, attention_options={"nonsense": 1})
    with pytest.raises(TypeError, match="nonsense"):
        build(family, attention=attention, nonsense=1)


def test_options_of_a_released_model_are_added_to_its_own():
    def options(name: str, **given) -> dict:
        cores = [core.options for core in build(name, **given).modules() if isinstance(core, SoftCore)]
        assert all(core == cores[0] for core in cores)
        return cores[0]

    changed = options("soft_release_tiny", attention_options={"iterations": 7})
    assert changed == {**options("soft_release_tiny"), "iterations": 7}
    assert (changed["start"], changed["ridge"]) == ("release", 0.01)
    changed = options("softpp_release_tiny", attention_options={"gradient": "one_step"})
    assert (changed["start"], changed["gradient"]) == ("release", "one_step")
    direct = options("softpp_release_tiny", attention_options={"inverse": "cholesky", "ridge": 1e-5})
    assert (direct["inverse"], direct["ridge"], direct["gradient"]) == ("cholesky", 1e-5, "one_step")
    # in a list too, stage 4 being softmax
    assert options("softpp_release_tiny", attention=["softpp"] * 3 + ["softmax"]) == options("softpp_release_tiny")
    # another attention has no options of the release
    assert build("soft_release_tiny", attention="inline")(torch.randn(1, 3, 64, 64)).shape == (1, 3)


@pytest.mark.parametrize("shifted", [False, True])
@torch.no_grad()
def test_softmax_windows_with_one_projection_and_a_local_residual(shifted):
    """In each window, with its own mean token; the padding has no part in it."""
    inner = PositionBiasAttention(8, 2, 4, symmetric=True, local_residual=True, qkv_bias=False).double()
    module, x = WindowedAttention(inner, 4, shifted=shifted, mask="pairs"), torch.randn(1, 35, 8).double()
    grid_size, shift = (7, 5), 2 if shifted else 0
    assert inner.qkv.weight.shape == (16, 8)
    q, v = inner.qkv(x).split(8, dim=-1)
    weights = module.weights(x, grid_size)[0]  # [2, 35, 35]
    attended = torch.cat([weights[head] @ v[0, :, 4 * head : 4 * head + 4] for head in range(2)], dim=-1)
    place = torch.arange(35)
    rows, columns = (place // 5 - shift) % 8, (place % 5 - shift) % 8
    for window in range(4):
        inside = ((rows // 4 == window // 2) & (columns // 4 == window % 2)).nonzero()[:, 0]
        whole = torch.zeros(1, 16, 8).double()
        slots = rows[inside] % 4 * 4 + columns[inside] % 4
        whole[0, slots] = v[0, inside]
        # the kernels come from the mean of the window's real tokens
        mean = x[:, inside].mean(1, keepdim=True).expand(1, 16, 8)
        local = inner.local(mean, whole.unflatten(-1, (2, 4)).transpose(1, 2), (4, 4))
        attended[inside] += local.transpose(1, 2).flatten(2)[0, slots]
    torch.testing.assert_close(module(x, grid_size)[0], inner.proj(attended))
    # the keys are the queries
    one = inner.weights(x[:, :16], (4, 4))[0, 0]
    torch.testing.assert_close(one, (q[0, :16, :4] @ q[0, :16, :4].T / 2 + inner.bias((4, 4))[0]).softmax(-1))


@torch.no_grad()
def test_softmax_strips_with_one_projection_and_a_local_residual():
    module = StripAttention(8, 2, 2, symmetric=True, local_residual=True).double()
    plain = StripAttention(8, 2, 2).double()
    shared = {key: value for key, value in module.state_dict().items() if not key.startswith("residual")}
    query = {key: torch.cat([value[:8], value]) for key, value in shared.items() if key.startswith("qkv")}
    plain.load_state_dict({**shared, **query})
    x, context = torch.randn(2, 35, 8).double(), torch.randn(2, 35, 8).double()
    values = module.qkv(x)[..., 8:].unflatten(-1, (2, 4)).transpose(1, 2)
    residual = module.residual(context, values, (7, 5)).transpose(1, 2).flatten(2) @ module.proj.weight.T
    torch.testing.assert_close(module(x, (7, 5), context=context), plain(x, (7, 5)) + residual)


@pytest.mark.parametrize("family", ["inline_swin_tiny", "inline_cswin_tiny"])
def test_softmax_blocks_of_swin_and_cswin_take_the_options(family):
    options = {"attention": "softmax", "attention_options": {"symmetric": True, "local_residual": True}}
    changed, plain = build(family, **options), build(family, attention="softmax")
    linear = [m.weight for m in changed.modules() if isinstance(m, nn.Linear) and m.out_features == 2 * m.in_features]
    residuals = [module for module in changed.modules() if isinstance(module, LocalResidual)]
    assert len(linear) == len(residuals) == sum(len(stage.blocks) for stage in changed.stages)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (plain, changed)]
    # no keys, and InLine's 10 C d_h + 10 C for each block
    added = [
        10 * stage.dim * (stage.dim // stage.blocks[0].attn.num_heads + 1)
        for stage in changed.stages
        for _ in stage.blocks
    ]
    keys = [stage.dim**2 + stage.dim for stage in changed.stages for _ in stage.blocks]
    assert sizes[1] - sizes[0] == sum(added) - sum(keys)
    logits = changed(torch.randn(2, 3, 72, 40))
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in changed.parameters())


@pytest.mark.parametrize("name", [name for name in MODEL_NAMES if "swin" in name])
def test_every_swin_and_cswin_does_without_softmax_blocks_and_without_others(name):
    """The models' own strips, windows and types of stages give way."""
    for options in ({"stage_types": "IIII"}, {"attention": ["softpp"] * 4}, {"attention": "softmax"}):
        model = timm.create_model(name, device="meta", **options)
        blocks = [block.attn for stage in model.stages for block in stage.blocks]
        kinds = {type(getattr(block, "attention", block)) for block in blocks}
        softmax = kinds & {PositionBiasAttention, StripAttention}
        assert len(kinds) == 1
        assert bool(softmax) == (options == {"attention": "softmax"})
