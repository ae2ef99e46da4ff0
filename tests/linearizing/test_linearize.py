import json
import shutil

import pytest
import timm
import torch
from timm.models import save_for_hf

import softline
from softline.engine.checkpoint import load_checkpoint, save_checkpoint
from softline.engine.events import Notice, Stepped
from softline.errors import UserError
from softline.linearizing.cost import measure_cost
from softline.linearizing.measuring import LayerEffect, only, worst
from softline.linearizing.plan import Plan, open_original
from softline.linearizing.work import Linearized
from softline.replacing.hosted import HostedAttention
from softline.tasks.linearization.build import open_teacher, weights_digest
from softline.tasks.loading import load_trained
from tests.engine.small import small_recipe, write_images
from tests.tasks.small_vit import STAGES, stage_recipe, train_teacher


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("linearizing")
    train_teacher(root)
    return root


def run(root, output, attention="inline", **options):
    options.setdefault("overrides", STAGES)
    options.setdefault("cost_sizes", ())
    return softline.linearize(
        f"{root}/teacher/last.pt", attention, data=f"{root}/data", output=root / output, **options
    )


def replaced(path):
    return [
        name for name, module in load_trained(str(path)).model.named_modules() if isinstance(module, HostedAttention)
    ]


@pytest.fixture(scope="module")
def result(root):
    return run(root, "whole", softmax_layers=1, cost_sizes=(16, 32))


def test_every_step_is_measured_at_every_size(result):
    assert [step.name for step in result.steps] == ["original", "replaced", "transferred", "mixed", "finetuned"]
    for step in result.steps:
        # the original's, and twice and four times the pixels in whole patches
        assert [scores.size for scores in step.scores] == [16, 24, 32]
        assert all(0 <= scores.agreement <= 1 and scores.divergence >= 0 for scores in step.scores)
    original, before, after = result.steps[:3]
    assert all(scores.agreement == 1 and scores.divergence == pytest.approx(0, abs=1e-6) for scores in original.scores)
    assert set(before.errors) == set(after.errors) == {f"blocks.{index}.attn" for index in range(3)}
    assert all(after.errors[layer] < before.errors[layer] for layer in before.errors)


def test_the_layer_that_matters_most_keeps_its_attention(root, result):
    assert len(result.effects) == 3
    hurts = max(result.effects, key=lambda effect: effect.divergence).layer
    assert result.kept == (hurts,)
    assert hurts not in result.replaced
    assert replaced(result.checkpoint) == list(result.replaced)
    teacher = load_checkpoint(root / "teacher/last.pt")["state_dict"]
    mixed = load_checkpoint(root / "whole/mixed.pt")["state_dict"]
    transferred = load_checkpoint(root / "whole/transfer/last.pt")["state_dict"]
    for name, value in mixed.items():
        assert torch.equal(value, (transferred if name in transferred else teacher)[name]), name
    assert f"{hurts}.qkv.weight" in mixed


def test_the_result_is_plain_and_read_back(root, result):
    content = json.loads((root / "whole/linearized.json").read_text())
    assert Linearized.from_dict(content) == result
    assert result.images == 2 * 10 * 8
    assert content["recipes"]["finetune"]["model"]["checkpoint"].endswith("mixed.pt")


def test_cost_is_that_of_both_models_in_turns(result):
    assert [(row.case, row.size) for row in result.cost] == [
        ("original", 16),
        ("linearized", 16),
        ("original", 32),
        ("linearized", 32),
    ]
    assert all(row.failure is None and row.milliseconds > 0 and row.macs > 0 for row in result.cost)


def test_operations_of_the_linearised_model_grow_linearly(root):
    recipe = stage_recipe(root, "transfer")
    rows = measure_cost(recipe.model, (128, 256), num_classes=2, rounds=1)
    macs = {(row.case, row.size): row.macs for row in rows}
    assert macs["linearized", 256] < 4.1 * macs["linearized", 128]
    assert macs["original", 256] > 6 * macs["original", 128]


def test_the_linearised_model_is_used_like_any_other(root, result):
    trained = result.load()
    assert trained.classes == ("dark", "light")
    assert str(trained.predict(root / "data/val/dark/000.png"))


def test_an_interrupted_call_goes_on_where_it_was(root, result):
    class Stop(Exception):
        pass

    def stop(stage, event):
        if stage == "finetune" and isinstance(event, Stepped) and event.step == 3:
            raise Stop

    options = {"softmax_layers": 1, "cost_sizes": (), "overrides": (*STAGES, "--save_every=1")}
    with pytest.raises(Stop):
        run(root, "part", progress=stop, **options)
    heard = []
    resumed = run(root, "part", progress=lambda stage, event: heard.append((stage, event)), **options)
    assert not [event for stage, event in heard if stage == "transfer" and isinstance(event, Stepped)]
    assert resumed.steps[-1].scores == result.steps[-1].scores
    assert not [event for _, event in heard if isinstance(event, Notice) and "alone" in event.text]


def test_stages_run_alone(root):
    first = run(root, "alone", stages=("transfer",), sizes=(16,))
    assert [step.name for step in first.steps] == ["original", "replaced", "transferred"]
    second = run(root, "alone", stages=("finetune",), sizes=(16,))
    assert [step.name for step in second.steps] == ["original", "replaced", "finetuned"]
    assert second.recipes["finetune"]["model"]["checkpoint"] == first.checkpoint
    without = run(root, "direct", stages=("finetune",), sizes=(16,))
    assert without.recipes["finetune"]["model"]["checkpoint"] is None


def test_overrides_are_for_both_stages_or_for_one(root):
    original = open_original(f"{root}/teacher/last.pt")
    plan = Plan(
        source="x",
        attention="softpp",
        data="y",
        output=root,
        queries="key",
        overrides=("--batch_size", "4", "--transfer.schedule.epochs=3", "--finetune.loss.labels", "1"),
    )
    first, second = (plan.recipe(stage, original, start=None, layers=["blocks.1.attn"]) for stage in plan.stages)
    assert (first.batch_size, second.batch_size) == (4, 4)
    assert (first.schedule.epochs, second.schedule.epochs) == (3, 8)
    assert (first.loss.labels, second.loss.labels) == (0, 1)
    assert second.model.replace.layers == ("blocks.1.attn",)
    assert second.model.replace.queries == "key"
    assert second.data.crop_pct == 1.0


def test_a_directory_of_timm_is_linearised(root, tmp_path):
    options = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, num_classes=2, **options)
    save_for_hf(model, tmp_path / "saved", model_args={"img_size": 16, **options}, safe_serialization=True)
    result = softline.linearize(
        f"{tmp_path}/saved",
        "linear",
        data=f"{root}/data",
        output=tmp_path / "out",
        sizes=(16,),
        cost_sizes=(),
        overrides=STAGES,
    )
    assert result.steps[-1].name == "finetuned"
    assert result.recipes["finetune"]["data"]["image_size"] == 16
    assert len(replaced(result.checkpoint)) == 2


def test_images_to_learn_from_may_have_another_size(root):
    result = run(root, "larger", image_size=24, stages=("transfer",))
    assert [scores.size for scores in result.steps[0].scores] == [24, 32, 48]
    assert result.load().settings["image_size"] == 24


def test_labels_are_the_models_whatever_the_order_of_the_folders(root, tmp_path):
    """timm's directories may name their classes in another order than that of the alphabet."""
    options = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2}
    trained = load_trained(f"{root}/teacher/last.pt").model
    model = timm.create_model("vit_tiny_patch16_224", num_classes=2, **options)
    model.load_state_dict(trained.state_dict())
    for parameter in (model.head.weight, model.head.bias):
        parameter.data = parameter.data.flip(0)
    model.pretrained_cfg["label_names"] = ["light", "dark"]
    save_for_hf(model, tmp_path / "saved", model_args=options, safe_serialization=True)
    same = {"data": f"{root}/data", "stages": ("transfer",), "sizes": (16,), "cost_sizes": (), "overrides": STAGES}
    swapped = softline.linearize(f"{tmp_path}/saved", "inline", output=tmp_path / "out", **same)
    plain = run(root, "ordered", stages=("transfer",), sizes=(16,))
    assert swapped.load().classes == ("light", "dark")
    assert swapped.steps[0].scores[0].top1 == plain.steps[0].scores[0].top1
    assert plain.steps[0].scores[0].top1 > 0.6


def test_one_layer_alone_is_replaced():
    original = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=3, num_heads=2)
    network = softline.replace_attention(
        timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=32, depth=3, num_heads=2), "inline"
    )
    single = only("blocks.1.attn", network, original)
    assert [name for name, module in single.named_modules() if isinstance(module, HostedAttention)] == ["blocks.1.attn"]


def test_the_worst_layers_are_those_with_the_largest_divergence():
    effects = [LayerEffect("a", 0.5, 0.1), LayerEffect("b", 0.9, 0.3), LayerEffect("c", 0.7, 0.2)]
    assert worst(effects, 2) == ["b", "c"]


def test_a_size_that_the_model_cannot_take_is_reported(root):
    result = run(root, "sizes", stages=("transfer",), sizes=(16, 2))
    assert [scores.failure is None for scores in result.steps[0].scores] == [True, False]
    assert "2 x 2 pixels" in result.steps[0].scores[1].failure


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "none"}, "attention"),
        ({"stages": ("train",)}, "stages"),
        ({"stages": ()}, "stages must name at least one"),
        ({"softmax_layers": 3}, "softmax_layers must be below the 3 layers, got 3"),
        ({"softmax_layers": 0, "layers": (0,)}, "layers leaves 2 layers as they are, more than softmax_layers=0"),
        ({"softmax_layers": -1}, "softmax_layers must be at least 0"),
        ({"layers": (5,)}, "an index from -3 to 2"),
        ({"options": {"wings": 2}}, "wings"),
        ({"overrides": ("--finetune.wings", "2")}, "unknown key wings"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(root, options, message):
    with pytest.raises(UserError) as error:
        run(root, "mistake", **options)
    assert message in str(error.value)
    assert not (root / "mistake").exists()


def test_what_cannot_be_linearised_is_refused(root, result, tmp_path):
    with pytest.raises(UserError, match="has been replaced already"):
        open_original(result.checkpoint)
    from softline.engine.train import train

    write_images(tmp_path)
    own = train(small_recipe(tmp_path, "--schedule.epochs=0.2", "--schedule.warmup_epochs=0")).output / "last.pt"
    with pytest.raises(UserError, match="It supports timm's VisionTransformer"):
        softline.linearize(str(own), "linear", data=f"{tmp_path}/data", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def other(root):
    """A teacher with the same architecture and other weights, and its directory."""
    place = root / "other"
    shutil.copytree(root / "teacher", place)
    content = load_checkpoint(place / "last.pt")
    content["state_dict"] = {name: 1.1 * value for name, value in content["state_dict"].items()}
    save_checkpoint(place / "last.pt", content)
    return place


def test_a_directory_of_another_teacher_is_refused_before_anything_is_measured(root, other):
    run(root, "mine", stages=("transfer",), sizes=(16,))
    heard = []
    for stages in (("transfer",), ("finetune",)):
        with pytest.raises(UserError, match=r"transfer/last\.pt has learned from another model than .*other/last\.pt"):
            softline.linearize(
                other / "last.pt",
                "inline",
                data=root / "data",
                output=root / "mine",
                stages=stages,
                cost_sizes=(),
                overrides=STAGES,
                progress=lambda *event: heard.append(event),
            )
    assert not [event for stage, event in heard if isinstance(event, Notice) and not event.routine]


def test_a_teacher_may_move_but_not_change(root, other):
    recipe = stage_recipe(root, "transfer")
    digest = weights_digest(open_original(f"{root}/teacher/last.pt").model)
    known = recipe.replace(teacher_digest=digest)
    assert open_teacher(known).classes == ("dark", "light")
    with pytest.raises(UserError, match=r"the weights of teacher .*other/last\.pt are not those of teacher_digest"):
        open_teacher(known.replace(teacher=f"{other}/last.pt"))


def test_only_a_transfer_of_the_same_attention_is_fine_tuned(root):
    run(root, "kinds", "linear", stages=("transfer",), sizes=(16,))
    for attention, options in (("efficient", {}), ("linear", {"feature_map": "relu"})):
        with pytest.raises(UserError, match=r"cannot be fine-tuned: .* differs in model\.replace"):
            run(root, "kinds", attention, stages=("finetune",), options=options)


def test_changed_options_are_refused_before_anything_is_measured(root):
    run(root, "options", stages=("transfer",), sizes=(16,))
    heard = []
    with pytest.raises(UserError, match=r"cannot continue: .* differs in optimizer\.lr"):
        run(
            root,
            "options",
            stages=("transfer",),
            overrides=(*STAGES, "--optimizer.lr=3e-3"),
            progress=lambda *event: heard.append(event),
        )
    assert heard == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--teacher=x.pt", "teacher follows from source"),
        ("--model.checkpoint=x.pt", r"model\.checkpoint follows from source"),
        ("--model.replace.attention=linear", r"model\.replace follows from attention"),
        ("--finetune.model.replace.queries=key", "follows from attention, layers, options, queries"),
        ("--stage=finetune", "stage follows from stages"),
        ("--transfer.output=zzz", "output follows from output"),
        ("--data.image_size=64", r"data\.image_size follows from image_size"),
    ],
)
def test_overrides_do_not_contradict_the_arguments(root, override, message):
    with pytest.raises(UserError, match=f"cannot be set: .*{message}"):
        run(root, "never", overrides=(*STAGES, override))
    assert not (root / "never").exists()


def test_options_of_a_stage_that_is_not_run_are_refused(root):
    with pytest.raises(UserError, match=r"--finetune\.adapters is for the stage finetune, and the stages are transfer"):
        run(root, "never", stages=("transfer",), overrides=("--finetune.adapters", "4"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": (0,)}, "sizes must be at least 1, got 0"),
        ({"cost_sizes": (-3,)}, "cost_sizes must be at least 1, got -3"),
        ({"overrides": (*STAGES, "--finetune.batch_size=64")}, r"batch_size \(64\) of finetune must be at most"),
        ({"layers": ()}, "layers must name at least one block"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(root, options, message):
    heard = []
    with pytest.raises(UserError, match=message):
        run(root, "never", progress=lambda *event: heard.append(event), **options)
    assert heard == []


def test_an_option_of_the_model_can_make_it_replaceable(root):
    recipe = load_checkpoint(root / "teacher/last.pt")
    recipe["recipe"]["model"]["options"]["attn_drop_rate"] = 0.1
    save_checkpoint(root / "dropping.pt", recipe)
    arguments = {"data": f"{root}/data", "output": root / "dropping", "sizes": (16,), "cost_sizes": ()}
    with pytest.raises(UserError, match="it drops attention weights"):
        softline.linearize(root / "dropping.pt", "inline", **arguments)
    result = softline.linearize(
        root / "dropping.pt",
        "inline",
        **arguments,
        stages=("transfer",),
        overrides=(*STAGES, "--model.options.attn_drop_rate=0"),
    )
    assert result.steps[-1].name == "transferred"
