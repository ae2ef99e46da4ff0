"""The speed tables in README.md and the documentation agree with benchmarks/results."""

import importlib.util
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from softline.measure import Row, growths

ROOT = Path(__file__).parents[2]
SPACE = "\N{NO-BREAK SPACE}"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_speed_table", ROOT / "tools" / "make_speed_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, name: str, *, kind: str = "models", scale: float = 1.0, more=(), finished=True) -> None:
    rows = [
        Row("vit", "infer", 256, "256x256", 256, 10 * scale, speedup=1, peak_bytes=2**20),
        Row("linear", "infer", 256, "256x256", 256, 5 * scale, speedup=2, peak_bytes=2**20),
        Row("vit", "infer", 512, "512x512", 1024, failure="out of memory"),
        Row("linear", "infer", 512, "512x512", 1024, 20 * scale, peak_bytes=2**22),
        *more,
    ]
    content = {
        "kind": kind,
        "command": "softline bench models vit linear --json out.json",
        "baseline": "vit",
        "finished": finished,
        "options": {"dtype": "float32", "batch": 1, "compile": False},
        "environment": {"cpu": "CPU", "threads": 1, "torch": "2.9", "commit": "abc", "date": "2026-01-02T03:04:05"},
        "rows": [asdict(row) for row in rows],
        "growth": [asdict(growth) for growth in growths(rows)],
    }
    (folder / name).write_text(json.dumps(content))


def test_all_tables_agree_with_the_results(tool):
    assert tool.main(["--check"]) == 0


def test_every_result_has_a_table_in_the_documentation(tool):
    text = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    assert {match["name"] for match in tool.BLOCK.finditer(text)} == set(tool.newest(ROOT / "benchmarks" / "results"))


def test_readme_and_documentation_are_the_default_pages(tool):
    pages = tool.default_pages()
    assert ROOT / "README.md" in pages
    assert ROOT / "docs" / "benchmarks.md" in pages
    assert ROOT / "docs" / "tasks" / "sequences.md" in pages


def test_no_table_names_a_path_of_one_machine(tool):
    for page in tool.default_pages():
        for match in tool.BLOCK.finditer(page.read_text()):
            assert not re.search(r"[ =`]/(?!speed)\w", match[0]), page


def test_blocks_are_filled_from_the_newest_results(tool, tmp_path, capsys):
    write(tmp_path, "2026-01-01-models.json", scale=100)
    write(tmp_path, "2026-01-02-models.json")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- speed: models -->\nold\n<!-- /speed -->\nafter\n")
    options = [str(page), "--results", str(tmp_path)]
    assert tool.main([*options, "--check"]) == 1
    assert f"{page} is out of date" in capsys.readouterr().err
    assert "old" in page.read_text()
    assert tool.main(options) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- speed: models -->\n|  | 256x256 | 512x512 |\n| --- | --- | --- |\n")
    assert "| `vit` | 10.0 ms | out of memory |" in text
    # the baseline failed at the larger size
    assert "| `linear` | 5.00 ms (2.00x) | 20.0 ms |" in text
    assert "`softline bench models vit linear` on 2026-01-02: CPU, 1 thread, torch 2.9, float32, batch 1" in text
    assert text.endswith("<!-- /speed -->\nafter\n")
    assert "old" not in text
    assert tool.main([*options, "--check"]) == 0


def test_several_pages_are_written_or_none(tool, tmp_path):
    write(tmp_path, "2026-01-02-models.json")
    good, bad = tmp_path / "good.md", tmp_path / "bad.md"
    good.write_text("<!-- speed: models -->\n<!-- /speed -->")
    bad.write_text("<!-- speed: none -->\n<!-- /speed -->")
    options = [str(good), str(bad), "--results", str(tmp_path)]
    assert tool.main(options) == 2
    assert good.read_text() == "<!-- speed: models -->\n<!-- /speed -->"
    bad.write_text("<!-- speed: models memory -->\n<!-- /speed -->")
    assert tool.main(options) == 0
    assert "10.0 ms" in good.read_text()
    assert "peak MiB" in bad.read_text()


def test_growth_and_memory_have_tables(tool, tmp_path):
    write(tmp_path, "2026-01-02-models.json")
    growth = tool.fill("<!-- speed: models growth -->\n<!-- /speed -->", tmp_path).replace(SPACE, "~")
    assert "| 256x256<br>to~512x512<br>(4x~tokens) |" in growth
    assert "| `linear` | infer | 1.00 | 1.00 | time~4.0x<br>memory~4.0x |" in growth
    assert "| `vit` | infer | - | - | time~-<br>memory~- |" in growth
    memory = tool.fill("<!-- speed: models memory -->\n<!-- /speed -->", tmp_path)
    assert "| `linear` | 1.00 | 4.00 | 3.91 | 1.00 |" in memory


def test_the_spread_of_the_times_is_stated(tool, tmp_path):
    write(tmp_path, "2026-01-02-models.json")
    block = "<!-- speed: models -->\n<!-- /speed -->"
    assert "interquartile" not in tool.fill(block, tmp_path)
    more = [Row("linear", "infer", 768, "768x768", 2304, 50.0, spread=spread) for spread in (0.5, 1.0, 4.0)]
    write(tmp_path, "2026-01-02-models.json", more=more)
    expected = "batch 1, commit abc. Half the interquartile range of a time is 2.0 % of it, and 8.0 % at most."
    assert expected in tool.fill(block, tmp_path)


def test_each_mode_has_its_slope_of_memory(tool, tmp_path):
    train = [
        Row("linear", "train", 256, "256x256", 256, peak_bytes=2**21),
        Row("linear", "train", 512, "512x512", 1024, peak_bytes=2**25),
    ]
    write(tmp_path, "2026-01-02-models.json", more=train)
    memory = tool.fill("<!-- speed: models memory -->\n<!-- /speed -->", tmp_path)
    assert "MiB per 1,000 tokens, infer | exponent, infer | MiB per 1,000 tokens, train | exponent, train |" in memory
    assert "| `linear` | 1.00 | 4.00 | 2.00 | 32.0 | 3.91 | 1.00 | 39.1 | 2.00 |" in memory
    assert "| `vit` | 1.00 | out of memory |  |  | - | - | - | - |" in memory


def test_interrupted_results_are_refused(tool, tmp_path, capsys):
    write(tmp_path, "2026-01-02-models.json", finished=False)
    page = tmp_path / "page.md"
    page.write_text("<!-- speed: models -->\n<!-- /speed -->")
    assert tool.main([str(page), "--results", str(tmp_path)]) == 2
    assert "2026-01-02-models.json is incomplete" in capsys.readouterr().err
    assert page.read_text() == "<!-- speed: models -->\n<!-- /speed -->"


def test_missing_and_broken_results_end_in_a_message(tool, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- speed: models -->\n<!-- /speed -->")
    options = [str(page), "--results", str(tmp_path), "--check"]
    assert tool.main(options) == 2
    assert "no results are named models" in capsys.readouterr().err
    (tmp_path / "2026-01-02-models.json").write_text("{")
    assert tool.main(options) == 2
    assert "2026-01-02-models.json is not valid JSON" in capsys.readouterr().err


def test_what_memory_measured_is_shown_as_memory(tool, tmp_path):
    write(tmp_path, "2026-01-02-memory.json", kind="memory")
    assert "peak MiB" in tool.fill("<!-- speed: memory -->\n<!-- /speed -->", tmp_path)


def test_a_page_without_blocks_stays_as_it_is(tool, tmp_path):
    assert tool.fill("nothing here\n", tmp_path) == "nothing here\n"


@pytest.mark.parametrize(
    ("block", "message"), [("none", r"no results are named none; .* has models"), ("models x", r"time, growth, memory")]
)
def test_mistakes_in_blocks_are_explained(tool, tmp_path, block, message):
    write(tmp_path, "2026-01-02-models.json")
    with pytest.raises(ValueError, match=message):
        tool.fill(f"<!-- speed: {block} -->\n<!-- /speed -->", tmp_path)


def described(kind: str, rows: list[dict]) -> str:
    machine = {"cpu": "CPU", "threads": 1, "torch": "2.9", "commit": "abc", "date": "2026-01-02T03:04:05"}
    options = {"dtype": "float32", "batch": 1, "compile": False}
    return json.dumps(
        {"kind": kind, "command": "measure", "finished": True, "options": options, "environment": machine, "rows": rows}
    )


def test_tables_of_whole_segmenters_photographs_and_rooflines(tool, tmp_path):
    size = {"height": 512, "width": 1024, "backbone": "net"}
    alone = {**size, "head": None, "seconds": 0.5, "peak_bytes": 2**27}
    whole = {**size, "head": "light", "seconds": 0.75, "peak_bytes": 2**28}
    other = {**alone, "backbone": "other"}
    (tmp_path / "2026-01-01-dense.json").write_text(described("dense", [alone, whole, other]))
    parts = [
        {"part": "matrix product", "milliseconds": 10.0, "operations": 2 * 10**9, "bytes": 0},
        {"part": "copy", "milliseconds": 1.0, "operations": 0, "bytes": 10**7},
        {"part": "step", "milliseconds": 2.0, "operations": 10**8, "bytes": 10**6},
    ]
    (tmp_path / "2026-01-01-roofline.json").write_text(described("roofline", parts))
    seen = {"model": "segmenter", "peak_bytes": 1.5e9, "seconds": 61.4}
    runs = [{**seen, "command": "predict"}, {**seen, "command": "evaluate", "seconds": 70.6}]
    (tmp_path / "2026-01-01-photographs.json").write_text(described("photographs", runs))
    page = tmp_path / "page.md"
    tables = ("dense", "roofline", "photographs")
    page.write_text("".join(f"<!-- speed: {name} {name} -->\n<!-- /speed -->\n" for name in tables))
    assert tool.main([str(page), "--results", str(tmp_path)]) == 0
    lines = page.read_text().splitlines()
    # no cell is broken but between its parts
    broken = [line.replace(SPACE, "~") for line in lines]
    assert "| 512~x~1024 | `net` | 0.50~s<br>128~MiB | 0.75~s<br>256~MiB<br>+0.25~s |" in broken
    assert "| 512~x~1024 | `other` | 0.50~s<br>128~MiB | - |" in broken
    assert "| step | 2.00 ms | 50 | 25 % | 0 | 5 % |" in lines
    assert "| segmenter | 1.50 GB, 61 s | 1.50 GB, 71 s |" in lines
