import dataclasses
import threading

import pytest
import torch
from PIL import Image

from softline.analysis.heatmap import query_map
from softline.analysis.locality import chance, local_mass
from softline.analysis.newton import layer_residual
from softline.analysis.subjects import open_subject
from softline.data.images.photographs import open_photograph
from softline.explorer import view
from softline.explorer.catalog import OWN, Choice, find_choices
from softline.explorer.view import Asked, Explorer, square_photo
from softline.plotting.contrast import contrast

MICRO = "softpp_micro (untrained)"
CENTRE = (0.5, 0.5)


@pytest.fixture(scope="module")
def cat():
    return square_photo("cat", open_photograph("cat"))


@pytest.fixture(scope="module")
def explorer():
    return Explorer(find_choices([]))


def test_the_map_is_that_of_the_analysis(explorer, cat, monkeypatch):
    drawn = {}
    monkeypatch.setattr(view, "draw_map", lambda image, contrast, cell: drawn.update(contrast=contrast, cell=cell))
    explorer.answer(Asked(MICRO, layer=1, head=0), cat, 64, (0.3, 0.9))
    subject = open_subject("softpp_micro")
    subject = dataclasses.replace(subject, settings={**subject.settings, "crop_pct": 1.0})
    given = subject.look(subject.prepare(cat.image, 64)[None])[0][1]
    row, column = int(0.9 * given.grid_size[0]), int(0.3 * given.grid_size[1])
    assert drawn["cell"] == (row, column)
    expected = contrast(query_map(given, given.token(row, column), head=0))
    torch.testing.assert_close(drawn["contrast"], expected)


def test_numbers_are_those_of_the_analysis(explorer, cat):
    answer = explorer.answer(Asked(MICRO, layer=1), cat, 40, CENTRE)
    subject = open_subject("softpp_micro")
    subject = dataclasses.replace(subject, settings={**subject.settings, "crop_pct": 1.0})
    given = subject.look(subject.prepare(cat.image, 40)[None])[0][1]
    # a grid of at most 10 x 10: all its queries count
    assert max(given.grid_size) <= 10
    assert answer.grid_size == given.grid_size
    assert answer.residual == pytest.approx(layer_residual(given), rel=1e-3)
    assert answer.mean_mass == pytest.approx(float(local_mass(given).mean()), rel=1e-5)
    assert answer.mean_chance == pytest.approx(chance(given))
    assert answer.chance == pytest.approx(9 / given.tokens)


def test_another_click_runs_no_model(explorer, cat, monkeypatch):
    first = explorer.answer(Asked(MICRO), cat, 64, CENTRE)
    monkeypatch.setattr(view.Subject, "look", lambda *_: pytest.fail("the model ran again"))
    second = explorer.answer(Asked(MICRO, layer=2, head=0), cat, 64, (0.1, 0.9))
    assert first.picture.tobytes() != second.picture.tobytes()


@pytest.mark.parametrize("query", [(0.0, 0.0), (1.0, 1.0)])
def test_corners_can_be_clicked(explorer, cat, query):
    assert explorer.answer(Asked(MICRO), cat, 64, query).picture.size == (560, 560)


def test_layers_and_heads_that_a_model_does_not_have_are_reset_to_what_it_has(explorer, cat):
    answer = explorer.answer(Asked(MICRO, layer=99, head=99), cat, 64, CENTRE)
    assert answer.asked == Asked(MICRO, layer=0, head=None)
    assert len(answer.layers) == 5
    assert answer.layers[0] == "stage 1, block 1 (softpp)"


def test_layers_are_known_without_running_the_model(explorer, cat, monkeypatch):
    asked = Asked(MICRO, "inline")
    expected = explorer.answer(asked, cat, 64, CENTRE).layers
    monkeypatch.setattr(view.Subject, "look", lambda *_: pytest.fail("the model ran"))
    assert Explorer(find_choices([])).layers(asked) == expected


def test_an_attention_takes_the_place_of_the_models_own(explorer, cat):
    answer = explorer.answer(Asked(MICRO, "inline"), cat, 64, CENTRE)
    assert answer.layers[0] == "stage 1, block 1 (inline)"
    assert answer.residual is None


def test_a_trained_classifier_names_classes(checkpoint, cat):
    explorer = Explorer(find_choices([str(checkpoint)]))
    label = next(iter(explorer.choices))
    # the attention that the browser showed for the model before
    answer = explorer.answer(Asked(label, "softmax"), cat, 32, CENTRE)
    assert answer.asked.attention == OWN
    assert answer.trained
    assert {name for name, _ in answer.predictions} == {"dark", "light"}
    assert sum(probability for _, probability in answer.predictions) == pytest.approx(1)
    assert answer.trained_size == 16


def test_an_untrained_model_names_none(explorer, cat):
    answer = explorer.answer(Asked(MICRO), cat, 64, CENTRE)
    assert (answer.trained, answer.predictions) == (False, ())


@pytest.mark.parametrize(
    ("asked", "size", "query", "message"),
    [
        (Asked("/etc/passwd"), 64, CENTRE, "model .*/etc/passwd"),
        (Asked(MICRO, "nonsense"), 64, CENTRE, "attention .*nonsense"),
        (Asked("softpp_tiny (untrained)"), 28, CENTRE, "at least 29 x 29 pixels, got a size of 28"),
        (Asked(MICRO), 4096, CENTRE, "from 28 to 1024 pixels, got 4096"),
        (Asked(MICRO), 64, (1.5, 0.5), "from 0 .* to 1"),
        (Asked(MICRO, "linformer"), 64, CENTRE, "covers at most 64 tokens"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_a_reason(explorer, cat, asked, size, query, message):
    with pytest.raises(ValueError, match=message):
        explorer.answer(asked, cat, size, query)


def test_a_model_without_attention_is_refused(cat):
    explorer = Explorer({"other": Choice("other", "resnet18", trained=False)})
    with pytest.raises(ValueError, match=r"resnet18 .* has no attention to show"):
        explorer.answer(Asked("other"), cat, 64, CENTRE)


def test_what_would_take_minutes_is_not_begun_but_counted(explorer, cat, monkeypatch):
    asked = Asked("softpp_tiny (untrained)", "softmax")
    monkeypatch.setattr(view.Subject, "look", lambda *_: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match="billion multiply-adds for 1024 x 1024 pixels"):
        explorer.answer(asked, cat, 1024, CENTRE)
    with pytest.raises(ValueError, match="billion multiply-adds for 1024 x 1024 pixels"):
        explorer.details(asked, 1024)
    cost = explorer.cost(asked, 1024)
    assert cost.macs > 20**2 * cost.usual_macs / 4


def test_weights_that_do_not_fit_in_memory_are_not_made(cat, monkeypatch):
    explorer, asked = Explorer(find_choices([])), Asked("inline_pvt_tiny (untrained)", "softmax")
    # as an attention of another package, which only promises all weights
    monkeypatch.delattr("softline.backbones.pvt.SpatialReductionAttention.rows")
    monkeypatch.setattr(view, "MAX_TENSOR_BYTES", 4 * 16**4 - 1)
    with pytest.raises(ValueError, match="weights of stage 1, block 1 for 256 tokens"):
        explorer.answer(asked, cat, 64, CENTRE)


def test_details_are_found_once(explorer, monkeypatch):
    asked = Asked(MICRO)
    assert explorer.known_details(asked, 68) is None
    details = explorer.details(asked, 68)
    assert details.cost.macs < details.cost.usual_macs
    assert details.time.seconds > 0
    monkeypatch.setattr(view, "need", lambda *_: pytest.fail("counted again"))
    assert explorer.known_details(asked, 68) == explorer.details(asked, 68) == details


def test_a_model_that_does_not_take_the_usual_size_has_a_cost_at_others(explorer):
    assert explorer.cost(Asked(MICRO, "linformer"), 32).usual_macs is None


def test_threads_wait_for_each_other(explorer, cat):
    answers = []

    def ask(place):
        answers.append(explorer.answer(Asked(MICRO, layer=place % 3), cat, 64, CENTRE))

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pictures = {answer.asked.layer: answer.picture.tobytes() for answer in answers}
    assert len(answers) == 6
    assert len(set(pictures.values())) == 3


def test_the_square_is_the_middle_of_the_image():
    image = Image.new("RGB", (30, 10), "red")
    image.paste("blue", (10, 0, 20, 10))
    photo = square_photo("image", image)
    assert photo.image.size == (10, 10)
    assert photo.image.getcolors() == [(100, (0, 0, 255))]
    assert photo.key != square_photo("image", Image.new("RGB", (10, 10), "red")).key
