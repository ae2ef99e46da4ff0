"""The network of every recipe, without its data."""

import pytest
import torch
from torch import nn

import softline
from softline.engine.optimizer import create_optimizer
from softline.engine.reading import list_recipes, load_recipe, parse_recipe
from softline.engine.recipe import ModelRecipe, OptimizerRecipe, ScheduleRecipe
from softline.engine.task import build_task, definition_of
from softline.errors import UserError
from tests.engine.small import RECIPE, small_recipe, write_images
from tests.tasks.small_dense import SEGMENTATION, dense_recipe
from tests.tasks.small_sequence import small_recipe as small_sequence_recipe
from tests.tasks.third_party import NumberData, ParityRecipe, definition

# the data of these tells the classes, and nothing else does
UNTOLD = {**dict.fromkeys(("flowers_deit", "linearize_transfer", "linearize_finetune"), 5), "cifar10_small": 10}
COUNTS = {
    "quickstart": 10,
    "softpp_tiny": 1000,
    "imagenet_inline_swin": 1000,
    "coco128_retinanet": 80,
    "mask_rcnn_softpp_tiny": 80,
    "ade20k_upernet": 150,
    "cityscapes_upernet": 19,
    "camvid_small": 11,
    "lra_listops": 10,
    "lra_text": 2,
    "lra_image_small": 10,
}


@pytest.mark.parametrize("name", list_recipes())
def test_every_recipe_builds_its_network(name):
    recipe = load_recipe(name)
    with torch.device("meta"):
        model = softline.build(name, classes=UNTOLD.get(name))
    optimizer = create_optimizer(model, recipe.optimizer, lr_scale=recipe.lr_scale)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


@pytest.mark.parametrize("name", COUNTS)
def test_recipes_tell_how_many_classes_there_are(name):
    recipe = load_recipe(name)
    assert len(definition_of(recipe).known_facts(recipe, None)["classes"]) == COUNTS[name]


def test_the_network_is_the_one_that_is_trained(tmp_path):
    write_images(tmp_path)
    recipes = [small_recipe(tmp_path), small_sequence_recipe(tmp_path)]
    for recipe, classes in zip(recipes, (["dark", "light"], None), strict=True):
        task = build_task(recipe)
        assert definition_of(recipe).known_facts(recipe, classes) == task.facts()
        built, expected = softline.build(recipe, classes=classes).state_dict(), task.model.state_dict()
        assert {key: each.shape for key, each in built.items()} == {key: each.shape for key, each in expected.items()}


def test_recipes_come_as_names_files_and_objects(tmp_path):
    (tmp_path / "mine.yaml").write_text(RECIPE.format(root=tmp_path))
    recipe = parse_recipe(RECIPE.format(root=tmp_path))
    for given in (tmp_path / "mine.yaml", str(tmp_path / "mine.yaml"), recipe):
        model = softline.build(given, classes=["ant", "bee", "cat"])
        assert isinstance(model, nn.Module)
        assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 3)
    named = parse_recipe(RECIPE.format(root=tmp_path), ["--model.options.num_classes=4"])
    assert softline.build(named)(torch.zeros(2, 3, 16, 16)).shape == (2, 4)


def test_no_weights_are_read(tmp_path):
    recipe = small_recipe(tmp_path, f"--model.checkpoint={tmp_path}/none.pth")
    assert softline.build(recipe, classes=2).head.out_features == 2


@pytest.mark.parametrize(
    ("recipe", "classes", "message"),
    [
        ("cifar10_small", None, "data.source cifar10_small does not tell its classes: .* by classes="),
        ("quickstart", 3, "data.source embedded has 10 classes, got classes=3"),
        ("cityscapes_upernet", 150, "data.layout cityscapes has 19 classes, got classes=150"),
        ("lra_text", 3, "data.name text has 2 classes, got classes=3"),
        ("cifar10_small", 0, "classes must be at least 1, got 0"),
        ("cifar10_small", True, "classes must be a whole number, got True"),
        ("cifar10_small", "ten", "classes must be names or their number, got 'ten'"),
        ("cifar10_small", [], "classes must be names or their number"),
        ("quickstrat", None, "no recipe is named 'quickstrat'. Did you mean quickstart"),
        ("nowhere.yaml", None, "no such recipe file: nowhere.yaml"),
    ],
)
def test_mistakes_are_named(recipe, classes, message):
    with pytest.raises(UserError, match=message):
        softline.build(recipe, classes=classes)


def test_directories_named_otherwise_do_not_tell_their_classes(tmp_path):
    recipe = load_recipe("coco128_retinanet", ["--data.source=birds"])
    with pytest.raises(UserError, match=r"data\.source birds does not tell its classes"):
        softline.build(recipe)
    # the name of a directory is a convention, which the caller may know better
    for name, count in (("softpp_tiny", 100), ("lra_image", 5)):
        recipe = load_recipe(name)
        assert len(definition_of(recipe).known_facts(recipe, [""] * count)["classes"]) == count
    counted = dense_recipe(SEGMENTATION, tmp_path, "--data.classes=7", "--data.ignore_index=null")
    assert definition_of(counted).known_facts(counted, None)["classes"] == list("0123456")


def test_tasks_without_classes_refuse_them():
    recipe = ParityRecipe(
        task="parity",
        output="run",
        batch_size=2,
        model=ModelRecipe(name="bits"),
        data=NumberData(),
        optimizer=OptimizerRecipe(lr=1),
        schedule=ScheduleRecipe(epochs=1),
    )
    assert definition.known_facts(recipe, None) == {}
    with pytest.raises(UserError, match="classes has no meaning for the task parity, got 2 of them"):
        definition.known_facts(recipe, ["even", "odd"])
