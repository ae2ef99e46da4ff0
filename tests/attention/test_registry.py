import sys

import pytest
import torch

import softline
from softline.attention.registry import ATTENTIONS, create_attention
from softline.registry import Registry


def test_every_attention_of_the_design_is_registered():
    names = "softmax gaussian soft softpp inline linear performer linformer nystrom reformer efficient hydra focused"
    assert set(names.split()) <= set(ATTENTIONS)
    assert softline.create_attention is create_attention


def test_unknown_names_list_the_known_ones_and_the_closest():
    with pytest.raises(
        ValueError, match=r"attention must be one of angular, efficient, .*softpp; got 'sofpp'"
    ) as error:
        create_attention("sofpp", 32, 2)
    assert "did you mean 'softpp'?" in str(error.value)


def test_unknown_options_list_the_known_ones_and_the_closest():
    with pytest.raises(ValueError, match=r"an option of 'soft' must be one of .*ratio.*; got 'ratios'; did you mean"):
        create_attention("soft", 32, 2, ratios=4)


def test_a_name_is_registered_once():
    registry = Registry("attention", group="softline.attention")
    registry.register("mine")(torch.nn.Identity)
    with pytest.raises(ValueError, match="attention 'mine' is registered already"):
        registry.register("mine")(torch.nn.Identity)


def test_other_packages_add_attentions_through_entry_points(tmp_path, monkeypatch):
    (tmp_path / "thirdparty.py").write_text(
        "from softline.attention import inline\n"
        "def sharp(dim, num_heads, *, num_prefix_tokens=0, sharpness=1.0):\n"
        "    module = inline(dim, num_heads, num_prefix_tokens=num_prefix_tokens)\n"
        "    module.sharpness = sharpness\n"
        "    return module\n"
    )
    metadata = tmp_path / "thirdparty-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[softline.attention]\nsharp = thirdparty:sharp\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry("attention", group="softline.attention")
    assert "sharp" in registry
    assert "thirdparty" not in sys.modules, "a package is imported when its attention is built, not when it is listed"
    monkeypatch.setattr("softline.attention.registry.ATTENTIONS", registry)
    module = create_attention("sharp", 32, 2, sharpness=3.0)
    assert module.sharpness == 3.0
    assert module(torch.randn(1, 4, 32), (2, 2)).shape == (1, 4, 32)
    with pytest.raises(ValueError, match="an option of 'sharp' must be one of sharpness; got 'sharpnes'"):
        create_attention("sharp", 32, 2, sharpnes=3.0)


def test_a_package_that_takes_a_name_twice_is_named_every_time(tmp_path, monkeypatch):
    metadata = tmp_path / "clashing-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: clashing\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[softline.attention]\nmine = clashing:soft\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry("attention", group="softline.attention")
    registry.register("mine")(torch.nn.Identity)
    for _ in range(2):
        with pytest.raises(ValueError, match="attention 'mine' of clashing is registered already; rename it"):
            list(registry)


def test_two_packages_that_declare_the_same_name_are_named_every_time(tmp_path, monkeypatch):
    for package in ("first", "second"):
        metadata = tmp_path / f"{package}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[softline.attention]\nmine = {package}:soft\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry("attention", group="softline.attention")
    declared = r"attention 'mine' is declared by (first and second|second and first); uninstall or rename one"
    for _ in range(2):
        with pytest.raises(ValueError, match=declared):
            list(registry)


@pytest.mark.parametrize(("dim", "num_heads"), [(30, 4), (32, 0), (0, 1)])
def test_dim_must_be_divisible_by_heads(dim, num_heads):
    with pytest.raises(ValueError, match=rf"dim \({dim}\) must be divisible by num_heads \({num_heads}\)"):
        create_attention("soft", dim, num_heads)


def test_prefix_tokens_are_not_negative():
    with pytest.raises(ValueError, match="num_prefix_tokens must be at least 0, got -1"):
        create_attention("soft", 32, 2, num_prefix_tokens=-1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("soft", {"ratio": 2.5}),
        ("soft", {"ratio": "22"}),
        ("soft", {"ratio": None}),
        ("soft", {"max_landmarks": True}),
        ("soft", {"max_landmarks": (7.0, 7.0)}),
        ("soft", {"iterations": 2.5}),
        ("soft", {"iterations": True}),
        ("soft", {"ridge": "0.1"}),
        ("soft", {"ridge": float("inf")}),
        ("soft", {"value_conv": 3.0}),
        ("soft", {"num_prefix_tokens": 1.5}),
        ("linformer", {"rank": 4.0}),
        ("reformer", {"bucket_size": 4.5}),
        ("reformer", {"rounds": 2.0}),
        ("focused", {"power": "3"}),
        ("performer", {"seed": "a"}),
    ],
)
def test_options_of_the_wrong_kind_are_named(name, options):
    (option,) = options
    with pytest.raises(ValueError, match=option.replace("value_conv", "value convolution")):
        create_attention(name, 32, 2, **options)
