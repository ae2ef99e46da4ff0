import json

import pytest

from softline import __version__
from softline.cli import bench, main
from softline.measure import cases
from softline.measure.failures import OUT_OF_MEMORY
from softline.measure.memory import Memory, ProcessMeter

LAYERS = ["bench", "layers", "--sizes", "64,32", "--rounds", "1"]


@pytest.fixture
def small_memory(monkeypatch):
    """Measured memory without processes: softmax is out of memory at 64 pixels, and quadratic before."""

    def measure(self, case, size, mode, setting):
        tokens = case.tokens(size)
        if "softmax" in case.name and size == 64:
            return OUT_OF_MEMORY
        return Memory(tokens**2 if "softmax" in case.name else 1000 * tokens, 2**30)

    monkeypatch.setattr(ProcessMeter, "__call__", measure)


def test_layers_print_a_table_and_write_json_and_a_figure(small_memory, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "4000000000")
    paths = tmp_path / "rows.json", tmp_path / "figure.png"
    assert main([*LAYERS, "--json", str(paths[0]), "--figure", str(paths[1]), "--threads", "1"]) == 0
    printed = capsys.readouterr()
    for expected in ("32x32, 16 tokens", "64x64", "softpp", "vs softmax", "GFLOP/s", "1.00x", "memory p", "1 thread,"):
        assert expected in printed.out
    assert OUT_OF_MEMORY in printed.out
    assert "GiB, which --memory-limit changes" in printed.out
    assert printed.err == ""
    written = json.loads(paths[0].read_text())
    assert [row["case"] for row in written["rows"]] == ["softmax", "softpp", "inline"] * 4
    assert [row["failure"] for row in written["rows"] if row["case"] == "softmax"] == [None, None] + [OUT_OF_MEMORY] * 2
    assert written["environment"]["softline"] == __version__
    assert written["environment"]["threads"] == 1
    settings, command = written["command"].split("softline ", 1)
    assert "MALLOC_TRIM_THRESHOLD_=4000000000" in settings
    assert command.startswith("bench layers --sizes 64,32")
    assert written["finished"]
    assert len(written["peaks"]) == 4
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_ops_and_models_are_timed_without_memory(tmp_path, capsys):
    out = tmp_path / "rows.json"
    ops = ["bench", "ops", "--ops", "softmax,inline", "--tokens", "32", "--baseline", "inline", "--no-memory"]
    assert main([*ops, "--rounds", "1", "--json", str(out)]) == 0
    assert "vs inline" in capsys.readouterr().out
    assert {row["mode"] for row in json.loads(out.read_text())["rows"]} == {"infer", "train"}
    models = ["bench", "models", "inline_micro", "inline_micro:attention=softmax", "--sizes", "32", "--no-memory"]
    assert main([*models, "--rounds", "1", "--dtype", "bfloat16", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["case"], row["mode"]) for row in rows] == [
        ("inline_micro", "infer"),
        ("inline_micro:attention=softmax", "infer"),
    ]
    assert all(row["milliseconds"] > 0 and row["peak_bytes"] is None for row in rows)


def test_sizes_of_the_same_number_of_tokens_are_measured(small_memory, capsys):
    assert main(["bench", "layers", "--attentions", "soft", "--sizes", "64,70", "--rounds", "1"]) == 0
    assert "64x64 -> 70x70 (1x)" in capsys.readouterr().out


def test_options_of_the_measurement_are_written(small_memory, tmp_path):
    out = tmp_path / "rows.json"
    arguments = [*LAYERS, "--attentions", "inline", "--mode", "infer", "--json", str(out)]
    assert main([*arguments, "--memory-limit", "0.5"]) == 0
    options = json.loads(out.read_text())["options"]
    assert (options["rounds"], options["mode"], options["sizes"]) == (1, "infer", [32, 64])
    assert options["memory_limit_bytes"] == 2**29
    assert main([*arguments, "--no-memory"]) == 0
    assert json.loads(out.read_text())["options"]["memory_limit_bytes"] is None


def test_nothing_measured_is_an_error(tmp_path, capsys):
    models = ["bench", "models", "inline_micro:no_such_option=1", "--sizes", "32", "--no-memory", "--rounds", "1"]
    assert main([*models, "--figure", str(tmp_path / "empty.png")]) == 1
    assert "no_such_option" in capsys.readouterr().out
    assert not (tmp_path / "empty.png").exists()


def test_memory_prints_slopes_and_says_which_is_smallest(small_memory, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    paths = tmp_path / "rows.json", tmp_path / "figure.png"
    memory = ["bench", "memory", "--attentions", "softmax-math,inline", "--steps", "1,2,4"]
    assert main([*memory, "--json", str(paths[0]), "--figure", str(paths[1])]) == 0
    printed = capsys.readouterr().out
    assert "smallest slopes [MiB per 1,000 tokens]: inline 1.0, softmax-math" in printed
    fits = {growth["case"]: growth["memory"]["exponent"] for growth in json.loads(paths[0].read_text())["growth"]}
    assert fits == {"softmax-math": pytest.approx(2), "inline": pytest.approx(1)}
    assert paths[1].exists()


@pytest.fixture
def small_figure_5(monkeypatch):
    """The networks of the figure on small images, with one narrow block in each stage."""
    swin = {"embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1]}
    deit = {"embed_dim": 8, "num_heads": 1, "depth": 1}
    pvt = {"embed_dims": [8] * 4, "num_heads": [1] * 4, "depths": [1] * 4}
    slim = {"inline_swin": swin, "inline_deit": deit, "inline_pvt": pvt}
    create = cases.create_for_size
    created = []

    def create_slim(name, size, **options):
        created.append((name, size, options))
        changes = slim[name.rpartition("_")[0]]
        own = {key: value for key, value in options.items() if key != "num_classes"}
        # Swin's types of stages count its own blocks
        types = {"stage_types": "IISS"} if "swin" in name else {}
        return create(name, size, **{**own, **changes, **types, "num_classes": 2})

    monkeypatch.setattr(cases, "create_for_size", create_slim)
    monkeypatch.setattr(cases, "FIGURE_5_PIXELS", 64)
    return created


@pytest.mark.parametrize("panel", bench.PANELS)
def test_a_panel_of_the_inline_figure_is_measured_in_pairs(panel, small_figure_5, tmp_path, capsys):
    out = tmp_path / "rows.json"
    sizes = {"runtime": "64", "windows": "4,8", "resolution": "32,64"}[panel]
    quick = ["--rounds", "2", "--warm-ups", "1", "--sizes", sizes, "--json", str(out)]
    assert main(["bench", "inline", panel, *quick]) == 0
    written = json.loads(out.read_text())
    names = list(dict.fromkeys(row["case"] for row in written["rows"]))
    assert [f"inline_{name}" for name in names[::2]] == names[1::2]
    assert all(len(row["rounds"]) == 2 and row["failure"] is None for row in written["rows"])
    assert (written["options"]["panel"], written["options"]["warm_ups"]) == (panel, 1)
    table = capsys.readouterr().out.partition("images per second")[2].splitlines()
    for line, name in zip(table[1 : 1 + len(names)], names, strict=True):
        assert line.startswith(name)
        assert line.count("x)") == (len(sizes.split(",")) if name.startswith("inline_") else 0)
    # the model of a pair is the same, with another attention
    softmax = {(model, size) for model, size, options in small_figure_5 if options.get("attention") == "softmax"}
    assert softmax == {(model, size) for model, size, _ in small_figure_5}


def test_panels_have_the_sizes_and_windows_of_the_figure():
    panels = cases.FIGURE_5
    assert [panel.sizes for panel in panels.values()] == [(224,), (7, 14, 28, 56), (224, 384, 640, 1024)]
    assert [len(panel.cases) for panel in panels.values()] == [12, 2, 2]
    softmax, inline = (
        next(module for module in case.build(14, cases.Setting()).module.modules() if hasattr(module, "window_size"))
        for case in panels["windows"].cases
    )
    assert (softmax.window_size, inline.window_size) == (14, 14)


def test_warm_ups_run_before_anything_is_measured():
    calls = []

    class Counted(cases.OperatorCase):
        def build(self, size, setting):
            work = super().build(size, setting)
            return work._replace(function=lambda *inputs: calls.append(1) or work.function(*inputs))

    cases.prepare(Counted("inline", 1, 8), 16, "infer", cases.Setting(warm_ups=3))
    assert len(calls) == 3


def test_an_interruption_keeps_what_was_measured(monkeypatch, tmp_path, capsys):
    def measure(self, case, size, mode, setting):
        if size == 64:
            raise KeyboardInterrupt
        return Memory(2**20, 2**30)

    monkeypatch.setattr(ProcessMeter, "__call__", measure)
    out = tmp_path / "rows.json"
    assert main([*LAYERS, "--mode", "infer", "--json", str(out)]) == 130
    assert f"what was measured so far: {out}" in capsys.readouterr().err
    written = json.loads(out.read_text())
    assert [(row["size"], row["case"]) for row in written["rows"]] == [(32, n) for n in ("softmax", "softpp", "inline")]
    assert all(row["milliseconds"] is not None for row in written["rows"])
    assert not written["finished"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layers", "--attentions", "softmax,inlin"], "got 'inlin'; did you mean 'inline'?"),
        (["memory", "--attentions", "softmax-mat"], "did you mean 'softmax-math'?"),
        (["ops", "--ops", "softmax,sofpp"], "got 'sofpp'; did you mean 'softpp'?"),
        (["models", "softpp_tyny"], "did you mean softpp_tiny"),
        (["models", "softpp_tiny", "softpp_tiny"], "names must be given and differ"),
        (["layers", "--baseline", "hydra"], "baseline must be one of inline, softmax, softpp; got 'hydra'"),
        (["layers", "--sizes", "4"], "image size must be at least one patch of 8 pixels, got 4"),
        (["ops", "--tokens", "0"], "tokens must be at least 1, got 0"),
        (["layers", "--rounds", "0"], "--rounds must be at least 1 and at most 1e+06, got 0"),
        (["layers", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["layers", "--memory-limit", "0"], "--memory-limit must be more than 0 GiB, got 0"),
        (["layers", "--no-memory", "--memory-limit", "2"], "--no-memory cannot keep to a --memory-limit (got 2.0)"),
        (["layers", "--figure", "x.foo"], "--figure must end in .png, .svg, .pdf; got 'x.foo'"),
        (["inline", "windows", "--warm-ups", "-1"], "--warm-ups must be at least 0 and at most 1e+06, got -1"),
        (["inline", "runtime", "--figure", "x.png"], "--figure draws cost against size: name several --sizes, got 224"),
        (["memory", "--figure", "x"], "--figure must end in .png, .svg, .pdf; got 'x'"),
        (["layers", "--device", "gpu"], "device must be cpu, cuda or cuda:N, got 'gpu'"),
        (["layers", "--sizes", "32", "--json", "/no/such/place/rows.json"], "no such directory: /no/such/place"),
    ],
)
def test_mistakes_end_in_a_message(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layers", "--sizes", "32,big"], "expected whole numbers separated by commas, got '32,big'"),
        ([], "the following arguments are required: WHAT"),
        (["models"], "the following arguments are required: MODEL"),
    ],
)
def test_arguments_that_cannot_be_read_end_in_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_names_on_the_help_page_are_those_of_the_library():
    assert (cases.MATH, tuple(cases.OPERATORS), tuple(cases.DTYPES)) == (bench.MATH, bench.OPERATORS, bench.DTYPES)
    assert tuple(cases.FIGURE_5) == bench.PANELS
