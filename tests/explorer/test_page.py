import pytest

gr = pytest.importorskip("gradio")

import torch  # noqa: E402
from PIL import Image  # noqa: E402

from softline.attention import ATTENTIONS  # noqa: E402
from softline.explorer import page as module  # noqa: E402
from softline.explorer.catalog import OWN, find_choices  # noqa: E402
from softline.explorer.page import MEAN, Page, read_asked, read_click, read_size  # noqa: E402
from softline.explorer.storage import Storage  # noqa: E402
from softline.explorer.view import Asked, Explorer  # noqa: E402
from tests.explorer.images import write_photo, write_text  # noqa: E402

MICRO = "softpp_micro (untrained)"
ASKED = (MICRO, OWN, 0, MEAN)
HUGE = {"index": [10**400, 1]}


@pytest.fixture
def warned(monkeypatch):
    """What the page has warned of."""
    texts = []
    monkeypatch.setattr(module.gr, "Warning", lambda text, **_: texts.append(text))
    return texts


@pytest.fixture(scope="module")
def explorer():
    return Explorer(find_choices([]))


@pytest.fixture
def page(explorer, tmp_path):
    return Page(explorer, Storage(tmp_path))


def size_of(path):
    with Image.open(path) as picture:
        return picture.size


def test_both_sides_and_the_photograph_are_shown(page):
    photograph, *sides = page.show("cat", None, 64, (0.5, 0.5), *ASKED, *ASKED)
    assert size_of(photograph) == (560, 560)
    assert len(sides) == 12
    attention, layer, head, picture, answer, details = sides[:6]
    assert size_of(picture) == (560, 560)
    assert [len(update["choices"]) for update in (attention, layer, head)] == [len(ATTENTIONS) + 1, 5, 2]
    assert attention["interactive"]
    assert "Newton residual" in answer
    assert "Time for one image" in details
    assert sides[9] == picture


def test_lists_follow_the_model(page):
    _, layer, head, *_ = page.show_side("cat", None, 64, (0.5, 0.5), MICRO, "inline", 99, 99)
    assert layer["choices"][0] == ("stage 1, block 1 (inline)", 0)
    assert (layer["value"], head["value"]) == (0, MEAN)
    assert head["choices"][0] == (MEAN, MEAN)


def test_what_was_asked_for_is_not_chosen_again_as_the_visitor_may_have_gone_on(page):
    for asked in (ASKED, (MICRO, "inline", 1, 0)):
        selectors = page.show_side("cat", None, 64, (0.5, 0.5), *asked)[:3]
        assert not any("value" in update for update in selectors)


def test_a_trained_model_is_set_to_its_own_attention(checkpoint, tmp_path):
    page = Page(Explorer(find_choices([str(checkpoint)])), Storage(tmp_path))
    attention, *_ = page.show_side("cat", None, 32, (0.5, 0.5), str(checkpoint.parent), "softmax", 0, MEAN)
    assert (attention["choices"], attention["value"], attention["interactive"]) == ([OWN], OWN, False)


def test_lists_follow_a_model_that_is_too_much_so_that_a_cheaper_attention_can_be_chosen(page):
    tiny = "softpp_tiny (untrained)"
    attention, layer, head, picture, *_ = page.show_side("cat", None, 1024, (0.5, 0.5), tiny, "softmax", 99, MEAN)
    assert picture is None
    assert attention["choices"] == [OWN, *ATTENTIONS]
    assert attention["interactive"]
    assert "value" not in attention
    assert (layer["choices"][0], layer["value"]) == (("stage 1, block 1 (softmax)", 0), 0)
    assert head == gr.skip()


def test_lists_of_an_unknown_model_stay(page):
    for model in ("/etc/passwd", None, [MICRO]):
        assert page.show_side("cat", None, 64, (0.5, 0.5), model, OWN, 0, MEAN)[:3] == [gr.skip()] * 3


def test_a_click_moves_the_query(page):
    event = gr.EventData(None, {"index": [140, 420], "value": None})
    query, photograph, *sides = page.click(event, "cat", None, 64, (0.5, 0.5), *ASKED, *ASKED)
    before = page.show("cat", None, 64, (0.5, 0.5), *ASKED, *ASKED)
    assert query == (0.25, 0.75)
    assert photograph != before[0]
    assert sides[3] != before[4]


@pytest.mark.parametrize(
    "data", [None, {}, {"index": None}, {"index": [1]}, {"index": ["a", 2]}, {"index": [9999, 5]}, HUGE]
)
def test_a_click_without_a_place_changes_nothing_but_says_so(page, warned, data):
    query, *_ = page.click(gr.EventData(None, data), "cat", None, 64, (0.5, 0.5), *ASKED, *ASKED)
    assert query == (0.5, 0.5)
    assert len(warned) == 1
    assert len(warned[0]) < 100


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("cat", 64, "/etc/passwd", OWN, 0, MEAN), "/etc/passwd"),
        (("cat", 64, MICRO, "nonsense", 0, MEAN), "nonsense"),
        (("cat", 64, MICRO, OWN, "x", MEAN), "layers and heads are numbers"),
        (("cat", 64, MICRO, OWN, 0, None), "layers and heads are numbers"),
        (("cat", 64, [MICRO], OWN, 0, MEAN), "choose one model"),
        (("cat", 64, None, OWN, 0, MEAN), "choose one model"),
        (("dog", 64, *ASKED), "there is no photograph"),
        (("cat", "64", *ASKED), "whole number of pixels"),
        (("cat", 64.5, *ASKED), "whole number of pixels"),
        (("cat", 28, "softpp_tiny (untrained)", OWN, 0, MEAN), "at least 29 x 29"),
    ],
)
def test_a_side_says_why_it_shows_no_map(page, values, message):
    name, size, *asked = values
    *_, picture, answer, details = page.show_side(name, None, size, (0.5, 0.5), *asked)
    assert picture is None
    assert 'role="alert"' in answer
    assert message in answer
    assert details == ""


def damaged(checkpoint, path, damage):
    """Write the checkpoint with a damage: text, a length in bytes, or a change of its content."""
    if isinstance(damage, str):
        path.write_text(damage)
    elif isinstance(damage, int):
        path.write_bytes(checkpoint.read_bytes()[:damage])
    else:
        content = torch.load(checkpoint, weights_only=True)
        damage(content)
        torch.save(content, path)


@pytest.mark.parametrize(
    "damage",
    [
        "no checkpoint",
        "",
        1000,
        lambda content: content.pop("facts"),
        lambda content: content.pop("recipe"),
        lambda content: content.update(facts=None),
        lambda content: content.update(recipe=[]),
        lambda content: content.update(state_dict=5, state_dict_ema=5),
        lambda content: content["state_dict"].clear(),
    ],
    ids=["text", "empty", "cut off", "no facts", "no recipe", "facts", "recipe", "weights", "no weights"],
)
def test_a_checkpoint_that_cannot_be_read_is_a_message_and_others_can_be_chosen(checkpoint, tmp_path, damage):
    (tmp_path / "run").mkdir()
    damaged(checkpoint, tmp_path / "run" / "best.pt", damage)
    page = Page(Explorer(find_choices([str(tmp_path), str(checkpoint)])), Storage(tmp_path))
    bad, good = (str(tmp_path / "run"), OWN, 0, MEAN), (str(checkpoint.parent), OWN, 0, MEAN)
    assert page.default_models() == (bad[0], good[0])
    for _ in range(2):
        _, *sides = page.show("cat", None, 32, (0.5, 0.5), *bad, *good)
        attention, layer, _, picture, answer, _ = sides[:6]
        assert picture is None
        assert (attention["choices"], layer["choices"]) == ([OWN], [])
        assert "best.pt" in answer
        assert size_of(sides[9]) == (560, 560)
        a, b, line = page.details(32, *bad, *good)
        assert (a, "ms" in b, line.count("bar")) == ("", True, 1)


def test_a_model_that_computes_no_finite_numbers_is_a_message(tmp_path):
    explorer = Explorer(find_choices([]))
    with torch.no_grad():
        next(explorer._subject(Asked(MICRO)).model.parameters()).fill_(float("nan"))
    *_, picture, answer, _ = Page(explorer, Storage(tmp_path)).show_side("cat", None, 64, (0.5, 0.5), *ASKED)
    assert picture is None
    assert "numbers that are not finite before stage 1, block 1" in answer


def test_an_upload_is_added_to_the_photographs_and_chosen(page, tmp_path):
    path = write_photo(tmp_path / "stored.png")
    uploaded, photos = page.receive({"path": str(path), "orig_name": "holiday.png"})
    assert photos.value == uploaded.name == "yours: holiday.png"
    assert [value for _, value in photos.choices] == ["cat", "coffee", "yours: holiday.png"]
    photo = page.photo(uploaded.name, uploaded)
    assert (photo.name, photo.key, photo.image.size) == (uploaded.name, uploaded.key, (40, 40))


def test_photographs_of_many_visitors_are_forgotten_before_they_fill_the_memory(explorer, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PHOTOS_BYTES", 2 * 3 * 40**2)
    page = Page(explorer, Storage(tmp_path))
    sent = [page.receive({"path": str(write_photo(tmp_path / f"{seed}.png", seed=seed))})[0] for seed in range(3)]
    for uploaded in sent[1:]:
        assert page.photo(uploaded.name, uploaded).key == uploaded.key
    answer = page.show_side(sent[0].name, sent[0], 64, (0.5, 0.5), *ASKED)[4]
    assert "yours: 0.png is no longer kept: upload it again" in answer


def test_a_refused_upload_leaves_the_page_as_it_is(page, tmp_path, warned):
    updates = page.receive({"path": str(write_text(tmp_path / "a.jpg")), "orig_name": "<i>.jpg"})
    assert updates == [gr.skip(), gr.skip()]
    assert len(warned) == 1
    assert warned[0].startswith("&lt;i&gt;.jpg cannot be read as an image")


@pytest.mark.parametrize("upload", [None, "x", {}, {"path": 5}, {"path": "/etc/passwd"}, {"path": "../x"}])
def test_a_forged_upload_is_refused(page, warned, upload):
    page.receive(upload)
    assert warned == ["only files that were uploaded to this page are read"]


@pytest.mark.parametrize("name", ["gone.png", "x" * 300, "a/" * 3000])
def test_an_upload_that_is_not_there_is_a_message(page, tmp_path, warned, name):
    assert page.receive({"path": str(tmp_path / name)}) == [gr.skip(), gr.skip()]
    assert len(warned) == 1


def test_a_directory_is_no_upload(page, tmp_path, warned):
    (tmp_path / "inside").mkdir()
    for path in (tmp_path, tmp_path / "inside"):
        assert page.receive({"path": str(path)}) == [gr.skip(), gr.skip()]
    assert warned == ["only files that were uploaded to this page are read"] * 2


def test_a_page_without_room_for_its_pictures_says_so(explorer, tmp_path, warned):
    page = Page(explorer, Storage(tmp_path, max_files=0))
    photograph, *_, picture, answer, _ = page.show("cat", None, 64, (0.5, 0.5), *ASKED, *ASKED)
    assert (photograph, picture) == (gr.skip(), None)
    assert "no room for more files" in answer
    assert len(warned) == 1


def test_a_link_out_of_the_folder_is_refused(page, tmp_path_factory, tmp_path, warned):
    secret = write_photo(tmp_path_factory.mktemp("elsewhere") / "secret.png")
    (tmp_path / "link.png").symlink_to(secret)
    page.receive({"path": str(tmp_path / "link.png")})
    assert warned == ["only files that were uploaded to this page are read"]


def test_details_come_for_both_sides_and_are_compared(page):
    a, b, line = page.details(64, *ASKED, *ASKED)
    assert a == b
    assert "ms" in a
    assert line.count("bar") == 2


def test_details_of_a_side_that_shows_nothing_are_empty(page):
    a, b, line = page.details(64, MICRO, "nonsense", 0, MEAN, *ASKED)
    assert a == ""
    assert "ms" in b
    assert line.count("bar") == 1
    assert page.details("64", *ASKED, *ASKED) == ["", "", ""]


def test_checkpoints_come_first(checkpoint, tmp_path):
    page = Page(Explorer(find_choices([str(checkpoint)])), Storage(tmp_path))
    assert page.default_models() == (str(checkpoint.parent), "softpp_tiny (untrained)")


def test_values_of_the_browser_are_read():
    assert read_asked("m", "a", 2, 1) == Asked("m", "a", 2, 1)
    assert read_asked("m", "a", 2, MEAN).head is None
    assert read_click(gr.EventData(None, {"index": [0, 560]})) == (0, 1)


@pytest.mark.parametrize(
    ("typed", "shown"),
    [(224.0, 224), (5000, 1024), (10**400, 1024), (0, 28), (-(10**400), 28), (1.5, 28), (1024.5, 1024), (None, 28)],
)
def test_a_size_outside_of_the_range_is_what_the_slider_then_shows(typed, shown):
    assert read_size(typed) == shown


def test_other_sizes_are_refused():
    for size in (True, "224", 99.7, float("nan"), [10**400]):
        with pytest.raises(ValueError, match="whole number"):
            read_size(size)
