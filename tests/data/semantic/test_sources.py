import io
import logging
import pickle
import struct
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import Cityscapes

from softline.data.images import CorruptImageError, find_corrupt, without
from softline.data.sampler import TrainBatches
from softline.data.semantic.classes import palette
from softline.data.semantic.sources import (
    IGNORE,
    CorruptMaskError,
    SemanticImages,
    SemanticSource,
    open_semantic,
)
from softline.data.semantic.transforms import semantic_eval_transform, semantic_train_transform

CAMVID = Path(__file__).parents[4] / "shared" / "data" / "camvid_small"
NAMES = ["sky", "road", "car"]


def write_image(path: Path, size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (10, 100, 200)).save(path)


def write_mask(path: Path, values: object = 0, size: tuple[int, int] = (6, 4), dtype: type = np.uint8) -> None:
    """``values`` fill the mask from its first pixel on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mask = np.zeros(size[0] * size[1], dtype)
    mask[: np.size(values)] = values
    Image.fromarray(mask.reshape(size[1], size[0])).save(path)


@pytest.fixture
def camvid(tmp_path: Path) -> Path:
    """Three images with values 0 to 2 and 3 for "no label"."""
    for name in ("a", "b", "c"):
        write_image(tmp_path / "train" / f"{name}.jpg")
        write_mask(tmp_path / "trainannot" / f"{name}.png", [0, 1, 2, 3])
    return tmp_path


def opened(root: Path, split: str = "train", ignore_index: int | None = 3, **options: Any) -> SemanticSource:
    return open_semantic("folder", root, split, classes=NAMES, ignore_index=ignore_index, **options)


def test_folders_are_read_as_camvid(camvid):
    source = opened(camvid)
    assert isinstance(source, SemanticSource)
    assert (len(source), source.classes) == (3, ("sky", "road", "car"))
    assert source.name(1) == f"{camvid}/train/b.jpg"
    image, labels = source.load(1)
    assert (image.mode, image.size, labels.dtype, labels.shape) == ("RGB", (6, 4), np.uint8, (4, 6))
    assert labels.ravel()[:5].tolist() == [0, 1, 2, IGNORE, 0]


def test_folders_may_be_below_images_and_masks(camvid):
    (camvid / "images").mkdir()
    (camvid / "masks").mkdir()
    (camvid / "train").rename(camvid / "images" / "val")
    (camvid / "trainannot").rename(camvid / "masks" / "val")
    assert opened(camvid, "val").name(0) == f"{camvid}/images/val/a.jpg"


def test_images_may_have_several_formats_and_lie_in_subfolders(camvid):
    write_image(camvid / "train" / "day" / "d.PNG")
    write_mask(camvid / "trainannot" / "day" / "d.png", 2)
    write_image(camvid / "train" / "e.1.jpeg")
    write_mask(camvid / "trainannot" / "e.1.png", 2)
    source = opened(camvid)
    assert [Path(source.name(index)).name for index in range(5)] == ["a.jpg", "b.jpg", "c.jpg", "d.PNG", "e.1.jpeg"]
    assert source.load(3)[1][0, 0] == 2


def test_a_number_of_classes_names_them_by_label(camvid):
    assert open_semantic("folder", camvid, "train", classes=4).classes == ("0", "1", "2", "3")


def test_no_label_may_be_0_and_the_classes_follow(camvid):
    labels = opened(camvid, ignore_index=0).load(0)[1]
    assert labels.ravel()[:5].tolist() == [IGNORE, 0, 1, 2, IGNORE]


def test_all_255_labels_can_be_classes(tmp_path):
    write_image(tmp_path / "train" / "a.png", (16, 16))
    write_mask(tmp_path / "trainannot" / "a.png", np.arange(256), (16, 16))
    labels = open_semantic("folder", tmp_path, "train", classes=255, ignore_index=255).load(0)[1]
    assert labels.ravel().tolist() == list(range(256))
    shifted = open_semantic("folder", tmp_path, "train", classes=255, ignore_index=0).load(0)[1]
    assert shifted.ravel().tolist() == [IGNORE, *range(255)]


@pytest.mark.parametrize("split", ["train", "training"])
def test_ade20k_has_its_classes_from_1_on(tmp_path, split):
    write_image(tmp_path / "images" / "training" / "ADE_train_00000001.jpg")
    write_mask(tmp_path / "annotations" / "training" / "ADE_train_00000001.png", [0, 1, 150])
    source = open_semantic("ade20k", tmp_path, split)
    assert source.load(0)[1].ravel()[:3].tolist() == [IGNORE, 0, 149]
    assert (len(source.classes), source.classes[0], source.classes[149]) == (150, "wall", "flag")
    write_mask(tmp_path / "annotations" / "training" / "ADE_train_00000001.png", [151])
    with pytest.raises(CorruptMaskError, match=r"must be 1 to 150 \(classes\) or 0 \(no label\), got 151 \(1 pixels\)"):
        source.load(0)


def test_ade20k_validates_on_its_validation_folder(tmp_path):
    write_image(tmp_path / "images" / "validation" / "v.jpg")
    write_mask(tmp_path / "annotations" / "validation" / "v.png")
    for split in ("val", "validation"):
        assert open_semantic("ade20k", tmp_path, split).name(0).endswith("images/validation/v.jpg")
    with pytest.raises(ValueError, match="split must be one of train, training, val, validation; got 'test'"):
        open_semantic("ade20k", tmp_path, "test")


@pytest.fixture
def cityscapes(tmp_path: Path) -> Path:
    for city in ("aachen", "bochum"):
        stem = f"{city}_000000_000019"
        write_image(tmp_path / "leftImg8bit" / "train" / city / f"{stem}_leftImg8bit.png", (7, 5))
        masks = tmp_path / "gtFine" / "train" / city
        write_mask(masks / f"{stem}_gtFine_labelIds.png", np.arange(34), (7, 5))
        # as in the release
        write_mask(masks / f"{stem}_gtFine_instanceIds.png", 24001, (7, 5), np.uint16)
        (masks / f"{stem}_gtFine_polygons.json").write_text("{}")
    return tmp_path


def test_cityscapes_label_ids_become_train_ids(cityscapes, caplog):
    with caplog.at_level(logging.WARNING):
        source = open_semantic("cityscapes", cityscapes, "train")
    assert caplog.records == []
    assert len(source) == 2
    assert source.name(1).endswith("leftImg8bit/train/bochum/bochum_000000_000019_leftImg8bit.png")
    expected = [known.train_id if 0 <= known.train_id < 19 else IGNORE for known in Cityscapes.classes[:34]]
    assert [known.id for known in Cityscapes.classes[:34]] == list(range(34))
    assert source.load(1)[1].ravel()[:34].tolist() == expected
    assert len(source.classes) == 19


def test_cityscapes_files_must_hold_label_ids(cityscapes):
    mask = cityscapes / "gtFine" / "train" / "aachen" / "aachen_000000_000019_gtFine_labelIds.png"
    write_mask(mask, [255, 34], (7, 5))
    with pytest.raises(CorruptMaskError, match=r"must be 0 to 33 \(label ids\) or 255 \(no label\), got 34 \(1 pixels"):
        open_semantic("cityscapes", cityscapes, "train").load(0)


def test_palette_masks_are_read_by_their_indices(camvid):
    for bits in (8, 4, 2):
        mask = Image.frombytes("P", (6, 4), bytes([0, 1, 2, 3, 3, 3] * 4))
        mask.putpalette([value for colour in palette(4).tolist() for value in colour])
        mask.save(camvid / "trainannot" / "a.png", bits=bits)
        assert opened(camvid).load(0)[1][0].tolist() == [0, 1, 2, IGNORE, IGNORE, IGNORE]


def refusal(source: SemanticSource, index: int = 0) -> str:
    with pytest.raises(CorruptMaskError) as error:
        source.load(index)
    return str(error.value)


def test_masks_of_another_size_are_refused(camvid):
    write_mask(camvid / "trainannot" / "a.png", size=(5, 4))
    assert refusal(opened(camvid)) == (
        f"mask {camvid}/trainannot/a.png: a mask must have the size of its image, it has 5x4 pixels, "
        f"its image {camvid}/train/a.jpg 6x4; repair it, or leave the image out by --skip-corrupt"
    )


def test_values_that_are_no_class_are_refused(camvid):
    write_mask(camvid / "trainannot" / "a.png", [3, 4, 4, 200])
    assert refusal(opened(camvid)) == (
        f"mask {camvid}/trainannot/a.png: its values must be 0 to 2 (classes) or 3 (no label), "
        "got 4 (2 pixels), 200 (1 pixels); repair it, or leave the image out by --skip-corrupt"
    )
    assert "must be 0 to 2 (classes), got 3 (1 pixels), 4 (2" in refusal(opened(camvid, ignore_index=None))
    write_mask(camvid / "trainannot" / "a.png", np.arange(100, 124))
    assert ", 109 (1 pixels) and 14 more;" in refusal(opened(camvid))


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (Image.new("RGB", (6, 4)), "its mode is RGB of 8 bits"),
        (Image.new("1", (6, 4)), "its mode is 1 of 1 bits"),
        (Image.new("I;16", (6, 4)), "its mode is I;16 of 16 bits"),
        (Image.new("LA", (6, 4)), "its mode is LA of 8 bits"),
    ],
    ids=lambda value: getattr(value, "mode", ""),
)
def test_masks_of_other_kinds_are_refused(camvid, mask, reason):
    mask.save(camvid / "trainannot" / "a.png")
    assert f"a mask must be a PNG of one 8-bit channel or of palette indices, {reason};" in refusal(opened(camvid))


def grey_png(rows: list[bytes], width: int, bits: int) -> bytes:
    """A PNG of packed rows; Pillow itself writes grey of 1, 8 and 16 bits only."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, len(rows), bits, 0, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_grey_masks_of_fewer_bits_are_refused_as_pillow_stretches_them(camvid):
    content = grey_png([bytes([0b00_01_10_11, 0b00_00_00_00])] * 4, 6, 2)
    (camvid / "trainannot" / "a.png").write_bytes(content)
    assert np.asarray(Image.open(io.BytesIO(content)))[0].tolist() == [0, 85, 170, 255, 0, 0]
    assert "its mode is L of 2 bits" in refusal(open_semantic("folder", camvid, "train", classes=255, ignore_index=255))


def test_masks_of_a_lossy_format_are_refused(camvid):
    file = io.BytesIO()
    Image.new("L", (6, 4)).save(file, "JPEG")
    (camvid / "trainannot" / "a.png").write_bytes(file.getvalue())
    assert "or of palette indices, it is JPEG;" in refusal(opened(camvid))


@pytest.mark.parametrize("broken", ["train/a.jpg", "trainannot/a.png"])
@pytest.mark.parametrize("content", [b"", b"text"])
def test_files_that_cannot_be_decoded_are_named(camvid, broken, content):
    (camvid / broken).write_bytes(content)
    with pytest.raises(CorruptImageError, match=rf"{broken} cannot be decoded \(not an image\).*--skip-corrupt"):
        opened(camvid).load(0)


def test_images_of_more_than_8_bits_are_refused(camvid):
    (camvid / "train" / "a.jpg").unlink()
    Image.fromarray(np.full((4, 6), 3000, np.uint16)).save(camvid / "train" / "a.png")
    with pytest.raises(CorruptImageError, match=r"train/a\.png cannot .*8 bits for each colour are needed"):
        opened(camvid).load(0)


def test_grey_images_become_rgb(camvid):
    Image.new("L", (6, 4), 9).save(camvid / "train" / "a.jpg")
    assert opened(camvid).load(0)[0].mode == "RGB"


def test_files_that_vanish_are_not_corrupt(camvid):
    source = opened(camvid)
    (camvid / "trainannot" / "b.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"trainannot/b\.png"):
        find_corrupt(source, threads=1)


def test_corrupt_pairs_are_found_and_left_out(camvid):
    write_mask(camvid / "trainannot" / "a.png", size=(5, 4))
    (camvid / "train" / "c.jpg").write_bytes(b"")
    source = opened(camvid)
    found = find_corrupt(source, threads=2)
    assert [(corrupt.index, corrupt.name) for corrupt in found] == [
        (0, f"{camvid}/trainannot/a.png"),
        (2, f"{camvid}/train/c.jpg"),
    ]
    assert found[0].reason.startswith("a mask must have the size of its image")
    for rest in (source.without([0, 2]), without(source, [0, 2])):
        assert (len(rest), rest.classes, rest.name(0)) == (1, source.classes, f"{camvid}/train/b.jpg")
        assert rest.load(0)[1].ravel()[:3].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="indices must lie between 0 and 2, got 3"):
        source.without([3])


def test_the_error_of_a_mask_survives_pickling(camvid):
    write_mask(camvid / "trainannot" / "a.png", 9)
    with pytest.raises(CorruptMaskError) as error:
        opened(camvid).load(0)
    again = pickle.loads(pickle.dumps(error.value))
    assert (type(again), str(again)) == (CorruptMaskError, str(error.value))


def test_a_corrupt_mask_stops_a_worker_with_its_name(camvid):
    write_mask(camvid / "trainannot" / "b.png", 9)
    dataset = SemanticImages(opened(camvid), semantic_eval_transform())
    with pytest.raises(CorruptMaskError, match=r"mask .*trainannot/b\.png: its values must be 0 to 2") as error:
        list(DataLoader(dataset, num_workers=1))
    # otherwise torch waits 5 seconds for the worker once the iterator in the traceback is collected
    traceback.clear_frames(error.tb)


def test_every_file_without_its_pair_is_listed(camvid):
    for number in range(12):
        write_image(camvid / "train" / f"x{number:02}.jpg")
    write_mask(camvid / "trainannot" / "lost.png")
    with pytest.raises(ValueError, match=r"13 do not: .*; and 3 more; leave them out by --skip-corrupt$") as error:
        opened(camvid)
    assert f"{camvid}/train/x00.jpg has no mask {camvid}/trainannot/x00.png; " in str(error.value)
    assert "x09" in str(error.value)
    assert "x10" not in str(error.value)


def test_a_mask_without_an_image_is_named(camvid):
    write_mask(camvid / "trainannot" / "lost.png")
    with pytest.raises(ValueError, match=r"1 do not: mask .*/trainannot/lost\.png has no image in .*/train; leave"):
        opened(camvid)


def test_two_images_for_one_mask_are_named(camvid):
    write_image(camvid / "train" / "a.png")
    with pytest.raises(ValueError, match=r"1 do not: .*/train/a\.png has the name of .*/train/a\.jpg; leave"):
        opened(camvid)


def test_files_without_their_pair_are_left_out_on_request(camvid):
    write_image(camvid / "train" / "a.png")
    write_image(camvid / "train" / "x.jpg")
    write_mask(camvid / "trainannot" / "lost.png")
    heard = []
    source = opened(camvid, skip_corrupt=True, notify=heard.append)
    assert [Path(source.name(index)).name for index in range(len(source))] == ["b.jpg", "c.jpg"]
    (notice,) = heard
    assert "3 do not and are left out: " in notice
    for name in ("a.png", "x.jpg", "lost.png"):
        assert name in notice
    for path in (camvid / "trainannot").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"none of the .* images in .* has one mask"):
        opened(camvid, skip_corrupt=True, notify=heard.append)


def test_cityscapes_pairs_are_checked_within_their_city(cityscapes):
    (cityscapes / "gtFine" / "train" / "bochum" / "bochum_000000_000019_gtFine_labelIds.png").unlink()
    with pytest.raises(ValueError, match=r"19_leftImg8bit\.png has no mask .*/bochum/.*19_gtFine_labelIds\.png; leave"):
        open_semantic("cityscapes", cityscapes, "train")


def test_other_files_are_counted_in_the_log(camvid, caplog):
    (camvid / "train" / "notes.txt").write_text("seen")
    (camvid / "train" / "._a.jpg").write_text("")
    with caplog.at_level(logging.WARNING):
        assert len(opened(camvid)) == 3
    assert [record.getMessage() for record in caplog.records] == [
        f"1 files in {camvid}/train are not images (.png, .jpg, .jpeg) and are ignored"
    ]


@pytest.mark.parametrize(
    ("open_it", "message"),
    [
        (
            lambda root: opened(root, "test"),
            r"no images for the split 'test': expected .*/test with .*/testannot or .*/images/test with .*/masks/test; "
            r"missing .*/test, .*/testannot, .*/images/test, .*/masks/test$",
        ),
        (lambda root: open_semantic("ade20k", root, "val"), "images/validation must be a folder .* does not exist"),
        (lambda root: open_semantic("cityscapes", root, "val"), "leftImg8bit/val must be a folder .* does not exist"),
        (lambda root: open_semantic("camvid", root, "val"), "layout must be one of ade20k, cityscapes, folder; got"),
        (lambda root: open_semantic("cityscapes", root, "training"), "split must be one of test, train, val; got"),
        (lambda root: open_semantic("folder", root, "train"), "folder needs classes: their names by label, or their"),
        (lambda root: open_semantic("folder", root, "train", classes="sky"), "must be a list of names or a number"),
        (lambda root: open_semantic("folder", root, "train", classes=["a", "a"]), "different names, got 'a' twice"),
        (lambda root: open_semantic("folder", root, "train", classes=[]), "classes must be at least 1, got 0"),
        (lambda root: open_semantic("folder", root, "train", classes=256), "classes must be at most 255, .* got 256"),
        (
            lambda root: opened(root, ignore_index=2),
            r"ignore_index must be 0 or lie between 3 \(classes\) and 255",
        ),
        (lambda root: opened(root, ignore_index=256), "ignore_index must be 0 or lie between .* got 256"),
        (lambda root: open_semantic("ade20k", root, "val", classes=3), "for the layout folder, .*; got classes 3"),
        (lambda root: open_semantic("ade20k", root, "val", ignore_index=0), "for the .*; got ignore_index 0"),
    ],
)
def test_what_cannot_be_opened_is_named(camvid, open_it: Callable[[Path], SemanticSource], message):
    with pytest.raises(ValueError, match=message):
        open_it(camvid)


def test_a_folder_without_images_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "trainannot").mkdir()
    with pytest.raises(ValueError, match=r"train holds no images: expected \*\.png, \*\.jpg, \*\.jpeg"):
        opened(tmp_path)


@pytest.fixture
def noisy(tmp_path: Path) -> SemanticSource:
    """Eight images of random colours and labels."""
    generator = np.random.default_rng(0)
    for index in range(8):
        write_mask(tmp_path / "trainannot" / f"{index}.png", generator.integers(0, 3, 30 * 20), (30, 20))
        (tmp_path / "train").mkdir(exist_ok=True)
        pixels = generator.integers(0, 255, (20, 30, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "train" / f"{index}.png")
    return opened(tmp_path)


def test_samples_do_not_depend_on_workers_or_interruption(noisy):
    dataset = SemanticImages(noisy, semantic_train_transform((16, 16)), seed=5)

    def batches(workers: int, start_step: int = 0) -> list:
        sampler = TrainBatches(8, batch_size=4, seed=3, start_step=start_step, total_steps=4)
        return list(DataLoader(dataset, batch_sampler=sampler, num_workers=workers))

    alone = batches(0)
    for others, expected in ((batches(1), alone), (batches(0, start_step=2), alone[2:])):
        for (images, labels), (expected_images, expected_labels) in zip(others, expected, strict=True):
            assert torch.equal(images, expected_images)
            assert torch.equal(labels, expected_labels)


def test_seed_epoch_and_index_each_change_the_sample(noisy):
    transform = semantic_train_transform((16, 16))
    first = SemanticImages(noisy, transform)
    assert len(first) == 8
    assert torch.equal(first[2][0], first[0, 2][0])
    images = [first[0, 2][0], first[1, 2][0], first[0, 3][0], SemanticImages(noisy, transform, seed=1)[2][0]]
    assert all(not torch.equal(images[i], images[j]) for i in range(4) for j in range(i))


def test_the_seed_is_checked(noisy):
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        SemanticImages(noisy, semantic_eval_transform(), seed=-1)


def test_a_source_can_be_sent_to_another_process(noisy):
    again = pickle.loads(pickle.dumps(SemanticImages(noisy, semantic_train_transform((8, 8)))))
    assert torch.equal(again[1][0], SemanticImages(noisy, semantic_train_transform((8, 8)))[1][0])


@pytest.mark.skipif(not CAMVID.is_dir(), reason="needs ../shared/data/camvid_small")
def test_real_images_are_read():
    train, val = (open_semantic("folder", CAMVID, split, classes=11, ignore_index=11) for split in ("train", "val"))
    assert (len(train), len(val)) == (120, 30)
    assert find_corrupt(train, threads=1) == find_corrupt(val, threads=1) == []
    present = set()
    for index in range(len(val)):
        image, labels = val.load(index)
        assert (image.size, labels.shape) == ((240, 180), (180, 240))
        present |= set(np.unique(labels).tolist())
    assert present == {*range(11), IGNORE}
    image, labels = SemanticImages(train, semantic_train_transform((128, 160)))[3, 7]
    assert (image.shape, labels.shape) == ((3, 128, 160), (128, 160))
