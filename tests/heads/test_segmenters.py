import copy

import pytest
import timm
import torch
from torch import nn

import softline  # noqa: F401
from softline.heads.segmenters import segformer, semantic_fpn, upernet
from softline.measure.counting import count_macs


def body(name="softpp_micro", **options):
    return timm.create_model(name, features_only=True, **options)


def segmenters(num_classes=5, **options):
    return {
        "upernet": lambda: upernet(body(**options), num_classes, channels=32),
        "semantic_fpn": lambda: semantic_fpn(body(**options), num_classes, channels=32, head_channels=64),
        "segformer": lambda: segformer(body(**options), num_classes, channels=32),
    }


EVERY = pytest.mark.parametrize("kind", sorted(segmenters()))


@EVERY
@pytest.mark.parametrize("size", [(64, 96), (33, 65), (50, 31), (1, 7)])
def test_logits_have_the_size_of_the_images(kind, size):
    # the smallest image has one token
    model = segmenters(ratios=(1, 1, 1, 1))[kind]().eval()
    logits = model(torch.randn(1, 3, *size))
    assert logits.shape == (1, 5, *size)
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", ["inline_micro", "resnet10t", "convnext_atto"])
@EVERY
def test_any_pyramid_of_four_stages_will_do(kind, name):
    options = {"out_indices": (1, 2, 3, 4)} if name == "resnet10t" else {}
    model = segmenters(name=name, **options)[kind]().eval()
    assert model(torch.randn(1, 3, 61, 75)).shape == (1, 5, 61, 75)


@EVERY
def test_image_does_not_depend_on_its_neighbours(kind):
    model = segmenters()[kind]().double().eval()
    images = torch.randn(3, 3, 47, 70, dtype=torch.float64)
    torch.testing.assert_close(model(images)[1:2], model(images[1:2]), rtol=0, atol=1e-5)


def test_logits_are_where_the_pixels_are():
    """A bright square moves the logits around its own place most."""
    for kind, build in segmenters().items():
        model = build().eval()
        plain = torch.zeros(1, 3, 96, 128)
        marked = plain.clone()
        marked[..., 64:80, 32:48] = 3
        change = (model(marked) - model(plain)).abs().sum((0, 1))
        row, column = divmod(int(change.argmax()), 128)
        assert (56 <= row < 88, 24 <= column < 56) == (True, True), f"{kind}: {row}, {column}"


def test_auxiliary_logits_are_given_in_training_only():
    model = segmenters()["upernet"]()
    images = torch.randn(2, 3, 40, 56)
    logits, auxiliary = model.train()(images)
    assert logits.shape == auxiliary.shape == (2, 5, 40, 56)
    assert isinstance(model.eval()(images), torch.Tensor)
    without = upernet(body(), 5, channels=32, auxiliary=False)
    assert isinstance(without.train()(images), torch.Tensor)
    for kind in ("semantic_fpn", "segformer"):
        assert isinstance(segmenters()[kind]().train()(images), torch.Tensor)


@EVERY
def test_every_parameter_learns(kind):
    """Otherwise DDP would wait for its gradient."""
    model = segmenters()[kind]().train()
    output = model(torch.randn(2, 3, 64, 64))
    sum(part.square().mean() for part in (output if isinstance(output, tuple) else (output,))).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@EVERY
def test_first_predictions_are_near_even(kind):
    """The stages' own sums, which nothing has normalised, do not reach the logits."""
    model = segmenters()[kind]().train()
    output = model(100 * torch.randn(2, 3, 64, 64))
    for logits in output if isinstance(output, tuple) else (output,):
        loss = -logits.log_softmax(1)[:, 0].mean()
        assert loss.item() == pytest.approx(torch.tensor(5.0).log().item(), abs=0.3)


@EVERY
def test_logits_are_float32_under_autocast(kind):
    model = segmenters()[kind]().eval()
    images = torch.randn(1, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
    assert logits.dtype == torch.float32
    assert (logits - model(images)).abs().max() <= 0.1 * model(images).abs().max()


@EVERY
def test_copy_and_state_dict_give_the_same_logits(kind):
    model = segmenters()[kind]().eval()
    images = torch.randn(1, 3, 40, 40)
    other = segmenters()[kind]().eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(copy.deepcopy(model)(images), model(images))
    assert torch.equal(other(images), model(images))


def test_training_upernet_on_one_image_is_refused():
    one = torch.randn(1, 3, 64, 64)
    with pytest.raises(ValueError, match="at least 2 images in each process's batch, got 1"):
        segmenters()["upernet"]().train()(one)
    # frozen statistics need no batch; the other decoders pool nothing to one pixel
    frozen = upernet(body(), 5, channels=32, auxiliary=False).train()
    for module in frozen.decoder.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    assert frozen(one).shape == (1, 5, 64, 64)
    for kind in ("semantic_fpn", "segformer"):
        assert segmenters()[kind]().train()(one).shape == (1, 5, 64, 64)


@pytest.mark.parametrize("size", [(64, 96), (36, 52)])
def test_segformer_multiplies_before_it_resizes_and_gets_the_same(size):
    """The decoder of segmentation-models-pytorch resizes first; values, and gradients of all parameters and maps."""
    torch.manual_seed(0)
    ours = segmenters()["segformer"]().decoder.double().train()
    theirs = copy.deepcopy(ours.decoder)
    sides = [tuple(-(-side // stride) for side in size) for stride in (4, 8, 16, 32)]
    channels = [projection.linear.in_features for projection in reversed(theirs.mlp_stage)]
    maps = [torch.randn(2, count, *side, dtype=torch.float64) for count, side in zip(channels, sides, strict=True)]
    image = torch.zeros(2, 3, *size, dtype=torch.float64)
    results = []
    # their decoder takes maps from stride 1 on, of which that at stride 2 is empty
    for decoder, before in ((ours, [image, image]), (theirs, [image, image[:, :0]])):
        inputs = [each.clone().requires_grad_() for each in maps]
        out = decoder([*before, *inputs])
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        results.append([out, *(each.grad for each in inputs), *(each.grad for each in decoder.parameters())])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_segformer_costs_less_than_the_backbone():
    with torch.device("meta"):
        model = segformer(body("softpp_tiny"), 19).eval()
        images = torch.randn(1, 3, 512, 1024)
    whole, backbone = (count_macs(lambda part=part: part(images)) for part in (model, model.maps))
    assert whole - backbone < 0.1 * backbone


def test_bad_options_are_named():
    for width in (32, 80):
        with pytest.raises(
            ValueError, match=rf"head_channels must be a multiple of 32, at least 64, for GroupNorm, got {width}"
        ):
            semantic_fpn(body(), 5, head_channels=width)
    with pytest.raises(ValueError, match="num_classes must be at least 1, got 0"):
        upernet(body(), 0)
    with pytest.raises(ValueError, match=r"dropout must be at least 0 and below 1, got 1\.0"):
        upernet(body(), 5, dropout=1.0)
    with pytest.raises(ValueError, match=r"strides \(4, 8, 16, 32\), got \(4, 8\)"):
        upernet(body(out_indices=(0, 1)), 5)


def millions(module):
    return sum(parameter.numel() for parameter in module.parameters()) / 1e6


@pytest.mark.parametrize(
    ("name", "count", "paper"),
    [("softpp_small", 58.854, 60), ("softpp_medium", 80.055, 81), ("softpp_large", 118.705, 121)],
)
def test_upernet_for_ade20k_is_as_large_as_the_paper_says(name, count, paper):
    """Heads are as wide as the paper's framework has them: 512 channels, 256 in the auxiliary head.

    Without the classifier of ImageNet, which has 0.8 to 1.0 M; the paper's column is that of Swin-T, S and B.
    """
    with torch.device("meta"):
        model = upernet(body(name), 150)
    assert millions(model) == pytest.approx(count, abs=1e-3)
    assert millions(model) == pytest.approx(paper, rel=0.02)
