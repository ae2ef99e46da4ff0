"""The documentation is complete, its code and commands run, and the site loads nothing from other machines."""

import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

from softline.attention import ATTENTIONS
from softline.attention.registry import option_names
from softline.backbones import MODEL_NAMES
from softline.cli import main, parse
from softline.engine.reading import list_recipes, load_recipe
from softline.engine.task import TASKS
from softline.experiments.presets import PRESETS, load_preset
from softline.layers.landmarks import create_landmarks
from softline.ops import soft_attention
from tests.documented_run import write_documented_run

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
SPEED = re.compile(r"<!-- speed: .*? -->\n(.*?)<!-- /speed -->", flags=re.DOTALL)
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```", flags=re.MULTILINE | re.DOTALL)
needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings", "latex2mathml")),
    reason="needs the packages of the extra docs",
)


def blocks(page: Path, language: str) -> list[str]:
    return [match["code"] for match in BLOCK.finditer(page.read_text()) if match["language"] == language]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def generators(monkeypatch):
    """Return a function that imports a module of tools/docs."""
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "docs"))
    return importlib.import_module


class Resources(HTMLParser):
    """Collects the addresses that a browser loads without a click."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        names = ("src", "srcset", "data", "poster") if tag != "link" else ("href",)
        self.found += [values[name] for name in names if values.get(name)]
        self.found += re.findall(r"url\(([^)]*)\)", values.get("style") or "")


class Text(HTMLParser):
    def __init__(self):
        super().__init__()
        self.parts = []

    def handle_data(self, data):
        self.parts.append(data)


def text_of(page: Path) -> str:
    reader = Text()
    reader.feed(page.read_text())
    return " ".join("".join(reader.parts).split())


@needs_mkdocs
def test_every_attention_has_a_page_with_its_options(site):
    index = text_of(site / "attentions" / "index.html")
    for name in ATTENTIONS:
        page = text_of(site / "attentions" / f"{name}.html")
        assert f'create_attention("{name}"' in page
        assert all(option in page for option in option_names(name)), name
        assert name in index


@needs_mkdocs
def test_options_are_described_by_the_function_that_their_factory_refers_to(site, generators):
    page = text_of(site / "attentions" / "softpp.html")
    docstrings = generators("docstrings")
    for function, option in ((create_landmarks, "max_landmarks"), (soft_attention, "iterations")):
        text = docstrings.parse(inspect.getdoc(function)).entries[option]
        start = re.split(r"[`(;]", text)[0].strip()
        assert len(start) > 10
        assert start in page


@needs_mkdocs
def test_every_model_and_every_recipe_is_listed(site):
    models, recipes = ((site / f"{name}.html").read_text() for name in ("models", "recipes"))
    assert [name for name in MODEL_NAMES if f"<code>{name}</code>" not in models] == []
    assert [name for name in list_recipes() if f"<code>{name}</code>" not in recipes] == []


@needs_mkdocs
def test_every_preset_of_compare_is_listed(site):
    page = text_of(site / "compare.html")
    for preset in PRESETS.values():
        assert preset.name in page
        assert preset.reference in page
        assert all(variant.name in page for variant in preset.variants)


@needs_mkdocs
@pytest.mark.parametrize("name", ["benchmarks", "tasks/sequences"])
def test_the_site_shows_the_speed_tables_of_its_pages(site, name):
    tables = SPEED.findall((ROOT / "docs" / f"{name}.md").read_text())
    cells = [cell.replace("`", "") for table in tables for cell in re.findall(r"(?<=\| )[^|\n]+(?= \|)", table)]
    numbers = [cell for cell in cells if re.match(r"[\d.,]+( ms)?( \([\d.,]+x\))?$", cell)]
    assert len(numbers) > 15
    shown = text_of(site / f"{name}.html")
    assert [cell for cell in numbers if cell not in shown] == []
    commands = [line for table in tables for line in table.splitlines() if line.startswith("`")]
    assert len(commands) == len(tables)
    assert [line for line in commands if line.replace("`", "") not in shown] == []


def test_the_table_of_the_readme_is_also_in_the_documentation():
    (table,) = SPEED.findall((ROOT / "README.md").read_text())
    assert table in SPEED.findall((ROOT / "docs" / "benchmarks.md").read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_modules_that_pages_name_exist(page):
    for name in set(re.findall(r"\bsoftline(?:\.\w+)+", re.sub(r"softline\.tasks\.<task>\S*", "", page.read_text()))):
        assert resolves(name), name


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, an attribute, or the name of an entry-point group."""
    if name in (ATTENTIONS.group, TASKS.group):
        return True
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                # annotations of a class have no value
                return part in getattr(found, "__annotations__", {})
            found = getattr(found, part)
        return True
    return False


@needs_mkdocs
def test_the_site_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        reader = Resources()
        reader.feed(page.read_text())
        assert [address for address in reader.found if re.match(r"(https?:)?//", address)] == [], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"""(url\(|@import\s*)["']?(https?:)?//""", sheet.read_text()), sheet


@needs_mkdocs
def test_equations_are_mathml_without_a_script(site):
    for name in ("softmax", "soft", "softpp", "inline", "linear"):
        page = (site / "concepts" / f"{name}.html").read_text()
        assert '<div class="equation"><math' in page
        assert "arithmatex" not in page
        assert "$$" not in page


@needs_mkdocs
@pytest.mark.parametrize("latex", [r"a + \nosuchcommand", r"\frac{a}{", r"\left( a"])
def test_a_formula_that_cannot_be_set_is_named_with_its_page(generators, latex):
    from mkdocs.exceptions import PluginError

    equations = generators("equations")
    with pytest.raises(PluginError, match=re.escape("concepts/page.md")) as caught:
        equations.set_equations(rf'<p><span class="arithmatex">\({latex}\)</span></p>', "concepts/page.md")
    assert repr(latex) in str(caught.value)


@needs_mkdocs
def test_a_request_for_an_unknown_listing_or_section_is_refused(generators):
    from mkdocs.exceptions import PluginError

    listings = generators("listings")
    with pytest.raises(PluginError, match=r"a\.md: a listing is one of attentions, models, .*; got 'recipe'"):
        listings.fill("<!-- docs: recipe -->", "a.md")
    with pytest.raises(PluginError, match=r"a\.md: README\.md has no heading 'Nowhere'"):
        listings.fill("<!-- docs: section README.md, Nowhere -->", "a.md")


@needs_mkdocs
def test_a_figure_comes_with_its_command_and_numbers(generators, monkeypatch, tmp_path):
    figures, listings = generators("figures"), generators("listings")
    folder = tmp_path / "docs" / "figures"
    folder.mkdir(parents=True)
    monkeypatch.setattr(figures, "FIGURES", folder)
    (folder / "injectivity.svg").write_text("<svg/>")
    models = {"linear": {"mean": 473.25, "share_of_far_pairs": 0.5}}
    content = {"command": "softline analyze injectivity runs/best.pt --output docs/figures", "images": 32}
    (folder / "injectivity.json").write_text(json.dumps({**content, "models": models}))
    text = listings.figure("injectivity", "Confusions")
    assert "![Confusions](../figures/injectivity.svg)" in text
    assert "`softline analyze injectivity runs/best.pt`" in text
    assert "| linear | 473.2 | 50 % |" in text


@needs_mkdocs
def test_a_figure_that_is_missing_or_names_one_machine_is_refused(generators, monkeypatch, tmp_path):
    figures, listings = generators("figures"), generators("listings")
    folder = tmp_path / "docs" / "figures"
    folder.mkdir(parents=True)
    monkeypatch.setattr(figures, "FIGURES", folder)
    with pytest.raises(ValueError, match=r"docs/figures/cost\.svg does not exist: .* softline analyze cost"):
        listings.figure("cost", "Cost")
    (folder / "heatmap.png").touch()
    (folder / "heatmap.json").write_text(json.dumps({"command": "softline analyze heatmap /home/me/best.pt"}))
    with pytest.raises(ValueError, match="absolute paths"):
        listings.figure("heatmap", "Maps")
    with pytest.raises(ValueError, match="a figure"):
        listings.figure("heatmaps", "Maps")


@needs_mkdocs
def test_docstrings_become_markdown(generators):
    docstrings = generators("docstrings")
    text = """Weights of a_b * c_d, see https://example.org/x.

    q, k: queries and keys [B, H, N, D],
        on two lines.
    scale: see `other`; ``None`` is 1.
    Half precision is widened.

    With these,
        S = P^T A P
    Deviations: none.
    """
    assert docstrings.parse(text).entries == {
        "q": "queries and keys [B, H, N, D], on two lines.",
        "k": "queries and keys [B, H, N, D], on two lines.",
        "scale": "see `other`; ``None`` is 1.",
    }
    assert docstrings.to_markdown(text, {"other": "softline.other"}) == (
        "Weights of a&#95;b &#42; c&#95;d, see <https://example.org/x.>\n\n"
        "- **`q`**, **`k`**: queries and keys &#91;B, H, N, D&#93;, on two lines.\n"
        "- **`scale`**: see [`other`][softline.other]; `None` is 1.\n\n"
        "Half precision is widened.\n\nWith these,\n\n```text\nS = P^T A P\n```\n\nDeviations: none."
    )


def test_the_example_of_a_new_attention_runs():
    page = ROOT / "docs" / "contribute" / "add-an-attention.md"
    names = {}
    try:
        for code in blocks(page, "python"):
            exec(compile(code, page.name, "exec"), names)
        assert "mean" in ATTENTIONS
        assert names["logits"].shape == (1, 10)
        torch.testing.assert_close(names["row"], names["weights"][:, :, 17:18])
        q, k, v = torch.randn(3, 2, 2, 35, 8, dtype=torch.float64)
        mask = torch.arange(35).expand(2, 35) < torch.tensor([[20], [35]])
        for key_mask in (None, mask):
            out = names["mean_attention"](q, k, v, key_mask=key_mask)
            weights = names["mean_weights"](q, k, key_mask=key_mask)
            torch.testing.assert_close(out, weights @ v)
    finally:
        ATTENTIONS._entries.pop("mean", None)


def test_the_example_of_a_new_task_runs(monkeypatch, tmp_path):
    page = ROOT / "docs" / "contribute" / "add-a-task.md"
    install_example(tmp_path, page)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TASKS, "_entries", {})
    monkeypatch.setattr(TASKS, "_found_entry_points", False)
    Path("brightness.yaml").write_text(blocks(page, "yaml")[0])
    Image.new("RGB", (32, 32), (200, 200, 200)).save("photograph.png")
    small = ["--batch_size", "8", "--data.train_samples", "16", "--data.val_samples", "9", "--schedule.epochs", "1"]
    assert main(["train", "brightness.yaml", *small]) == 0
    assert main(["evaluate", "runs/brightness/best.pt", "--json", "evaluation.json"]) == 0
    assert {"close", "loss"} <= json.loads(Path("evaluation.json").read_text())["rows"][0]["metrics"].keys()
    predicting = ["predict", "runs/brightness/best.pt", "photograph.png", "--digits", "3"]
    assert main([*predicting, "--json", "predictions.json"]) == 0
    assert "brightness" in Path("predictions.json").read_text()
    comparing = ["compare", "--recipe", "brightness.yaml", "--attentions", "inline", "--output", "compared"]
    assert main([*comparing, *small]) == 0
    assert json.loads(Path("compared/comparison.json").read_text())["metric"] == "close"


def install_example(folder: Path, page: Path) -> None:
    """Write the package of a page with its entry points as an installer would."""
    package, information = folder / "my_package", folder / "my_package-1.0.dist-info"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "brightness.py").write_text("\n\n".join(blocks(page, "python")))
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (declared,) = blocks(page, "toml")
    groups = tomllib.loads(declared)["project"]["entry-points"]
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (information / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def documented_run(tmp_path_factory):
    return write_documented_run(tmp_path_factory.mktemp("documented"))


@pytest.mark.parametrize(
    "name", ["index.md", "training.md", "models.md", "replace.md", "attentions/index.md", "see/hooks.md"]
)
def test_the_code_of_a_page_runs(name, documented_run, monkeypatch):
    monkeypatch.chdir(documented_run)
    code = blocks(ROOT / "docs" / name, "python")
    assert code
    # the blocks of a page build on each other
    names = {}
    for part in code:
        exec(compile(part, name, "exec"), names)


def test_the_way_to_a_linear_model_works(documented_run, monkeypatch, capsys):
    """Every command of the page, and its Python, with fewer steps."""
    monkeypatch.chdir(documented_run)
    page = ROOT / "docs" / "linearize.md"
    steps = ["--schedule.epochs", "0.02", "--schedule.warmup_epochs", "0"]
    stages = [word.replace("--", f"--{stage}.") for stage in ("transfer", "finetune") for word in steps]
    few = {"train": steps, "linearize": [*stages, "--sizes", "28", "--cost-sizes", "0"]}
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    assert [line.split()[1] for line in lines[:5]] == ["train", "linearize", "evaluate", "export", "predict"]
    for line in lines:
        words = shlex.split(line)
        assert main([*words[1:], *few.get(words[1], [])]) == 0, capsys.readouterr().err
    assert {"finetune", "transfer", "report.html", "linearized.json"} <= set(os.listdir("runs/vit_inline"))
    (code,) = blocks(page, "python")
    exec(compile(code.replace("cost_sizes=()", f"cost_sizes=(), overrides={stages}"), page.name, "exec"), names := {})
    assert names["result"].steps[-1].name == "finetuned"


def commands():
    """Yield every softline command in a shell block, with the page that shows it."""
    for page in (*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"):
        lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
        for line in lines:
            words = shlex.split(line, comments=True)
            for start in ("softline", "softline.cli"):
                if start in words:
                    name = page.relative_to(ROOT).as_posix()
                    yield pytest.param(words[words.index(start) + 1 :], id=f"{name}: {' '.join(words)}")


@pytest.mark.parametrize("arguments", list(commands()))
def test_commands_are_understood(arguments):
    options = parse(arguments)
    recipe, preset = (getattr(options, name, None) for name in ("recipe", "preset"))
    if preset is not None:
        load_preset(preset, recipe, options.overrides, scale=getattr(options, "scale", None) or "miniature")
    elif recipe in list_recipes():
        load_recipe(recipe, options.overrides)
    else:
        assert recipe is None or recipe.endswith(".yaml")
