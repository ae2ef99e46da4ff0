import dataclasses
import math
from functools import cache
from typing import NamedTuple

import pytest
import timm
import torch
from timm.scheduler import CosineLRScheduler

from softline.backbones import MODEL_NAMES
from softline.engine.optimizer import create_optimizer, create_schedule, total_steps
from softline.engine.reading import differing_keys, dump_recipe, list_recipes, load_recipe, parse_recipe
from softline.engine.recipe import EmaRecipe, Recipe
from softline.tasks.classification.build import build_mixup, train_image_transform
from softline.tasks.images import eval_image_transform, image_settings
from softline.tasks.networks import build_model

SMALL = """
task: classification
output: runs/small
batch_size: 4
model: {name: inline_micro, options: {attention: inline, drop_path_rate: 0.1}}
data: {source: embedded, mean: [0.5, 0.5, 0.5]}
optimizer: {lr: 1.0e-3, clip_norm: 1.0}
schedule: {epochs: 2}
"""


@cache
def packaged(name: str) -> Recipe:
    return load_recipe(name)


class Training(NamedTuple):
    """What the papers and their releases say, for all GPUs together and with learning rates scaled to the batch."""

    lr: float
    batch: int
    drop_path: float
    epochs: tuple[int, int, int]
    """Of the cosine, the warm-up in it and the cool-down after it."""
    edge_lrs: tuple[float, float]
    """Where the warm-up starts and where the cosine ends."""
    clip: float | None
    ema: float | None = None
    weight_decay: float = 0.05


def soft(lr: float) -> Training:
    return Training(lr, 1024, 0.1, (300, 10, 0), (1e-6, 5e-5), 1.0, 0.99996)


def inline_swin(gpu_batch: int, drop_path: float) -> Training:
    scale = gpu_batch * 8 / 512
    return Training(5e-4 * scale, gpu_batch * 8, drop_path, (300, 20, 0), (5e-7 * scale, 5e-6 * scale), 5.0)


def inline_pvt(gpu_batch: int, drop_path: float, clip: float | None) -> Training:
    scale = gpu_batch * 8 / 512
    return Training(5e-4 * scale, gpu_batch * 8, drop_path, (300, 5, 10), (1e-6 * scale, 1e-5 * scale), clip)


def inline_cswin(gpu_batch: int, drop_path: float, weight_decay: float) -> Training:
    batch = gpu_batch * 8
    edges = (1e-6 * batch / 512, 1e-5 * batch / 512)
    ema = 0.9996 ** (batch / 4096)
    return Training(5e-4 * batch / 512, batch, drop_path, (300, 20, 10), edges, None, ema, weight_decay)


PUBLISHED = {
    "soft_tiny": soft(1e-3),
    "soft_small": soft(1e-3),
    "soft_medium": soft(3.5e-4),
    "soft_large": soft(3.3e-4),
    "soft_release_tiny": soft(1e-3),
    "soft_release_small": soft(1e-3),
    "soft_release_medium": soft(3.5e-4),
    "soft_release_large": soft(3.3e-4),
    "soft_release_huge": soft(2.7e-4),
    "softpp_tiny": soft(1e-3),
    "softpp_small": soft(1e-3),
    "softpp_medium": soft(4e-4),
    "softpp_large": soft(3.3e-4),
    "softpp_release_tiny": soft(1e-3),
    "softpp_release_small": soft(1e-3),
    "softpp_release_medium": soft(4e-4),
    "softpp_release_large": soft(3.3e-4),
    "softpp_release_huge": soft(2.7e-4),
    "inline_deit_tiny": inline_swin(512, 0.1),
    "inline_deit_small": inline_swin(128, 0.1),
    "inline_deit_base": inline_swin(64, 0.1),
    "inline_swin_tiny": inline_swin(128, 0.2),
    "inline_swin_small": inline_swin(128, 0.3),
    "inline_swin_base": inline_swin(64, 0.5),
    "inline_swin_base_384": Training(1e-5, 256, 0.5, (30, 5, 0), (1e-8, 1e-7), 5.0, None, 1e-8),
    "inline_pvt_tiny": inline_pvt(128, 0.1, None),
    "inline_pvt_small": inline_pvt(128, 0.1, None),
    "inline_pvt_medium": inline_pvt(128, 0.3, 1.0),
    "inline_pvt_large": inline_pvt(64, 0.3, 1.0),
    "inline_cswin_tiny": inline_cswin(128, 0.2, 0.05),
    "inline_cswin_small": inline_cswin(128, 0.4, 0.05),
    "inline_cswin_base": inline_cswin(64, 0.5, 0.1),
    "inline_cswin_base_384": Training(
        2.5e-6, 256, 0.7, (20, 0, 10), (2.5e-6, 2.5e-7), None, 0.9996 ** (256 / 4096), 1e-8
    ),
}


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_reads_back_as_it_was_written(name):
    recipe = packaged(name)
    assert parse_recipe(dump_recipe(recipe)) == recipe
    assert recipe.task == "sequence" or timm.is_model(recipe.model.name)
    # the command of that name writes to runs/quickstart
    assert recipe.output == ("runs/clothes" if name == "quickstart" else f"runs/{name}")


def test_every_model_has_a_recipe_of_its_name():
    models = [name for name in MODEL_NAMES if not name.endswith("_micro")]
    assert sorted(PUBLISHED) == models
    for name in models:
        assert packaged(name).model.name == name


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_says_what_was_published(name):
    recipe, published = packaged(name), PUBLISHED[name]
    optimizer, schedule = recipe.optimizer, recipe.schedule
    assert optimizer.name == "adamw"
    assert optimizer.lr * recipe.lr_scale == pytest.approx(published.lr)
    assert optimizer.weight_decay == published.weight_decay
    assert optimizer.clip_norm == published.clip
    assert recipe.batch_size == published.batch
    assert recipe.model.options == {"drop_path_rate": published.drop_path}
    assert (schedule.epochs, schedule.warmup_epochs, schedule.cooldown_epochs) == published.epochs
    assert schedule.per_epoch == name.startswith("soft")
    assert optimizer.decay_positions == name.startswith(("soft", "inline_pvt"))
    edges = (schedule.warmup_lr * recipe.lr_scale, schedule.min_lr * recipe.lr_scale)
    assert edges == pytest.approx(published.edge_lrs)
    # what is averaged over, 1 / (1 - decay) steps, to a thousandth
    forgotten = None if recipe.ema is None else 1 - recipe.ema.decay
    assert forgotten == (None if published.ema is None else pytest.approx(1 - published.ema, rel=1e-3))


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipe_augments_as_was_published(name):
    recipe = packaged(name)
    augment = dataclasses.asdict(recipe.augment)
    assert augment == {
        "scale": (0.08, 1.0),
        "ratio": (3 / 4, 4 / 3),
        "hflip": 0.5,
        "color_jitter": 0.4,
        "auto_augment": "rand-m9-mstd0.5-inc1",
        "random_interpolation": name.startswith("soft"),
        "erase_prob": 0.25,
        "erase_mode": "pixel",
        "erase_count": 1,
        "mixup": 0.8,
        "cutmix": 1.0,
        "mixup_prob": 1.0,
        "switch_prob": 0.5,
        "smoothing": 0.1,
    }
    assert recipe.precision == ("fp32" if name.startswith("soft") else "fp16")


@pytest.mark.parametrize("name", ["inline_swin_base", "inline_cswin_base"])
def test_fine_tuning_starts_where_the_training_at_224_ended(name):
    assert packaged(f"{name}_384").model.checkpoint == f"{packaged(name).output}/best.pt"


@pytest.mark.parametrize(
    "name",
    [
        "inline_cswin_base",
        "inline_swin_base",
    ],
)
def test_fine_tuning_takes_over_the_weights(tmp_path, name):
    slim = {"embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 8)}
    trained = dataclasses.replace(packaged(name).model, options=slim)
    tuned = dataclasses.replace(packaged(f"{name}_384").model, options=slim, checkpoint=str(tmp_path / "best.pt"))
    source = build_model(trained, 10)
    torch.save({"state_dict": source.state_dict()}, tmp_path / "best.pt")
    model = build_model(tuned, 10)
    torch.testing.assert_close(model.head.weight, source.head.weight)


@pytest.mark.parametrize("name", PUBLISHED)
def test_test_images_are_cropped_as_the_model_says(name):
    data = packaged(name).data
    assert (data.image_size, data.interpolation, data.crop_pct, data.crop_mode) == (None,) * 4


CLASSIFICATION = [name for name in list_recipes() if packaged(name).task == "classification"]


@pytest.mark.parametrize("name", CLASSIFICATION)
def test_recipe_builds_what_it_names(name):
    recipe = packaged(name)
    # the weights of another run are not there
    fresh = dataclasses.replace(recipe.model, checkpoint=None)
    with torch.device("meta"):
        model = build_model(fresh, 10, recipe.data.image_size)
    settings = image_settings(model, recipe.data)
    train_image_transform(recipe.augment, settings)
    eval_image_transform(settings)
    assert (build_mixup(recipe.augment, 10) is None) == (recipe.augment.mixup == recipe.augment.cutmix == 0)
    optimizer = create_optimizer(model, recipe.optimizer, lr_scale=recipe.lr_scale)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


@pytest.mark.parametrize("name", PUBLISHED)
def test_learning_rate_runs_through_the_published_numbers(name):
    recipe, published = packaged(name), PUBLISHED[name]
    epochs, warmup, cooldown = published.epochs
    # a linear layer has no position embedding
    plain = dataclasses.replace(recipe.optimizer, decay_positions=False)
    optimizer = create_optimizer(torch.nn.Linear(2, 2), plain, lr_scale=recipe.lr_scale)
    schedule = create_schedule(optimizer, recipe.schedule, steps_per_epoch=100, lr_scale=recipe.lr_scale)

    def lr_after(epoch: float) -> float:
        schedule.step_update(round(epoch * 100))
        return optimizer.param_groups[0]["lr"]

    assert lr_after(0) == pytest.approx(published.edge_lrs[0] if warmup else published.lr)
    # a cosine that the warm-up replaces at its beginning has sunk a little when the warm-up ends
    assert lr_after(warmup) == pytest.approx(published.lr, rel=0.1)
    assert lr_after(epochs) == pytest.approx(published.edge_lrs[1])
    assert total_steps(recipe.schedule, 100) == (epochs + cooldown) * 100
    assert lr_after(epochs + cooldown) == pytest.approx(published.edge_lrs[1])


def test_rate_of_soft_changes_between_epochs_as_in_its_release():
    """The release calls timm's scheduler with the number of the epoch; the cosine does not wait for the warm-up."""
    recipe = packaged("soft_medium")
    optimizers = [torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=3.5e-4) for _ in range(2)]
    schedule = create_schedule(optimizers[0], recipe.schedule, steps_per_epoch=7)
    timms = CosineLRScheduler(optimizers[1], t_initial=300, lr_min=5e-5, warmup_t=10, warmup_lr_init=1e-6)
    for epoch in (0, 1, 9, 10, 11, 150, 298, 299):
        if epoch < 10:
            expected = 1e-6 + (3.5e-4 - 1e-6) * epoch / 10
        else:
            expected = 5e-5 + (3.5e-4 - 5e-5) * (1 + math.cos(math.pi * epoch / 300)) / 2
        timms.step(epoch)
        for step in range(7 * epoch, 7 * (epoch + 1)):
            schedule.step_update(step)
            ours, theirs = (optimizer.param_groups[0]["lr"] for optimizer in optimizers)
            assert ours == pytest.approx(expected, rel=1e-12)
            assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "exempt"),
    [
        # as released: of the parameters with more than one dimension, those that the releases exempt
        ("soft_tiny", {"stages.3.cls_token"}),
        ("softpp_release_tiny", {"stages.3.cls_token"}),
        ("inline_pvt_tiny", set()),
        ("inline_deit_tiny", {"stages.0.cls_token", "stages.0.position.weight"}),
        (
            "inline_swin_tiny",
            {f"stages.3.blocks.{block}.attn.attention.position_bias" for block in range(2)},
        ),
    ],
)
@pytest.mark.parametrize("layer_decay", [None, 0.9])
def test_weight_decay_is_that_of_the_releases(name, exempt, layer_decay):
    recipe = packaged(name)
    with torch.device("meta"):
        model = build_model(recipe.model, 1000)
    optimizer = create_optimizer(model, dataclasses.replace(recipe.optimizer, layer_decay=layer_decay))
    decays = {parameter: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    named = dict(model.named_parameters())
    assert len(decays) == len(named)
    for key, parameter in named.items():
        expected = 0 if parameter.ndim <= 1 or key in exempt else 0.05
        assert decays[parameter] == expected, key
    positions = sum(key.endswith("position.weight") for key in named)
    assert positions == (0 if "swin" in name else 1 if "deit" in name else 4)


def test_position_embeddings_of_timm_decay_too():
    model = timm.create_model("deit_tiny_patch16_224", depth=1, device="meta")
    recipe = dataclasses.replace(packaged("imagenet").optimizer, decay_positions=True)
    (undecayed,) = (
        group["params"] for group in create_optimizer(model, recipe).param_groups if not group["weight_decay"]
    )
    left = {key for key, value in model.named_parameters() if value.ndim > 1 and any(value is p for p in undecayed)}
    assert left == {"cls_token"}


@pytest.mark.parametrize("name", ["inline_swin_tiny", "inline_cswin_tiny", "resnet18", "vit_base_patch16_rope_224"])
@pytest.mark.parametrize("layer_decay", [None, 0.9])
def test_position_embeddings_that_do_not_exist_cannot_decay(name, layer_decay):
    model = timm.create_model(name, device="meta")
    recipe = dataclasses.replace(packaged("imagenet_soft").optimizer, layer_decay=layer_decay)
    with pytest.raises(ValueError, match=r"decay_positions: true has no effect on a model without position embeddings"):
        create_optimizer(model, recipe)
    create_optimizer(model, dataclasses.replace(recipe, decay_positions=False))


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("schedule: {epochs: 2}", "schedule: {epoch: 2}", r"schedule\.epoch; did you mean schedule\.epochs"),
        ("batch_size: 4", "batchsize: 4", "unknown key batchsize; did you mean batch_size"),
        ("lr: 1.0e-3", "learning_rate: 1.0e-3", r"unknown key optimizer\.learning_rate; known are .*optimizer\.lr"),
        ("batch_size: 4", "batch_size: many", "batch_size must be .*int, got many"),
        ("batch_size: 4", "batch_size: 4.5", "batch_size must be .*int, got 4.5"),
        ("lr: 1.0e-3", "lr: fast", r"optimizer\.lr must be .*float, got fast"),
        ("mean: [0.5, 0.5, 0.5]", "mean: [grey]", r"data\.mean must be .*float.*, got \['grey'\]"),
        ("output: runs/small", "output: small\naugment: {scale: [0.5]}", r"augment\.scale must be .* 2 elements"),
        ("output: runs/small", "output: small\nprecision: int8", "precision must be one of .*'fp16', got int8"),
        ("batch_size: 4", "", "missing key batch_size"),
        ("lr: 1.0e-3, ", "", r"missing key optimizer\.lr"),
        ("name: inline_micro, ", "", r"missing key model\.name"),
        ("task: classification", "", "missing key task: one of .*classification"),
        ("task: classification", "task: clasification", "did you mean 'classification'"),
        ("batch_size: 4", "batch_size: 0", "batch_size must be at least 1, got 0"),
        ("epochs: 2", "epochs: 2, warmup_epochs: 3", r"schedule\.warmup_epochs must be .* at most 2, got 3"),
        ("batch_size: 4", "batch_size: 5\naugment: {mixup: 0.8}", "batch_size / accumulate must be even, got 5 / 1"),
        ("batch_size: 4", "base: quikstart", "no recipe is named 'quikstart'. Did you mean quickstart?"),
        ("batch_size: 4", "base: nowhere.yaml", r"no such recipe file: .*nowhere\.yaml"),
        ("batch_size: 4", "base: [quickstart]", r"base must be the name of a recipe .*, got \['quickstart'\]"),
    ],
)
def test_mistake_in_a_file_is_named(tmp_path, line, instead, message):
    assert line in SMALL
    path = tmp_path / "mistaken.yaml"
    path.write_text(SMALL.replace(line, instead))
    with pytest.raises(ValueError, match=message):
        load_recipe(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold keys and values, such as 'task: classification', got None"),
        ("# nothing yet", "got None"),
        ("classification", "got 'classification'"),
        ("- task\n- output", r"got \['task', 'output'\]"),
        ("model: {name: inline_micro", "is not YAML: .*line 1"),
        ("task: classification\n\toutput: runs", "is not YAML: .*line 2"),
    ],
)
def test_file_without_keys_is_named(tmp_path, text, message):
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"odd\.yaml .*{message}"):
        load_recipe(str(path))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--optimizer.lrr", "1"], r"unknown key optimizer\.lrr; did you mean optimizer\.lr\?"),
        (["--lr", "1"], r"unknown key lr; did you mean optimizer\.lr\?"),
        (["--base", "quickstart"], "unknown key base"),
        (["--model.opts.attention", "softmax"], r"unknown key model\.opts\.attention"),
        (["--batch_size", "many"], "batch_size must be .*int, got many"),
        (["--batch_size"], "--batch_size needs a value"),
        (["--output="], "--output needs a value"),
        (["--batch_size", "4", "8"], "expected --key value, got '8'"),
        (["batch_size=8"], "expected --key value, got 'batch_size=8'"),
        (["--schedule.epochs", "-1"], r"schedule\.epochs must be above 0 and at most 1e\+06, got -1"),
        (["--optimizer.weight_decay", ".nan"], r"optimizer\.weight_decay must be at least 0, got nan"),
        (["--device", "tpu"], "device must be one of 'auto', 'cpu', got tpu"),
    ],
)
def test_mistaken_override_is_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        parse_recipe(SMALL, overrides)


@pytest.mark.parametrize("start", ["one", "two"])
def test_circle_of_bases_is_shown(tmp_path, start):
    (tmp_path / "one.yaml").write_text("base: two.yaml")
    (tmp_path / "two.yaml").write_text("base: one.yaml")
    with pytest.raises(ValueError, match=rf"in a circle: .*{start}\.yaml -> .*\.yaml -> .*{start}\.yaml"):
        load_recipe(str(tmp_path / f"{start}.yaml"))


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"no recipe is named 'soft_tinny'\. Did you mean soft_tiny\?"):
        load_recipe("soft_tinny")


def test_file_builds_on_its_neighbour_and_on_the_package(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: quickstart\noptimizer: {lr: 0.5}\nema: {decay: 0.9}")
    (tmp_path / "yours.yaml").write_text("base: mine.yaml\nbatch_size: 8\nema: null")
    recipe, quickstart = load_recipe(str(tmp_path / "yours.yaml")), load_recipe("quickstart")
    optimizer = dataclasses.replace(quickstart.optimizer, lr=0.5)
    assert recipe == dataclasses.replace(quickstart, optimizer=optimizer, batch_size=8)


@pytest.mark.parametrize("form", ["--{key} {value}", "--{key}={value}"])
@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("optimizer.lr", "1e-2", 0.01),
        ("data.mean", "[0.1,0.2,0.3]", (0.1, 0.2, 0.3)),
        ("data.mean", "null", None),
        ("optimizer.clip_norm", "null", None),
        ("augment.scale", "[0.5,1]", (0.5, 1.0)),
        ("schedule.milestones", "[1,2]", (1.0, 2.0)),
        ("data.source", "../images", "../images"),
        ("model.compile", "true", True),
        ("model.options", "{attention: softmax}", {"attention": "softmax"}),
        ("model.options.attention", "softmax", {"attention": "softmax", "drop_path_rate": 0.1}),
        ("model.options.depths", "[1,1,1,1]", {"attention": "inline", "drop_path_rate": 0.1, "depths": [1, 1, 1, 1]}),
        ("optimizer.options.betas", "[0.9,0.95]", {"betas": [0.9, 0.95]}),
    ],
)
def test_override_replaces_one_value(form, key, value, expected):
    override = form.format(key=key, value=value)
    recipe = parse_recipe(SMALL, override.split(" ", 1) if "=" not in form else [override])
    section, name = key.split(".")[:2]
    assert getattr(getattr(recipe, section), name) == expected
    changed = differing_keys(parse_recipe(SMALL), recipe)
    # what a resumed run may change does not make another recipe
    assert bool(changed) == (key not in recipe.free_keys)
    assert all(f"{other}.".startswith(f"{section}.{name}.") for other in changed)


def test_last_of_several_overrides_counts():
    assert parse_recipe(SMALL, ["--batch_size", "8", "--batch_size", "16"]).batch_size == 16


def test_average_of_the_weights_is_switched_on():
    assert parse_recipe(SMALL, ["--ema.decay", "0.9"]).ema == EmaRecipe(decay=0.9)


def test_average_of_the_weights_is_switched_off():
    assert load_recipe("soft_tiny", ["--ema", "null"]).ema is None


@pytest.mark.parametrize("overrides", [["--ema.decay", "0.5"], ["--ema", "{decay: 0.5}"]])
def test_average_of_the_weights_is_changed(overrides):
    assert load_recipe("soft_tiny", overrides).ema.decay == 0.5
