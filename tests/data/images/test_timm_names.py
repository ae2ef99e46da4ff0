import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

from softline.data.images import (
    CorruptImageError,
    ImageSource,
    ImageStream,
    StreamImages,
    eval_transform,
    find_corrupt,
    open_source,
    timm_names,
)
from softline.errors import UserError

# webdataset leaves its shards open
leaks = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")


@pytest.fixture
def cifar10(tmp_path: Path) -> Path:
    """Three images for training and one for testing, in the layout of torchvision's CIFAR-10."""
    directory = tmp_path / "cifar-10-batches-py"
    directory.mkdir()
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        data = {"data": np.zeros((1, 3072), np.uint8), "labels": [3]}
        (directory / name).write_bytes(pickle.dumps(data))
    names = ["airplane", "automobile", "bird", "cat"]
    (directory / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    return tmp_path


def test_torchvision_sets_are_read_by_index(cifar10, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    for split, count in (("train", 5), ("val", 1), ("test", 1)):
        source = open_source("torch/cifar10", split, root=str(cifar10))
        assert isinstance(source, ImageSource)
        assert (len(source), source.classes[source.load(0)[1]]) == (count, "cat")
        assert source.name(0) == f"torch/cifar10/{split}/0"


def test_corrupt_images_of_torchvision_sets_are_named(folder):
    (folder / "val" / "bee" / "1.jpg").write_bytes(b"text")
    source = timm_names.TorchImages(ImageFolder(folder / "val"), "torch/imagenet")
    assert source.classes == ("ant", "bee")
    with pytest.raises(CorruptImageError, match=r"val/bee/1\.jpg cannot be decoded \(not an image\)"):
        source.load(4)
    assert [corrupt.index for corrupt in find_corrupt(source)] == [4]


def test_torchvision_sets_decode_images_as_all_sources_do(folder, postscript):
    (folder / "val" / "bee" / "1.jpg").write_bytes(postscript)
    source = timm_names.TorchImages(ImageFolder(folder / "val"), "torch/imagenet")
    assert source.load(3)[0].size == (9, 7)
    with pytest.raises(CorruptImageError, match=r"val/bee/1\.jpg cannot be decoded \(not an image\)"):
        source.load(4)


def test_links_in_torchvision_sets_are_refused(folder):
    (folder / "val" / "ant" / "again").symlink_to("..")
    with pytest.raises(UserError, match=r"val/ant/again is a symbolic link to \.\.: links inside a dataset"):
        timm_names.TorchImages(ImageFolder(folder / "val"), "torch/imagenet")


def test_unknown_and_unreachable_torchvision_sets_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="timm cannot open 'torch/nothing': Unknown torchvision dataset nothing"):
        open_source("torch/nothing", "train", root=str(tmp_path))
    with pytest.raises(ValueError, match="the source 'torch/cifar10' needs root"):
        open_source("torch/cifar10", "train")
    with pytest.raises(ValueError, match="split must be one of test, train, val; got 'trian'"):
        open_source("torch/cifar10", "trian", root=str(tmp_path))
    with pytest.raises(ValueError, match=f"'torch/image_folder' must be given as a directory: {tmp_path}"):
        open_source("torch/image_folder", "val", root=str(tmp_path))

    def fail(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", fail)
    with pytest.raises(UserError, match=r"torch/cifar10 is not in .* and could not be downloaded: no network"):
        open_source("torch/cifar10", "train", root=str(tmp_path))


@pytest.mark.parametrize(
    ("source", "package"),
    [("hfds/x", "datasets"), ("hfids/x", "datasets"), ("tfds/x", "tensorflow-datasets"), ("wds/x", "webdataset")],
)
def test_a_missing_package_is_named(monkeypatch, source, package):
    monkeypatch.setattr(timm_names, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=f"needs the package {package}: pip install {package}"):
        open_source(source, "train", root="x")


@pytest.fixture
def shards(tmp_path: Path, pack, picture) -> Callable[..., str]:
    """Two shards of four images for training, one for validation."""
    pytest.importorskip("webdataset")

    def write(photo: bytes | None = None) -> str:
        for shard, start in (("train-0", 0), ("train-1", 4), ("val-0", 8)):
            members = {}
            for number in range(start, start + 4):
                members[f"{number:02}.jpg"] = photo or picture(number)
                members[f"{number:02}.cls"] = str(number % 3).encode()
            pack(tmp_path / f"{shard}.tar", members)
        splits = {
            name: {"name": name, "num_samples": 4 * len(files), "filenames": files, "shard_lengths": [4] * len(files)}
            for name, files in {"train": ["train-0.tar", "train-1.tar"], "validation": ["val-0.tar"]}.items()
        }
        (tmp_path / "_info.json").write_text(json.dumps({"splits": splits}))
        return str(tmp_path)

    return write


@leaks
def test_a_shard_that_ends_in_a_damaged_header_is_refused(shards):
    """webdataset takes it for the end, and would yield 2 of 4 images."""
    root = Path(shards())
    content = bytearray((root / "val-0.tar").read_bytes())
    content[content.index(b"10.jpg") + 100] ^= 1
    (root / "val-0.tar").write_bytes(content)
    with pytest.raises(UserError, match=r"val-0\.tar must be"):
        list(open_source("wds/images", "val", root=str(root)))


@leaks
def test_shards_have_as_many_images_as_their_description_says(shards):
    root = shards()
    info = Path(root, "_info.json")
    info.write_text(info.read_text().replace("[4]", "[5]"))
    with pytest.raises(UserError, match="holds 4 samples, and shard_lengths says 5"):
        list(open_source("wds/images", "val", root=root))


@leaks
def test_webdatasets_are_read_in_order(shards):
    root = shards()
    val = open_source("wds/images", "val", root=root)
    assert isinstance(val, ImageStream)
    assert not isinstance(val, ImageSource)
    assert (len(val), val.classes, [label for _, label in val]) == (4, (), [2, 0, 1, 2])
    train = open_source("wds/images", "train", root=root)
    train.set_epoch(1)
    assert (len(train), len(list(train))) == (8, 8)
    # each worker reads its own shards, even after a pass in this process
    loader = DataLoader(StreamImages(val, eval_transform(8)), num_workers=2)
    assert sorted(label.item() for _, label in loader) == [0, 1, 2, 2]


@leaks
def test_broken_images_of_webdatasets_are_not_passed_over(shards):
    stream = open_source("wds/images", "val", root=shards(b"text"))
    with pytest.raises(ValueError, match=r"an image of wds/images/validation cannot be decoded \(not an image\)"):
        list(stream)


@leaks
def test_images_of_webdatasets_start_no_program(shards, postscript):
    stream = open_source("wds/images", "val", root=shards(postscript))
    with pytest.raises(UserError, match=r"an image of wds/images/validation cannot be decoded \(not an image\)"):
        list(stream)


def test_commands_and_addresses_are_no_directories_of_shards(tmp_path, monkeypatch):
    pytest.importorskip("webdataset")
    monkeypatch.chdir(tmp_path)
    for root in (f"pipe:touch {tmp_path}/harmed;", "http://localhost:9/shards", "hf://x/y"):
        with pytest.raises(UserError, match="root of the source 'wds/images' must be a local directory, got "):
            open_source("wds/images", "val", root=root)
    # even if there is a directory of that name
    (tmp_path / "pipe:touch harmed;").mkdir()
    with pytest.raises(UserError, match=r"must hold _info\.json with"):
        open_source("wds/images", "val", root="pipe:touch harmed;")
    assert not (tmp_path / "harmed").exists()


def test_a_shard_that_was_cut_at_a_header_is_refused(shards, tmp_path):
    root = shards()
    content = (tmp_path / "val-0.tar").read_bytes()
    (tmp_path / "val-0.tar").write_bytes(content[: len(content) // 4096 * 2048])
    with pytest.raises(UserError, match=r"val-0\.tar must be a complete \.tar file: it has no end marker"):
        open_source("wds/images", "val", root=root)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"filenames": ["/etc/hostname"]}, "filenames in .* must be a file below .*: it must not be an absolute path"),
        ({"filenames": ["../val-0.tar"]}, r"it must not contain '\.\.', got '\.\./val-0\.tar'"),
        ({"filenames": "val-0.tar"}, "filenames in .* must be list"),
        ({"filenames": []}, "must have a length for each file, it has 0 filenames and 1 shard_lengths"),
        ({"num_samples": "4"}, "num_samples in .* must be int, got '4'"),
        ({"num_samples": -4}, "num_samples in .* must be at least 1, got -4"),
        ({"shard_lengths": [1.5]}, "shard_lengths in .* must be list"),
    ],
)
def test_a_damaged_description_of_shards_is_named(shards, tmp_path, change, problem):
    root = shards()
    info = json.loads((tmp_path / "_info.json").read_text())
    info["splits"]["validation"] |= change
    (tmp_path / "_info.json").write_text(json.dumps(info))
    with pytest.raises(UserError, match=problem):
        open_source("wds/images", "val", root=root)


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "[]", '{"splits": []}', '{"splits": {"val": 3}}'])
def test_a_description_of_shards_of_another_kind_is_named(shards, tmp_path, content):
    root = shards()
    (tmp_path / "_info.json").write_text(content)
    with pytest.raises(UserError, match=f"^{tmp_path}"):
        open_source("wds/images", "val", root=root)


def test_incomplete_webdatasets_are_refused(shards, tmp_path):
    root = shards()
    with pytest.raises(ValueError, match="wds/images has no split 'nothing'; it has train, validation"):
        open_source("wds/images", "nothing", root=root)
    (tmp_path / "_info.json").unlink()
    with pytest.raises(ValueError, match=r"must hold _info\.json with"):
        open_source("wds/images", "train", root=root)


@pytest.fixture
def hugging_face(folder: Path) -> str:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    return str(folder)


def test_hugging_face_sets_are_read_by_index(hugging_face, folder, tmp_path):
    (folder / "val" / "bee" / "1.jpg").write_bytes(b"text")
    # datasets takes a folder named val for its split validation
    source = open_source(f"hfds/{hugging_face}", "val", root=str(tmp_path / "cache"))
    assert isinstance(source, ImageSource)
    assert (len(source), source.classes) == (6, ("ant", "bee"))
    assert [source.load(index)[1] for index in (0, 5)] == [0, 1]
    assert source.name(5).endswith("val/bee/2.jpg")
    assert [corrupt.index for corrupt in find_corrupt(source)] == [4]
    with pytest.raises(ValueError, match="has no split 'extra'; it has train, validation"):
        open_source(f"hfds/{hugging_face}", "extra", root=str(tmp_path / "cache"))


def test_what_timm_cannot_stream_is_said(hugging_face, tmp_path):
    message = rf"hfids/.*; use hfds/{hugging_face}"
    with pytest.raises(ValueError, match=message):
        open_source(f"hfids/{hugging_face}", "train", root=str(tmp_path / "cache"))
