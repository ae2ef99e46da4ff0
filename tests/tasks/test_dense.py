import json
import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from softline.cli import main
from softline.engine.checkpoint import load_checkpoint
from softline.engine.optimizer import create_optimizer, total_steps
from softline.engine.reading import list_recipes, load_recipe
from softline.engine.recipe import ModelRecipe
from softline.engine.task import Setup, build_task
from softline.engine.train import train
from softline.tasks.loading import load_trained
from softline.tasks.networks import build_body, load_body
from softline.weights.releases import read_weights
from tests.engine.small import evaluated
from tests.tasks.small_dense import DETECTION, SEGMENTATION, dense_recipe, write_coco, write_scenes

DENSE = [name for name in list_recipes() if load_recipe(name).task in ("detection", "segmentation")]
KINDS = {"detection": DETECTION, "masks": DETECTION, "cascade": DETECTION, "segmentation": SEGMENTATION}
OVERRIDES = {
    "detection": [],
    "masks": ["--head.name=mask_rcnn"],
    "cascade": ["--head.name=cascade_mask_rcnn"],
    "segmentation": [],
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def recipe_of(kind, root, *overrides):
    return dense_recipe(KINDS[kind], root, *OVERRIDES[kind], *overrides)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One finished run of each kind, by its directory."""
    directories = {}
    for kind in KINDS:
        root = directories[kind] = tmp_path_factory.mktemp(kind)
        write_coco(root)
        write_scenes(root)
        train(recipe_of(kind, root))
    return directories


@every_kind
def test_runs_are_measured_alike_in_training_and_from_their_checkpoint(kind, runs):
    content = load_checkpoint(runs[kind] / "run/last.pt")
    trained = load_trained(str(runs[kind] / "run/last.pt"))
    [(_, result)] = evaluated(trained)
    assert result.samples == 3
    assert result.metrics == pytest.approx(content["metrics"], rel=1e-6)


@every_kind
def test_analyses_see_the_backbone(kind, runs):
    trained = load_trained(str(runs[kind] / "run/last.pt"))
    view = trained.view()
    assert view.model in list(trained.model.modules())
    assert (view.classes, view.data, view.settings["mode"]) == ((), None, "RGB")
    with torch.no_grad():
        assert view.model.eval().forward_features(torch.zeros(1, 3, 64, 64)).shape[-1] == view.model.num_features


def test_metrics_are_those_of_the_task(runs):
    metrics = {kind: set(load_checkpoint(root / "run/last.pt")["metrics"]) for kind, root in runs.items()}
    boxes = {"AP", "AP50", "AP75", "APs", "APm", "APl"}
    assert metrics["detection"] == boxes
    assert metrics["masks"] == metrics["cascade"] == boxes | {f"mask_{name}" for name in boxes}
    assert metrics["segmentation"] == {"mIoU", "mean_accuracy", "pixel_accuracy"}


@every_kind
def test_a_run_that_is_interrupted_ends_with_the_same_weights(kind, runs, tmp_path):
    whole = load_checkpoint(runs[kind] / "run/last.pt")
    root = runs[kind]

    class Interrupted(Exception):
        pass

    def interrupt(event):
        if getattr(event, "step", 0) == 3 and type(event).__name__ == "Stepped":
            raise Interrupted

    recipe = recipe_of(kind, root, f"--output={tmp_path}/again", "--save_every=1")
    with pytest.raises(Interrupted):
        train(recipe, listeners=[interrupt])
    train(recipe, resume=True)
    again = load_checkpoint(tmp_path / "again/last.pt")
    assert again["step"] == whole["step"]
    assert all(torch.equal(again["state_dict"][key], value) for key, value in whole["state_dict"].items())


def test_a_run_goes_on_when_the_weights_it_began_with_are_gone(runs, tmp_path):
    root, path = runs["segmentation"], tmp_path / "classifier.pth"
    options = recipe_of("segmentation", root).model.options
    torch.save(timm.create_model("softpp_micro", **options).state_dict(), path)
    given = [f"--output={tmp_path}/again", f"--model.checkpoint={path}", "--schedule.epochs=1"]
    first = train(recipe_of("segmentation", root, *given))
    path.unlink()
    again = train(recipe_of("segmentation", root, *given), resume=True)
    assert (again.step, again.finished) == (first.step, True)
    new = [f"--output={tmp_path}/new", f"--model.checkpoint={path}", "--data.source=nowhere"]
    with pytest.raises(ValueError, match=r"model\.checkpoint: no such file: .*classifier\.pth"):
        train(recipe_of("segmentation", root, *new))


def test_weights_of_flattened_networks_find_their_places(tmp_path):
    classifier = timm.create_model("convnext_atto", num_classes=3)
    path = tmp_path / "convnext.pth"
    torch.save(classifier.state_dict(), path)
    heard = []
    body = build_body(ModelRecipe(name="convnext_atto", checkpoint=str(path)), notify=heard.append)
    assert torch.equal(body.state_dict()["stem_0.weight"], classifier.state_dict()["stem.0.weight"])
    assert f"all {len(body.state_dict())} tensors" in heard[0]


def test_too_few_wide_or_tall_images_are_told(runs):
    heard = []
    recipe = recipe_of("detection", runs["detection"], "--batch_size=5", "--data.group_aspects=true")
    build_task(recipe, Setup(notify=heard.append))
    assert "4 wide images are fewer than batch_size 5 and are never trained on" in heard[0]
    assert "4 tall images" in heard[1]


def test_wide_and_tall_images_are_in_batches_of_their_own(runs):
    task = build_task(recipe_of("detection", runs["detection"]))
    assert task.groups == [0, 1] * 4
    assert build_task(recipe_of("detection", runs["detection"], "--data.group_aspects=false")).groups is None


def test_positions_and_norms_of_the_backbone_do_not_decay(runs):
    recipe = recipe_of("segmentation", runs["segmentation"])
    model = build_task(recipe).model
    decayed, undecayed = set(), set()
    for group in create_optimizer(model, recipe.optimizer).param_groups:
        (decayed if group["weight_decay"] else undecayed).update(id(parameter) for parameter in group["params"])
    named = dict(model.named_parameters())
    positions = [name for name in named if name.endswith("position.weight")]
    assert len(positions) == 4
    assert all(id(named[name]) in undecayed for name in positions)
    assert id(named["maps.body.model.stages.0.blocks.0.attn.qkv.weight"]) in decayed
    assert len(decayed) + len(undecayed) == len(named)


def test_backbones_start_from_a_classifier_and_say_so(tmp_path):
    classifier = timm.create_model("inline_micro", num_classes=5, img_size=64)
    path = tmp_path / "classifier.pth"
    torch.save(classifier.state_dict(), path)
    heard = []
    body = build_body(ModelRecipe(name="inline_micro", checkpoint=str(path)), notify=heard.append)
    own = body.model.state_dict()
    # positions are interpolated to those that the model learns
    same = [key for key in own if own[key].shape == classifier.state_dict()[key].shape]
    assert all(torch.equal(own[key], classifier.state_dict()[key]) for key in same)
    assert len(same) > 0.9 * len(own)
    assert f"all {len(own)} tensors of the backbone loaded from {path}" in heard[0]
    assert "not needed: " in heard[0]
    assert "head.weight" in heard[0]


def test_weights_of_another_backbone_are_refused(tmp_path):
    path = tmp_path / "other.pth"
    torch.save(timm.create_model("softpp_micro").state_dict(), path)
    body = build_body(ModelRecipe(name="inline_micro"))
    before = {key: value.clone() for key, value in body.model.state_dict().items()}
    with pytest.raises(ValueError, match=r"not a state dict of inline_micro .*missing"):
        load_body(body.model, read_weights(path, "inline_micro"), name="inline_micro", path="x", notify=print)
    assert all(torch.equal(value, before[key]) for key, value in body.model.state_dict().items())


def test_backbones_without_a_pyramid_are_refused(runs):
    flat = ["--model.name=inline_deit_tiny", "--model.options={}"]
    with pytest.raises(ValueError, match=r"strides \(4, 8, 16, 32\), got \(16, 16, 16\)"):
        build_task(recipe_of("segmentation", runs["segmentation"], *flat))


def test_unknown_options_of_a_head_are_refused(runs):
    with pytest.raises(ValueError, match=r"head\.options of upernet: .*wings"):
        build_task(recipe_of("segmentation", runs["segmentation"], "--head.options.wings=2"))


# the commands


def test_evaluate_prints_a_line_for_each_class(runs, capsys, tmp_path):
    checkpoint = str(runs["segmentation"] / "run/last.pt")
    assert main(["evaluate", checkpoint, "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    for expected in ("class", "ground", "thing", "mIoU %", "pixel_accuracy %", "images/s"):
        assert expected in printed
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [each["name"] for each in row["details"]["classes"]] == ["ground", "thing"]


def test_segmenters_are_evaluated_in_windows_on_request(runs, capsys):
    checkpoint = str(runs["segmentation"] / "run/last.pt")
    printed = []
    for inference in ("whole", "slide"):
        assert main(["evaluate", checkpoint, "--inference", inference]) == 0
        printed.append(capsys.readouterr().out.split("images")[0])
    assert printed[0] != printed[1]


def test_evaluate_takes_other_data(runs, capsys):
    checkpoint, source = str(runs["detection"] / "run/last.pt"), str(runs["detection"] / "coco")
    assert main(["evaluate", checkpoint, source, "--split", "train"]) == 0
    assert "8 images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (
            "detection",
            ["--sizes", "32"],
            "--sizes has no meaning for a detector, which takes --split, --annotations, --skip-corrupt",
        ),
        (
            "segmentation",
            ["--annotations", "x.json"],
            "--annotations has no meaning for a segmenter, which takes --split, --inference, --skip-corrupt",
        ),
        ("detection", ["nowhere"], "nowhere"),
        ("detection", ["--inference", "slide"], "--inference has no meaning for a detector"),
    ],
)
def test_mistakes_in_evaluate_end_in_a_message(kind, arguments, message, runs, capsys):
    assert main(["evaluate", str(runs[kind] / "run/last.pt"), *arguments]) == 2
    assert message in capsys.readouterr().err


@every_kind
def test_predict_draws_images_of_the_same_size_or_with_a_legend(kind, runs, tmp_path, capsys):
    images = sorted(map(str, (runs[kind] / ("scenes" if kind == "segmentation" else "coco") / "val").glob("*.png")))
    arguments = [*images, "--out", str(tmp_path / "drawn"), "--json", str(tmp_path / "found.json")]
    score = [] if kind == "segmentation" else ["--score", "0"]
    assert main(["predict", str(runs[kind] / "run/last.pt"), *arguments, *score]) == 0
    with_pictures = capsys.readouterr().out
    assert with_pictures.count("->") == 3
    assert main(["predict", str(runs[kind] / "run/last.pt"), *images, "--batch-size", "2", *score]) == 0
    assert capsys.readouterr().out == re.sub(" -> .*png:", ":", with_pictures)
    found = json.loads((tmp_path / "found.json").read_text())
    for path, prediction in zip(images, found, strict=True):
        with Image.open(path) as before, Image.open(tmp_path / "drawn" / path.split("/")[-1]) as after:
            assert after.width > before.width if kind == "segmentation" else after.size == before.size
            assert after.convert("RGB").crop((0, 0, *before.size)).tobytes() != before.convert("RGB").tobytes()
        if kind == "segmentation":
            assert sum(prediction["pixels"].values()) == pytest.approx(1)
            with Image.open(tmp_path / "drawn" / f"{Path(path).stem}_labels.png") as labels:
                counts = np.bincount(np.asarray(labels).ravel(), minlength=2) / (labels.width * labels.height)
            shares = [prediction["pixels"].get(name, 0) for name in ("ground", "thing")]
            assert counts.tolist() == pytest.approx(shares)
        else:
            assert all(each["class"] in ("brick", "leaf") for each in prediction["objects"])


def test_predict_does_not_draw_over_the_images(runs, tmp_path, capsys):
    image = tmp_path / "0.png"
    image.write_bytes((runs["detection"] / "coco/val/0.png").read_bytes())
    before = image.read_bytes()
    assert main(["predict", str(runs["detection"] / "run/last.pt"), str(image), "--out", str(tmp_path)]) == 2
    assert "0.png is one of the files and would be overwritten" in capsys.readouterr().err
    assert image.read_bytes() == before


def test_only_sure_objects_are_drawn(runs):
    trained = load_trained(str(runs["detection"] / "run/last.pt"))
    image = str(runs["detection"] / "coco/val/0.png")
    found = trained.predict(image, score=0.999)
    assert found.to_dict() == {"name": image, "objects": []}
    assert str(found) == "no objects"
    with Image.open(image) as before:
        assert found.draw().tobytes() == before.tobytes()


def test_the_score_asked_for_counts_not_the_one_trained_with(runs):
    trained = load_trained(str(runs["detection"] / "run/last.pt"))
    trained.model.score_threshold = 0.999
    image = str(runs["detection"] / "coco/val/0.png")

    def scores(least):
        return trained.predict(image, score=least).scores.tolist()

    every = scores(0.0)
    assert trained.model.score_threshold == 0.999
    middle = sorted(every)[len(every) // 2]
    assert scores(middle) == [score for score in every if score > middle] != []


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (
            "detection",
            ["--out", "OUT", "--top", "3"],
            "--top has no meaning for a detector, which takes --score, --batch-size",
        ),
        (
            "segmentation",
            ["--out", "OUT", "--score", "0.5"],
            "--score has no meaning for a segmenter, which takes --inference, --batch-size",
        ),
        ("detection", ["--out", "OUT", "--score", "2"], "score must be at least 0 and below 1, got 2.0"),
        ("detection", ["IMAGE", "--out", "OUT"], "several files would be drawn to 0.png"),
    ],
)
def test_mistakes_in_predict_end_in_a_message(kind, arguments, message, runs, tmp_path, capsys):
    image = str(runs["detection"] / "coco/val/0.png")
    given = [{"OUT": str(tmp_path / "out"), "IMAGE": image}.get(argument, argument) for argument in arguments]
    assert main(["predict", str(runs[kind] / "run/last.pt"), image, *given]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@every_kind
@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_images_larger_than_the_memory_are_refused_before_they_are_computed(kind, command, runs, monkeypatch, capsys):
    if command == "evaluate" and kind != "segmentation":
        pytest.skip("detectors resize the images they are evaluated on")
    monkeypatch.setattr("softline.engine.footprint.available_memory", lambda: 10**5)
    image = str(runs[kind] / ("scenes/val/0.png" if kind == "segmentation" else "coco/val/0.png"))
    assert main([command, str(runs[kind] / "run/last.pt"), *([image] if command == "predict" else [])]) == 2
    told = capsys.readouterr().err
    assert "an image of 56 x 40 pixels" in told if kind == "segmentation" else "an image of 96 x 64 pixels" in told
    assert "and 0.0 GB are available: " in told
    if kind == "segmentation":
        assert "use windows (--inference slide)" in told
        more = [image] if command == "predict" else []
        assert main([command, str(runs[kind] / "run/last.pt"), *more, "--inference", "slide"]) == 0


# recipes


def test_frozen_batch_norms_keep_their_numbers_in_training():
    body = build_body(ModelRecipe(name="softpp_micro", freeze_batch_norm=True)).train()
    before = {name: buffer.clone() for name, buffer in body.named_buffers()}
    assert any(name.endswith("running_mean") for name in before)
    body(torch.randn(2, 3, 64, 64))
    assert all(torch.equal(buffer, before[name]) for name, buffer in body.named_buffers())
    learnt = dict(body.named_parameters())
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in body.modules())
    assert len(learnt) == len(list(timm.create_model("softpp_micro", features_only=True).parameters())) - 2 * sum(
        isinstance(module, torch.nn.BatchNorm2d)
        for module in timm.create_model("softpp_micro", features_only=True).modules()
    )


@pytest.mark.parametrize(
    ("kind", "override", "message"),
    [
        ("detection", "--strategy=fsdp", "strategy fsdp is not for detection"),
        ("detection", "--data.train_short_sides=[]", "at least one length"),
        ("detection", "--data.train_short_sides=[2000]", r"data\.train_short_sides must be .* at most 96, got 2000"),
        ("detection", "--head.name=yolo", r"head\.name"),
        ("segmentation", "--data.classes=null", r"needs data\.classes"),
        ("segmentation", "--data.crop=[0, 8]", r"data\.crop must be at least 1, got 0"),
        ("segmentation", "--data.scale=[2, 1]", r"data\.scale \(second\) must be at least 2, got 1\.0"),
        ("segmentation", "--data.kernel=2", r"unknown key data\.kernel"),
        (
            "segmentation",
            "--data.base_size=[2048, 512]",
            r"data\.base_size \(long side\) must be at least 2048, got 512",
        ),
        ("segmentation", "--data.mean=[0.5]", r"data\.mean must be 3 numbers, one for each colour, got \[0\.5\]"),
    ],
)
def test_mistakes_in_dense_recipes_are_explained(kind, override, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        recipe_of(kind, tmp_path, override)


PUBLISHED_EPOCHS = {"coco_retinanet": (12, (8, 11)), "coco_mask_rcnn_3x": (36, (27, 33))}


@pytest.mark.parametrize("name", PUBLISHED_EPOCHS)
def test_coco_recipes_say_what_was_published(name):
    recipe = load_recipe(name)
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay, recipe.batch_size) == (1e-4, 0.01, 16)
    assert (recipe.schedule.epochs, recipe.schedule.milestones) == PUBLISHED_EPOCHS[name]
    assert (recipe.data.short_side, recipe.data.long_side) == (800, 1333)
    assert (min(recipe.data.train_short_sides), max(recipe.data.train_short_sides)) == (
        (480, 800) if name.endswith("3x") else (800, 800)
    )
    assert recipe.model.options == {"drop_path_rate": 0.1}
    assert (recipe.data.skip_empty_boxes, recipe.data.skip_corrupt) == (True, False)


@pytest.mark.parametrize(
    ("name", "images", "steps", "warmup", "crop", "lr", "decay", "power", "batch"),
    [
        ("ade20k_upernet", 20_210, 160_000, 1500, 512, 6e-5, 0.01, 1.0, 16),
        ("cityscapes_upernet", 2975, 40_000, 1500, 768, 6e-5, 0.01, 1.0, 8),
        ("ade20k_semantic_fpn", 20_210, 40_000, 0, 512, 2e-4, 1e-4, 0.9, 16),
    ],
)
def test_segmentation_recipes_say_what_was_published(name, images, steps, warmup, crop, lr, decay, power, batch):
    recipe = load_recipe(name)
    per_epoch = images // recipe.batch_size
    assert total_steps(recipe.schedule, per_epoch) == pytest.approx(steps, abs=1)
    assert round(recipe.schedule.warmup_epochs * per_epoch) == pytest.approx(warmup, abs=1)
    assert recipe.data.crop == (crop, crop)
    assert (recipe.optimizer.lr, recipe.schedule.name) == (lr, "poly")
    assert (recipe.optimizer.weight_decay, recipe.schedule.power, recipe.batch_size) == (decay, power, batch)
    assert recipe.model.options == {"drop_path_rate": 0.1}


@pytest.mark.parametrize("name", [name for name in DENSE if name.startswith(("ade20k", "cityscapes"))])
def test_only_inline_is_trained_at_several_scales(name):
    """The SOFT paper says: multi-scale training is not used."""
    inline = "inline" in name or "semantic_fpn" in name
    assert load_recipe(name).data.scale == ((0.5, 2.0) if inline else (1.0, 1.0))


@pytest.mark.parametrize(("size", "drop_path"), [("tiny", 0.3), ("small", 0.3), ("base", 0.5)])
def test_segmenters_of_inline_are_trained_as_in_the_groups_other_paper(size, drop_path):
    recipe = load_recipe(f"ade20k_upernet_inline_swin_{size}")
    assert recipe.model.options == {"drop_path_rate": drop_path}
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (6e-5, 0.01)


INLINE_COCO = [name for name in DENSE if "rcnn_inline" in name and not name.startswith("coco")]


def test_inline_has_a_coco_recipe_for_each_row_of_its_tables():
    pvt = [f"mask_rcnn_inline_pvt_{size}" for size in ("tiny", "small", "medium", "large")]
    swin = [f"mask_rcnn_inline_swin_{size}" for size in ("tiny", "small")]
    cascade = [f"cascade_mask_rcnn_inline_swin_{size}" for size in ("tiny", "tiny_3x", "small_3x", "base_3x")]
    assert sorted(INLINE_COCO) == sorted([*pvt, *swin, *(f"{name}_3x" for name in (*pvt, *swin)), *cascade])


@pytest.mark.parametrize("name", INLINE_COCO)
def test_coco_recipes_of_inline_are_those_of_the_groups_other_paper(name):
    recipe = load_recipe(name)
    long, swin = name.endswith("3x"), "swin" in name
    assert recipe.model.name == name.removesuffix("_3x").partition("rcnn_")[2]
    assert recipe.model.checkpoint == f"runs/{recipe.model.name}/best.pt"
    assert recipe.head.name == name.partition("_inline")[0]
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay, recipe.batch_size) == (1e-4, 0.05 if swin else 1e-4, 16)
    assert (recipe.schedule.epochs, recipe.schedule.milestones) == ((36, (27, 33)) if long else (12, (8, 11)))
    assert min(recipe.data.train_short_sides) == (480 if swin or long else 800)
    assert (recipe.data.short_side, recipe.data.long_side) == (800, 1333)
    drop_path = {"inline_pvt_small": 0.2, "inline_pvt_large": 0.2, "inline_swin_base": 0.4}.get(recipe.model.name, 0.1)
    assert recipe.model.options == {"drop_path_rate": drop_path}


def test_dense_models_are_listed_beside_the_papers_numbers(capsys, tmp_path):
    assert main(["models", "--dense", "[ra]*_small", "--json", str(tmp_path / "dense.json")]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    detector, segmenter = json.loads((tmp_path / "dense.json").read_text())
    assert (detector["recipe"], detector["operations"]) == ("retinanet_softpp_small", None)
    assert set(segmenter["operations"]) == {"macs", "newton"}
    assert printed[1] == ["retinanet_softpp_small", "26.43", "10.94", "37.37", "38", "-0.63"]
    assert printed[2][:6] == ["ade20k_upernet_softpp_small", "26.43", "32.42", "58.85", "60", "-1.15"]
    assert printed[2][6:] == ["512", "235.0", "237", "-0.8"]


def test_a_pattern_that_no_dense_model_matches_is_an_error(capsys):
    assert main(["models", "--dense", "yolo*"]) == 2
    assert "no recipe matches 'yolo*'" in capsys.readouterr().err
