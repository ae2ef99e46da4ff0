"""The explorer in a real browser: run by `make test-browser`.

SOFTLINE_CHROMIUM names the browser; SOFTLINE_SCREENSHOTS a directory that keeps the pictures.
"""

import os
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.browser.chromium import PATIENCE, open_browser
from tests.explorer.images import write_bomb, write_photo, write_text
from tests.explorer.running import explore, free_port

pytest.importorskip("gradio")
sync_api = pytest.importorskip("playwright.sync_api")

pytestmark = pytest.mark.browser

LAPTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
# it has another address, and is there
CHANGED = """([place, before]) => {
    const image = document.querySelector(place + " img");
    return image && image.src !== before && image.complete && image.naturalWidth > 0;
}"""
MAPS = ("#map-a", "#map-b")
# the page learns a second late that the server has closed the stream of answers
LATE_END = """
const send = window.fetch.bind(window);
window.fetch = async (...given) => {
    const response = await send(...given);
    if (!response.url.includes("/queue/data")) return response;
    const late = new TransformStream({
        async transform(part, controller) {
            const text = new TextDecoder().decode(part), end = text.indexOf('data: {"msg":"close_stream"');
            const cut = end < 0 ? text.length : end, encoder = new TextEncoder();
            controller.enqueue(encoder.encode(text.slice(0, cut)));
            if (end < 0) return;
            await new Promise((done) => setTimeout(done, 1000));
            controller.enqueue(encoder.encode(text.slice(cut)));
        },
    });
    return new Response(response.body.pipeThrough(late), { headers: response.headers });
};
"""


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with explore(tmp_path_factory.mktemp("explored"), "--port", free_port()) as server:
        yield server


class Visit:
    """A page that was opened, and all that it asked for and complained of."""

    def __init__(self, page, screenshots: Path) -> None:
        self.page, self.screenshots = page, screenshots
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda line: line.type in ("error", "warning") and self.complaints.append(line.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def open(self, address: str) -> None:
        self.page.goto(address)
        for place in MAPS:
            self.page.wait_for_selector(f"{place} img", state="attached", timeout=PATIENCE)
        self.settle()

    def settle(self) -> None:
        """Until the slower numbers are there too."""
        for place in ("#details-a", "#details-b"):
            sync_api.expect(self.page.locator(place)).to_contain_text("billion", timeout=PATIENCE)

    def source(self, place: str) -> str:
        return self.page.get_attribute(f"{place} img", "src")

    def pixels(self, place: str) -> bytes:
        return self.page.request.get(self.source(place)).body()

    def change(self, act, *places: str) -> None:
        """Do something, and wait until these pictures are others."""
        before = {place: (self.source(place), self.pixels(place)) for place in places}

        act()
        for place, (source, pixels) in before.items():
            self.page.locator(place).scroll_into_view_if_needed()
            self.page.wait_for_function(CHANGED, arg=[place, source], timeout=PATIENCE)
            assert self.pixels(place) != pixels

    def click(self, place: str, x: float, y: float) -> None:
        box = self.page.locator(f"{place} img").bounding_box()
        self.page.click(f"{place} img", position={"x": x * box["width"], "y": y * box["height"]})

    def choose(self, side: str, label: str, option: str) -> None:
        self.page.locator(f".side-{side}").get_by_label(label, exact=True).click()
        self.page.get_by_role("option", name=option, exact=True).click()

    def upload(self, path: Path) -> None:
        self.page.locator("input[type=file]").first.set_input_files(path)

    def resize(self, size: int | str) -> None:
        number = self.page.locator("#size input[type=number]")
        number.fill(str(size))
        number.blur()

    def expect_choices(self, side: str, **values: str) -> None:
        for label, value in values.items():
            selector = self.page.locator(f".side-{side}").get_by_label(label, exact=True)
            sync_api.expect(selector).to_have_value(value, timeout=PATIENCE)

    def shoot(self, name: str) -> None:
        # what fades in is there
        self.page.wait_for_timeout(500)
        self.page.screenshot(path=self.screenshots / f"{name}.png", full_page=True)


@pytest.fixture
def visit(browser, server, tmp_path):
    screenshots = Path(os.environ.get("SOFTLINE_SCREENSHOTS") or tmp_path)
    screenshots.mkdir(parents=True, exist_ok=True)
    context = browser.new_context(viewport=LAPTOP)
    visit = Visit(context.new_page(), screenshots)
    visit.open(server.address)
    yield visit
    context.close()
    outside = [url for url in visit.requests if urlsplit(url).hostname not in ("127.0.0.1", None)]
    assert outside == []
    assert visit.requests
    assert visit.complaints == []
    assert "Traceback" not in server.log.read_text()


def test_an_uploaded_image_can_be_clicked_through(visit, tmp_path):
    photo = write_photo(tmp_path / "noise.png", (320, 240))
    visit.change(lambda: visit.upload(photo), *MAPS, "#photograph")
    sync_api.expect(visit.page.get_by_label("yours: noise.png")).to_be_checked()
    visit.change(lambda: visit.click("#photograph", 0.2, 0.8), *MAPS, "#photograph")
    visit.change(lambda: visit.click("#photograph", 0.7, 0.3), *MAPS)
    visit.change(lambda: visit.click("#map-b", 0.1, 0.1), *MAPS)
    visit.shoot("upload")


def test_layers_heads_models_and_attentions_can_be_chosen(visit):
    page = visit.page
    visit.change(lambda: visit.choose("a", "Layer", "stage 2, block 1 (softpp)"), "#map-a")
    sync_api.expect(page.locator("#answer-a")).to_contain_text("28 x 28")
    visit.change(lambda: visit.choose("a", "Head", "head 2"), "#map-a")
    visit.change(lambda: visit.choose("b", "Model", "softpp_micro (untrained)"), "#map-b")
    visit.change(lambda: visit.choose("b", "Attention", "softmax"), "#map-b")
    sync_api.expect(page.locator(".side-b").get_by_label("Layer")).to_have_value("stage 1, block 1 (softmax)")
    sync_api.expect(page.locator("#answer-b")).not_to_contain_text("Newton")
    visit.shoot("choices")


def test_a_choice_made_while_another_is_computed_is_kept_and_computed(visit):
    visit.choose("b", "Model", "soft_tiny (untrained)")
    visit.choose("b", "Attention", "hydra")
    visit.expect_choices("b", Layer="stage 1, block 1 (hydra)", Attention="hydra", Model="soft_tiny (untrained)")
    visit.choose("b", "Attention", "inline")
    visit.choose("b", "Head", "head 1")
    visit.expect_choices("b", Layer="stage 1, block 1 (inline)", Attention="inline", Head="head 1")
    visit.settle()
    visit.expect_choices("b", Layer="stage 1, block 1 (inline)", Attention="inline", Head="head 1")


def test_a_long_file_name_stays_in_its_box(visit, tmp_path):
    photo = write_photo(tmp_path / f"{'n' * 200}.png", (320, 240))
    visit.change(lambda: visit.upload(photo), *MAPS)
    column = visit.page.locator("#photo-side").bounding_box()
    name = visit.page.locator("#photo-side label", has_text="yours").bounding_box()
    assert name["x"] + name["width"] <= column["x"] + column["width"]
    assert visit.page.locator("#photo-side").evaluate("one => one.scrollWidth <= one.clientWidth")
    visit.shoot("long-name")


def test_a_larger_image_costs_more_and_what_is_too_much_is_a_message(visit):
    visit.change(lambda: visit.choose("b", "Model", "softpp_micro (untrained)"), "#map-b")
    visit.change(lambda: visit.choose("b", "Attention", "gaussian"), "#map-b")
    visit.change(lambda: visit.resize(320), *MAPS)
    sync_api.expect(visit.page.locator("#cost")).to_contain_text("320 x 320", timeout=PATIENCE)
    # the box then shows the most
    visit.resize(5000)
    sync_api.expect(visit.page.locator("#size input[type=number]")).to_have_value("1024")
    sync_api.expect(visit.page.locator("#answer-b")).to_contain_text("choose a smaller size", timeout=PATIENCE)
    sync_api.expect(visit.page.locator("#cost")).to_contain_text("1024 x 1024", timeout=PATIENCE)
    visit.shoot("large")
    for typed in (28, 0, ""):
        visit.resize(typed)
        sync_api.expect(visit.page.locator("#size input[type=number]")).to_have_value("28")
        sync_api.expect(visit.page.locator("#answer-a")).to_contain_text("got a size of 28", timeout=PATIENCE)
    visit.resize(224)
    for place in MAPS:
        visit.page.wait_for_selector(f"{place} img", timeout=PATIENCE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_phone(visit, scheme):
    visit.page.emulate_media(color_scheme=scheme)
    visit.page.set_viewport_size(PHONE)
    visit.page.reload()
    for place in (*MAPS, "#photograph"):
        visit.page.locator(place).scroll_into_view_if_needed()
        image = visit.page.locator(f"{place} img")
        image.wait_for(timeout=PATIENCE)
        box = image.bounding_box()
        assert box["x"] >= 0
        assert 250 < box["width"] <= PHONE["width"] - box["x"]
        assert abs(box["width"] - box["height"]) < 2
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    tops = [visit.page.locator(place).bounding_box()["y"] for place in ("#photograph", *MAPS)]
    assert tops == sorted(tops)
    visit.settle()
    visit.change(lambda: visit.click("#map-a", 0.6, 0.6), *MAPS)
    visit.shoot(f"phone-{scheme}")


def test_both_colour_schemes_fit_a_laptop(visit):
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= LAPTOP["width"]
    visit.shoot("laptop-light")
    visit.page.emulate_media(color_scheme="dark")
    visit.page.reload()
    visit.page.wait_for_selector("#map-b img", timeout=PATIENCE)
    visit.settle()
    visit.shoot("laptop-dark")


def test_files_that_are_no_images_are_answered_and_the_page_goes_on(visit, tmp_path):
    page, before = visit.page, visit.source("#map-a")
    visit.upload(write_text(tmp_path / "text.jpg"))
    page.get_by_text("text.jpg cannot be read as an image").wait_for(timeout=PATIENCE)
    visit.shoot("refused")
    visit.upload(write_bomb(tmp_path / "bomb.png"))
    page.get_by_text("bomb.png cannot be read as an image").wait_for(timeout=PATIENCE)
    assert visit.source("#map-a") == before
    visit.change(lambda: visit.click("#photograph", 0.9, 0.9), *MAPS)


def test_a_click_is_answered_that_is_made_while_the_stream_of_answers_ends(visit):
    visit.page.add_init_script(LATE_END)
    visit.page.reload()
    visit.settle()
    for step in range(3):
        visit.change(partial(visit.click, "#photograph", 0.2 + 0.2 * step, 0.5), *MAPS)


def test_a_file_that_is_too_large_is_answered(visit, tmp_path):
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(25 * 2**20)
    visit.upload(large)
    visit.page.get_by_text("exceed the maximum allowed size of 20").wait_for(timeout=PATIENCE)
    visit.shoot("too-large")
    visit.change(lambda: visit.click("#photograph", 0.1, 0.9), *MAPS)
