import runpy
from pathlib import Path

import numpy as np
import pytest

from softline.data.images import fashion_mnist, open_source
from softline.errors import UserError

ROOT = Path(__file__).parents[3]
PACKAGE = Path(fashion_mnist.__file__).parent
needs_debian = pytest.mark.skipif(not fashion_mnist.DEBIAN.is_dir(), reason="dataset-fashion-mnist is not installed")


@pytest.mark.parametrize(("split", "count"), [("train", 600), ("val", 100)])
def test_embedded_images_are_balanced(split, count):
    source = open_source("embedded", split)
    labels = [source.load(index)[1] for index in range(len(source))]
    assert np.bincount(labels).tolist() == [count] * 10
    assert len(source.classes) == 10
    image, label = source.load(count)
    assert (image.mode, image.size, source.classes[label]) == ("L", (28, 28), "Trouser")
    assert source.name(17) == f"embedded/{'train' if split == 'train' else 'test'}/17"


def test_val_and_test_are_the_same_images():
    val, test = (open_source("embedded", split) for split in ("val", "test"))
    assert all(val.load(index)[0].tobytes() == test.load(index)[0].tobytes() for index in range(0, 1000, 100))


def test_embedded_files_are_small_and_licensed():
    assert sum(file.stat().st_size for file in PACKAGE.glob("*.xz")) < 4_000_000
    assert "Copyright (c) 2017 Zalando SE" in (PACKAGE / "LICENSE").read_text()


@needs_debian
def test_embedded_files_can_be_made_again_byte_for_byte(tmp_path):
    script = ROOT / "tools" / "make_fashion_mnist.py"
    if not script.is_file():
        pytest.skip("no checkout")
    runpy.run_path(str(script))["write"](tmp_path)
    for name in ("train.npy.xz", "test.npy.xz"):
        assert (tmp_path / name).read_bytes() == (PACKAGE / name).read_bytes()


@needs_debian
def test_embedded_images_are_in_the_full_set():
    full, part = open_source("fashion-mnist", "test"), open_source("embedded", "test")
    assert len(full) == 10_000
    known = {(full.load(index)[0].tobytes(), full.load(index)[1]) for index in range(len(full))}
    assert all((part.load(index)[0].tobytes(), part.load(index)[1]) in known for index in range(len(part)))
    assert full.name(3) == "fashion-mnist/test/3"


def test_a_failed_download_names_the_ways_out(monkeypatch, tmp_path):
    from torchvision import datasets

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr(fashion_mnist, "DEBIAN", tmp_path / "absent")
    monkeypatch.setattr(datasets, "FashionMNIST", fail)
    with pytest.raises(UserError, match=r"(?s)could not be downloaded.*no network.*dataset-fashion-mnist.*'embedded'"):
        open_source("fashion-mnist", "train", root=str(tmp_path))


def test_unknown_splits_are_refused():
    with pytest.raises(ValueError, match=r"split must be one of test, train, val; got 'trian'; did you mean 'train'\?"):
        open_source("embedded", "trian")
