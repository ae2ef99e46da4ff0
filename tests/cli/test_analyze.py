import json

import pytest
from PIL import Image

from softline.analysis import injectivity
from softline.cli import analyze_arguments as command
from softline.cli import main
from softline.engine.train import train
from tests.engine.small import small_recipe, write_images

KINDS = ["heatmap", "newton", "spectrum", "injectivity", "locality"]


def analyze(capsys, *arguments):
    code = main(["analyze", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(scope="module")
def softpp(tmp_path_factory):
    """A checkpoint with landmarks."""
    root = tmp_path_factory.mktemp("softpp")
    write_images(root, train=4, val=4)
    train(small_recipe(root, "--model.options.attention=softpp", "--schedule.epochs=1"))
    return root / "run/best.pt"


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_writes_its_figure_and_numbers(softpp, tmp_path, capsys, kind):
    code, out, err = analyze(capsys, kind, softpp, "--output", tmp_path / "out", "--count", "2")
    assert (code, err) == (0, "")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"{kind}.{end}" for end in ("json", "png", "svg")
    ]
    with Image.open(tmp_path / "out" / f"{kind}.png") as figure:
        assert figure.width > 500
    content = json.loads((tmp_path / "out" / f"{kind}.json").read_text())
    assert content.pop("command").startswith(f"softline analyze {kind}")
    assert content
    assert f"figure: {tmp_path / 'out' / kind}.png" in out


def test_cost_needs_no_model(tmp_path, capsys):
    code, out, _ = analyze(capsys, "cost", "--attentions", "softmax,inline", "--grids", "8,16", "--output", tmp_path)
    assert code == 0
    content = json.loads((tmp_path / "cost.json").read_text())
    assert [(one["attention"], one["tokens"]) for one in content["costs"]] == [
        ("softmax", 64),
        ("softmax", 256),
        ("inline", 64),
        ("inline", 256),
    ]
    assert "N=256" in out


def test_the_toy_example_needs_no_model(tmp_path, capsys):
    code, out, _ = analyze(capsys, "injectivity", "--output", tmp_path)
    assert code == 0
    assert "0.31 0.23 0.25 0.20   0.36 0.22 0.25 0.17" in out
    content = json.loads((tmp_path / "injectivity.json").read_text())
    assert content["models"] == {}
    assert len(content["toy"]) == 2


def test_the_criterion_and_its_thresholds_are_in_the_output(trained, tmp_path, capsys):
    limits = ["--query-distance", "0.25", "--weight-distance", "0.5"]
    _, out, _ = analyze(capsys, "injectivity", trained / "run/best.pt", *limits, "--count", "1", "--output", tmp_path)
    assert "confused: ||p - q|| > 0.25 mean ||q||  and  max |w(p) - w(q)| < 0.5 / N" in out
    content = json.loads((tmp_path / "injectivity.json").read_text())
    assert (content["query_distance"], content["weight_distance"]) == (0.25, 0.5)


def test_models_of_random_weights_are_called_that(tmp_path, capsys):
    arguments = ["softpp_micro", "other=softpp_micro:attention=inline", "--count", "1", "--output", tmp_path]
    code, out, _ = analyze(capsys, "heatmap", *arguments, "--rollout", "--layers", "0,-2", "--heads", "0,mean")
    assert code == 0
    assert "random weights, nothing trained: softpp_micro, other" in out
    maps = json.loads((tmp_path / "heatmap.json").read_text())["maps"]
    assert {one["subject"] for one in maps} == {"softpp_micro", "other"}
    assert len(maps) == 2 * (2 * 2 + 1)


def test_newton_has_a_panel_for_each_set_of_images(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (40, 40), (90, 20, 200)).save(tmp_path / name / "1.png")
    sets = [part for name in ("a", "b") for part in ("--images", f"{name.upper()}={tmp_path / name}")]
    code, out, _ = analyze(capsys, "newton", "soft_micro", *sets, "--linear", "--output", tmp_path / "out")
    assert code == 0
    content = json.loads((tmp_path / "out/newton.json").read_text())
    assert list(content["models"]) == ["soft_micro on A", "soft_micro on B"]
    assert content["images"] == {"A": 1, "B": 1}
    assert "soft_micro on B" in out


def test_spectrum_is_drawn_for_numbers_of_landmarks(tmp_path, capsys):
    options = ["--landmarks", "100,50", "--samples", "--linear", "--count", "1"]
    code, _, _ = analyze(capsys, "spectrum", "soft_micro", *options, "--output", tmp_path)
    assert code == 0
    found = json.loads((tmp_path / "spectrum.json").read_text())["models"]["soft_micro"]
    assert [(norm["landmarks"], norm["image_size"]) for norm in found["norms"]] == [(50, [40, 80]), (100, [80, 80])]
    assert len(found["eigenvalues"][0]["mean"]) == 100
    assert found["norms"][0]["samples"]["inverse"] == [found["norms"][0]["inverse"]]


def test_maps_of_the_rivals_stand_side_by_side(tmp_path, capsys):
    rivals = ["Transformer=softpp_micro:attention=softmax", "Performer=softpp_micro:attention=performer"]
    rivals += ["Nyströmformer=softpp_micro:attention=nystrom", "SOFT=soft_micro"]
    options = ["--scaling", "unit", "--beside", "--layers", "1", "--heads", "0,1", "--count", "1"]
    code, _, _ = analyze(capsys, "heatmap", *rivals, *options, "--output", tmp_path)
    assert code == 0
    maps = json.loads((tmp_path / "heatmap.json").read_text())["maps"]
    assert len(maps) == 4 * 2
    with Image.open(tmp_path / "heatmap.png") as figure:
        # five panels wide, two high
        assert figure.width > 2 * figure.height


def test_local_sums_are_listed_on_request(tmp_path, capsys):
    arguments = ["locality", "inline_micro", "--count", "1", "--accuracy-count", "0", "--output", tmp_path]
    _, plain, _ = analyze(capsys, *arguments)
    code, out, _ = analyze(capsys, *arguments, "--sums")
    assert code == 0
    assert "9 / N" in out
    assert "9 / N" not in plain


def test_accuracy_shows_runs_alone_or_beside_the_papers(trained, tmp_path, capsys):
    run = trained / "run"
    code, out, _ = analyze(capsys, "accuracy", "--runs", run, "--throughput", "--batch", "2", "--output", tmp_path)
    assert code == 0
    assert "img/s" in out
    (point,) = json.loads((tmp_path / "accuracy.json").read_text())["points"]
    assert (point["kind"], point["name"], point["device"]) == ("run", "softpp_micro", "cpu")
    papers = ["--papers", "inline", "--models", "inline_deit_tiny", "--imagenet"]
    assert analyze(capsys, "accuracy", "--runs", run, *papers, "--output", tmp_path)[0] == 0
    points = json.loads((tmp_path / "accuracy.json").read_text())["points"]
    assert {one["group"] for one in points} == {"InLine and its rivals on ImageNet-1K"}
    assert [one["name"] for one in points if one["kind"] == "counted"] == ["InLine-DeiT-T"]


def test_masked_accuracy_is_of_trained_classifiers_alone(trained, tmp_path, capsys):
    checkpoint = trained / "run/best.pt"
    code, out, _ = analyze(capsys, "locality", checkpoint, "fresh=softpp_micro", "--count", "1", "--output", tmp_path)
    assert code == 0
    assert "no accuracy: fresh " in out
    content = json.loads((tmp_path / "locality.json").read_text())
    assert set(content["masses"]) == {"softpp_micro", "fresh"}
    assert set(content["accuracies"]) == {"softpp_micro"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["newton", "softpp_micro:attention=inline"], "inverts no matrix: it has inline attention, not soft or softpp"),
        (["heatmap", "resnet18"], "has no attention to show"),
        (["heatmap", "softpp_micro", "--layers", "9"], "layer must be from -5 to 4"),
        (["heatmap", "softpp_micro", "--heads", "3"], "head must be at least 0 and below 1, got 3"),
        (["heatmap", "softpp_micro", "--query", "2,0"], "a query is X,Y from 0 (left, top) to 1"),
        (["heatmap", "softpp_tiny", "--size", "16"], "needs images of at least 29 x 29 pixels, got a size of 16"),
        (["heatmap", "softpp_micro", "--images", "nowhere"], "no such image: nowhere"),
        (["heatmap", "softpp_micro", "--count", "0"], "count must be at least 1, got 0"),
        (["locality", "runs/nowhere.pt"], "nowhere.pt"),
        (["cost", "--attentions", "softmaxx"], "did you mean 'softmax'?"),
        (["cost", "--grids", "0"], "at least"),
        (["injectivity", "softpp_micro", "--query-distance", "-1"], "query_distance must be at least 0"),
        (["injectivity", "--images", "here"], "--images are for models: name at least one MODEL"),
        (["locality", "softpp_micro", "--accuracy-count", "-5"], "--accuracy-count must be at least 0, got -5"),
        (["heatmap", "softpp_micro", "--seed", "99999999999999999999"], "seed must be below 2^63"),
        (["cost", "--attentions", ""], "name at least one attention and one grid"),
        (["newton", "softpp_micro", "--images", "A=nowhere"], "no such image: nowhere"),
        (["newton", "softpp_micro", "--images", "A=here", "--images", "there"], "got 'there' without a name"),
        (["spectrum", "softpp_micro", "--landmarks", "101"], "got 101; the nearest are 100 and 104"),
        (
            ["spectrum", "softpp_micro", "--landmarks", "64", "--size", "64"],
            "decides the size of the images: leave out",
        ),
        (["accuracy", "--papers", ""], "there is nothing to draw: name a paper by --papers, or runs by --runs"),
        (["accuracy", "--runs", "nowhere"], "nowhere has none"),
        (["accuracy", "--papers", "softs"], "paper must be one of inline, soft; got 'softs'"),
        (["accuracy", "--imagenet"], "--imagenet draws runs beside published models"),
        (["accuracy", "--batch", "4"], "--batch is for measuring: add --throughput"),
        (["accuracy", "--runs", "a", "--models", "soft_tiny"], "--models are those of the papers"),
    ],
)
def test_mistakes_end_in_a_message(tmp_path, capsys, arguments, message):
    code, _, err = analyze(capsys, *arguments, "--output", tmp_path)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_numbers_stay_plain_whatever_happens(softpp, tmp_path, capsys):
    arguments = [softpp, "command=softpp_micro", "--count", "1", "--iterations", "150", "--output", tmp_path]
    assert analyze(capsys, "newton", *arguments)[0] == 0

    def refuse(constant):
        raise AssertionError(constant)

    content = json.loads((tmp_path / "newton.json").read_text(), parse_constant=refuse)
    assert content["command"].startswith("softline analyze")
    assert set(content["models"]) == {"softpp_micro", "command"}


def test_images_of_16_bits_are_refused_without_advice_that_does_not_help(tmp_path, capsys):
    Image.new("I;16", (40, 40)).save(tmp_path / "deep.png")
    code, _, err = analyze(capsys, "heatmap", "softpp_micro", "--images", tmp_path / "deep.png", "--output", tmp_path)
    assert code == 2
    assert "deep.png cannot be used: 8 bits for each colour are needed" in err
    assert "--skip-corrupt" not in err


def test_an_empty_folder_is_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    code, _, err = analyze(capsys, "heatmap", "softpp_micro", "--images", tmp_path / "empty", "--output", tmp_path)
    assert code == 2
    assert f"{tmp_path / 'empty'} holds no images" in err


def test_defaults_are_those_of_the_library():
    constants = (injectivity.QUERY_DISTANCE, injectivity.WEIGHT_DISTANCE, injectivity.MOST_QUERIES)
    assert constants == (command.QUERY_DISTANCE, command.WEIGHT_DISTANCE, command.MOST_QUERIES)
