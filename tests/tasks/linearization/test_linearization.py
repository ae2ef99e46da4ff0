import copy

import pytest
import torch
import torch.nn.functional as F

from softline.engine.checkpoint import load_checkpoint
from softline.engine.events import Stepped
from softline.engine.task import build_task
from softline.engine.train import train
from softline.errors import UserError
from softline.replacing.hosted import HostedAttention
from softline.replacing.replace import transformer_blocks
from softline.tasks.linearization.adapters import LowRank, merge_adapters
from softline.tasks.linearization.task import divergence, relative_error
from softline.tasks.loading import load_trained
from tests.tasks.small_vit import stage_recipe, train_teacher


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("linearization")
    train_teacher(root)
    return root


@pytest.fixture
def teacher(root):
    return load_trained(f"{root}/teacher/last.pt").model.eval()


def batch_of(task, count=8):
    return task.collate([task.val_set[index] for index in range(count)])


def hosted(network):
    return {name: module for name, module in network.named_modules() if isinstance(module, HostedAttention)}


def run_and_steps(recipe, **options):
    events = []
    result = train(recipe, listeners=[events.append], **options)
    return result, [event for event in events if isinstance(event, Stepped)]


# definitions


def test_relative_error_is_that_of_each_sample():
    new, old = torch.randn(2, 3, 5, 7)
    expected = [((a - b).norm() / b.norm()) ** 2 for a, b in zip(new, old, strict=True)]
    assert relative_error(new, old) == pytest.approx(torch.stack(expected))
    assert relative_error(old, old).tolist() == [0, 0, 0]


def test_divergence_is_kullback_leibler_from_the_old_probabilities():
    new, old = torch.randn(2, 4, 6)
    p, q = (old / 2).softmax(1), (new / 2).softmax(1)
    assert divergence(new, old, 2.0) == pytest.approx(4 * (p * (p.log() - q.log())).sum(1), abs=1e-6)
    assert divergence(old, old).abs().max() < 1e-6


# transfer


def test_the_network_computes_what_the_teacher_does_during_transfer(root, teacher):
    task = build_task(stage_recipe(root, "transfer"))
    images, _ = batch_of(task)
    with torch.no_grad():
        assert torch.allclose(task.model.eval()(images), teacher(images), atol=1e-6)


def test_errors_are_those_of_each_attention_given_the_teachers_tokens(root, teacher):
    task = build_task(stage_recipe(root, "transfer"))
    batch = batch_of(task)
    loss = task.loss(task.model.train(), batch)
    given, returned = {}, {}
    for name in hosted(task.model):
        old = teacher.get_submodule(name)
        old.register_forward_hook(
            lambda _, args, out, name=name: (given.update({name: args[0]}), returned.update({name: out}))[0]
        )
    with torch.no_grad():
        teacher(batch[0])
    expected = {}
    for name, module in hosted(task.model).items():
        module._forward_hooks.clear()
        expected[f"errors/{name}"] = float(relative_error(module(given[name]), returned[name]).mean().detach())
    assert {name: float(value) for name, value in loss.logs.items()} == pytest.approx(expected, rel=1e-4)
    assert float(loss.value.detach()) == pytest.approx(sum(expected.values()) / 3, rel=1e-4)


def test_transfer_lowers_the_error_of_every_layer_and_changes_nothing_else(root, teacher):
    result, steps = run_and_steps(stage_recipe(root, "transfer", f"--output={root}/t1", "--schedule.epochs=4"))
    first, last = steps[0].logs, steps[-1].logs
    assert len(first) == 3
    assert all(last[name] < 0.8 * first[name] for name in first)
    student = load_trained(str(result.output / "last.pt")).model
    old, new = teacher.state_dict(), student.state_dict()
    for name, value in new.items():
        if ".attn." not in name:
            assert torch.equal(value, old[name]), name
    assert not torch.equal(new["blocks.0.attn.attention.qkv.weight"], old["blocks.0.attn.qkv.weight"])


def test_softmax_needs_no_transfer(root):
    task = build_task(stage_recipe(root, "transfer", "--model.replace.attention=softmax"))
    assert float(task.loss(task.model, batch_of(task)).value.detach()) < 1e-9


def test_drop_path_is_off_during_transfer(root):
    task = build_task(stage_recipe(root, "transfer", "--model.options.drop_path_rate=0.9"))
    batch = batch_of(task)
    losses = [float(task.loss(task.model.train(), batch).value.detach()) for _ in range(3)]
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("stage", ["transfer", "finetune"])
@pytest.mark.parametrize("options", [(), ("--ema.decay=0.9",)])
def test_an_interrupted_stage_ends_bitwise_equal(root, stage, options):
    def recipe(name):
        return stage_recipe(root, stage, f"--output={root}/{stage}-{name}-{len(options)}", "--save_every=1", *options)

    def stop(event):
        if isinstance(event, Stepped) and event.step == 4:
            raise KeyError

    whole = train(recipe("whole"))
    with pytest.raises(KeyError):
        train(recipe("part"), listeners=[stop])
    resumed = train(recipe("part"), resume=True)
    assert resumed.metrics == whole.metrics
    weights = [load_checkpoint(run.output / "last.pt")["state_dict"] for run in (whole, resumed)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


# fine-tuning


def test_the_loss_of_fine_tuning_is_the_sum_of_its_terms(root, teacher):
    weights = ("--loss.labels=0.5", "--loss.logits=2", "--loss.features=3", "--loss.temperature=2")
    task = build_task(stage_recipe(root, "finetune", *weights, "--model.options.drop_path_rate=0"))
    images, labels = batch = batch_of(task)
    outputs = {}
    student = copy.deepcopy(task.model)
    for network in (student, teacher):
        for name, block in transformer_blocks(network).items():
            block._forward_hooks.clear()
            key = (network is teacher, name)
            block.register_forward_hook(lambda _, args, out, key=key: outputs.update({key: out}))
    logits, theirs = student(images), teacher(images)
    features = [
        relative_error(outputs[False, name], outputs[True, name]).mean() for name in transformer_blocks(student)
    ]
    expected = 0.5 * F.cross_entropy(logits, labels) + 2 * divergence(logits, theirs, 2.0).mean() + sum(features)
    loss = task.loss(task.model, batch)
    assert float(loss.value.detach()) == pytest.approx(float(expected.detach()), rel=1e-4)
    loss.value.backward()
    assert all(parameter.grad is not None for parameter in task.model.parameters())
    assert all(parameter.grad is None for parameter in task.teacher.parameters())


def test_fine_tuning_starts_from_transferred_weights(root):
    transferred = train(stage_recipe(root, "transfer", f"--output={root}/t2")).output / "last.pt"
    task = build_task(stage_recipe(root, "finetune", f"--model.checkpoint={transferred}"))
    expected = load_checkpoint(transferred)["state_dict"]
    assert all(torch.equal(value, expected[name]) for name, value in task.model.state_dict().items())
    result = train(stage_recipe(root, "finetune", f"--model.checkpoint={transferred}", f"--output={root}/f2"))
    assert set(result.metrics) == {"top1", "top5", "loss", "agreement", "divergence_loss"}


@pytest.mark.parametrize("attention", ["inline", "softpp", "linear"])
def test_what_was_trained_can_be_loaded_and_used(root, attention):
    name = f"--model.replace.attention={attention}"
    path = train(stage_recipe(root, "finetune", name, f"--output={root}/{attention}")).output / "last.pt"
    trained = load_trained(str(path))
    assert str(trained.task) == "linearization"
    assert set(hosted(trained.model)) == {f"blocks.{index}.attn" for index in range(3)}
    found = trained.predict(f"{root}/data/val/dark/000.png")
    assert set(found.to_dict()["classes"]) == {"dark", "light"}


def test_images_need_no_labels(root, tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for path in (root / "data" / split).rglob("*.png"):
            (tmp_path / split / f"{path.parent.name}{path.name}").write_bytes(path.read_bytes())
    given = [f"--data.source={tmp_path}", "--labelled=false"]
    result = train(stage_recipe(root, "transfer", *given, f"--output={tmp_path}/transfer"))
    assert result.metrics["explained"] > 0
    result = train(stage_recipe(root, "finetune", *given, f"--output={tmp_path}/finetune"))
    assert set(result.metrics) == {"agreement", "divergence_loss"}
    assert load_trained(str(result.output / "last.pt")).classes == ("dark", "light")


# adapters


def test_adapters_train_little_and_merge_into_the_weights(root):
    recipe = stage_recipe(root, "finetune", "--adapters=2", f"--output={root}/adapters")
    task = build_task(recipe)
    trained = {name for name, parameter in task.model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".attn." in name for name in trained)
    assert not any("original" in name for name in trained)
    low = [module for module in task.model.modules() if isinstance(module, LowRank)]
    assert len(low) == 6
    for module in low:
        torch.nn.init.normal_(module.up)
    images, _ = batch_of(task)
    adapted = task.model.eval()
    with torch.no_grad():
        expected = adapted(images)
        merged = merge_adapters(copy.deepcopy(adapted))
        assert torch.allclose(merged(images), expected, atol=1e-5)
    assert not [module for module in merged.modules() if isinstance(module, LowRank)]


def test_a_run_with_adapters_can_be_resumed_and_loaded(root, teacher):
    recipe = stage_recipe(root, "finetune", "--adapters=2", f"--output={root}/adapters2")
    path = train(recipe).output / "last.pt"
    model = load_trained(str(path)).model
    assert not [name for name in model.state_dict() if "parametrizations" in name]
    assert torch.equal(model.blocks[0].mlp.fc1.weight, teacher.blocks[0].mlp.fc1.weight)
    assert not torch.equal(model.blocks[0].attn.attention.qkv.weight, teacher.blocks[0].attn.qkv.weight)
    assert train(recipe, resume=True).finished


# mistakes


@pytest.mark.parametrize(
    ("stage", "options", "message"),
    [
        ("transfer", ["--model.replace=null"], "model.replace.attention must name the new attention"),
        ("transfer", ["--adapters=2"], "adapters are for stage finetune"),
        ("finetune", ["--adapters=0"], "adapters must be at least 1"),
        ("finetune", ["--adapters=2", "--strategy=fsdp"], "adapters cannot be trained with strategy fsdp"),
        ("finetune", ["--loss.logits=0", "--loss.features=0"], "there is nothing to learn"),
        ("finetune", ["--loss.logits=-1"], "loss.logits must be at least 0"),
        ("finetune", ["--loss.temperature=0"], "loss.temperature must be above 0"),
        ("finetune", ["--loss.labels=1", "--labelled=false"], "loss.labels must be 0 for images without labels"),
        ("transfer", ["--model.replace.attention=none"], "attention"),
        ("transfer", ["--model.replace.layers=[7]"], "an index from -3 to 2"),
        ("transfer", ["--model.options.depth=4"], "not a state dict of vit_tiny_patch16_224"),
        ("transfer", ["--teacher=none.pt"], "none.pt"),
    ],
)
def test_mistakes_are_named(root, stage, options, message):
    with pytest.raises(UserError) as error:
        build_task(stage_recipe(root, stage, *options))
    assert message in str(error.value)


def test_other_classes_than_the_teachers_are_refused(root, tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for name in ("cat", "dog"):
            folder = tmp_path / split / name
            folder.mkdir()
            (folder / "0.png").write_bytes((root / "data/val/dark/000.png").read_bytes())
    with pytest.raises(UserError, match=r"missing dark, light; unknown cat, dog"):
        build_task(stage_recipe(root, "transfer", f"--data.source={tmp_path}"))


def test_a_linearised_model_is_opened_without_its_teacher(root, tmp_path):
    teacher = tmp_path / "teacher.pt"
    teacher.write_bytes((root / "teacher/last.pt").read_bytes())
    recipe = stage_recipe(root, "transfer", f"--teacher={teacher}", f"--output={tmp_path}/run", "--schedule.epochs=0.4")
    path = train(recipe).output / "last.pt"
    teacher.unlink()
    assert load_trained(str(path)).classes == ("dark", "light")
    with pytest.raises(UserError, match=r"teacher\.pt"):
        train(recipe, resume=True)
