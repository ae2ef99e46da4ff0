"""The page docs/deploy.md and the programs of examples/deploy: everything on the page is run as it is written there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from PIL import Image

from softline.cli import main
from softline.data.images.photographs import open_photograph
from softline.engine.reading import load_recipe
from softline.engine.train import train
from tests.documented_run import write_documented_run

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
EXAMPLES = ROOT / "examples" / "deploy"
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```", flags=re.MULTILINE | re.DOTALL)
# those of AOTInductor take minutes, those of C++ need what is not everywhere
SLOW, NATIVE = re.compile(r"--compile|aoti_load_package"), re.compile(r"g\+\+|\./classify")
# runs a program as if these packages were not installed
ALONE = """
import runpy, sys
sys.modules.update(dict.fromkeys(("torch", "torchvision", "timm", "softline")))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def page_steps() -> list[tuple[str, str]]:
    """Return the commands and Python blocks of the page in their order, each with its language."""
    steps = []
    for match in BLOCK.finditer(PAGE):
        if match["language"] == "sh":
            steps += [("sh", line) for line in match["code"].replace("\\\n", " ").splitlines()]
        elif match["language"] == "python":
            steps.append(("python", match["code"]))
    return steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a directory with the run of the page, images and the examples."""
    folder = write_documented_run(tmp_path_factory.mktemp("deployed"))
    # a network with inline attention has a third of the operators of SOFT++
    (folder / "runs" / "inline").unlink()
    short = ["--schedule.epochs=0.02", "--schedule.warmup_epochs=0", "--device=cpu", "--model.options.attention=inline"]
    train(load_recipe("quickstart", [*short, f"--output={folder}/runs/inline"]))
    (folder / "examples").symlink_to(ROOT / "examples")
    Image.open(folder / "shoe.png").convert("L").save(folder / "shoe.pgm")
    open_photograph("coffee").save(folder / "coffee.png")
    return folder


def run_steps(steps: list[tuple[str, str]]) -> None:
    """Run commands and Python blocks, which build on each other."""
    names = {}
    for language, step in steps:
        if language == "python":
            exec(compile(step, "deploy.md", "exec"), names)
            continue
        program, *arguments = shlex.split(step)
        if program == "softline":
            assert main(arguments) == 0, step
        else:
            assert program == "python", step
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def exported(folder):
    """Return the directory after all steps of the page that need no compiler."""
    with chdir(folder):
        run_steps([step for step in page_steps() if not SLOW.search(step[1]) and not NATIVE.search(step[1])])
    return folder


def test_the_steps_of_the_page_write_the_files_that_they_name(exported):
    named = set(re.findall(r"--to (\S+)", "\n".join(step for _, step in page_steps() if not SLOW.search(step))))
    assert len(named) > 5
    assert {path.name for path in exported.glob("clothes*")} == named


@pytest.mark.slow
def test_the_steps_of_the_page_that_need_a_compiler_run(exported, monkeypatch):
    monkeypatch.chdir(exported)
    steps = [step for step in page_steps() if SLOW.search(step[1])]
    assert len(steps) == 2
    run_steps([("python", "import torch"), *steps])
    assert (exported / "clothes_here.pt2").exists()


def test_metadata_is_what_the_page_says(exported):
    def metadata(name):
        stored = onnxruntime.InferenceSession(exported / name).get_modelmeta().custom_metadata_map
        return {key: json.loads(value) for key, value in stored.items()}

    plain, from_bytes = metadata("clothes.onnx"), metadata("clothes_bytes.onnx")
    assert plain.keys() == {"model", "task", "classes", "mean", "std", "size", "softline"}
    assert all(f"`{key}`" in PAGE for key in plain)
    assert (plain["mean"], plain["std"], plain["size"]) == ([0.286], [0.353], {"height": 28, "width": 28})
    assert {"interpolation", "crop_pct", "crop_mode"} <= plain["softline"]["description"]["settings"].keys()
    assert from_bytes["mean"] is None
    assert metadata("clothes_features.onnx")["task"] == "features"
    extra = {"softline.json": ""}
    torch.export.load(exported / "clothes.pt2", extra_files=extra)
    assert json.loads(extra["softline.json"])["classes"] == plain["classes"]


@pytest.mark.parametrize("image", ["shoe.png", "coffee.png"])
def test_onnx_runtime_alone_finds_what_softline_predicts(exported, image, monkeypatch):
    monkeypatch.chdir(exported)
    program = [sys.executable, "-c", ALONE, EXAMPLES / "onnx_only.py", "clothes.onnx", image]
    done = subprocess.run(program, check=True, capture_output=True, text=True)
    assert read_bars(done.stdout) == predicted("clothes.onnx", image)


def predicted(model: str, image: str) -> dict[str, float]:
    """Return what `softline predict` finds."""
    assert main(["predict", model, image, "--json", "predictions.json"]) == 0
    (found,) = json.loads(Path("predictions.json").read_text())
    shares = [100 * probability for probability in found["probabilities"]]
    return pytest.approx(dict(zip(found["classes"], shares, strict=True)), abs=2e-4)


def read_bars(text: str) -> dict[str, float]:
    return {name: float(share) for share, name in re.findall(r"([\d.]+) %  (.*)", text)}


@pytest.mark.parametrize(("model", "what"), [("clothes_bytes.onnx", "normalised"), ("clothes_features.onnx", "class")])
def test_the_program_without_softline_refuses_files_that_are_no_classifiers(exported, model, what):
    program = [sys.executable, EXAMPLES / "onnx_only.py", exported / model, exported / "shoe.png"]
    done = subprocess.run(program, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert what in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("language", "path"), [("js", "web/classify.js"), ("cpp", "classify.cpp")])
def test_excerpts_on_the_page_are_in_the_example(language, path):
    (excerpt,) = (match["code"] for match in BLOCK.finditer(PAGE) if match["language"] == language)
    assert excerpt in (EXAMPLES / path).read_text()


def find_headers() -> Path | None:
    """Return the directory of ONNX Runtime's C++ headers, which SOFTLINE_ONNXRUNTIME names if it is no usual one."""
    named = os.environ.get("SOFTLINE_ONNXRUNTIME")
    places = [named] if named else ["/usr/include/onnxruntime", "/usr/local/include/onnxruntime", "/usr/local/include"]
    return next((Path(place) for place in places if (Path(place) / "onnxruntime_cxx_api.h").exists()), None)


def test_the_program_in_cpp_finds_what_softline_predicts(exported, monkeypatch):
    headers = find_headers()
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"), None)
    if headers is None or library is None or shutil.which("g++") is None:
        pytest.skip("needs g++ and ONNX Runtime's C++ headers: SOFTLINE_ONNXRUNTIME names their directory")
    monkeypatch.chdir(exported)
    Path("onnxruntime/lib").mkdir(parents=True)
    Path("onnxruntime/include").symlink_to(headers.resolve())
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        Path("onnxruntime/lib", name).symlink_to(library)
    compiling, running = (shlex.split(step) for _, step in page_steps() if NATIVE.search(step))
    subprocess.run(compiling, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": "onnxruntime/lib"}
    done = subprocess.run(running, check=True, capture_output=True, text=True, env=environment)
    assert read_bars(done.stdout) == predicted("clothes_28.onnx", "shoe.png")
    done = subprocess.run([*running[:2], "shoe.png"], check=False, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (
        2,
        "error: shoe.png is no binary PPM or PGM file of 8 bits without comments\n",
    )
