import pytest
import torch

from softline import ATTENTIONS
from softline.analysis.locality import (
    chance,
    hidden_keys,
    key_names,
    leave_out,
    local_mass,
    local_masses,
    local_sum,
    masked_accuracies,
    plot_locality,
)
from softline.attention.registry import create_attention
from softline.measure.counting import peak_bytes
from tests.analysis.conftest import make_pictures, make_subject


class Labelled:
    classes = ("a", "b", "c", "d")

    def __init__(self, pictures):
        self.pictures = pictures

    def __len__(self):
        return len(self.pictures)

    def load(self, index):
        return self.pictures[index].image, self.pictures[index].label

    def name(self, index):
        return self.pictures[index].name


def first_layer(subject, picture, size=None):
    (given, *_), _ = subject.look(subject.prepare(picture.image, size)[None])
    return given


@torch.no_grad()
@pytest.mark.parametrize("attention", ["softmax", "inline", "softpp"])
@pytest.mark.parametrize("name", ["softpp_micro", "inline_deit_tiny"])
def test_local_mass_is_the_share_of_the_neighbourhood(attention, name, pictures):
    options = {"img_size": 96, "depth": 2} if name == "inline_deit_tiny" else {}
    subject = make_subject(attention, name, **options)
    given = first_layer(subject, pictures[0], 96)
    weights, prefix = given.layer.attention.weights(given.x, given.grid_size)[0], given.layer.prefix
    height, width = given.grid_size
    shares, sums = [], []
    for row in range(height):
        for column in range(width):
            near = [
                prefix + r * width + c
                for r in range(max(row - 1, 0), min(row + 2, height))
                for c in range(max(column - 1, 0), min(column + 2, width))
            ]
            line = weights[:, prefix + row * width + column]
            sums.append(line[:, near].sum(-1))
            shares.append(line[:, near].abs().sum(-1) / line.abs().sum(-1))
    torch.testing.assert_close(local_mass(given)[0], torch.stack(shares).mean(0))
    torch.testing.assert_close(local_sum(given)[0], torch.stack(sums).mean(0))


@torch.no_grad()
def test_negative_weights_are_subtracted_from_the_sum_alone(pictures):
    given = first_layer(make_subject("softmax"), pictures[0])
    torch.testing.assert_close(local_sum(given), local_mass(given))
    subject = make_subject("inline")
    # scores that are large enough for negative weights
    subject.model.stages[0].blocks[0].attn.qkv.weight.mul_(500)
    given = first_layer(subject, pictures[0])
    assert given.layer.attention.weights(given.x, given.grid_size).min() < 0
    assert not torch.allclose(local_sum(given), local_mass(given), rtol=1e-3)


def test_even_weights_have_the_mass_of_chance(pictures):
    subject = make_subject("softmax")
    with torch.no_grad():
        subject.model.stages[0].blocks[0].attn.qkv.weight.zero_()
        given = first_layer(subject, pictures[0])
        assert float(local_mass(given).mean()) == pytest.approx(chance(given))
    # corners have 4 neighbours, edges 6, the others 9
    assert chance(given) == pytest.approx((4 * 4 + 24 * 6 + 36 * 9) / 64 / 64)


def test_only_grids_larger_than_the_window_are_measured(pictures):
    found = local_masses(make_subject("softmax"), pictures)
    assert [one.grid_size for one in found] == [(8, 8), (4, 4)]
    assert [one.whole_window for one in found] == [9 / 64, 9 / 16]
    assert [one.sum for one in found] == pytest.approx([one.mass for one in found])
    with pytest.raises(ValueError, match="no layer that sees a grid of more than 9 x 9 tokens"):
        local_masses(make_subject("softmax"), pictures, side=9)


@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_nothing_hidden_changes_nothing(attention):
    module = create_attention(attention, 32, 2).eval()
    x = torch.randn(2, 20, 32)
    weights = module.weights(x, (4, 5))
    kept = leave_out(weights, torch.zeros(20, 20, dtype=torch.bool), module.operator.name)
    torch.testing.assert_close(kept, weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["softmax", "linear", "inline"])
@torch.no_grad()
def test_what_remains_still_sums_to_one_and_hides_the_rest(attention):
    module = create_attention(attention, 32, 2).eval()
    weights = module.weights(torch.randn(2, 20, 32), (4, 5))
    hidden = torch.rand(20, 20) < 0.4
    kept = leave_out(weights, hidden, attention)
    assert (kept[..., hidden] == 0).all()
    torch.testing.assert_close(kept.sum(-1), torch.ones(2, 2, 20))


@torch.no_grad()
def test_softmax_without_keys_is_softmax_over_the_others():
    q, k = torch.randn(2, 1, 1, 6, 8)
    from softline import ops

    hidden = torch.eye(6, dtype=torch.bool)
    scores = (8**-0.5 * q @ k.mT).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(leave_out(ops.softmax_weights(q, k), hidden, "softmax"), scores.softmax(-1))


def test_hidden_keys_do_not_reach_the_output_and_come_back(pictures):
    subject = make_subject("softmax")
    image = subject.prepare(pictures[0].image)[None]
    layer = subject.layers[0]
    with torch.no_grad():
        before = subject.model(image)
        with hidden_keys([layer], side=3):
            during = subject.model(image)
        after = subject.model(image)
    assert not torch.allclose(before, during, atol=1e-6)
    assert torch.equal(before, after)


@torch.no_grad()
def test_a_token_in_a_hidden_window_has_no_influence():
    subject = make_subject("softmax")
    attention, x = subject.layers[0].attention, torch.randn(1, 64, subject.layers[0].attention.dim)
    changed = x.clone()
    changed[:, 9] += 1  # row 1, column 1
    with hidden_keys(subject.layers[:1], side=3):
        first, second = attention(x, (8, 8)), attention(changed, (8, 8))
    same = (first - second).abs().amax(-1)[0] < 1e-6
    rows, columns = torch.arange(64) // 8, torch.arange(64) % 8
    near = (rows - 1).abs().le(1) & (columns - 1).abs().le(1)
    # the token's own row changes because its query did
    near[9] = False
    assert same[near].all()
    assert not same[~near].any()


def test_accuracies_name_what_is_hidden_and_where():
    subject = make_subject("inline")
    found = masked_accuracies(subject, Labelled(make_pictures(8)), count=8, sides=(3, 7))
    assert [one.keys for one in found] == [
        "none",
        "local 3x3",
        "random, as many as 3x3",
        "local 7x7",
        "random, as many as 7x7",
    ]
    assert found[1].layers == ["stage 1, block 1", "stage 2, block 1"]
    assert found[3].layers == ["stage 1, block 1"]
    assert all(0 <= one.top1 <= 1 for one in found)


def test_chance_is_that_of_every_query_counted():
    subject = make_subject("softmax", "inline_deit_tiny", img_size=(48, 80), depth=1)
    (given,), _ = subject.look(torch.randn(1, 3, 48, 80))
    assert given.grid_size == (3, 5)
    # neighbours of the 4 corners, of 2 + 6 other tokens at the edge, and of the 3 inside; 15 tokens and a class token
    assert chance(given) == pytest.approx((4 * 4 + 8 * 6 + 3 * 9) / 15 / 16)


def test_layers_that_see_windows_alone_are_left_out():
    subject = make_subject("inline", "inline_cswin_tiny")
    found = local_masses(subject, make_pictures(1, (128, 128)), size=128)
    assert {one.layer.partition(",")[0] for one in found} == {"stage 1", "stage 2", "stage 4"}


def test_masses_of_many_tokens_take_no_memory_of_all_pairs():
    subject = make_subject("inline")
    (given, *_), _ = subject.look(torch.randn(1, 3, 384, 384))
    assert given.tokens == 9216
    pairs = 9216**2 * 4
    assert peak_bytes(lambda: (local_mass(given), chance(given))) < pairs


def test_keys_of_windows_cannot_be_hidden():
    subject = make_subject("softmax", "inline_swin_tiny")
    with pytest.raises(ValueError, match="softmax attends inside windows: keys cannot be hidden there"):
        masked_accuracies(subject, Labelled(make_pictures(1, (64, 64))), count=1, size=64)


def test_accuracy_of_too_many_tokens_is_refused(monkeypatch):
    monkeypatch.setattr("softline.analysis.locality.MOST_WEIGHTS_BYTES", 1000)
    with pytest.raises(ValueError, match="hiding keys needs all N x N weights of a layer"):
        masked_accuracies(make_subject("inline"), Labelled(make_pictures(1)), count=1)


@torch.no_grad()
def test_random_keys_are_the_same_for_every_image_and_batch(pictures):
    subject = make_subject("softmax")
    images = torch.stack([subject.prepare(picture.image) for picture in pictures])
    with hidden_keys(subject.layers[:2], side=3, seed=0):
        together = subject.model(images)
        alone = torch.cat([subject.model(image[None]) for image in images])
    with hidden_keys(subject.layers[:2], side=3, seed=5):
        others = subject.model(images)
    torch.testing.assert_close(together, alone)
    assert not torch.allclose(together, others, atol=1e-6)


def test_the_batch_does_not_change_the_accuracy(monkeypatch):
    subject, source = make_subject("inline"), Labelled(make_pictures(6))
    whole = masked_accuracies(subject, source, count=6)
    monkeypatch.setattr("softline.analysis.locality.WEIGHTS_BYTES", 1)
    assert masked_accuracies(subject, source, count=6) == whole


def test_models_of_different_depth_share_a_figure(pictures):
    pyramid, flat = make_subject("inline"), make_subject("softmax", "inline_deit_tiny", img_size=96, depth=3)
    masses = {"one": local_masses(pyramid, pictures), "other": local_masses(flat, pictures, size=96)}
    accuracies = {
        "one": masked_accuracies(pyramid, Labelled(make_pictures(4)), count=4),
        "other": masked_accuracies(flat, Labelled(make_pictures(4)), count=4, sides=(3, 5), size=96),
    }
    figure = plot_locality(masses, accuracies)
    labels = [tick.get_text() for tick in figure.axes[0].get_xticklabels()]
    assert labels == ["layer 1", "layer 2", "layer 3"]
    assert key_names(accuracies)[:2] == ["none", "local 3x3"]


def test_other_classes_are_refused():
    source = Labelled(make_pictures(2))
    source.classes = ("b", "a", "c", "d")
    with pytest.raises(ValueError, match="classes are not those that inline was trained for"):
        masked_accuracies(make_subject("inline"), source, count=2)


def test_the_figure_shows_accuracies_where_there_are_any(pictures):
    subject = make_subject("inline")
    masses = {"inline": local_masses(subject, pictures)}
    assert len(plot_locality(masses, {}).axes) == 1
    accuracies = {"inline": masked_accuracies(subject, Labelled(make_pictures(4)), count=4)}
    assert len(plot_locality(masses, accuracies).axes) == 2
    axis = plot_locality(masses, accuracies, sums=True).axes[1]
    assert list(axis.lines[0].get_ydata()) == [one.sum for one in masses["inline"]]
    assert (axis.lines[1].get_linestyle(), list(axis.lines[1].get_ydata())) == (":", [9 / 64, 9 / 16])
