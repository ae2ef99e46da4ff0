from dataclasses import replace

import pytest
import torch
from PIL import Image

from softline.analysis.subjects import choose_pictures, choose_sets, open_subject, open_subjects, read_pictures
from softline.data.images.photographs import PHOTOGRAPHS, open_photograph
from softline.engine.train import train
from softline.errors import UserError
from tests.engine.small import small_recipe, write_images


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of a few steps, on images of three classes."""
    root = tmp_path_factory.mktemp("runs")
    write_images(root, train=4, val=6, classes=("dark", "grey", "light"))
    for attention in ("softpp", "inline"):
        options = [f"--model.options.attention={attention}", f"--output={root / attention / 'seed0'}"]
        train(small_recipe(root, "--schedule.epochs=1", *options))
    return root


def test_a_checkpoint_brings_its_classes_images_and_settings(runs):
    subject = open_subject(str(runs / "softpp" / "seed0" / "last.pt"))
    assert subject.name == "softpp_micro"
    assert subject.trained
    assert subject.classes == ("dark", "grey", "light")
    pictures = choose_pictures(subject, [], 6)
    assert [picture.label for picture in pictures] == [0, 0, 1, 1, 2, 2]
    assert subject.prepare(pictures[0].image).shape == (3, 16, 16)
    seen, logits = subject.look(subject.prepare(pictures[0].image, 56)[None])
    assert seen[0].grid_size == (14, 14)
    assert logits.shape == (1, 3)


def test_checkpoints_are_called_by_what_tells_them_apart(runs):
    paths = [str(runs / name / "seed0" / "last.pt") for name in ("softpp", "inline")]
    assert [subject.name for subject in open_subjects(paths)] == ["softpp", "inline"]
    assert [subject.name for subject in open_subjects([f"mine={paths[0]}", paths[1]])] == ["mine", "softpp_micro"]
    with pytest.raises(ValueError, match="several models are called softpp_micro: name them apart by NAME=MODEL"):
        open_subjects(["softpp_micro", "softpp_micro"])


def test_a_model_by_name_is_fresh_and_repeatable():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, second = (open_subject("softpp_micro:attention=linear") for _ in range(2))
    assert not first.trained
    assert first.layers[0].operator == "linear"
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [picture.name for picture in choose_pictures(first, [], 9)] == list(PHOTOGRAPHS)


def test_images_shown_are_those_prepared():
    subject = open_subject("softpp_micro")
    grey = Image.new("RGB", (64, 64), (128, 128, 128))
    torch.testing.assert_close(subject.shown(subject.prepare(grey)), torch.full((3, 32, 32), 128 / 255))


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_the_photographs_can_be_opened(name):
    image = open_photograph(name)
    assert image.mode == "RGB"
    assert 300 <= min(image.size) <= max(image.size) <= 640


def test_folders_are_searched_throughout_and_in_order(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.png", "a.jpg", "deep/c.png", "._a.jpg"):
        Image.new("RGB", (8, 8)).save(tmp_path / name, format="PNG")
    (tmp_path / "notes.txt").write_text("no image")
    assert [picture.name for picture in read_pictures([str(tmp_path)], 9)] == ["a.jpg", "b.png", "c.png"]
    assert len(read_pictures([str(tmp_path)], 2)) == 2


def test_named_images_are_sets_of_their_own(tmp_path):
    for name in ("a/1.png", "a/2.png", "b/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    subject = open_subject("softpp_micro")
    texts = [f"A={tmp_path / 'a'}", f"B={tmp_path / 'b'}", f"A={tmp_path / 'b'}"]
    found = choose_sets(subject, texts, 9)
    assert {name: len(pictures) for name, pictures in found.items()} == {"A": 3, "B": 1}
    assert {name: len(pictures) for name, pictures in choose_sets(subject, texts, 1).items()} == {"A": 1, "B": 1}
    assert list(choose_sets(subject, [str(tmp_path / "a"), str(tmp_path / "b")], 9)) == [""]
    assert len(choose_sets(subject, [], 9)[""]) == len(PHOTOGRAPHS)
    with pytest.raises(ValueError, match=r"either all images are given as NAME=PATH or none of them, got .*b' without"):
        choose_sets(subject, [texts[0], str(tmp_path / "b")], 9)
    with pytest.raises(ValueError, match="images are PATH or NAME=PATH, got 'A='"):
        choose_sets(subject, ["A="], 9)


def test_bad_images_are_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} holds no images"):
        read_pictures([str(tmp_path)], 4)
    with pytest.raises(ValueError, match=r"no such image: nowhere\.png"):
        read_pictures(["nowhere.png"], 4)
    (tmp_path / "text.png").write_text("text")
    with pytest.raises(ValueError, match=r"text.png cannot be decoded \(not an image\)"):
        read_pictures([str(tmp_path / "text.png")], 4)


def test_models_without_attention_to_show_are_refused():
    with pytest.raises(ValueError, match=r"resnet18 .* has no attention to show"):
        open_subject("resnet18")
    with pytest.raises(ValueError, match="no such checkpoint: runs/nowhere/best"):
        open_subject("runs/nowhere/best")
    with pytest.raises(ValueError, match="softpp_tny"):
        open_subject("softpp_tny")


@pytest.mark.parametrize("source", ["hfds/someone/pictures", "torch/cifar10", "fashion-mnist", "wds/shards"])
def test_the_data_that_a_checkpoint_names_is_not_fetched(source):
    subject = replace(open_subject("softpp_micro"), data=(source, "val", None))
    with pytest.raises(UserError, match=f"the images of {source}.* may have to be fetched: name files by --images"):
        choose_pictures(subject, [], 1)
