import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from softline.data.images import CorruptImageError
from softline.data.sequences.interface import SequenceError, SequenceSamples, SequenceSource
from softline.data.sequences.pixels import luma, open_grey_images, open_pathfinder
from softline.errors import UserError

PHOTOGRAPHS = Path(__file__).parents[4] / "shared" / "data" / "cifar10_small"
TRAIN_BATCHES = [f"data_batch_{number}" for number in range(1, 6)]


def names(source: SequenceSource) -> list[str]:
    return [source.name(index) for index in range(len(source))]


def dump(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        pickle.dump(content, file, protocol=2)


def colours(rows: int, red: int = 0, green: int = 0, blue: int = 0) -> np.ndarray:
    """Images of one colour, planes after each other [rows, 3072]."""
    return np.repeat(np.array([[red, green, blue]], np.uint8), 1024, axis=1).repeat(rows, axis=0)


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """Five batches of 4 training images whose grey values and labels tell them apart, and one of 3 test images."""
    folder = tmp_path / "cifar-10-batches-py"
    dump(folder / "batches.meta", {b"label_names": [b"cat", b"dog"], b"num_vis": 3072})
    for batch, name in enumerate(TRAIN_BATCHES):
        data = np.stack([colours(1, *[10 * batch + row] * 3)[0] for row in range(4)])
        dump(folder / name, {b"data": data, b"labels": [0, 1, 1, 0], b"batch_label": b"x"})
    dump(folder / "test_batch", {b"data": colours(3, red=255), b"labels": [1, 0, 1]})
    return tmp_path


@pytest.mark.parametrize(
    ("colour", "value"),
    [
        ((255, 255, 255), 255),
        # 0.2989 * 255.5 = 76.4, 0.587 * 255.5 = 149.98, 0.114 * 255.5 = 29.1
        ((255, 0, 0), 76),
        ((0, 255, 0), 149),
        ((0, 0, 255), 29),
        # (2.989 + 11.74 + 3.42) * 255.5 / 255 = 18.18
        ((10, 20, 30), 18),
        ((0, 0, 0), 0),
        # 0.2989 * 3 and 0.2989 * 4 lie on both sides of 1
        ((3, 0, 0), 0),
        ((4, 0, 0), 1),
    ],
)
def test_grey_is_weighted_and_truncated_as_in_the_benchmark(colour, value):
    assert luma(np.array(colour, np.uint8)[:, None]).tolist() == [value]


def test_grey_colours_keep_their_values():
    values = np.arange(256, dtype=np.uint8)
    assert np.array_equal(luma(np.stack([values] * 3)), values)


def test_batches_are_read_row_by_row(cifar):
    data = np.zeros((1, 3, 32, 32), np.uint8)
    data[0, 0, 0, 1], data[0, 1, 1, 0], data[0, 2, 31, 31] = 255, 255, 255
    dump(cifar / "cifar-10-batches-py" / "test_batch", {b"data": data.reshape(1, 3072), b"labels": [1]})
    source = open_grey_images(cifar, "test")
    assert isinstance(source, SequenceSource)
    assert (source.classes, source.vocabulary, source.max_length, source.parts) == (("cat", "dog"), 512, 1024, 1)
    (tokens,), label = source.load(0)
    assert (tokens.dtype, tokens.shape, label) == (np.uint16, (1024,), 1)
    assert {int(place): int(tokens[place]) for place in np.flatnonzero(tokens)} == {1: 76, 32: 149, 1023: 29}


@pytest.mark.parametrize("below", ["", "cifar-10-batches-py"])
def test_the_root_may_be_the_folder_of_the_batches_or_hold_it(cifar, below):
    source = open_grey_images(cifar / below, "test")
    assert names(source) == [f"{cifar}/cifar-10-batches-py/test_batch: image {row}" for row in range(3)]
    assert [source.load(index)[1] for index in range(3)] == [1, 0, 1]


def test_training_batches_are_split_into_nine_tenths_and_one(cifar):
    train, val = (open_grey_images(cifar, split) for split in ("train", "val"))
    assert (len(train), len(val)) == (18, 2)
    every = [f"{cifar}/cifar-10-batches-py/{batch}: image {row}" for batch in TRAIN_BATCHES for row in range(4)]
    assert sorted(names(train) + names(val)) == every
    for source in (train, val):
        for index, name in enumerate(names(source)):
            (tokens,), label = source.load(index)
            batch, row = int(name[-10]), int(name[-1])
            assert (set(tokens.tolist()), label) == ({10 * (batch - 1) + row}, [0, 1, 1, 0][row])


def test_the_seed_decides_which_images_validate(cifar):
    held = [names(open_grey_images(cifar, "val", seed=seed)) for seed in range(20)]
    assert held[0] == names(open_grey_images(cifar, "val"))
    assert len({tuple(chosen) for chosen in held}) > 10
    assert names(open_grey_images(cifar, "test", seed=1)) == names(open_grey_images(cifar, "test"))


def python2_batch(rows: int) -> bytes:
    """What Python 2 wrote, as in the release: strings of bytes, and numpy's old module."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    state = b"(K\x01K" + bytes([rows]) + b"M" + struct.pack("<H", 3072) + b"\x86"
    kind = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xff"
    kind += b"J\xff\xff\xff\xffK\x00tb"
    content = b"T" + struct.pack("<i", rows * 3072) + colours(rows, blue=255).tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    array += state + kind + b"\x89" + content + b"tb"
    labels = b"](" + b"K\x01" * rows + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + labels + b"u."


def test_batches_of_python_2_are_read_as_in_the_release(cifar):
    folder = cifar / "cifar-10-batches-py"
    content = python2_batch(2)
    assert pickle.loads(content, encoding="bytes")[b"data"].shape == (2, 3072)
    (folder / "test_batch").write_bytes(content)
    (folder / "batches.meta").write_bytes(b"(dp1\nS'label_names'\np2\n(lp3\nS'cat'\np4\naS'dog'\np5\nas.")
    source = open_grey_images(cifar, "test")
    assert (len(source), source.classes) == (2, ("cat", "dog"))
    (tokens,), label = source.load(1)
    assert (set(tokens.tolist()), label) == ({29}, 1)


def test_batches_stored_by_column_are_read_the_same(cifar):
    data = (np.arange(2 * 3072) % 251).reshape(2, 3072).astype(np.uint8)
    expected = []
    for stored in (data, np.asfortranarray(data)):
        dump(cifar / "cifar-10-batches-py" / "test_batch", {b"data": stored, b"labels": [0, 1]})
        expected.append([open_grey_images(cifar, "test").load(index)[0][0].tolist() for index in range(2)])
    assert expected[0] == expected[1]
    assert expected[0][0] != expected[0][1]


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def test_code_in_a_batch_is_never_run(cifar, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = cifar / "cifar-10-batches-py" / "test_batch"
    dump(path, {b"data": Harmful(), b"labels": [0]})
    with pytest.raises(
        ValueError, match=rf"^{path} must be a file of CIFAR-10's Python version: it refers to .*\.mkdir"
    ):
        open_grey_images(cifar, "test")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "exhausted"),
        (b"text", "opcode b'x' unknown"),
        (pickle.dumps([1, 2]), r"a dictionary, got \[1, 2\]$"),
        (python2_batch(2)[:-3000], "expected 6144 bytes in a string4, but only 3163 remain"),
        # a list in a list in a list ...
        (b"]" * 100_000 + b"a" * 99_999 + b".", "a dictionary, got "),
        # a tuple in a tuple in a tuple ... as a key, which Python cannot hash
        (b"}" + b"(" * 10**6 + b"t" * 10**6 + b"K\x01s.", "it has more than 1000 tuples"),
        # number 2 ** 31 of the values, for all of which there would have to be memory
        (b"]r\x00\x00\x00\x80.", "stores a value as number 2147483648"),
        (b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.", "written as latin1, got 'rot13'"),
        (b"cnumpy.core.multiarray\n_reconstruct\n)R(K\x01NNNNtb.", "an array must have a shape, a type and bytes"),
    ],
    ids=["empty", "text", "list", "truncated", "nested", "nested tuples", "number", "codec", "state"],
)
def test_a_batch_that_cannot_be_read_is_named(cifar, content, problem):
    path = cifar / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{path} must be a file of CIFAR-10's Python version: .*({problem})"):
        open_grey_images(cifar, "test")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({b"labels": [0]}, r" must have uint8 \[images, 3072\] under b'data', got None$"),
        ({b"data": colours(1).astype(np.int32)}, r"got an array of type 'i4' \[1, 3072\] in 12288 bytes$"),
        ({b"data": colours(1)[:, :1024]}, r"got an array of type 'u1' \[1, 1024\] in 1024 bytes$"),
        ({b"data": colours(1)[0]}, r"got an array of type 'u1' \[3072\] in 3072 bytes$"),
        ({b"data": colours(2)}, r" must have a list of 2 labels, .* under b'labels', got None$"),
        ({b"data": colours(2), b"labels": [0]}, r" must have a list of 2 labels, .* got 1 labels$"),
        ({b"data": colours(2), b"labels": [0, 2]}, r": image 1: the label must be 0 to 1, got 2$"),
        ({b"data": colours(2), b"labels": [True, 0]}, r": image 0: the label must be 0 to 1, got True$"),
    ],
)
def test_a_batch_of_another_kind_is_refused(cifar, content, problem):
    path = cifar / "cifar-10-batches-py" / "test_batch"
    dump(path, content)
    with pytest.raises(ValueError, match=f"^{path}.*{problem}"):
        open_grey_images(cifar, "test")


def test_classes_must_have_names(cifar):
    dump(cifar / "cifar-10-batches-py" / "batches.meta", {b"label_names": []})
    with pytest.raises(ValueError, match=r"batches\.meta must have class names under b'label_names', got \[\]"):
        open_grey_images(cifar, "test")


def test_missing_batches_are_all_named(cifar):
    folder = cifar / "cifar-10-batches-py"
    for name in ("data_batch_2", "data_batch_5"):
        (folder / name).unlink()
    assert len(open_grey_images(cifar, "test")) == 3
    with pytest.raises(ValueError, match="split 'val'") as error:
        open_grey_images(cifar, "val")
    assert str(error.value) == (
        f"CIFAR-10's batches for the split 'val' were not found; looked for {folder}/data_batch_2, "
        f"{folder}/data_batch_5; they come from cifar-10-python.tar.gz of cs.toronto.edu/~kriz/cifar.html"
    )


def write_image(path: Path, pixels: object, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.array(pixels, np.uint8)).convert(mode).save(path)


RED_GREEN_BLUE = [[[255, 0, 0], [0, 255, 0], [0, 0, 255]], [[0, 0, 0], [255, 255, 255], [10, 20, 30]]]


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """12 training images and 2 test images of 3x2 pixels in two classes."""
    for name in ("ant", "bee"):
        for number in range(6):
            write_image(tmp_path / "train" / name / f"{number}.png", RED_GREEN_BLUE)
        write_image(tmp_path / "test" / name / "0.png", RED_GREEN_BLUE)
    return tmp_path


def test_class_folders_are_read_in_grey_row_by_row(folders):
    source = open_grey_images(folders, "test")
    assert isinstance(source, SequenceSource)
    assert (source.classes, source.vocabulary, source.max_length, source.parts) == (("ant", "bee"), 512, 6, 1)
    assert names(source) == [f"{folders}/test/ant/0.png", f"{folders}/test/bee/0.png"]
    (tokens,), label = source.load(1)
    assert (tokens.dtype, tokens.tolist(), label) == (np.uint16, [76, 149, 29, 0, 255, 18], 1)


def test_training_folders_are_split_into_nine_tenths_and_one(folders):
    train, val = (open_grey_images(folders, split) for split in ("train", "val"))
    assert (len(train), len(val)) == (10, 2)
    every = [f"{folders}/train/{name}/{number}.png" for name in ("ant", "bee") for number in range(6)]
    assert sorted(names(train) + names(val)) == every
    for source in (train, val):
        assert [source.load(index)[1] for index in range(len(source))] == ["/bee/" in name for name in names(source)]


@pytest.mark.parametrize(
    ("pixels", "mode", "tokens"),
    [
        ([[1, 2, 3], [4, 5, 255]], "L", [1, 2, 3, 4, 5, 255]),
        (RED_GREEN_BLUE, "RGBA", [76, 149, 29, 0, 255, 18]),
        (RED_GREEN_BLUE, "P", None),
    ],
)
def test_grey_images_are_taken_as_they_are_and_others_as_rgb(folders, pixels, mode, tokens):
    write_image(folders / "test" / "ant" / "0.png", pixels, mode)
    source = open_grey_images(folders, "test")
    if tokens is None:
        rgb = np.asarray(Image.open(folders / "test" / "ant" / "0.png").convert("RGB"))
        tokens = luma(np.moveaxis(rgb, -1, 0)).ravel().tolist()
    assert source.load(0)[0][0].tolist() == tokens


def test_images_of_another_size_than_the_first_are_named(folders):
    write_image(folders / "test" / "bee" / "0.png", np.zeros((3, 2, 3)))
    source = open_grey_images(folders, "test")
    assert len(source.load(0)[0][0]) == 6
    with pytest.raises(SequenceError) as error:
        source.load(1)
    assert str(error.value) == (
        f"{folders}/test/bee/0.png: every image must have the size of the first, it has 2x3 pixels, the first 3x2"
    )


def test_images_that_cannot_be_decoded_are_named(folders):
    (folders / "test" / "bee" / "0.png").write_bytes(b"text")
    source = open_grey_images(folders, "test")
    with pytest.raises(CorruptImageError, match=r"test/bee/0\.png cannot be decoded \(not an image\)"):
        source.load(1)


def test_images_of_more_than_8_bits_are_refused(folders):
    Image.fromarray(np.full((2, 3), 3000, np.uint16)).save(folders / "test" / "bee" / "0.png")
    with pytest.raises(CorruptImageError, match=r"bee/0\.png cannot .*8 bits for each colour are needed"):
        open_grey_images(folders, "test").load(1)


def test_both_splits_must_have_the_same_classes(folders):
    write_image(folders / "test" / "cow" / "0.png", RED_GREEN_BLUE)
    for split in ("train", "test"):
        with pytest.raises(ValueError, match=r"train and .*/test must have the same .*; only one of them has cow$"):
            open_grey_images(folders, split)


def test_one_image_cannot_be_split(tmp_path):
    for split in ("train", "test"):
        write_image(tmp_path / split / "ant" / "0.png", RED_GREEN_BLUE)
    with pytest.raises(ValueError, match="1 images are too few, the split 'train' would have none"):
        open_grey_images(tmp_path, "train")
    assert len(open_grey_images(tmp_path, "test")) == 1


def test_missing_images_say_where_they_were_looked_for(folders):
    for path in (folders / "test").glob("*/*"):
        path.unlink()
        path.parent.rmdir()
    (folders / "test").rmdir()
    with pytest.raises(ValueError, match="split 'train'") as error:
        open_grey_images(folders, "train")
    assert str(error.value) == (
        "CIFAR-10's batches or folders of images for the split 'train' were not found; looked for "
        f"{folders}/batches.meta, {folders}/cifar-10-batches-py/batches.meta, {folders}/train, {folders}/test; "
        "they come from cifar-10-python.tar.gz of cs.toronto.edu/~kriz/cifar.html"
    )


def write_sample(folder: Path, number: int, sample: int, label: int, *, size: tuple[int, int] = (4, 3)) -> None:
    """An image of one grey value, its number, and its line; ``size`` is width and height."""
    write_image(folder / "imgs" / str(number) / f"sample_{sample}.png", np.full(size[::-1], 20 * number + sample))
    (folder / "metadata").mkdir(exist_ok=True)
    with open(folder / "metadata" / f"{number}.npy", "a") as file:
        file.write(f"imgs/{number} sample_{sample}.png {sample} {label} 1.0 14 4 5 0.5\n")


def test_class_names_may_not_be_nested(cifar):
    path = cifar / "cifar-10-batches-py" / "batches.meta"
    path.write_bytes(b"}X\x0b\x00\x00\x00label_names" + b"]" * 50_000 + b"a" * 49_999 + b"s.")
    with pytest.raises(UserError, match=rf"{path} must have class names under b'label_names', got "):
        open_grey_images(cifar, "test")


@pytest.fixture
def pathfinder(tmp_path: Path) -> Path:
    """22 images in the folders 2 and 10, labelled by turns."""
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    for number in (2, 10):
        for sample in range(11):
            write_sample(folder, number, sample, sample % 2)
    return tmp_path


def test_metadata_that_are_no_regular_file_are_refused(pathfinder):
    folder = pathfinder / "pathfinder32" / "curv_contour_length_14" / "metadata"
    os.mkfifo(folder / "3.npy")
    with pytest.raises(UserError, match=r"metadata/3\.npy must be a regular file, it is a named pipe"):
        open_pathfinder(pathfinder, "train")


def test_pathfinder_is_read_as_its_metadata_list_it(pathfinder):
    source = open_pathfinder(pathfinder, "train")
    assert isinstance(source, SequenceSource)
    assert (source.classes, source.vocabulary, source.max_length, source.parts) == (("open", "connected"), 512, 12, 1)
    for index, name in enumerate(names(source)):
        number, sample = int(Path(name).parent.name), int(Path(name).stem[7:])
        assert name == f"{pathfinder}/pathfinder32/curv_contour_length_14/imgs/{number}/sample_{sample}.png"
        (tokens,), label = source.load(index)
        assert (tokens.dtype, tokens.tolist(), label) == (np.uint16, [20 * number + sample] * 12, sample % 2)


def test_pathfinder_pixels_are_read_row_by_row(pathfinder):
    folder = pathfinder / "pathfinder32" / "curv_contour_length_14"
    source = open_pathfinder(pathfinder, "test")
    write_image(Path(source.name(0)), np.arange(0, 240, 20).reshape(3, 4))
    assert source.load(0)[0][0].tolist() == list(range(0, 240, 20))
    assert source.name(0).startswith(str(folder))


def test_pathfinder_is_split_into_eight_tenths_and_twice_one(pathfinder):
    sources = [open_pathfinder(pathfinder, split) for split in ("train", "val", "test")]
    assert [len(source) for source in sources] == [17, 2, 3]
    every = [name for source in sources for name in names(source)]
    assert sorted(every) == sorted(str(path) for path in pathfinder.rglob("*.png"))
    assert names(open_pathfinder(pathfinder, "val", seed=1)) != names(sources[1])


def test_samples_are_ordered_by_number_whatever_file_lists_them(pathfinder):
    expected = names(open_pathfinder(pathfinder, "train"))
    numbers = [(int(Path(name).parent.name), int(Path(name).stem[7:])) for name in expected]
    assert numbers == sorted(numbers)
    metadata = pathfinder / "pathfinder32" / "curv_contour_length_14" / "metadata"
    lines = [line for path in metadata.iterdir() for line in path.read_text().splitlines()]
    for path in metadata.iterdir():
        path.unlink()
    (metadata / "0.npy").write_text("\r\n".join(reversed(lines)))
    assert names(open_pathfinder(pathfinder, "train")) == expected


@pytest.mark.parametrize("below", ["", "pathfinder32", "pathfinder32/curv_contour_length_14"])
def test_the_root_may_be_any_folder_down_to_the_images(pathfinder, below):
    assert len(open_pathfinder(pathfinder / below, "train")) == 17


def test_the_release_may_be_unpacked_into_a_folder_of_its_name(pathfinder):
    (pathfinder / "lra_release").mkdir()
    (pathfinder / "pathfinder32").rename(pathfinder / "lra_release" / "pathfinder32")
    assert len(open_pathfinder(pathfinder, "train")) == 17


def test_larger_images_are_longer_sequences(tmp_path):
    for sample in range(10):
        write_sample(tmp_path / "pathfinder128" / "curv_contour_length_14", 0, sample, 1, size=(128, 128))
    source = open_pathfinder(tmp_path / "pathfinder128", "test")
    assert source.max_length == len(source.load(0)[0][0]) == 16384


def test_a_missing_image_is_named_with_its_line(pathfinder):
    source = open_pathfinder(pathfinder, "test")
    image = Path(source.name(0))
    image.unlink()
    line = int(image.stem[7:]) + 1
    with pytest.raises(SequenceError) as error:
        source.load(0)
    metadata = f"{pathfinder}/pathfinder32/curv_contour_length_14/metadata/{image.parent.name}.npy:{line}"
    assert str(error.value) == f"{metadata}: names the image {image}, which does not exist"


@pytest.mark.parametrize("content", [b"", b"text"])
def test_an_image_of_pathfinder_that_cannot_be_decoded_is_named(pathfinder, content):
    source = open_pathfinder(pathfinder, "test")
    Path(source.name(1)).write_bytes(content)
    with pytest.raises(CorruptImageError, match=rf"{source.name(1)} cannot be decoded \(not an image\)"):
        source.load(1)


def test_an_image_of_pathfinder_must_be_grey_and_of_the_first_size(pathfinder):
    source = open_pathfinder(pathfinder, "test")
    write_image(Path(source.name(0)), np.zeros((3, 4, 3)))
    with pytest.raises(SequenceError, match=r"sample_\d+\.png: the image must be 8-bit greyscale, its mode is RGB$"):
        source.load(0)
    write_image(Path(source.name(0)), np.zeros((4, 4)))
    with pytest.raises(SequenceError, match=r"must have the size of the first, it has 4x4 pixels, the first 4x3$"):
        source.load(0)


@pytest.mark.parametrize(
    "line",
    [
        "imgs/2 sample_99.png 99",
        "imgs/2 sample_99.png 99 2 1.0",
        "imgs/2 sample_99.png 99 1.0 1.0",
        "imgs/2 sample_099.png 99 1 1.0",
        "imgs/../2 sample_99.png 99 1 1.0",
        "imgs/2 ../sample_99.png 99 1 1.0",
        "",
        "\x93NUMPY\x01\x00",
    ],
)
def test_a_malformed_line_is_refused_when_pathfinder_is_opened(pathfinder, line):
    path = pathfinder / "pathfinder32" / "curv_contour_length_14" / "metadata" / "2.npy"
    path.write_bytes(path.read_bytes() + line.encode("latin1") + b"\n")
    with pytest.raises(SequenceError) as error:
        open_pathfinder(pathfinder, "train")
    assert str(error.value) == (
        f"{path}:12: a line must be imgs/<number> sample_<number>.png <number> <label 0 or 1> and more, got {line!r}"
    )


def test_an_image_that_is_listed_twice_is_refused(pathfinder):
    metadata = pathfinder / "pathfinder32" / "curv_contour_length_14" / "metadata"
    (metadata / "3.npy").write_text("imgs/2 sample_4.png 4 1\n")
    with pytest.raises(SequenceError) as error:
        open_pathfinder(pathfinder, "train")
    assert str(error.value) == (
        f"{metadata}/3.npy:1: every image must be listed once, this one is also listed in {metadata}/2.npy:5"
    )


def test_too_few_images_of_pathfinder_cannot_be_split(tmp_path):
    for sample in range(5):
        write_sample(tmp_path, 0, sample, 0)
    with pytest.raises(ValueError, match=rf"{tmp_path}: 5 images are too few, the split 'val' would have none"):
        open_pathfinder(tmp_path, "val")


def test_missing_pathfinder_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(ValueError, match="split 'train'") as error:
        open_pathfinder(tmp_path, "train")
    below = "curv_contour_length_14/metadata"
    assert str(error.value) == (
        f"Pathfinder's images for the split 'train' were not found; looked for {tmp_path}/metadata, "
        f"{tmp_path}/{below}, {tmp_path}/pathfinder32/{below}, {tmp_path}/lra_release/pathfinder32/{below}; "
        "they come from lra_release.gz of github.com/google-research/long-range-arena"
    )
    (tmp_path / "metadata").mkdir()
    with pytest.raises(ValueError, match=rf"{tmp_path}/metadata must hold \*\.npy files .*; found none"):
        open_pathfinder(tmp_path, "train")


OPENERS: list[tuple[Callable[..., SequenceSource], str]] = [
    (open_grey_images, "cifar"),
    (open_grey_images, "folders"),
    (open_pathfinder, "pathfinder"),
]


@pytest.mark.parametrize(("open_it", "data"), OPENERS)
def test_splits_and_seeds_are_checked(open_it, data, request):
    root = request.getfixturevalue(data)
    with pytest.raises(ValueError, match="split must be one of test, train, val; got 'eval'"):
        open_it(root, "eval")
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        open_it(root, "train", seed=-1)


@pytest.mark.parametrize(("open_it", "data"), OPENERS)
def test_pixels_are_the_same_in_workers_and_after_pickling(open_it, data, request):
    source = open_it(request.getfixturevalue(data), "train")
    again = pickle.loads(pickle.dumps(source))
    assert names(again) == names(source)
    for index, ((part,), label) in enumerate(DataLoader(SequenceSamples(source), batch_size=None, num_workers=1)):
        (expected,), expected_label = source.load(index)
        assert part.tolist() == again.load(index)[0][0].tolist() == expected.tolist()
        assert label == again.load(index)[1] == expected_label


@pytest.mark.parametrize(
    ("open_it", "data", "held"),
    [
        # where PCG64's first permutations of 20, 12 and 22 numbers have the tenth that validates
        (open_grey_images, "cifar", ["data_batch_1: image 1", "data_batch_4: image 3"]),
        (open_grey_images, "folders", ["train/ant/1.png", "train/bee/2.png"]),
        (open_pathfinder, "pathfinder", ["imgs/10/sample_3.png", "imgs/10/sample_6.png"]),
    ],
)
def test_the_split_of_seed_0_is_the_same_in_every_process(open_it, data, held, request):
    found = names(open_it(request.getfixturevalue(data), "val"))
    assert len(found) == len(held)
    assert all(name.endswith(f"/{end}") for name, end in zip(found, held, strict=True))


@pytest.mark.skipif(not PHOTOGRAPHS.is_dir(), reason="needs ../shared/data/cifar10_small")
def test_real_photographs_are_read():
    train, val, test = (open_grey_images(PHOTOGRAPHS, split) for split in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (4500, 500, 1000)
    assert not {*names(train)} & {*names(val)}
    assert (train.max_length, len(train.classes), train.classes[0]) == (1024, 10, "airplane")
    labels = np.zeros(10, int)
    for index in range(0, 1000, 10):
        (tokens,), label = test.load(index)
        labels[label] += 1
        with Image.open(test.name(index)) as image:
            # Pillow weighs almost alike, and rounds
            assert np.abs(tokens - np.asarray(image.convert("L"), int).ravel()).max() <= 1
    assert labels.tolist() == [10] * 10
