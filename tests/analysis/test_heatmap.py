import pytest
import torch

from softline.analysis.heatmap import (
    cell_at,
    heat_maps,
    plot_heat_maps,
    plot_models_beside,
    query_map,
    rollout,
    spread_to_finer,
)
from softline.backbones.inspection import find_backbone
from softline.plotting.contrast import unit_scale
from tests.analysis.conftest import make_subject


@torch.no_grad()
def test_a_map_is_a_row_of_the_weights(pictures):
    subject = make_subject("inline")
    image, maps = heat_maps(subject, pictures[0], (0.3, 0.9), subject.layers[:2], [0, None])
    assert image.shape == (3, 32, 32)
    assert [one.column for one in maps] == [
        "stage 1, block 1, head 1",
        "stage 1, block 1, mean of heads",
        "stage 2, block 1, head 1",
        "stage 2, block 1, mean of heads",
    ]
    seen, _ = subject.look(subject.prepare(pictures[0].image)[None])
    weights = seen[1].layer.attention.weights(seen[1].x, (4, 4))[0, :, 3 * 4 + 1]
    assert maps[2].query == (3, 1)
    torch.testing.assert_close(maps[2].values, weights[0].reshape(4, 4))
    torch.testing.assert_close(maps[3].values, weights.mean(0).reshape(4, 4))


@pytest.mark.parametrize(
    ("query", "cell"), [((0, 0), (0, 0)), ((1, 1), (3, 6)), ((0.5, 0.5), (2, 3)), ((0.99, 0.2), (0, 6))]
)
def test_points_of_the_image_fall_into_cells(query, cell):
    assert cell_at(query, (4, 7)) == cell


def test_mistakes_are_named(pictures):
    subject = make_subject()
    with pytest.raises(ValueError, match=r"a query is X,Y from 0 .* to 1 .*, got 1\.2,0"):
        heat_maps(subject, pictures[0], (1.2, 0), subject.layers, [None])
    with pytest.raises(ValueError, match="head must be at least 0 and below 1, got 7"):
        heat_maps(subject, pictures[0], (0, 0), subject.layers[:1], [7])
    tiny = make_subject(name="softpp_tiny")
    with pytest.raises(ValueError, match="softpp needs images of at least 29 x 29 pixels, got a size of 28"):
        tiny.prepare(pictures[0].image, 28)


@torch.no_grad()
def test_rollout_of_a_flat_network_is_the_product_of_its_mixed_weights(pictures):
    subject = make_subject("softmax", "inline_deit_tiny", img_size=64, depth=3)
    seen, _ = subject.look(subject.prepare(pictures[0].image, 64)[None])
    found = rollout(find_backbone(subject.model), seen)
    product = torch.eye(17)
    for given in seen:
        mean = given.layer.attention.weights(given.x, given.grid_size)[0].mean(0)
        product = (mean + torch.eye(17)) / 2 @ product
    expected = product[0, 1:].reshape(4, 4)
    torch.testing.assert_close(found[0], expected / expected.sum())


@pytest.mark.parametrize("attention", ["softmax", "soft", "inline", "hydra"])
def test_rollout_through_a_pyramid_is_a_distribution_over_the_first_stage(attention, pictures):
    subject = make_subject(attention)
    _, maps = heat_maps(subject, pictures[0], (0.5, 0.5), [], [], with_rollout=True)
    assert maps[0].values.shape == (8, 8)
    assert float(maps[0].values.sum()) == pytest.approx(1, abs=1e-5)
    assert (maps[0].values >= 0).all()


def test_a_network_that_does_not_mix_tokens_depends_on_all_alike(pictures):
    # without attention to others every token of the last stage stands for those that it covers
    subject = make_subject("softmax", global_pool="avg")
    seen, _ = subject.look(subject.prepare(pictures[0].image)[None])
    with torch.no_grad():
        for given in seen:
            given.layer.attention.qkv.weight.zero_()
    values = rollout(find_backbone(subject.model), seen)[0]
    torch.testing.assert_close(values, torch.full((8, 8), 1 / 64))


def test_shares_stay_on_their_part_of_the_image():
    subject = make_subject("softmax")
    seen, _ = subject.look(torch.randn(1, 3, 28, 28))
    fine, coarse = seen[0], seen[1]
    assert (fine.grid_size, coarse.grid_size) == ((7, 7), (4, 4))
    share = torch.zeros(1, 16)
    share[0, 4 * 1 + 3] = 1  # from 1/4 to 1/2 of the height, the last quarter of the width
    grid = spread_to_finer(share, coarse, fine).reshape(7, 7)
    # rows 1.75 to 3.5 of 7, columns 5.25 to 7
    rows, columns = torch.tensor([0, 0.25, 1, 0.5, 0, 0, 0]) / 1.75, torch.tensor([0, 0, 0, 0, 0, 0.75, 1]) / 1.75
    torch.testing.assert_close(grid, rows[:, None] * columns)
    even = spread_to_finer(torch.full((1, 16), 1 / 16), coarse, fine)
    torch.testing.assert_close(even, torch.full((1, 49), 1 / 49))


def test_layers_come_in_the_order_they_were_asked_for(pictures):
    subject = make_subject()
    layers = [subject.layers[2], subject.layers[0]]
    _, maps = heat_maps(subject, pictures[0], (0.5, 0.5), layers, [None])
    assert [one.column.rpartition(",")[0] for one in maps] == ["stage 3, block 1", "stage 1, block 1"]


def test_maps_can_be_written_as_plain_numbers(pictures):
    subject = make_subject()
    _, (one,) = heat_maps(subject, pictures[0], (0.5, 0.5), subject.layers[:1], [None])
    plain = one.to_dict()
    assert plain["grid_size"] == (8, 8)
    torch.testing.assert_close(torch.tensor(plain["values"]), one.values, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_the_mean_of_heads_is_the_mean(pictures):
    subject = make_subject("linear")
    given = subject.look(subject.prepare(pictures[0].image)[None])[0][1]
    heads = [query_map(given, 5, head=head) for head in range(given.layer.attention.num_heads)]
    torch.testing.assert_close(query_map(given, 5), torch.stack(heads).mean(0))


def test_the_figure_has_a_panel_for_the_image_and_each_map(pictures):
    subject = make_subject()
    rows = [heat_maps(subject, one, (0.2, 0.2), subject.layers[:3], [None], with_rollout=True) for one in pictures]
    assert len(plot_heat_maps(rows).axes) == 2 * (1 + 3 + 1)


def test_unit_scaling_goes_from_the_lowest_weight_to_the_highest():
    row = torch.tensor([[-0.5, 0.0], [0.5, 1.5]])
    torch.testing.assert_close(unit_scale(row), torch.tensor([[0, 0.25], [0.5, 1]]))
    assert torch.equal(unit_scale(torch.full((2, 2), 1 / 3)), torch.zeros(2, 2))


def test_models_stand_side_by_side_with_a_row_for_each_head(pictures):
    subjects = [make_subject(name) for name in ("softmax", "performer", "nystrom", "soft")]
    groups = [
        [heat_maps(subject, picture, (0.2, 0.2), [subject.layers[1]], [0, 1]) for subject in subjects]
        for picture in pictures
    ]
    figure = plot_models_beside(groups, scaling="unit")
    assert len(figure.axes) == 2 * 2 * (1 + 4)
    titles = [axis.get_title() for axis in figure.axes[:5]]
    assert titles == ["image and query", "softmax", "performer", "nystrom", "soft"]
    assert [axis.texts[0].get_text().split("\n")[-1] for axis in figure.axes[::5]] == ["head 1", "head 2"] * 2
    shown = figure.axes[1].images[1]
    assert (shown.get_clim(), float(shown.get_array().min()), float(shown.get_array().max())) == ((0, 1), 0, 1)
    torch.testing.assert_close(torch.tensor(shown.get_array()), unit_scale(groups[0][0][1][0].values))


def test_an_unknown_scaling_is_refused(pictures):
    subject = make_subject()
    with pytest.raises(ValueError, match="scaling must be one of difference, unit; got 'units'; did you mean 'unit'"):
        plot_heat_maps([heat_maps(subject, pictures[0], (0.5, 0.5), subject.layers[:1], [None])], scaling="units")
