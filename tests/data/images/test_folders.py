import logging
import shutil
import tarfile
from pathlib import Path

import pytest

from softline.data.images import ImageSource, check_same_classes, open_source
from softline.errors import UserError

CIFAR = Path(__file__).parents[4] / "shared" / "data" / "cifar10_small"


def content(source: ImageSource) -> list[tuple[bytes, int]]:
    return [(image.tobytes(), label) for image, label in map(source.load, range(len(source)))]


def test_folders_are_classes(folder):
    source = open_source(str(folder), "train")
    assert source.classes == ("ant", "bee")
    assert [label for _, label in content(source)] == [0, 0, 0, 1, 1, 1]
    assert source.name(4) == f"{folder}/train/bee/1.jpg"
    assert source.load(4)[0].size == (9, 7)


def test_classes_that_are_numbers_stand_in_order_of_value(folder):
    for split in ("train", "val"):
        (folder / split / "ant").rename(folder / split / "10")
        (folder / split / "bee").rename(folder / split / "9")
    assert open_source(str(folder), "train").classes == ("9", "10")


def test_val_is_the_first_of_val_validation_and_test(folder, picture):
    shutil.copytree(folder / "val", folder / "test")
    (folder / "test" / "ant" / "more.png").write_bytes(picture(kind="PNG"))
    assert len(open_source(str(folder), "val")) == 6
    assert len(open_source(str(folder), "test")) == 7
    shutil.rmtree(folder / "val")
    assert len(open_source(str(folder), "val")) == 7
    (folder / "test").rename(folder / "validation")
    assert open_source(str(folder), "val").name(0) == f"{folder}/validation/ant/0.jpg"


def test_class_folders_alone_are_for_evaluation(folder):
    assert len(open_source(str(folder / "val"), "val")) == 6
    with pytest.raises(ValueError, match=r"no images for the split 'train': expected .*/val/train/<class>/\*\.jpg"):
        open_source(str(folder / "val"), "train")


def test_a_missing_split_is_not_replaced_by_another(folder):
    shutil.rmtree(folder / "val")
    with pytest.raises(ValueError, match=r"expected .*/val/<class>/.*or .*/test/<class>.*; found the split train only"):
        open_source(str(folder), "val")


def test_folders_without_images_are_refused(folder, tmp_path):
    (folder / "train" / "cow").mkdir()
    with pytest.raises(ValueError, match=r"class folder .*/train/cow holds no images \(\.png, \.jpg, \.jpeg\)"):
        open_source(str(folder), "train")
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"empty/train holds no images: expected .*/train/<class>/<image>"):
        open_source(str(tmp_path / "empty"), "train")


def test_images_out_of_place_are_refused(folder, picture):
    (folder / "train" / "0.jpg").write_bytes(picture())
    with pytest.raises(ValueError, match=r"train/0\.jpg is out of place: expected .*/train/<class>/<image>"):
        open_source(str(folder), "train")


def test_images_may_lie_deeper_in_their_class(folder, picture):
    before = open_source(str(folder), "train")
    (folder / "train" / "ant" / "images").mkdir()
    (folder / "train" / "ant" / "images" / "new.jpg").write_bytes(picture())
    source = open_source(str(folder), "train")
    assert source.classes == before.classes
    assert len(source) == len(before) + 1
    (index,) = [i for i in range(len(source)) if source.name(i).endswith("ant/images/new.jpg")]
    assert source.classes[source.load(index)[1]] == "ant"


def test_other_files_are_counted_in_the_log(folder, caplog):
    (folder / "train" / "ant" / "notes.txt").write_text("seen")
    (folder / "train" / "ant" / ".hidden").write_text("")
    with caplog.at_level(logging.WARNING):
        assert len(open_source(str(folder), "train")) == 6
    assert [record.getMessage() for record in caplog.records] == [
        f"1 files in {folder}/train are not images (.png, .jpg, .jpeg) and are ignored"
    ]


def test_classes_must_agree(folder):
    train = open_source(str(folder), "train")
    check_same_classes(train, open_source(str(folder), "val"))
    (folder / "val" / "bee").rename(folder / "val" / "wasp")
    message = "same classes, got 2 and 2; missing in validation: bee; only in validation: wasp"
    with pytest.raises(ValueError, match=message):
        check_same_classes(train, open_source(str(folder), "val"))


def test_long_lists_of_classes_are_cut(folder):
    train = open_source(str(folder), "train")
    for number in range(14):
        shutil.copytree(folder / "val" / "ant", folder / "val" / f"c{number}")
    with pytest.raises(ValueError, match=r"missing in validation: none; only in validation: c0, .*, c9 and 4 more"):
        check_same_classes(train, open_source(str(folder), "val"))


def test_a_loop_of_links_does_not_multiply_the_images(folder):
    (folder / "train" / "ant" / "again").symlink_to(folder / "train")
    with pytest.raises(UserError, match=rf"ant/again is a symbolic link to {folder}/train: links inside a dataset"):
        open_source(str(folder), "train")


def test_a_split_may_be_a_link_but_not_to_the_dataset_itself(folder, tmp_path):
    expected = content(open_source(str(folder), "train"))
    (folder / "train").rename(tmp_path / "elsewhere")
    (folder / "train").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(folder)
    assert content(open_source(str(tmp_path / "link"), "train")) == expected
    (folder / "train").unlink()
    (folder / "train").symlink_to(folder)
    with pytest.raises(UserError, match=rf"images/train is a symbolic link to {folder}, which contains it"):
        open_source(str(folder), "train")


def members(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.jpg")}


def test_a_tar_file_is_read_like_the_directory_it_holds(folder, tmp_path, pack):
    tar = pack(tmp_path / "set.tar", {f"./{name}": data for name, data in members(folder).items()})
    for split in ("train", "val"):
        packed, plain = open_source(str(tar), split), open_source(str(folder), split)
        assert packed.classes == plain.classes
        assert content(packed) == content(plain)
    assert packed.name(0) == f"{tar}/val/ant/0.jpg"


def test_splits_and_classes_may_be_tar_files(folder, tmp_path, pack):
    expected = content(open_source(str(folder), "train"))
    classes = {
        f"{name}.tar": pack(tmp_path / "class.tar", members(folder / "train" / name)).read_bytes()
        for name in ("ant", "bee")
    }
    (tmp_path / "packed").mkdir()
    pack(tmp_path / "packed" / "train.tar", classes)
    source = open_source(str(tmp_path / "packed"), "train")
    assert content(source) == expected
    assert source.name(5) == f"{tmp_path}/packed/train.tar/bee/2.jpg"


def test_a_tar_file_of_classes_alone_is_for_evaluation(folder, tmp_path, pack):
    tar = pack(tmp_path / "classes.tar", members(folder / "val"))
    assert content(open_source(str(tar), "val")) == content(open_source(str(folder), "val"))
    with pytest.raises(ValueError, match=r"classes\.tar has no images for the split 'train'"):
        open_source(str(tar), "train")


def test_a_tar_file_cut_at_a_header_has_not_fewer_images(folder, tmp_path, pack):
    tar = pack(tmp_path / "set.tar", members(folder))
    with tarfile.open(tar) as whole:
        end = whole.getmembers()[7].offset
    tar.write_bytes(tar.read_bytes()[:end])
    with pytest.raises(UserError, match=r"set\.tar must be .*: it ends after 7 members without the end marker"):
        open_source(str(tar), "train")


def test_other_files_in_a_tar_file_are_counted_in_the_log(folder, tmp_path, pack, caplog):
    tar = pack(tmp_path / "set.tar", members(folder) | {"train/ant/notes.txt": b"seen"})
    with caplog.at_level(logging.WARNING):
        assert len(open_source(str(tar), "train")) == 6
    assert [record.getMessage() for record in caplog.records] == [
        f"1 files in {tar} are not images (.png, .jpg, .jpeg) and are ignored"
    ]


def test_broken_tar_files_are_named(tmp_path, pack):
    (tmp_path / "text.tar").write_text("no archive")
    with pytest.raises(ValueError, match=r"text\.tar must be an uncompressed, complete \.tar file"):
        open_source(str(tmp_path / "text.tar"), "val")
    empty = pack(tmp_path / "empty.tar", {})
    with pytest.raises(ValueError, match=r"empty\.tar holds no images"):
        open_source(str(empty), "val")


@pytest.mark.skipif(not CIFAR.is_dir(), reason="needs ../shared/data/cifar10_small")
def test_real_images_are_read():
    train, val = (open_source(str(CIFAR), split) for split in ("train", "val"))
    check_same_classes(train, val)
    assert (len(train), len(val), len(val.classes)) == (5000, 1000, 10)
    image, label = val.load(999)
    assert (image.size, val.classes[label]) == ((32, 32), "truck")
