import dataclasses
import json
from multiprocessing import active_children
from typing import Any

import pytest
import torch
from torch import nn

from softline.cli import main
from softline.cli.compare import comparison_table
from softline.engine.checkpoint import load_checkpoint
from softline.engine.events import Stepped
from softline.engine.reading import load_recipe
from softline.engine.task import build_task
from softline.errors import UserError
from softline.experiments.compare import Comparison, CurvePoint, Run, VariantResult, compare
from softline.experiments.figures import plot_comparison
from softline.experiments.model_cost import ModelCost, measure_costs
from softline.experiments.presets import PRESETS, Variant, attention_variants, load_preset, variant_recipe
from softline.experiments.runs import Finished
from softline.experiments.workers import run_in_processes
from softline.measure.turns import take_turns
from softline.plotting.colors import comparison_colors
from softline.tasks.classification.recipe import ClassificationRecipe
from softline.tasks.networks import build_model
from tests.experiments.misbehaving import misbehave
from tests.tasks.small_dense import SEGMENTATION, dense_recipe, write_scenes

SMALL_MODEL = ["--model.options.embed_dims=[8,8,8,8]", "--model.options.num_heads=[1,1,1,1]"]


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums over tokens round alike in this process and in those that share its threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _few_images(tmp_path):
    """A folder of a few images, so that a run takes no time: three steps."""
    from PIL import Image

    for split, count in (("train", 12), ("val", 4)):
        for label in ("dark", "light"):
            folder = tmp_path / "data" / split / label
            folder.mkdir(parents=True)
            for index in range(count):
                shade = index + (200 if label == "light" else 0)
                Image.new("L", (28, 28), shade).save(folder / f"{index}.png")


@pytest.fixture
def small(tmp_path) -> list[str]:
    epochs = ["--batch_size=8", "--schedule.epochs=1", "--schedule.warmup_epochs=0", "--log_every=1"]
    return [*epochs, *SMALL_MODEL, f"--data.source={tmp_path / 'data'}"]


@pytest.fixture
def recipe(small) -> ClassificationRecipe:
    loaded = load_recipe("quickstart", small)
    assert isinstance(loaded, ClassificationRecipe)
    return loaded


def built(recipe: Any, classes: int = 10) -> nn.Module:
    return build_model(recipe.model, classes, recipe.data.image_size)


def run_of(seed: int, score: float | None) -> Run:
    reason = None if score is not None else "the loss is nan"
    curve = (CurvePoint(1.0, 2.0, 0.5), CurvePoint(2.0, 1.0, score or 0.1))
    return Run(seed, 90, score, reason, curve, "top1")


def row_of(name: str, *scores: float | None, printed: float | None = None) -> VariantResult:
    cost = ModelCost(700_000, 6_000_000, 400_000, 500.0, 1500.0)
    return VariantResult(name, {}, cost, tuple(run_of(seed, score) for seed, score in enumerate(scores)), printed)


EXAMPLE = Comparison(
    "Example",
    "Table 2",
    "top1",
    "images",
    (0, 1),
    (row_of("softmax", 0.8, 0.9, printed=80.0), row_of("softpp", 0.7, None), row_of("linear", None, None)),
    {"batch_size": 8},
    {"cpu": "a processor", "threads": 1},
)

# presets


@pytest.mark.parametrize("name", PRESETS)
def test_variants_of_a_preset_build_different_models(name):
    preset, base = load_preset(name)
    models = {variant.name: built(variant_recipe(base, variant)) for variant in preset.variants}
    assert len({repr(model) for model in models.values()}) == len(preset.variants)
    images = torch.randn(2, 1, 28, 28)
    for model in models.values():
        assert model.eval()(images).shape == (2, 10)


def test_variants_differ_as_they_claim():
    def models(name: str) -> dict[str, Any]:
        preset, base = load_preset(name)
        return {variant.name: built(variant_recipe(base, variant)) for variant in preset.variants}

    def attention(model: Any) -> Any:
        return model.stages[0].blocks[0].attn

    def size(model: Any) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    for name, model in models("attentions").items():
        assert {block.attn.operator.name for stage in model.stages for block in stage.blocks} == {name}
    landmarks = {name: attention(model).core.landmarks for name, model in models("bottleneck").items()}
    assert {name: layer.plan.cap for name, layer in landmarks.items()} == {f"{n}x{n}": (n, n) for n in range(3, 8)}
    symmetric = models("symmetric")
    assert [attention(model).qkv.out_features // 32 for model in symmetric.values()] == [3, 2]
    pyramid = models("pyramid")
    assert [len({stage.reduction for stage in model.stages}) for model in pyramid.values()] == [1, 1, 4]
    assert size(pyramid["flat"]) == pytest.approx(size(pyramid["pyramid"]), rel=0.1)
    overlap = models("overlap")
    assert size(overlap["no-overlap"]) < size(overlap["overlap"])
    # fewer landmarks than the 441 tokens, or SOFT would compute the exact kernel
    _, recipe = load_preset("gaussian")
    tokens = (recipe.data.image_size // 4) ** 2
    assert (attention(models("gaussian")["soft"]).core.landmarks.plan.cap, tokens) == ((7, 7), 441)
    gradients = {name: attention(model).core.options["gradient"] for name, model in models("gradient").items()}
    assert gradients == {name: name for name in ("one_step", "autograd")}
    for name, model in models("softmax-maps").items():
        assert (attention(model).operator.name, attention(model).core.phi.name) == ("softmax", name)
    for name, model in models("inline-kernels").items():
        kernel, feature_map = name.split("-")
        assert attention(model).operator.name == kernel
        assert attention(model).local is None
        assert (getattr(attention(model).core, "affine", None) is not None) == (name == "linear-affine_relu")
        if kernel == "inline":
            assert attention(model).core.feature_map == feature_map
        elif feature_map != "affine_relu":
            assert attention(model).core.options["feature_map"] == feature_map
    for name, model in models("inline-windows").items():
        side, residual = name.split("x")[0], name.endswith("-residual")
        assert attention(model).window_size == int(side)
        assert (attention(model).attention.local is not None) == residual
    for name, model in models("linear-attentions").items():
        assert {block.attn.operator.name for stage in model.stages for block in stage.blocks} == {name}
    residual = {name: attention(model).local is not None for name, model in models("inline-residual").items()}
    assert [name for name, has in residual.items() if has] == ["inline-residual", "softmax-residual"]


def test_a_preset_can_change_another_recipe():
    assert load_preset("inline-kernels")[1].model.name == "inline_micro"
    assert load_preset("inline-kernels", "inline_swin_tiny")[1].model.name == "inline_swin_tiny"
    assert load_preset("inline-kernels", None, ["--model.name=softpp_micro"])[1].model.name == "softpp_micro"


# costs


def test_models_are_timed_in_turns():
    order = []
    seconds = take_turns({name: lambda name=name: order.append(name) for name in "ab"}, 2, wait=lambda: None)
    assert order == ["a", "b"] * 3
    assert set(seconds) == {"a", "b"}


def test_costs_are_those_of_one_image(recipe):
    doubled = dataclasses.replace(recipe, batch_size=16)
    costs = measure_costs({"once": recipe, "doubled": doubled}, build_task(recipe), rounds=1)
    assert costs["once"].parameters == sum(parameter.numel() for parameter in built(recipe, 2).parameters())
    assert costs["once"].macs == costs["doubled"].macs > 0
    assert costs["doubled"].peak_bytes == pytest.approx(costs["once"].peak_bytes, rel=0.2)
    assert costs["once"].train_per_second > 0 < costs["once"].infer_per_second


# runs


def test_every_variant_is_trained_with_every_seed(recipe, tmp_path):
    heard: list[tuple[str, int, str]] = []
    result = compare(
        recipe,
        attention_variants(["softmax", "inline"]),
        seeds=[0, 3],
        output=tmp_path / "runs",
        progress=lambda name, seed, event: heard.append((name, seed, type(event).__name__)),
    )
    assert [(row.name, [run.seed for run in row.runs]) for row in result.rows] == [
        ("softmax", [0, 3]),
        ("inline", [0, 3]),
    ]
    for name in ("softmax", "inline"):
        for seed in (0, 3):
            directory = tmp_path / "runs" / name / f"seed{seed}"
            run = json.loads((directory / "result.json").read_text())["run"]
            assert run["step"] == 3
            assert (directory / "last.pt").exists()
            kinds = [kind for *key, kind in heard if key == [name, seed]]
            assert kinds[0] == "Started"
            assert kinds[-1] == "Finished"
    (point,) = result.rows[0].runs[0].curve
    assert point.epoch == 1
    assert point.score == result.rows[0].runs[0].score


def test_variants_share_the_images_of_the_base(recipe, tmp_path):
    flat = PRESETS["pyramid"].variants[1]
    options = {**flat.changes["model"]["options"], "embed_dim": 8, "num_heads": 1, "depth": 1}
    # what only the pyramid takes
    plain = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, options={"in_chans": 1}))
    changes = {"model": {**flat.changes["model"], "options": options}}
    compare(plain, [Variant("flat", changes)], seeds=[0], output=tmp_path / "runs")
    used = load_recipe(str(tmp_path / "runs/flat/seed0/recipe.yaml"))
    assert used.model.name == "inline_deit_tiny"
    # its own is squash
    assert used.data.crop_mode == "center"


def test_what_is_finished_is_not_repeated_and_what_is_not_goes_on(recipe, tmp_path):
    variants = attention_variants(["softmax", "inline"])
    uninterrupted = compare(recipe, variants, seeds=[0], output=tmp_path / "whole")

    def interrupt(name: str, seed: int, event: Any) -> None:
        if name == "inline" and isinstance(event, Stepped) and event.step == 2:
            raise KeyboardInterrupt

    saving = dataclasses.replace(recipe, save_every=1)
    with pytest.raises(KeyboardInterrupt):
        compare(saving, variants, seeds=[0], output=tmp_path / "runs", progress=interrupt)
    finished = tmp_path / "runs/softmax/seed0/last.pt"
    before = finished.stat().st_mtime_ns
    heard: list[tuple[str, Any]] = []
    result = compare(
        saving,
        variants,
        seeds=[0],
        output=tmp_path / "runs",
        progress=lambda name, seed, event: heard.append((name, event)),
    )
    assert [type(event) for name, event in heard if name == "softmax"] == [Finished]
    assert finished.stat().st_mtime_ns == before
    steps = [event.step for name, event in heard if name == "inline" and isinstance(event, Stepped)]
    assert steps == [2, 3]
    assert [row.runs for row in result.rows] == [row.runs for row in uninterrupted.rows]


def test_runs_of_another_recipe_are_not_taken_for_these(recipe, tmp_path):
    variants = attention_variants(["softmax"])
    compare(recipe, variants, seeds=[0], output=tmp_path / "runs")
    longer = dataclasses.replace(recipe, schedule=dataclasses.replace(recipe.schedule, epochs=2))
    with pytest.raises(ValueError, match=r"another recipe, which differs in schedule\.epochs: name another directory"):
        compare(longer, variants, seeds=[0], output=tmp_path / "runs")


def test_a_diverged_run_is_a_result(recipe, tmp_path):
    variants = [
        Variant("sound", {}),
        Variant("diverging", {"optimizer": {"lr": 1e30, "clip_norm": None}}),
    ]
    result = compare(recipe, variants, seeds=[0], output=tmp_path / "runs")
    sound, diverging = result.rows
    assert sound.mean is not None
    assert diverging.mean is None
    (run,) = diverging.diverged
    assert 0 < run.step < 3
    assert "not finite" in str(run.diverged)
    again: list[Any] = []
    repeated = compare(
        recipe, variants, seeds=[0], output=tmp_path / "runs", progress=lambda *what: again.append(what[2])
    )
    assert all(isinstance(event, Finished) and event.reused for event in again)
    assert [row.runs for row in repeated.rows] == [row.runs for row in result.rows]


def test_parallel_jobs_give_the_results_of_one(recipe, tmp_path):
    variants = attention_variants(["softmax", "inline"])
    one = compare(recipe, variants, seeds=[0], output=tmp_path / "one")
    heard: list[tuple[str, str]] = []
    two = compare(
        recipe,
        variants,
        seeds=[0],
        output=tmp_path / "two",
        jobs=2,
        progress=lambda name, seed, event: heard.append((name, type(event).__name__)),
    )
    assert [row.runs for row in two.rows] == [row.runs for row in one.rows]
    assert heard.count(("softmax", "Stepped")) == heard.count(("inline", "Stepped")) == 3


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [("fail", ValueError, "a mistake in the data"), ("die", ValueError, r"ended unexpectedly \(exit code 3\)")],
)
def test_a_failing_or_dying_process_is_an_error(task, error, message):
    with pytest.raises(error, match=message):
        run_in_processes(misbehave, [task], processes=1, threads=1, hear=lambda _: None)


def test_an_interrupt_ends_the_processes():
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_processes(misbehave, ["sleep"], processes=1, threads=1, hear=interrupt)
    assert active_children() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": []}, "at least one variant, got none"),
        ({"variants": [Variant("a", {}), Variant("a", {})]}, "different names, got 'a' twice"),
        ({"variants": [Variant("../a", {})]}, r"letters, digits and \. \+ - _, got '\.\./a'"),
        ({"variants": [Variant("a", {"optimiser": {}})]}, "variant a: unknown key optimiser; did you mean optimizer"),
        ({"seeds": [1, 1]}, r"seeds must be different whole numbers, at least one, got \[1, 1\]"),
        ({"seeds": [-1]}, "seed must be at least 0, got -1"),
        ({"jobs": 0}, "jobs must be at least 1, got 0"),
    ],
)
def test_mistakes_are_named(recipe, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        compare(recipe, **{"variants": [Variant("a", {})], "seeds": [0], "output": tmp_path, **changes})


# results


def test_a_comparison_survives_json():
    again = Comparison.from_dict(json.loads(json.dumps(EXAMPLE.to_dict())))
    assert again == EXAMPLE


def test_mean_and_spread_leave_diverged_seeds_out():
    both, one, none = EXAMPLE.rows
    assert both.mean == pytest.approx(0.85)
    assert both.spread == pytest.approx(0.1 / 2**0.5)
    assert (one.mean, one.spread, len(one.diverged)) == (0.7, None, 1)
    assert (none.mean, none.spread, len(none.diverged)) == (None, None, 2)
    assert EXAMPLE.to_dict()["rows"][1]["scores"] == [0.7, None]


def test_numbers_of_the_paper_stand_beside_the_results():
    softmax, softpp = comparison_table(EXAMPLE).splitlines()[1:3]
    assert softmax.split()[-1] == "80.0"
    assert softpp.split()[-1] == "-"
    without = dataclasses.replace(EXAMPLE, rows=EXAMPLE.rows[1:])
    assert "paper" not in comparison_table(without)


def test_results_written_before_papers_were_quoted_are_read():
    content = EXAMPLE.to_dict()
    for row in content["rows"]:
        del row["printed_top1"]
    assert Comparison.from_dict(content).rows[1:] == EXAMPLE.rows[1:]


def test_a_comparison_is_drawn(tmp_path):
    plot_comparison(EXAMPLE, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_variants_have_different_colours():
    for preset in PRESETS.values():
        for variants in (preset.variants, preset.paper):
            names = [variant.name for variant in variants]
            assert len(set(comparison_colors(names).values())) == len(names)


# other tasks


def test_results_written_before_metrics_had_names_are_read(recipe, tmp_path):
    first = compare(recipe, [Variant("a", {})], seeds=[0], output=tmp_path / "runs")
    path = tmp_path / "runs/a/seed0/result.json"
    content = json.loads(path.read_text())
    content["run"]["top1"] = content["run"].pop("score")
    del content["run"]["metric"], content["checksum"]
    path.write_text(json.dumps(content))
    again = compare(recipe, [Variant("a", {})], seeds=[0], output=tmp_path / "runs")
    assert again.rows[0].runs == first.rows[0].runs


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace('"score": ', '"score": 1'), "its checksum is wrong"),
        (lambda text: text[:-20], "is not JSON"),
        (lambda text: text.replace('"run"', '"rum"'), "has no run"),
        (lambda text: "[" * 100_000, "nested too deeply"),
    ],
)
def test_results_that_were_changed_are_not_taken_for_results(recipe, tmp_path, damage, message):
    compare(recipe, [Variant("a", {})], seeds=[0], output=tmp_path / "runs")
    path = tmp_path / "runs/a/seed0/result.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(UserError, match=message):
        compare(recipe, [Variant("a", {})], seeds=[0], output=tmp_path / "runs")


def test_segmenters_are_compared_by_their_own_metric(tmp_path):
    write_scenes(tmp_path)
    recipe = dense_recipe(SEGMENTATION, tmp_path)
    result = compare(recipe, attention_variants(["softpp", "inline"]), seeds=[0], output=tmp_path / "runs")
    assert (result.metric, result.unit) == ("mIoU", "images")
    for row in result.rows:
        checkpoint = load_checkpoint(tmp_path / "runs" / row.name / "seed0/last.pt")
        assert row.scores == [checkpoint["metrics"]["mIoU"]]
        assert [point.score for point in row.runs[0].curve][-1] == row.scores[0]
        assert row.cost.macs > 0
    assert result.rows[0].cost.macs != result.rows[1].cost.macs


# the command


def test_compare_prints_a_table_and_writes_json_and_a_figure(small, tmp_path, capsys):
    arguments = ["compare", "--attentions", "softmax,inline", *small, "--output", str(tmp_path / "runs")]
    assert main([*arguments, "--seeds", "0,1"]) == 0
    printed = capsys.readouterr()
    for expected in ("variant", "softmax", "inline", "±", "MMACs", "train/s", "mean ± standard deviation of 2 seeds"):
        assert expected in printed.out
    assert max(map(len, printed.out.splitlines())) <= 100 + len(str(tmp_path))
    assert "[4/4] inline, seed 1: top-1" in printed.err
    written = Comparison.from_dict(json.loads((tmp_path / "runs/comparison.json").read_text()))
    assert [row.name for row in written.rows] == ["softmax", "inline"]
    assert (tmp_path / "runs/comparison.png").exists()


def test_compare_lists_presets(capsys):
    assert main(["compare", "--list"]) == 0
    printed = capsys.readouterr().out
    for name, preset in PRESETS.items():
        assert name in printed
        assert preset.reference in printed
        assert all(variant.name in printed for variant in (*preset.variants, *preset.paper))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["atentions"], "got 'atentions'; did you mean 'attentions'?"),
        (["--attentions", "softmax,inlin"], "got 'inlin'; did you mean 'inline'?"),
        (["sampling", "--attentions", "inline"], "name a preset or --attentions, not both"),
        (["--schedule.epoch", "1"], "unknown key schedule.epoch; did you mean schedule.epochs?"),
        (["--output", "/dev/null/runs"], "could not create the directory /dev/null/runs"),
        (["--json", "/no/such/place/rows.json"], "no such directory: /no/such/place"),
        (["--recipe", "quickstat"], "Did you mean quickstart?"),
    ],
)
def test_mistakes_on_the_command_line_end_in_a_message(arguments, message, capsys):
    assert main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_seeds_that_are_no_numbers_end_in_a_message(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--seeds", "0,one"])
    assert stop.value.code == 2
    assert "expected whole numbers separated by commas, got '0,one'" in capsys.readouterr().err
