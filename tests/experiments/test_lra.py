import json

import pytest

from softline.cli import main
from softline.cli.lra import lra_table
from softline.engine.events import Preparing
from softline.experiments.lra import PAPER, LraResults, LraRun, lra_recipe, run_lra
from softline.experiments.runs import Finished
from tests.tasks.small_sequence import small_overrides


def run_of(task, attention, accuracy, seed=0):
    diverged = None if accuracy else "the loss is nan"
    return LraRun(task, attention, seed, 100, 5, accuracy, accuracy, diverged)


def test_each_attention_is_trained_and_tested_once(tmp_path):
    recipes = {"listops": lra_recipe("listops", small=True, overrides=small_overrides(tmp_path))}
    heard = []
    *_, results = run_lra(
        recipes,
        ["softpp", "inline"],
        seeds=[0, 1],
        output=tmp_path / "lra",
        progress=lambda name, seed, event: heard.append((name, seed, event)),
    )
    assert [(run.attention, run.seed) for run in results.runs] == [
        ("softpp", 0),
        ("softpp", 1),
        ("inline", 0),
        ("inline", 1),
    ]
    assert all(run.step == 12 and 0 <= run.test_accuracy <= 1 and run.parameters > 1000 for run in results.runs)
    assert (tmp_path / "lra/listops/inline/seed1/best.pt").is_file()
    again = []
    *_, repeated = run_lra(
        recipes,
        ["softpp", "inline"],
        seeds=[0, 1],
        output=tmp_path / "lra",
        progress=lambda name, seed, event: again.append(event),
    )
    assert all(isinstance(event, Finished) and event.reused for event in again)
    assert repeated.runs == results.runs


def test_the_command_prints_and_writes_the_table(tmp_path, capsys):
    command = ["lra", "--small", "--tasks", "listops", "--attentions", "soft", "--output", str(tmp_path / "lra")]
    assert main([*command, *small_overrides(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "ListOps" in printed
    assert "(37.40)" in printed
    content = json.loads((tmp_path / "lra/lra.json").read_text())
    assert [run["attention"] for run in content["runs"]] == ["soft"]
    assert content["paper_percent"]["soft"]["image"] == 46.91
    assert content["accuracy_percent"][0]["mean"] == pytest.approx(100 * content["runs"][0]["test_accuracy"])
    assert content["command"].startswith("softline lra --small")
    assert content["small"]
    assert "for the full tasks" in printed


def test_the_table_has_the_papers_averages():
    tasks = ["listops", "text", "retrieval", "image"]
    runs = [run_of(task, "soft", 0.5) for task in tasks] + [run_of(task, "inline", 0.25) for task in tasks[:3]]
    table = lra_table(LraResults((*runs, run_of("image", "inline", None)), False, {}), tasks, ["soft", "inline"])
    header, soft, inline, note = table.splitlines()
    assert header.split() == ["attention", "ListOps", "Text", "Retrieval", "Image", "average"]
    assert soft.split()[-2:] == ["50.00", "(57.39)"]
    assert inline.split()[-2:] == ["diverged", "-"]
    assert "Table 12" in note


def test_several_seeds_have_a_spread():
    runs = tuple(run_of("image", "soft", 0.1 * seed, seed) for seed in (4, 5, 6))
    results = LraResults(runs, False, {})
    assert results.mean("image", "soft") == pytest.approx(50)
    assert results.spread("image", "soft") == pytest.approx(10)
    assert "50.00 ± 10.00 (46.91)" in lra_table(results, ["image"], ["soft"])
    lost = LraResults((*runs, run_of("image", "soft", None, 7)), False, {})
    assert "50.00 ± 10.00 (1 diverged) (46.91)" in lra_table(lost, ["image"], ["soft"])


@pytest.mark.parametrize("missing", ["image", "test"])
def test_missing_data_is_found_before_any_training(missing, tmp_path):
    overrides = small_overrides(tmp_path)
    recipes = {"listops": lra_recipe("listops", small=True, overrides=overrides)}
    if missing == "image":
        recipes["image"] = lra_recipe("image", small=True, overrides=["--data.source=nowhere"])
    else:
        for split in ("train", "val"):
            (tmp_path / f"basic_{split}.tsv").write_text("Source\tTarget\n( ( ( [MAX 2 ) 9 ) ] )\t9\n")
        recipes["listops"] = lra_recipe("listops", data=str(tmp_path))
    with pytest.raises(ValueError, match=r"looked for .*(nowhere|basic_test)"):
        next(run_lra(recipes, ["inline"], seeds=[0], output=tmp_path / "lra"))
    assert not (tmp_path / "lra").exists()


def test_generating_is_told(tmp_path):
    heard = []
    recipes = {"listops": lra_recipe("listops", small=True, overrides=small_overrides(tmp_path))}
    next(run_lra(recipes, ["inline"], seeds=[0], output=tmp_path / "lra", progress=lambda *what: heard.append(what)))
    assert any(name == "listops" and isinstance(event, Preparing) for name, _, event in heard)


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="softline lra trains in one process: with torchrun"):
        next(run_lra({}, ["inline"], seeds=[0], output=tmp_path))


def test_overrides_of_generating_are_for_listops_alone():
    given = ["--data.generate.workers", "2", "--seed=3", "--data.generate.seed=1", "--accumulate", "2"]
    recipe = lra_recipe("text", overrides=given)
    assert (recipe.seed, recipe.accumulate, recipe.data.generate) == (3, 2, None)
    assert lra_recipe("listops", overrides=given).data.generate.workers == 2


def test_the_papers_rows_have_the_averages_it_prints():
    averages = {name: round(sum(row) / 4, 2) for name, row in PAPER.items()}
    printed = {"softmax": 54.92, "reformer": 51.47, "linformer": 52.59, "performer": 49.58, "soft": 57.39}
    assert {name: averages[name] for name in printed} == pytest.approx(printed, abs=0.011)


def test_data_is_taken_from_one_directory(tmp_path):
    assert lra_recipe("text", data=str(tmp_path)).data.source == str(tmp_path)
    assert lra_recipe("listops", data=str(tmp_path)).data.generate is not None
    (tmp_path / "lra_release/listops-1000").mkdir(parents=True)
    (tmp_path / "lra_release/listops-1000/basic_train.tsv").touch()
    read = lra_recipe("listops", data=str(tmp_path)).data
    assert (read.source, read.generate) == (str(tmp_path), None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--small", "--tasks", "text"], "text has no small recipe; listops, image have"),
        (["--tasks", "poems"], "task must be one of image, listops"),
        (["--tasks", "text,text"], "--tasks must be different"),
        (["--tasks", "text", "--data", "nowhere"], "no such directory: nowhere"),
        (["--tasks", "text", "--data", "."], "looked for"),
        (["--tasks", ""], "--tasks must be different, at least one, got none"),
        (["--small", "--tasks", "listops", "--attentions", "soft,soft"], "attentions must be different"),
        (["--small", "--tasks", "listops", "--attentions", "softest"], "softest"),
    ],
)
def test_mistakes_end_in_a_message(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["lra", *arguments]) == 2
    assert message in capsys.readouterr().err
