import copy
import json
import os
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from softline.data.coco.source import CocoSource, decode_mask, encode_mask
from softline.data.images import CorruptImageError, find_corrupt
from softline.errors import UserError

COCO128 = Path(__file__).parents[4] / "shared" / "data" / "coco128"
HEIGHT, WIDTH = 12, 16
# rows 2-5 and columns 3-7, as runs down the columns
RUNS = [3 * 12 + 2, 4, 8, 4, 8, 4, 8, 4, 8, 4, 8 * 12 + 6]
SQUARE = {"size": [HEIGHT, WIDTH], "counts": RUNS}
# the same rectangle, compressed as COCO's tools write it
PACKED = {"size": [HEIGHT, WIDTH], "counts": "V1480000000n2"}


def an_object(number: int, image_id: int, **change: Any) -> dict[str, Any]:
    corners = [3, 2, 8, 2, 8, 6, 3, 6]
    return {
        "id": number,
        "image_id": image_id,
        "category_id": 1,
        "bbox": [3, 2, 5, 4],
        "area": 20.0,
        "iscrowd": 0,
        "segmentation": [corners],
    } | change


def contents() -> dict[str, Any]:
    """Image 7 with every encoding of one rectangle, 40 without objects, 9 with a crowd alone."""
    return {
        "categories": [{"id": 90, "name": "brush"}, {"id": 1, "name": "person"}, {"id": 13, "name": "sign"}],
        "images": [
            {"id": number, "file_name": f"{number}.png", "height": HEIGHT, "width": WIDTH} for number in (7, 40, 9)
        ],
        "annotations": [
            an_object(100, 7),
            an_object(101, 9, iscrowd=1, category_id=13, segmentation=SQUARE),
            an_object(102, 7, category_id=90, segmentation=SQUARE),
            an_object(103, 7, category_id=13, segmentation=PACKED, area=19.5),
        ],
    }


@pytest.fixture
def write(tmp_path: Path, picture: Callable[..., bytes]) -> Callable[..., tuple[Path, Path]]:
    """Write three images and the annotations; what CocoSource takes."""
    (tmp_path / "images").mkdir()
    for number in (7, 9, 40):
        (tmp_path / "images" / f"{number}.png").write_bytes(picture(number, size=(WIDTH, HEIGHT), kind="PNG"))

    def to_file(content: Any) -> tuple[Path, Path]:
        (tmp_path / "objects.json").write_text(json.dumps(content))
        return tmp_path / "images", tmp_path / "objects.json"

    return to_file


def test_labels_follow_ids_with_gaps(write):
    source = CocoSource(*write(contents()))
    assert source.classes == ("person", "sign", "brush")
    assert source.category_ids == (1, 13, 90)
    assert source.load(0)[1].labels.tolist() == [0, 2, 1]


def test_an_image_comes_with_its_objects(write):
    images, file = write(contents())
    source = CocoSource(images, file)
    assert (len(source), source.name(0), source.size(0)) == (3, f"{images}/7.png", (HEIGHT, WIDTH))
    assert [source.image_id(index) for index in range(3)] == [7, 40, 9]
    image, objects = source.load(0)
    assert (image.size, image.getpixel((0, 0))) == ((WIDTH, HEIGHT), (7, 100, 200))
    assert objects.boxes.tolist() == [[3, 2, 8, 6]] * 3
    assert objects.area.tolist() == [20, 20, 19.5]
    assert objects.crowd.tolist() == [False] * 3
    assert source.load(2)[1].crowd.tolist() == [True]
    kinds = [tensor.dtype for tensor in objects[:4]]
    assert kinds == [torch.float32, torch.int64, torch.bool, torch.float32]


def test_polygons_and_both_kinds_of_runs_give_the_same_mask(write):
    masks = CocoSource(*write(contents())).load(0)[1].masks()
    expected = torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8)
    expected[:, 2:6, 3:8] = 1
    assert masks.dtype == torch.uint8
    assert torch.equal(masks, expected)


def test_a_mask_may_have_several_polygons(write):
    content = contents()
    parts = [[1, 1, 3, 1, 3, 3, 1, 3], [10.0, 5, 14, 5, 14, 9, 10, 9]]
    content["annotations"][0] |= {"segmentation": parts, "bbox": [1, 1, 13, 8]}
    mask = CocoSource(*write(content)).load(0)[1].masks()[0]
    expected = torch.zeros(HEIGHT, WIDTH, dtype=torch.uint8)
    expected[1:3, 1:3] = 1
    expected[5:9, 10:14] = 1
    assert torch.equal(mask, expected)


def test_images_without_objects_stay(write):
    source = CocoSource(*write(contents()))
    objects = source.load(1)[1]
    assert [tuple(tensor.shape) for tensor in objects[:4]] == [(0, 4), (0,), (0,), (0,)]
    assert objects.masks().shape == (0, HEIGHT, WIDTH)
    # a crowd is no object to train on
    assert source.with_objects() == [0]


def test_a_file_may_have_images_alone(write):
    source = CocoSource(*write(contents() | {"annotations": []}))
    assert (len(source), source.with_objects()) == (3, [])
    assert source.load(2)[1].boxes.shape == (0, 4)


def test_some_objects_can_be_taken(write):
    objects = CocoSource(*write(contents())).load(0)[1].only(torch.tensor([False, True, True]))
    assert objects.labels.tolist() == [2, 1]
    assert objects.area.tolist() == [20, 19.5]
    assert objects.segmentations == (SQUARE, PACKED)
    assert objects.masks().shape == (2, HEIGHT, WIDTH)


def test_what_is_left_out_leaves_classes_and_order(write):
    source = CocoSource(*write(contents()))
    rest = source.without([1])
    assert [rest.image_id(index) for index in range(len(rest))] == [7, 9]
    assert rest.load(1)[1].crowd.tolist() == [True]
    assert (rest.classes, len(source), len(rest.without([]))) == (source.classes, 3, 2)
    assert rest.without([0]).with_objects() == []
    for index in (-1, 3):
        with pytest.raises(ValueError, match=f"indices must lie between 0 and 2, got {index}"):
            source.without([index])


def test_changing_what_was_loaded_leaves_the_source_alone(write):
    source = CocoSource(*write(contents()))
    source.load(0)[1].boxes.zero_()
    assert source.load(0)[1].boxes.tolist() == [[3, 2, 8, 6]] * 3


def test_threads_and_other_processes_read_the_same(write):
    source = CocoSource(*write(contents()))
    other = pickle.loads(pickle.dumps(source))
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(other.load, [0] * 20))
    for _, objects in loaded:
        assert objects.segmentations == source.load(0)[1].segmentations
        assert torch.equal(objects.masks(), source.load(0)[1].masks())


def change(kind: str, place: int, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content[kind][place].update(values)


def drop(kind: str, place: int, key: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content[kind][place].pop(key) and None


def box(*values: float) -> Callable[[dict[str, Any]], None]:
    return change("annotations", 0, bbox=list(values))


def segmentation(value: Any) -> Callable[[dict[str, Any]], None]:
    return change("annotations", 0, segmentation=value)


# what is done to the file, the kind it is counted as, the entry that is named and what is said of it
PROBLEMS = {
    "file missing": (
        change("images", 0, file_name="absent.png"),
        "missing image file",
        r"image 7: .*/images/absent\.png does not exist",
    ),
    "file no text": (
        change("images", 0, file_name=5),
        "wrong file name",
        r"image 7: file_name must be a file below .*/images: it must be text that is not empty, got 5",
    ),
    "file absolute": (
        change("images", 0, file_name="/etc/hostname"),
        "wrong file name",
        "image 7: file_name must be a file below .*/images: it must not be an absolute path, got '/etc/hostname'",
    ),
    "file above": (
        change("images", 0, file_name="../images/7.png"),
        "wrong file name",
        r"image 7: .* it must not contain '\.\.', got '\.\./images/7\.png'",
    ),
    "file of null": (change("images", 0, file_name="7\0.png"), "wrong file name", "image 7: .*a null character, got"),
    "file of no name": (change("images", 0, file_name=""), "wrong file name", "image 7: .* not empty, got ''"),
    "file of surrogates": (change("images", 0, file_name="\ud800"), "wrong file name", "image 7: .* Unicode text, got"),
    "file too long": (change("images", 0, file_name="x" * 5000), "missing image file", "image 7: .* cannot be read: "),
    "file of another image": (
        change("images", 1, file_name="./7.png"),
        "repeated file",
        r"image 40: .*/images/7\.png already belongs to another image",
    ),
    "image too large": (
        change("images", 0, height=2**31, width=2**31),
        "image too large",
        r"image 7: an image must have at most 89,478,485 pixels, got 2147483648 x 2147483648 \(height x width\)",
    ),
    "height": (
        change("images", 0, height=0),
        "image without a size",
        "image 7: height must be a positive whole number, got 0",
    ),
    "no width": (drop("images", 0, "width"), "missing key in images", "image 7: has no 'width'"),
    "image twice": (change("images", 1, id=7), "repeated id in images", "image 7: id 7 appears twice"),
    "image of no id": (drop("images", 1, "id"), "missing key in images", "entry 1 of images: has no 'id'"),
    "image id text": (
        change("images", 1, id="40"),
        "wrong id in images",
        "image '40': id must be a whole number, got '40'",
    ),
    "object twice": (
        change("annotations", 1, id=100),
        "repeated id in annotations",
        "annotation 100 of image 9: id 100 appears twice",
    ),
    "no box": (
        drop("annotations", 0, "bbox"),
        "missing key in annotations",
        "annotation 100 of image 7: has no 'bbox'",
    ),
    "unknown image": (
        change("annotations", 0, image_id=8),
        "unknown image_id",
        "annotation 100 of image 8: image_id 8 is not in the file",
    ),
    "unknown category": (
        change("annotations", 0, category_id=2),
        "unknown category_id",
        "annotation 100 of image 7: category_id 2 is not in the file",
    ),
    "crowd": (
        change("annotations", 0, iscrowd=2),
        "wrong iscrowd",
        "annotation 100 of image 7: iscrowd must be 0 or 1, got 2",
    ),
    "area": (
        change("annotations", 0, area=float("nan")),
        "wrong area",
        "annotation 100 of image 7: area must be a finite number, at least 0, got nan",
    ),
    "flat box": (
        box(3, 2, 5, 0.0),
        "box of no area",
        r"annotation 100 of image 7: width and height of bbox must be positive, got \[3, 2, 5, 0\.0\]",
    ),
    "negative box": (box(3, 2, -5, 4), "box of no area", r"100 .* must be positive, got \[3, 2, -5, 4\]"),
    "infinite box": (
        box(3, 2, float("inf"), 4),
        "wrong box",
        r"100 .*: bbox must be 4 finite numbers \(x, y, width, height\), got \[3, 2, inf, 4\]",
    ),
    "huge box": (box(3, 2, 10**400, 4), "wrong box", r"100 .* got \[3, 2, 10+\.\.\."),
    "box beyond float32": (box(3, 2, 1e308, 4), "wrong box", r"100 .* at most 1\.7e\+38, got \[3, 2, 1e\+308, 4\]"),
    "box of truths": (box(3, 2, True, 4), "wrong box", r"100 .* got \[3, 2, True, 4\]"),
    "short box": (box(3, 2, 5), "wrong box", r"100 .* got \[3, 2, 5\]"),
    "box to the right": (
        box(3, 2, 14.1, 4),
        "box outside its image",
        r"100 .*: bbox \[3, 2, 14\.1, 4\] exceeds its image of 12 x 16 \(height x width\)",
    ),
    "box above": (box(3, -1.5, 5, 4), "box outside its image", r"100 .*: bbox \[3, -1\.5, 5, 4\] exceeds"),
    "box of a millionth": (box(3, 2, 1e-8, 4), "box of no area", r"100 .* must be positive, got \[3, 2, 1e-08, 4\]"),
    "two points": (
        segmentation([[3, 2, 8, 6]]),
        "wrong polygon",
        r"100 .*: a polygon must be .* of at least 3 points, got \[3, 2, 8, 6\]",
    ),
    "odd polygon": (segmentation([[3, 2, 8, 6, 3, 6, 1]]), "wrong polygon", "100 .* at least 3 points"),
    "polygon of text": (segmentation([["3", 2, 8, 6, 3, 6]]), "wrong polygon", r"100 .* got \['3', 2"),
    "polygon outside": (
        segmentation([[3, 2, 1e15, 2, 8, 6]]),
        "polygon outside its image",
        r"100 .*: polygon \[3, 2, 1000000000000000\.0, 2, 8, 6\] exceeds its image of 12 x 16",
    ),
    "text": (segmentation("abc"), "wrong segmentation", "100 .*: segmentation must be polygons or runs, got 'abc'"),
    "other size": (
        segmentation({"size": [16, 12], "counts": [0, 192]}),
        "mask of another size than its image",
        r"100 .*: the mask has \[16, 12\] \(height, width\), its image \[12, 16\]",
    ),
    "short runs": (
        segmentation({"size": [12, 16], "counts": [0, 191]}),
        "wrong mask",
        r"100 .*: counts of a mask must be whole numbers with the sum 192, got \[0, 191\]",
    ),
    "negative runs": (segmentation({"size": [12, 16], "counts": [-1, 193]}), "wrong mask", r"100 .* \[-1, 193\]"),
    "empty runs": (
        segmentation({"size": [12, 16], "counts": [192]}),
        "empty segmentation",
        r"100 .*: segmentation is empty: counts \[192\]",
    ),
    "broken packed runs": (
        segmentation({"size": [12, 16], "counts": "hello world"}),
        "wrong mask",
        "100 .*: counts 'hello world' cannot be decoded: ",
    ),
    "short packed runs": (
        segmentation({"size": [12, 16], "counts": "V148"}),
        "wrong mask",
        "100 .*: counts 'V148' can",
    ),
    "entry of another type": (
        lambda content: content["annotations"].insert(0, 3),
        "entry of annotations that is not an object",
        "entry 0 of annotations: must be a JSON object, got 3",
    ),
}


def left(name: str) -> dict[int, list[int]]:
    """The labels in each image once the problem is left out."""
    if name.startswith("file of another"):
        return {7: [0, 2, 1], 9: [1]}
    if name.startswith("file") or name in ("image too large", "height", "no width"):
        return {40: [], 9: [1]}
    if name in ("image twice", "image of no id", "image id text"):
        return {7: [0, 2, 1], 9: [1]}
    if name == "object twice":
        return {7: [0, 2, 1], 40: [], 9: []}
    if name == "entry of another type":
        return {7: [0, 2, 1], 40: [], 9: [1]}
    return {7: [2, 1], 40: [], 9: [1]}


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_problem_is_named_and_can_be_left_out(write, name):
    spoil, kind, text = PROBLEMS[name]
    content = contents()
    spoil(content)
    images, file = write(content)
    with pytest.raises(ValueError, match=text) as caught:
        CocoSource(images, file)
    first, *_, last = str(caught.value).split("; ")
    assert first.startswith(f"{file}: 1 x {kind}")
    assert last == "repair these, or leave them out by --skip-corrupt"
    heard: list[str] = []
    source = CocoSource(images, file, skip_corrupt=True, notify=heard.append)
    (message,) = heard
    assert re.search(text, message)
    assert message.startswith(f"{file}: left out, together with all objects of an image: 1 x {kind}")
    assert {source.image_id(index): source.load(index)[1].labels.tolist() for index in range(len(source))} == left(name)


def test_an_image_left_out_takes_its_objects_along(write):
    content = contents()
    content["images"][0]["file_name"] = "absent.png"
    heard: list[str] = []
    source = CocoSource(*write(content), skip_corrupt=True, notify=heard.append)
    assert [source.image_id(index) for index in range(len(source))] == [40, 9]
    assert [len(source.instances(index).labels) for index in range(2)] == [0, 1]
    assert "unknown" not in heard[0]


def test_only_what_is_wrong_is_left_out(write):
    content = contents()
    content["annotations"][2]["bbox"] = [3, 2, 0, 4]
    source = CocoSource(*write(content), skip_corrupt=True, notify=lambda _: None)
    assert source.load(0)[1].labels.tolist() == [0, 1]
    assert source.load(2)[1].labels.tolist() == [1]


def test_empty_boxes_alone_can_be_forgiven(write):
    content = contents()
    content["annotations"][2]["bbox"] = [3, 2, 0, 4]
    heard: list[str] = []
    source = CocoSource(*write(content), skip_empty_boxes=True, notify=heard.append)
    assert source.load(0)[1].labels.tolist() == [0, 1]
    assert "1 x box of no area" in heard[0]
    content["images"][2]["file_name"] = "absent.png"
    with pytest.raises(ValueError, match="1 x missing image file, 1 x box of no area"):
        CocoSource(*write(content), skip_empty_boxes=True, notify=heard.append)


def test_annotations_may_lack_crowd_and_area(write):
    content = contents()
    for entry in content["annotations"]:
        entry.pop("area")
        if not entry.pop("iscrowd"):
            continue
        entry["iscrowd"] = 1
    content["annotations"][2].pop("segmentation")
    content["annotations"][2]["bbox"] = [3, 2, 5, 3]
    heard: list[str] = []
    source = CocoSource(*write(content), notify=heard.append)
    objects = source.instances(0)
    assert objects.crowd.tolist() == [False] * 3
    assert sorted(objects.area.tolist()) == [15, 20, 20]
    assert source.instances(2).crowd.tolist() == [True]
    (message,) = heard
    assert message.endswith("4 annotations have no area: using that of their mask, or else of their box")


def test_objects_without_a_mask_are_problems_where_masks_are_needed(write):
    content = contents()
    content["annotations"][0]["segmentation"] = []
    with pytest.raises(ValueError, match="1 x object without a mask"):
        CocoSource(*write(content), masks=True)
    source = CocoSource(*write(content), masks=True, skip_corrupt=True, notify=lambda _: None)
    assert len(source.instances(0).labels) == 2
    source.check_masks()


def test_a_file_whose_annotations_are_all_wrong_is_refused(write):
    content = contents()
    for entry in content["annotations"]:
        del entry["bbox"]
    with pytest.raises(ValueError, match="none of its 4 annotations could be used"):
        CocoSource(*write(content), skip_corrupt=True, notify=lambda _: None)


def test_a_missing_file_says_what_it_should_be(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.json does not exist: it must be JSON in COCO's format"):
        CocoSource(tmp_path, tmp_path / "gone.json")


def test_categories_have_different_names(write):
    content = contents()
    content["categories"][1]["name"] = "sign"
    with pytest.raises(ValueError, match="categories must have different names, 'sign' appears twice"):
        CocoSource(*write(content))


def test_masks_are_encoded_as_runs_that_decode_to_them():
    mask = np.random.default_rng(0).random((13, 9)) > 0.6
    encoded = encode_mask(mask)
    assert json.loads(json.dumps(encoded))["size"] == [13, 9]
    assert np.array_equal(decode_mask(encoded, (13, 9)), mask)


def test_boxes_may_exceed_the_border_by_rounding(write):
    content = contents()
    content["annotations"][0]["bbox"] = [-0.4, 2, 17.2, 10.6]
    boxes = CocoSource(*write(content)).load(0)[1].boxes
    torch.testing.assert_close(boxes[0], torch.tensor([-0.4, 2, 16.8, 12.6]))


def test_ten_problems_are_listed_and_all_are_counted(write):
    content = contents()
    content["annotations"] = [an_object(number, 7, bbox=[0, 0, 0, 1]) for number in range(12)]
    content["annotations"] += [an_object(number, 8) for number in range(50, 53)]
    with pytest.raises(ValueError, match="12 x box of no area, 3 x unknown image_id") as caught:
        CocoSource(*write(content))
    lines = str(caught.value).split("; ")
    assert [line for line in lines if line.startswith("annotation ")] == lines[1:11]
    assert lines[11] == "and 5 more"


def test_a_sound_file_has_nothing_to_tell(write):
    CocoSource(*write(contents()), skip_corrupt=True, notify=pytest.fail)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "must be a JSON object with the lists images, annotations, categories; images is not a list"),
        ({"images": [], "categories": []}, "annotations is not a list"),
        (contents() | {"images": {}}, "images is not a list"),
        (contents() | {"categories": []}, "names no categories"),
        (contents() | {"categories": [{"id": 1}]}, "category 1: has no 'name'"),
        (contents() | {"categories": [{"id": 1, "name": 5}]}, "category 1: name must be text that is not empty, got 5"),
        (contents() | {"categories": [{"id": 1, "name": "a"}] * 2}, "category 1: id 1 appears twice"),
        (contents() | {"images": [], "annotations": []}, "describes no image of .*/images that could be used"),
    ],
)
@pytest.mark.parametrize("skip_corrupt", [False, True])
def test_files_of_another_format_are_refused(write, content, message, skip_corrupt):
    with pytest.raises(ValueError, match=rf"objects\.json.*{message}"):
        CocoSource(*write(copy.deepcopy(content)), skip_corrupt=skip_corrupt, notify=lambda _: None)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\xfa", b"", b"[" * 100_000, b"1" * 10_000])
def test_what_is_not_json_is_refused(tmp_path, content):
    (tmp_path / "objects.json").write_bytes(content)
    with pytest.raises(UserError, match=r"objects\.json is (not JSON: |nested too deeply)"):
        CocoSource(tmp_path, tmp_path / "objects.json")


def test_images_of_another_size_and_broken_ones_are_found(write, picture):
    images, file = write(contents())
    (images / "40.png").write_bytes(picture(size=(HEIGHT, WIDTH), kind="PNG"))
    (images / "9.png").write_bytes(b"text")
    source = CocoSource(images, file)
    text = rf"40\.png has another .*: 16 x 12 pixels \(height x width\), but {file} says 12 x 16 for image 40; .*--skip"
    with pytest.raises(ValueError, match=text) as caught:
        source.load(1)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(CorruptImageError, match=r"9\.png cannot be decoded \(not an image\)"):
        source.load(2)
    corrupt = find_corrupt(source)
    assert [each.index for each in corrupt] == [1, 2]
    rest = source.without([each.index for each in corrupt])
    assert find_corrupt(rest) == []


def test_a_note_to_turn_the_picture_is_ignored(write):
    images, file = write(contents())
    picture = Image.new("RGB", (WIDTH, HEIGHT))
    orientation = 0x0112
    exif = picture.getexif()
    exif[orientation] = 6
    picture.save(images / "7.png", exif=exif)
    image, _ = CocoSource(images, file).load(0)
    assert image.getexif()[orientation] == 6
    assert image.size == (WIDTH, HEIGHT)


def test_objects_may_have_boxes_alone(write):
    content = contents()
    for entry in content["annotations"][:2]:
        del entry["segmentation"]
    content["annotations"][0]["segmentation"] = []
    source = CocoSource(*write(content))
    assert source.load(0)[1].segmentations == (None, SQUARE, PACKED)
    with pytest.raises(ValueError, match=r"objects\.json: masks need .*; annotation 100 has none \(2 of 4 have none\)"):
        source.check_masks()
    with pytest.raises(ValueError, match="an object that has only a box has no mask"):
        source.load(0)[1].masks()


def test_paths_may_hold_folders_and_any_character(write, picture):
    content = contents()
    content["images"][0]["file_name"] = "Ähre ☂/1.png"
    images, file = write(content)
    (images / "Ähre ☂").mkdir()
    (images / "7.png").rename(images / "Ähre ☂" / "1.png")
    source = CocoSource(images, file)
    assert source.name(0) == f"{images}/Ähre ☂/1.png"
    assert source.load(0)[0].size == (WIDTH, HEIGHT)


@pytest.mark.skipif(not COCO128.is_dir(), reason="needs ../shared/data/coco128")
def test_real_photographs_are_read():
    source = CocoSource(COCO128 / "train2017", COCO128 / "annotations" / "instances_train2017.json")
    objects = [source.instances(index) for index in range(len(source))]
    assert (len(source), len(source.classes), source.category_ids[-1]) == (128, 80, 90)
    assert sum(len(each.labels) for each in objects) == 939
    assert sum(int(each.crowd.sum()) for each in objects) == 10
    assert len(source.with_objects()) == 126
    for index in range(0, 128, 16):
        image, found = source.load(index)
        masks = found.masks().numpy()
        assert masks.shape == (len(found.labels), image.height, image.width)
        # a mask's outline is its box, to the pixels that the box cuts
        for mask, (left, top, right, bottom) in zip(masks, found.boxes.tolist(), strict=True):
            rows, columns = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
            outline = [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
            np.testing.assert_allclose(outline, [left, top, right, bottom], atol=1.5)


def test_a_folder_of_images_that_is_a_link_is_refused_below_the_named_one(write, tmp_path):
    content = contents()
    images, file = write(content)
    (tmp_path / "linked").symlink_to(images)
    assert len(CocoSource(tmp_path / "linked", file)) == 3
    (images / "more").symlink_to(images)
    content["images"][0]["file_name"] = "more/7.png"
    write(content)
    with pytest.raises(UserError, match=rf"image 7: {images}/more is a symbolic link to {images}: links inside"):
        CocoSource(images, file)


def test_annotations_must_be_a_regular_file(write, tmp_path):
    images, _ = write(contents())
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(UserError, match=r"pipe\.json must be a regular file, it is a named pipe"):
        CocoSource(images, tmp_path / "pipe.json")
