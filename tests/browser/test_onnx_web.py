"""The page of examples/deploy/web in a real browser: run by `make test-browser`.

npm fetches onnxruntime-web. SOFTLINE_CHROMIUM names the browser; SOFTLINE_SCREENSHOTS a directory that keeps the
pictures.
"""

import os
import shutil
import subprocess
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import softline
from softline.data.images.photographs import open_photograph
from softline.deploy.export import export
from tests.browser.chromium import PATIENCE, open_browser
from tests.documented_run import write_documented_run

pytest.importorskip("onnxruntime")
sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
WEB = ROOT / "examples" / "deploy" / "web"
RUNTIME = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
ROWS = """rows => rows.map(row => {
    const meter = row.querySelector("[role=meter]");
    return [meter.ariaLabel, Number(meter.ariaValueNow), row.innerText.trim()];
})"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a directory with the page, onnxruntime-web, a model and images."""
    folder = tmp_path_factory.mktemp("web")
    fetch_runtime(folder)
    shutil.copytree(WEB, folder, dirs_exist_ok=True)
    write_documented_run(folder)
    trained = softline.load(folder / "runs" / "clothes" / "best.pt")
    with torch.no_grad():
        # as sure of itself as after a long training
        trained.model.get_classifier().weight.mul_(6)
    export(trained, folder / "model.onnx", size=(28, 28), batch=1, rounds=1)
    open_photograph("coffee").save(folder / "coffee.png")
    return folder


def fetch_runtime(folder: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("needs npm, which fetches onnxruntime-web")
    command = ["npm", "pack", "--silent", "onnxruntime-web"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    except subprocess.TimeoutExpired:
        pytest.skip("npm cannot fetch onnxruntime-web: no answer")
    if done.returncode:
        pytest.skip(f"npm cannot fetch onnxruntime-web: {done.stderr.strip()[-200:]}")
    archive = folder / done.stdout.split()[-1]
    with tarfile.open(archive) as packed:
        for name in RUNTIME:
            (folder / name).write_bytes(packed.extractfile(f"package/dist/{name}").read())
    archive.unlink()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address(folder):
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()
        thread.join()


@pytest.fixture
def page():
    with open_browser() as browser:
        yield browser.new_page(viewport={"width": 900, "height": 560})


def shoot(page, name: str) -> None:
    if folder := os.environ.get("SOFTLINE_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def classify(page, image: Path) -> list[tuple[str, float, str]]:
    """Choose an image, and return the names, probabilities and texts of the bars."""
    page.locator("input[type=file]").set_input_files(image)
    page.wait_for_selector(f"img[alt='{image.name}']")
    sync_api.expect(page.locator("#time")).to_contain_text("ms", timeout=PATIENCE)
    return [tuple(row) for row in page.locator("#bars li").evaluate_all(ROWS)]


def test_the_browser_finds_what_onnx_runtime_finds_in_python(page, folder, address):
    requests, complaints = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda line: line.type in ("error", "warning") and complaints.append(line.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    sync_api.expect(page.locator("#state")).to_contain_text("softpp_micro, 10 classes", timeout=PATIENCE)
    exported = softline.load(folder / "model.onnx")
    found = classify(page, folder / "shoe.png")
    wanted = exported.predict(folder / "shoe.png")
    shoot(page, "web")
    assert [name for name, _, _ in found] == list(wanted.classes[:5])
    assert [probability for _, probability, _ in found] == pytest.approx(list(wanted.probabilities[:5]), abs=1e-4)
    assert found[0][2].split("\n") == [found[0][0], f"{100 * found[0][1]:.1f} %"]
    # not all classes are alike
    assert found[0][1] > 0.2
    assert [url for url in requests if not url.startswith((address.removesuffix("index.html"), "blob:"))] == []
    assert complaints == []


def test_a_photograph_is_resized_and_cropped(page, folder, address):
    page.goto(address)
    page.wait_for_selector("input:enabled", state="attached", timeout=PATIENCE)
    image = folder / "coffee.png"
    wanted = softline.load(folder / "model.onnx").predict(image)
    found = classify(page, image)
    shoot(page, "web-photograph")
    # browsers resize by a filter of their own
    assert found[0][1] == pytest.approx(wanted.probability, abs=0.1)
    assert found[0][0] == wanted.label


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "404"), (b"<html>", "no ONNX file"), (b"", "no classifier of softline")],
    ids=["missing", "other", "empty"],
)
def test_a_file_that_is_no_exported_model_is_named_on_the_page(page, folder, address, content, message):
    if content is not None:
        (folder / "other.onnx").write_bytes(content)
    page.goto(f"{address}?model=other.onnx")
    sync_api.expect(page.locator("#state.error")).to_contain_text(message, timeout=PATIENCE)
    assert page.locator("input[type=file]").is_disabled()
    shoot(page, "web-error")


def test_a_file_that_is_no_image_is_named_on_the_page(page, folder, address):
    page.goto(address)
    page.wait_for_selector("input:enabled", state="attached", timeout=PATIENCE)
    (folder / "note.txt").write_text("no image")
    page.locator("input[type=file]").set_input_files(folder / "note.txt")
    sync_api.expect(page.locator("#state.error")).to_contain_text("note.txt")
    assert len(classify(page, folder / "bag.png")) == 5
    sync_api.expect(page.locator("#state")).not_to_contain_text("note.txt")
