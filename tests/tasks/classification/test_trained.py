import pytest
import timm
import torch
from timm.models import save_for_hf

from softline.engine.checkpoint import load_checkpoint
from softline.engine.train import train
from softline.errors import UserError
from softline.tasks.classification.task import Classification
from softline.tasks.loading import load_trained
from tests.engine.small import evaluated, small_recipe, write_images


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    write_images(root)
    train(small_recipe(root, "--schedule.epochs=1", "--ema.decay=0.5", "--data.mean=[0.4, 0.5, 0.6]"))
    return root


def test_checkpoint_scores_what_training_logged(root):
    content = load_checkpoint(root / "run/last.pt")
    [(on, result)] = evaluated(load_trained(str(root / "run/last.pt")), f"{root}/data")
    assert (on, result.samples) == ({"size": 16}, 18)
    assert result.metrics == pytest.approx(content["metrics"], rel=1e-6)


def test_averaged_weights_are_used(root):
    content = load_checkpoint(root / "run/last.pt")
    weights = load_trained(str(root / "run/last.pt")).model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in content["state_dict_ema"].items())
    assert any(not torch.equal(weights[name], tensor) for name, tensor in content["state_dict"].items())


def test_images_are_prepared_as_in_training(root):
    trained = load_trained(str(root / "run/last.pt"))
    assert (trained.name, trained.classes) == ("softpp_micro", ("dark", "light"))
    assert trained.settings["image_size"] == 16
    assert tuple(trained.settings["mean"]) == (0.4, 0.5, 0.6)
    assert trained.settings["mode"] == "RGB"


def test_checkpoint_is_used_without_the_data_it_was_trained_on(root, tmp_path):
    image = tmp_path / "image.png"
    image.write_bytes((root / "data/val/dark/000.png").read_bytes())
    (root / "data").rename(root / "away")
    try:
        found = load_trained(str(root / "run/last.pt")).predict(str(image))
    finally:
        (root / "away").rename(root / "data")
    assert sorted(found.classes) == ["dark", "light"]
    assert sum(found.probabilities) == pytest.approx(1)


def test_directory_that_timm_saved_gives_the_same_predictions(root, tmp_path):
    model = timm.create_model("softpp_micro", num_classes=2, attention="inline", img_size=32).eval()
    arguments = {"attention": "inline", "img_size": 32}
    save_for_hf(
        model, tmp_path / "saved", model_args=arguments, model_config={"num_classes": 2, "label_names": ["a", "b"]}
    )
    trained = load_trained(str(tmp_path / "saved"))
    assert trained.classes == ("a", "b")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(trained.model.eval()(images), model(images))


def test_labels_without_names_are_numbers(root, tmp_path):
    model = timm.create_model("resnet10t", num_classes=3)
    save_for_hf(model, tmp_path / "saved", model_config={"num_classes": 3})
    trained = load_trained(str(tmp_path / "saved"))
    assert (trained.task, trained.classes) == ("classification", ())
    assert sorted(trained.predict(root / "data/val/dark/000.png").classes) == ["0", "1", "2"]


def test_data_of_another_number_of_classes_is_refused(root, tmp_path):
    model = timm.create_model("resnet10t", num_classes=3)
    save_for_hf(model, tmp_path / "saved", model_config={"num_classes": 3})
    with pytest.raises(ValueError, match=r"data has 2 classes, the model 3"):
        evaluated(load_trained(str(tmp_path / "saved")), f"{root}/data")


def test_labels_follow_the_names_of_the_classes(root):
    """Data that names the same classes in another order scores the same."""
    trained = load_trained(str(root / "run/last.pt"))
    [(_, usual)] = evaluated(trained, f"{root}/data")
    head = trained.model.get_classifier()
    with torch.no_grad():
        head.weight.copy_(head.weight.flip(0))
        head.bias.copy_(head.bias.flip(0))
    trained.classes = trained.classes[::-1]
    [(_, again)] = evaluated(trained, f"{root}/data")
    assert again.metrics == pytest.approx(usual.metrics, rel=1e-6)


def test_sizes_do_not_influence_each_other(root):
    trained = load_trained(str(root / "run/last.pt"))
    [(_, alone)] = evaluated(trained, f"{root}/data", sizes=[16])
    [_, (_, after)] = evaluated(trained, f"{root}/data", sizes=[40, 16])
    assert after.metrics == alone.metrics


@pytest.mark.parametrize("label", [-1, 2])
def test_labels_without_a_class_are_named(label):
    """As shards may have them, which name no classes."""
    task = Classification(torch.nn.Identity(), ["dark", "light"])
    assert task.collate([(torch.zeros(3), 1)])[1].tolist() == [1]
    with pytest.raises(UserError, match=rf"labels must be from 0 to 1, one for each class, got {label}"):
        task.collate([(torch.zeros(3), 0), (torch.zeros(3), label)])
