"""Sequences through the same engine and commands as images."""

import json
import subprocess

import pytest
import torch
from PIL import Image

from softline.cli import main
from softline.engine.checkpoint import load_checkpoint
from softline.engine.events import Preparing, Stepped, read_log
from softline.engine.loading import steps_per_epoch, train_batches
from softline.engine.optimizer import create_schedule, total_steps
from softline.engine.reading import load_recipe
from softline.engine.task import build_task
from softline.engine.train import train
from softline.errors import UserError
from softline.tasks.loading import load_trained
from tests.engine.test_distributed import TOLERANCE, TORCHRUN, environment
from tests.tasks.small_sequence import small_overrides, small_recipe


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Of a finished run."""
    root = tmp_path_factory.mktemp("sequences")
    heard = []
    result = train(small_recipe(root), listeners=[heard.append])
    assert result.finished
    assert [event for event in heard if isinstance(event, Preparing)][-1].total == 74
    return root


def test_evaluations_come_every_so_many_steps_and_at_the_end(root):
    log = read_log(root / "run/log.jsonl")
    assert [line["step"] for line in log if line["event"] == "evaluated"] == [5, 10, 12]
    assert not any(line["event"] == "preparing" for line in log)
    assert [line["step"] for line in log if line["event"] == "saved"] == [5, 6, 10, 12]


def test_an_interrupted_run_goes_on_exactly_as_it_would_have(root, tmp_path):
    whole = load_checkpoint(root / "run/last.pt")
    recipe = small_recipe(root, f"--output={tmp_path}/again")

    def interrupt(event):
        if isinstance(event, Stepped) and event.step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, listeners=[interrupt])
    assert load_checkpoint(tmp_path / "again/last.pt")["step"] == 6
    train(recipe, resume=True)
    again = load_checkpoint(tmp_path / "again/last.pt")
    assert all(torch.equal(again["state_dict"][key], value) for key, value in whole["state_dict"].items())


def test_a_checkpoint_is_used_without_its_data(root):
    trained = load_trained(str(root / "run/best.pt"))
    assert trained.facts == {"classes": list("0123456789"), "vocabulary": 32, "positions": 64, "parts": 1}
    with pytest.raises(UserError, match="lra_encoder is a model of sequences: there is no image to show it"):
        trained.view()
    assert trained.model(torch.randint(1, 16, (2, 1, 30))).shape == (2, 10)


def test_evaluate_tests_on_another_split(root, capsys, tmp_path):
    assert main(["evaluate", str(root / "run/best.pt"), "--split", "test", "--json", str(tmp_path / "out.json")]) == 0
    assert "sequences/s" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (row["split"], row["samples"]) == ("test", 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["evaluate", "CHECKPOINT", "--sizes", "32"],
            "--sizes has no meaning for a model of sequences, which takes --split",
        ),
        (["evaluate", "CHECKPOINT", "--skip-corrupt"], "--skip-corrupt has no meaning for a model of sequences"),
        (["evaluate", "CHECKPOINT", "--split", "dev"], "--split must be one of test, train, val"),
        (["evaluate", "CHECKPOINT", "nowhere"], "nowhere holds no ListOps samples"),
        (["predict", "CHECKPOINT", "x.txt"], "no such file: x.txt"),
        (["predict", "CHECKPOINT", "CHECKPOINT"], "best.pt must be a text, it has null characters"),
    ],
)
def test_mistakes_end_in_a_message(arguments, message, root, capsys):
    assert main([str(root / "run/best.pt") if part == "CHECKPOINT" else part for part in arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--model.name=softpp_tiny", "model.name must be lra_encoder for sequences, got softpp_tiny"),
        ("--model.channels_last=true", "model.channels_last is for images"),
        ("--data.max_length=100", "data.max_length is for text and retrieval"),
        ("--data.name=text", "data.generate is for listops"),
        ("--eval_steps=0", "eval_steps must be at least 1, got 0"),
        ("--data.val_split=dev", "data.val_split must be one of 'train', 'val', 'test', got dev"),
        ("--data.generate.samples=[10,10]", r"data.generate.samples must be a tuple with 3 elements, got \[10, 10\]"),
        ("--data.generate.max_length=6", r"data.generate.max_length must be at least 7, got 6"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        small_recipe(tmp_path, given)


def test_options_of_the_encoder_are_checked(root, tmp_path):
    with pytest.raises(ValueError, match=r"model\.options of lra_encoder: .*width"):
        build_task(small_recipe(root, "--model.options.width=3"))
    with pytest.raises(ValueError, match=r"model\.options\.positions \(39\) must be at least the 40 tokens"):
        build_task(small_recipe(root, "--model.options.positions=39"))
    wide = build_task(small_recipe(root, "--model.options.hidden_dim=7", "--model.options.positions=99")).model
    assert wide.head[0].out_features == 7
    assert wide.encoder.positions.num_embeddings == 99


def test_a_cache_of_other_settings_is_named(root):
    with pytest.raises(ValueError, match="seed"):
        build_task(small_recipe(root, "--data.generate.seed=1"))


def test_a_model_is_tested_on_the_benchmarks_own_expressions(root, tmp_path, capsys):
    (tmp_path / "basic_val.tsv").write_text("Source\tTarget\n( ( ( [MAX 2 ) 9 ) ] )\t9\n")
    (tmp_path / "basic_train.tsv").write_text("Source\tTarget\n( ( ( [MAX 2 ) 9 ) ] )\t9\n")
    assert main(["evaluate", str(root / "run/best.pt"), str(tmp_path)]) == 0
    assert capsys.readouterr().out.split()[-1] == "1", "the number of sequences"


def test_evaluation_begins_with_the_shortest(root):
    val_set = build_task(small_recipe(root)).val_set
    lengths = [len(val_set[index][0][0]) for index in range(len(val_set))]
    assert lengths == sorted(lengths)
    assert lengths != [lengths[0]] * len(lengths)


def test_what_does_not_fit_in_a_batch_ends_a_worker_with_its_message(root, capsys):
    task = build_task(small_recipe(root))
    task.positions = 10
    batches = train_batches(task, small_recipe(root, "--workers=1"), start_step=0, total_steps=2)
    with pytest.raises(ValueError, match=r"^a sequence must have 1 to 10 tokens"):
        list(batches)


def test_batches_can_be_alike_in_length(root):
    recipe = small_recipe(root, "--data.group_lengths=true", "--batch_size=1")
    task = build_task(recipe)
    assert len(task.groups) == 48
    (root / "listops-1000").mkdir()
    (root / "listops-1000/basic_train.tsv").write_text("Source\tTarget\n( ( ( [MAX 2 ) 9 ) ] )\t9\n")
    (root / "listops-1000/basic_val.tsv").write_text("Source\tTarget\n( ( ( [MAX 2 ) 9 ) ] )\t9\n")
    read = load_recipe("lra_listops", [f"--data.source={root}", "--data.generate=null", "--data.group_lengths=true"])
    with pytest.raises(ValueError, match=r"data\.group_lengths: the files of listops tell"):
        build_task(read)


# the benchmark's sizes, and what its settings say: steps, warm-up, batch
PUBLISHED = {
    "listops": (96_000, 5_000, 1_000, 32, 50),
    "text": (25_000, 20_000, 8_000, 32, 500),
    "retrieval": (147_086, 30_000, 800, 32, 300),
    "image": (45_000, 35_000, 175, 256, 175),
    "pathfinder": (160_000, 62_400, 312, 256, 312),
}


@pytest.mark.parametrize("task", PUBLISHED)
def test_recipes_have_the_published_settings(task):
    samples, steps, warmup, batch, every = PUBLISHED[task]
    recipe = load_recipe(f"lra_{task}")
    assert (recipe.batch_size, recipe.eval_steps, recipe.optimizer.lr) == (batch, every, 1e-4)
    assert (recipe.optimizer.weight_decay, recipe.optimizer.options) == (0, {"eps": 1e-6})
    per_epoch = samples // batch
    assert total_steps(recipe.schedule, per_epoch) == steps
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1e-4)
    schedule = create_schedule(optimizer, recipe.schedule, steps_per_epoch=per_epoch, lr_scale=1.0)
    rates = {}
    for step in (0, warmup // 2, warmup, (warmup + steps) // 2, steps - 1):
        schedule.step_update(step)
        rates[step] = optimizer.param_groups[0]["lr"]
    # straight from 1/25 up to the full rate, and down to almost nothing
    low, middle, top, half, last = rates.values()
    assert low == pytest.approx(4e-6)
    assert middle == pytest.approx(4e-6 + (1e-4 - 4e-6) * (warmup // 2) / warmup, rel=1e-3)
    assert top == pytest.approx(1e-4, rel=1e-3)
    assert half == pytest.approx(0.5e-4, rel=1e-2)
    assert last < 1e-4 * 2 / (steps - warmup)


def test_the_small_recipe_counts_its_steps(root):
    recipe = small_recipe(root)
    assert steps_per_epoch(build_task(recipe), recipe) == 6


def test_two_processes_follow_the_course_of_one_and_generate_once(root, tmp_path):
    shared = ["--batch_size=8", "--schedule.epochs=1", "--model.options.dropout=0", "--model.options.attention=inline"]
    one = small_recipe(root, *shared, f"--output={tmp_path}/one")
    train(one)
    given = small_overrides(tmp_path, *shared, f"--output={tmp_path}/two")
    subprocess.run([*TORCHRUN, "softline.cli", "train", "lra_listops_small", *given], check=True, env=environment())
    losses = [
        [line["loss"] for line in read_log(tmp_path / name / "log.jsonl") if line["event"] == "stepped"]
        for name in ("one", "two")
    ]
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], abs=TOLERANCE)
    made = [line for line in read_log(tmp_path / "two/log.jsonl") if "is complete" in line.get("text", "")]
    assert len(made) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["listops", "one", "two"]


def write_text(root):
    for split in ("train", "test"):
        for sentiment in ("neg", "pos"):
            folder = root / "aclImdb" / split / sentiment
            folder.mkdir(parents=True)
            for number in range(6):
                (folder / f"{number}_1.txt").write_bytes(sentiment.encode() * (number + 1))


def write_retrieval(root):
    (root / "tsv_data").mkdir()
    for split in ("train", "eval", "test"):
        lines = [f"{number % 2}.0\ta\tb\t{'x' * (number + 1)}\t{'y' * 5}" for number in range(12)]
        (root / "tsv_data" / f"new_aan_pairs.{split}.tsv").write_text("\n".join(lines))


def write_image(root):
    for split in ("train", "test"):
        for label in ("a", "b"):
            (root / split / label).mkdir(parents=True)
            for number in range(6):
                Image.new("RGB", (4, 3), (40 * number, 90, 3)).save(root / split / label / f"{number}.png")


def write_pathfinder(root):
    folder = root / "pathfinder32" / "curv_contour_length_14"
    (folder / "imgs" / "0").mkdir(parents=True)
    (folder / "metadata").mkdir()
    for number in range(20):
        Image.new("L", (4, 4), 10 + number).save(folder / "imgs" / "0" / f"sample_{number}.png")
    lines = [f"imgs/0 sample_{number}.png {number} {number % 2} 1 2" for number in range(20)]
    (folder / "metadata" / "0.npy").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("task", "write", "length"),
    [
        ("text", write_text, 18),
        ("retrieval", write_retrieval, 12),
        ("image", write_image, 12),
        ("pathfinder", write_pathfinder, 16),
    ],
)
def test_every_task_of_the_benchmark_trains_and_is_tested(task, write, length, tmp_path, capsys):
    write(tmp_path)
    given = [f"--data.source={tmp_path}", f"--output={tmp_path}/run", "--batch_size=4", "--schedule.epochs=2"]
    result = train(load_recipe(f"lra_{task}", [*given, "--eval_steps=2", "--schedule.warmup_epochs=0", "--device=cpu"]))
    assert result.finished
    trained = load_trained(str(tmp_path / "run/best.pt"))
    assert trained.facts["positions"] >= length
    assert trained.facts["parts"] == (2 if task == "retrieval" else 1)
    assert main(["evaluate", str(tmp_path / "run/best.pt"), "--split", "test"]) == 0
    assert "accuracy" in capsys.readouterr().out
