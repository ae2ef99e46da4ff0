import gc
import json
import resource
from pathlib import Path

import pytest
import timm
import torch
from accelerate.utils import set_seed

from softline.engine import distributed
from softline.engine.checkpoint import load_checkpoint
from softline.engine.events import Evaluated, Notice, Saved, Started, Stepped, read_log
from softline.engine.nonfinite import NonFiniteError
from softline.engine.task import build_task
from softline.engine.train import StopSignal, Trainer, train
from tests.engine.small import small_recipe, write_images


class Interrupted(Exception):
    pass


def stop_at(step):
    def listener(event):
        if isinstance(event, Stepped) and event.step == step:
            raise Interrupted

    return listener


def weights(path, key="state_dict"):
    return load_checkpoint(path)[key]


def assert_equal_weights(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


@pytest.fixture
def root(tmp_path):
    write_images(tmp_path)
    return tmp_path


def test_run_learns_tells_and_leaves_its_files(root):
    events = []
    result = train(small_recipe(root, "--schedule.epochs", "6"), listeners=[events.append])
    assert result.finished
    assert result.step == 30
    assert result.best["top1"] >= 0.8
    kinds = [type(event) for event in events]
    assert kinds[0] is Started
    assert kinds.count(Stepped) == 30
    assert kinds.count(Evaluated) == kinds.count(Saved) == 6
    losses = [event.loss for event in events if isinstance(event, Stepped)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    names = {path.name for path in result.output.iterdir()}
    assert names == {"last.pt", "best.pt", "log.jsonl", "recipe.yaml", "tensorboard"}
    lines = read_log(result.output / "log.jsonl")
    assert [line["loss"] for line in lines if line["event"] == "stepped"] == losses


def test_checkpoint_is_read_by_timm(root):
    recipe = small_recipe(root)
    output = train(recipe).output
    options = {**recipe.model.options, "img_size": 16, "num_classes": 2}
    model = timm.create_model(recipe.model.name, checkpoint_path=str(output / "last.pt"), **options)
    assert_equal_weights(dict(model.state_dict()), weights(output / "last.pt"))


@pytest.mark.parametrize("options", [(), ("--ema.decay", "0.9"), ("--accumulate", "2", "--augment.mixup", "0.8")])
def test_run_interrupted_at_any_step_ends_bitwise_equal(root, options):
    whole = train(small_recipe(root, "--output", f"{root}/whole", *options))
    for step in (1, 4, 5, 8):
        recipe = small_recipe(root, "--output", f"{root}/part{step}", "--save_every", "1", *options)
        with pytest.raises(Interrupted):
            train(recipe, listeners=[stop_at(step)])
        resumed = train(recipe, resume=True)
        assert resumed.metrics == whole.metrics
        for key in ("state_dict", *(["state_dict_ema"] if "--ema.decay" in options else [])):
            assert_equal_weights(weights(resumed.output / "last.pt", key), weights(whole.output / "last.pt", key))


def test_resumed_run_goes_on_from_the_last_checkpoint_in_the_middle_of_an_epoch(root):
    recipe = small_recipe(root, "--save_every", "3")
    with pytest.raises(Interrupted):
        train(recipe, listeners=[stop_at(8)])
    events = []
    train(recipe, resume=True, listeners=[events.append])
    assert events[0].start_step == 6
    steps = [line["step"] for line in read_log(root / "run" / "log.jsonl") if line["event"] == "stepped"]
    assert steps == list(range(1, 11))


def test_loading_processes_do_not_change_a_run(root):
    alone = train(small_recipe(root, "--output", f"{root}/alone"))
    helped = train(small_recipe(root, "--output", f"{root}/helped", "--workers", "2"))
    assert_equal_weights(weights(alone.output / "last.pt"), weights(helped.output / "last.pt"))


def test_checkpoint_is_not_overwritten_by_a_new_run(root):
    recipe = small_recipe(root, "--schedule.epochs", "0.2", "--schedule.warmup_epochs", "0")
    train(recipe)
    before = (root / "run" / "last.pt").read_bytes()
    with pytest.raises(ValueError, match=r"holds a checkpoint: continue by --resume"):
        train(recipe)
    assert (root / "run" / "last.pt").read_bytes() == before


def test_resuming_where_nothing_is_starts_and_says_so(root):
    events = []
    recipe = small_recipe(root, "--schedule.epochs", "0.2", "--schedule.warmup_epochs", "0")
    train(recipe, resume=True, listeners=[events.append])
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert notices == [f"there is no checkpoint in {root}/run yet: starting at step 0"]


def test_resuming_by_another_recipe_names_what_differs(root):
    short = ("--schedule.epochs", "0.4", "--schedule.warmup_epochs", "0")
    train(small_recipe(root, *short))
    with pytest.raises(ValueError, match=r"another recipe, which differs in model\.options\.attention, optimizer\.lr"):
        train(small_recipe(root, *short, "--optimizer.lr", "1", "--model.options.attention", "soft"), resume=True)
    # what does not alter the result may change
    train(small_recipe(root, *short, "--workers", "1", "--log_every", "7"), resume=True)


def test_averaged_weights_are_those_evaluated(root):
    recipe = small_recipe(root, "--ema.decay", "1.0", "--schedule.epochs", "1")
    first, *_ = [e for e in _events(recipe) if isinstance(e, Evaluated)]
    content = load_checkpoint(root / "run" / "last.pt")
    start, end = content["state_dict_ema"], content["state_dict"]
    assert any(not torch.equal(start[name], end[name]) for name in start)
    assert content["metrics"] == first.metrics


def _events(recipe, **options):
    events = []
    train(recipe, listeners=[events.append], **options)
    return events


def test_accumulated_batches_equal_one_large_batch(root):
    # layer norms only: batch norms see the parts
    plain = ("--model.name", "inline_micro", "--model.options.drop_path_rate", "0")
    whole = _losses(small_recipe(root, "--output", f"{root}/whole", *plain))
    parts = _losses(small_recipe(root, "--output", f"{root}/parts", "--accumulate", "4", *plain))
    # float32 sums in another order, over ten steps
    torch.testing.assert_close(torch.tensor(parts), torch.tensor(whole), rtol=1e-4, atol=1e-5)


def _losses(recipe):
    return [event.loss for event in _events(recipe) if isinstance(event, Stepped)]


@pytest.mark.parametrize(
    "option",
    [
        # not 16 pixels: on some processors torch's bfloat16 gradient of a 3 x 3 kernel is undefined on a 1 x 1 grid
        ("--precision", "bf16", "--data.image_size", "32"),
        ("--model.grad_checkpointing", "true"),
        ("--model.channels_last", "true"),
        ("--optimizer.name", "lamb"),
        ("--optimizer.layer_decay", "0.7"),
        ("--schedule.name", "multistep", "--schedule.milestones", "[1]"),
        ("--schedule.cooldown_epochs", "1"),
        ("--augment.cutmix", "1.0", "--augment.mixup", "0.8"),
        ("--augment.auto_augment", "rand-m9-mstd0.5-inc1", "--augment.erase_prob", "0.5"),
        ("--model.name", "resnet10t", "--model.options", "{}", "--data.image_size", "32"),
    ],
    ids=lambda option: option[0],
)
def test_option_trains(root, option):
    losses = _losses(small_recipe(root, *option))
    assert len(losses) == (15 if "cooldown" in option[0] else 10)
    assert len(set(losses)) == len(losses), "every step changes the weights"


def test_gradient_checkpointing_changes_nothing(root):
    plain = _losses(small_recipe(root, "--output", f"{root}/a"))
    again = _losses(small_recipe(root, "--output", f"{root}/b", "--model.grad_checkpointing", "true"))
    torch.testing.assert_close(torch.tensor(again), torch.tensor(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_compiled_model_trains_to_the_same_losses(root):
    plain = ("--model.options.drop_path_rate", "0", "--schedule.epochs", "1")
    eager = _losses(small_recipe(root, "--output", f"{root}/a", *plain))
    compiled = _losses(small_recipe(root, "--output", f"{root}/b", "--model.compile", "true", *plain))
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager), rtol=1e-3, atol=1e-4)


def test_learning_rate_scales_with_the_batch(root):
    recipe = small_recipe(root, "--optimizer.lr_batch", "4", "--schedule.warmup_epochs", "0")
    first = next(event for event in _events(recipe) if isinstance(event, Stepped))
    assert first.lr == pytest.approx(2 * 3e-3)


def test_weights_of_another_run_are_a_start(root):
    first = train(small_recipe(root, "--output", f"{root}/first")).output
    recipe = small_recipe(root, "--model.checkpoint", str(first / "best.pt"), "--data.image_size", "24")
    events = _events(recipe)
    assert events[0].start_step == 0
    fresh = _losses(small_recipe(root, "--output", f"{root}/fresh", "--data.image_size", "24"))
    assert next(event for event in events if isinstance(event, Stepped)).loss != fresh[0]


def test_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(root):
    recipe = small_recipe(root, "--save_every", "1")
    kept = {}

    def break_weights_at_4(event):
        if isinstance(event, Saved) and event.step == 3:
            kept["bytes"] = (root / "run" / "last.pt").read_bytes()
            with torch.no_grad():
                trainer.model.stages[1].blocks[0].mlp.fc1.weight.fill_(float("inf"))

    trainer = _trainer(recipe, [break_weights_at_4])
    with pytest.raises(NonFiniteError) as caught:
        _run(trainer)
    message = str(caught.value)
    assert "the loss is nan, first not finite in stages.1.blocks.0.mlp.fc1 (Linear) at step 3" in message
    assert "learning rate" in message
    assert f"the last good checkpoint is {root}/run/last.pt" in message
    assert (root / "run" / "last.pt").read_bytes() == kept["bytes"]


def test_gradient_that_is_not_finite_stops_the_run_before_the_weights_change(root):
    recipe = small_recipe(root)
    trainer = _trainer(recipe, [])
    parameter = trainer.model.stages[0].blocks[0].mlp.fc1.weight
    parameter.register_hook(lambda gradient: gradient * float("nan"))
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    with pytest.raises(NonFiniteError, match=r"gradient is not finite, first that of stages\.0.* at step 0"):
        _run(trainer)
    assert_equal_weights(dict(trainer.model.named_parameters()), before)


def test_weights_that_are_not_finite_are_never_saved(root):
    trainer = _trainer(small_recipe(root), [])
    trainer.save()
    before = (root / "run" / "last.pt").read_bytes()
    with torch.no_grad():
        trainer.model.stages[1].blocks[0].mlp.fc1.weight[0, 0] = float("inf")
    trainer.step = 1
    with pytest.raises(NonFiniteError, match=r"stages\.1.*fc1\.weight is not finite at step 1; .*last\.pt keeps what"):
        trainer.save()
    assert (root / "run" / "last.pt").read_bytes() == before


def _trainer(recipe, listeners):
    accelerator = distributed.start()
    set_seed(0)
    Path(recipe.output).mkdir(parents=True)

    def tell(event):
        for listener in listeners:
            listener(event)

    return Trainer(recipe, build_task(recipe), accelerator, tell)


def _run(trainer):
    return trainer.run(StopSignal())


def test_log_is_json_lines(root):
    output = train(small_recipe(root)).output
    for line in (output / "log.jsonl").read_text().splitlines():
        assert json.loads(line)["event"] in ("started", "stepped", "evaluated", "saved", "notice")


def test_memory_does_not_grow_over_epochs(root):
    live, peaks = [], []

    def weigh(event):
        if isinstance(event, Saved):
            gc.collect()
            live.append(sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)))
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)

    train(small_recipe(root, "--schedule.epochs", "12", "--ema.decay", "0.9"), listeners=[weigh])
    assert len(peaks) == 12
    assert live[-1] <= live[4]
    # MiB; the allocator still settles in the first epochs
    assert peaks[-1] - peaks[4] < 8


def test_epoch_is_saved_before_an_evaluation_that_fails(root):
    picture = root / "data" / "val" / "dark" / "003.png"
    whole = picture.read_bytes()
    picture.write_bytes(whole[:50])
    with pytest.raises(ValueError, match=r"003\.png cannot be decoded"):
        train(small_recipe(root))
    assert load_checkpoint(root / "run" / "last.pt")["step"] == 5
    picture.write_bytes(whole)
    events = _events(small_recipe(root), resume=True)
    assert [event.step for event in events if isinstance(event, Evaluated)] == [5, 10]


def test_resumed_run_may_leave_out_what_turned_out_corrupt(root):
    short = ("--schedule.epochs", "1", "--schedule.warmup_epochs", "0")
    (root / "data" / "val" / "dark" / "003.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="leave it out by --skip-corrupt"):
        train(small_recipe(root, *short))
    result = train(small_recipe(root, *short, "--data.skip_corrupt", "true"), resume=True)
    assert result.finished
    notices = [line["text"] for line in read_log(root / "run" / "log.jsonl") if line["event"] == "notice"]
    assert any("val: 1 of 18 images are corrupt and left out" in text for text in notices)


def test_learning_rate_shown_is_the_highest_of_the_layers(root):
    recipe = small_recipe(root, "--optimizer.layer_decay", "0.5", "--schedule.warmup_epochs", "0")
    first = next(event for event in _events(recipe) if isinstance(event, Stepped))
    assert first.lr == pytest.approx(3e-3)


def test_rate_that_changes_once_per_epoch_is_that_of_the_first_step(root):
    recipe = small_recipe(root, "--schedule.per_epoch", "true", "--schedule.warmup_epochs", "0")
    rates = [event.lr for event in _events(recipe) if isinstance(event, Stepped)]
    # a cosine over two epochs of five steps
    assert rates == pytest.approx([3e-3] * 5 + [1.5e-3] * 5)


def test_polynomial_schedule_falls_as_its_power_says(root):
    recipe = small_recipe(root, "--schedule.name", "poly", "--schedule.warmup_epochs", "0", "--schedule.power", "2")
    rates = [event.lr for event in _events(recipe) if isinstance(event, Stepped)]
    assert rates == pytest.approx([3e-3 * (1 - step / 10) ** 2 for step in range(10)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch_size", "6", "--accumulate", "2", "--augment.mixup", "0.2"), r"batch_size / accumulate must be even"),
        (("--schedule.name", "multistep"), r"multistep needs schedule\.milestones"),
        (("--schedule.decay_epochs", "0"), r"schedule\.decay_epochs must be above 0"),
        (
            ("--model.name", "inception_v4", "--model.options", "{}", "--model.grad_checkpointing", "true"),
            "not offer it",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(root, options, message):
    with pytest.raises(ValueError, match=message):
        train(small_recipe(root, *options))
