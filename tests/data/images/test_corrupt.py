import io
import pickle

import pytest
from PIL import Image

from softline.data.images import CorruptImage, CorruptImageError, ImageSource, find_corrupt, open_source, without

# bytes of a file, and a part of the reason
BROKEN = {
    "cut.jpg": "[Tt]runcated",
    "empty.jpg": "not an image",
    "text.jpg": "not an image",
    "damaged.png": "broken|truncated|unrecognized",
}


@pytest.fixture
def source(folder, picture) -> ImageSource:
    """Six sound images and four broken ones."""
    photo, png = picture(size=(64, 48)), bytearray(picture(kind="PNG", size=(64, 48)))
    png[len(png) // 2 :] = b"\0" * (len(png) - len(png) // 2)
    contents = {"cut.jpg": photo[: len(photo) * 2 // 3], "empty.jpg": b"", "text.jpg": b"text", "damaged.png": png}
    for name, data in contents.items():
        (folder / "train" / "bee" / name).write_bytes(data)
    return open_source(str(folder), "train")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_is_named_where_it_is_read(source, name):
    index = next(index for index in range(len(source)) if source.name(index).endswith(name))
    with pytest.raises(
        CorruptImageError, match=rf"train/bee/{name} cannot be decoded \(.*({BROKEN[name]}).*--skip-corr"
    ):
        source.load(index)


def test_a_missing_file_is_not_a_corrupt_one(source, folder):
    (folder / "train" / "ant" / "0.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"ant/0\.jpg"):
        find_corrupt(source)


def test_the_error_survives_pickling():
    error = pickle.loads(pickle.dumps(CorruptImageError("a.jpg", "cut")))
    assert (error.name, error.reason) == ("a.jpg", "cut")


@pytest.mark.parametrize("threads", [1, 4])
def test_every_broken_image_is_found(source, threads):
    seen = []
    found = find_corrupt(source, threads=threads, progress=lambda done, total: seen.append((done, total)))
    assert sorted(corrupt.name.rsplit("/")[-1] for corrupt in found) == sorted(BROKEN)
    assert all(isinstance(corrupt, CorruptImage) and source.name(corrupt.index) == corrupt.name for corrupt in found)
    assert seen[-1] == (10, 10)


def test_shards_together_find_the_same(source):
    parts = [corrupt for rank in range(3) for corrupt in find_corrupt(source, shard=(rank, 3))]
    assert sorted(parts, key=lambda corrupt: corrupt.index) == find_corrupt(source)
    with pytest.raises(ValueError, match=r"rank \(3\) must be less than processes \(3\)"):
        find_corrupt(source, shard=(3, 3))


def test_what_is_left_out_leaves_classes_and_order(source):
    rest = without(source, [corrupt.index for corrupt in find_corrupt(source)])
    assert len(rest) == 6
    assert rest.classes == source.classes
    assert [rest.load(index)[1] for index in range(6)] == [0, 0, 0, 1, 1, 1]
    assert find_corrupt(rest) == []
    assert rest.name(3).endswith("bee/0.jpg")
    with pytest.raises(ValueError, match="indices must lie between 0 and 9, got 10"):
        without(source, [10])


def test_an_image_of_too_many_pixels_is_corrupt(folder, picture, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    file = io.BytesIO()
    Image.new("RGB", (20, 20)).save(file, "PNG")
    (folder / "train" / "ant" / "huge.png").write_bytes(file.getvalue())
    (corrupt,) = find_corrupt(open_source(str(folder), "train"))
    assert "decompression bomb" in corrupt.reason


def test_a_tar_file_is_scanned_by_many_threads(folder, tmp_path, pack, picture):
    files = {f"ant/{index}.jpg": picture(index, size=(40, 40)) for index in range(100)}
    source = open_source(str(pack(tmp_path / "set.tar", files | {"ant/broken.jpg": b"x"})), "val")
    assert [corrupt.name for corrupt in find_corrupt(source)] == [f"{tmp_path}/set.tar/ant/broken.jpg"]
