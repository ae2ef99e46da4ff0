import pytest
import timm

from softline.analysis.accuracy import (
    GROUPS,
    OTHER_NETWORKS,
    Stopwatch,
    among_published,
    catalog_points,
    plot_accuracy,
    published_points,
    run_points,
)
from softline.analysis.published import PUBLISHED
from softline.engine.checkpoint import load_checkpoint
from softline.engine.train import train
from softline.measure.catalog import REPORTED_TOP1, describe
from tests.engine.small import small_recipe, write_images


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_images(root, train=4, val=6, classes=("dark", "light"))
    for attention in ("softpp", "inline"):
        options = [f"--model.options.attention={attention}", f"--output={root / attention}"]
        train(small_recipe(root, "--schedule.epochs=1", *options))
    return root


@pytest.mark.parametrize(
    ("paper", "name", "expected"),
    [
        ("soft", "SOFT-Medium", (48e6, 8.7e9, 83.2)),
        ("soft", "SOFT++-Large", (85e6, 15.4e9, 84.1)),
        ("soft", "PVT-Small", (24e6, 4.0e9, 79.8)),
        ("soft", "LambdaNets-50", (16e6, None, 78.9)),
        ("inline", "InLine-PVT-S", (21.6e6, 3.9e9, 82.0)),
        ("inline", "CSwin-B, 384", (78e6, 47.0e9, 85.4)),
    ],
)
def test_published_numbers_are_those_of_the_papers(paper, name, expected):
    (row,) = [row for row in PUBLISHED if (row.paper, row.name) == (paper, name)]
    assert (row.parameters, row.macs, row.top1) == expected


def test_the_table_lists_every_model_with_a_reported_accuracy_once_and_names_its_sources():
    models = [row.model for row in PUBLISHED if row.model is not None]
    assert sorted(models) == sorted(REPORTED_TOP1)
    assert len({(row.paper, row.name) for row in PUBLISHED}) == len(PUBLISHED)
    assert all(row.source for row in PUBLISHED)
    for row in PUBLISHED:
        if row.model is not None:
            assert timm.get_pretrained_cfg(row.model).input_size[-1] == row.image_size
    speeds = {row.name: (round(row.per_second), row.device) for row in PUBLISHED if row.per_second is not None}
    assert speeds["SOFT++-Tiny"] == (3436, "V100")
    assert speeds["InLine-Swin-S"] == (610, "RTX 3090")


def test_softlines_models_have_counted_costs_and_published_accuracy():
    seen = []
    (point,) = catalog_points(["soft"], pattern="softpp_tiny", hear=seen.append)
    card = describe("softpp_tiny")
    assert seen == ["softpp_tiny"]
    assert (point.parameters, point.macs, point.kind) == (card.parameters, card.macs, "counted")
    assert 0 < point.newton_macs < point.macs
    assert point.macs_without_newton == card.macs - card.newton_macs
    (drawn,) = plot_accuracy([point]).axes[1].lines
    # the paper says 1.9
    assert drawn.get_xdata() == pytest.approx([1.93], abs=0.005)
    assert (point.family, point.top1, point.group) == ("SOFT++", 80.9, GROUPS["soft"])
    # the speed on another device does not become softline's
    assert point.per_second is None


def test_accuracies_of_other_networks_are_not_given_to_softlines_models():
    seen = []
    catalog_points(["soft"], pattern="soft*_release_[st]*", hear=seen.append)
    assert seen == ["soft_release_tiny", "softpp_release_tiny"]
    for name in OTHER_NETWORKS:
        (row,) = [row for row in PUBLISHED if row.model == name]
        assert (row.parameters, describe(name).parameters) == (24e6, pytest.approx(38.9e6, abs=0.05e6))
        with pytest.raises(ValueError, match=f"the published accuracy of {name} belongs to another network"):
            catalog_points(["soft"], pattern=name)


def test_runs_bring_their_own_accuracy_and_cost(runs):
    points = run_points([str(runs / "softpp"), str(runs / "inline")], stopwatch=Stopwatch(batch=2, rounds=1))
    assert [point.name for point in points] == ["softpp", "inline"]
    for point in points:
        content = load_checkpoint(runs / point.name / "best.pt")
        assert point.top1 == 100 * content["best"]["top1"]
        assert point.parameters == sum(
            weight.numel() for name, weight in content["state_dict"].items() if not _is_buffer(name)
        )
        assert point.macs > 0
        assert point.per_second > 0
        assert point.device == "cpu"
        assert point.group == f"runs on {content['recipe']['data']['source']}"
    (named,) = run_points([f"mine={runs / 'softpp'}"])
    assert (named.name, named.per_second) == ("mine", None)
    together = among_published([named], ["inline", "soft"])
    assert [point.group for point in together] == list(GROUPS.values())


def _is_buffer(name):
    return name.endswith(("running_mean", "running_var", "num_batches_tracked"))


def test_mistakes_are_named(runs, tmp_path):
    with pytest.raises(ValueError, match=rf"with a best\.pt; {tmp_path} has none"):
        run_points([str(tmp_path)])
    with pytest.raises(ValueError, match="several runs are called a: name them apart by NAME=DIR"):
        run_points([f"a={runs / 'softpp'}", f"a={runs / 'inline'}"])
    with pytest.raises(ValueError, match="paper must be one of inline, soft; got 'softs'"):
        published_points(["softs"])
    with pytest.raises(ValueError, match="no model of these papers with a published accuracy matches 'inline_pvt"):
        catalog_points(["soft"], pattern="inline_pvt*")
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        Stopwatch(batch=0)


def test_the_figure_has_a_row_for_each_group_and_panels_of_speed_on_request(runs):
    points = [*published_points(["soft", "inline"]), *run_points([str(runs / "softpp")])]
    plain = plot_accuracy(points)
    labels = [axis.get_xlabel() for axis in plain.axes if axis.get_xlabel()]
    assert labels == ["parameters [millions]", "multiply-adds without Newton's iterations [billions]"] * 3
    assert [axis.get_title(loc="left") for axis in plain.axes[::3]] == [*GROUPS.values(), points[-1].group]
    fast = plot_accuracy(points, speed=True)
    # nothing was measured here
    assert len(fast.axes) == 3 * 4
    # Table 2 of SOFT has six speeds on one device, two of them of SOFT itself
    drawn = [place for line in fast.axes[2].lines for place in line.get_xdata()]
    assert sorted(drawn) == [3240, 3436, 3436, 3518, 3657, 3779]
    assert not fast.axes[2 * 4 + 2].lines
