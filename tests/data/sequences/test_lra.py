import pytest

from softline.data.sequences.interface import SequenceSource
from softline.data.sequences.listops import ListOpsSettings
from softline.data.sequences.lra import open_lra

SMALL = ListOpsSettings(samples=(6, 3, 2), min_length=5, max_length=40)


@pytest.mark.parametrize("below", [".", "listops-1000", "lra_release/listops-1000"])
def test_the_benchmarks_expressions_are_found(tmp_path, below):
    (tmp_path / below).mkdir(parents=True, exist_ok=True)
    (tmp_path / below / "basic_train.tsv").write_text("Source\tTarget\n( ( ( [MAX 2 ) 9 ) ] )\t9\n")
    source = open_lra("listops", tmp_path, "train")
    (tokens,), label = source.load(0)
    assert (tokens.tolist(), label) == ([12, 3, 10, 15], 9)


def test_generated_expressions_are_kept(tmp_path):
    heard = []
    options = {"generate": SMALL, "progress": lambda *numbers: heard.append(numbers)}
    sources = [open_lra("listops", tmp_path / "made", split, **options) for split in ("train", "val", "test")]
    assert [len(source) for source in sources] == [6, 3, 2]
    assert all(isinstance(source, SequenceSource) for source in sources)
    told = len(heard)
    assert heard[-1][1] == 11
    again = open_lra("listops", tmp_path / "made", "train", **options)
    assert len(heard) == told
    assert again.load(0)[0][0].tolist() == sources[0].load(0)[0][0].tolist()


def test_sources_tell_lengths_without_reading(tmp_path):
    source = open_lra("listops", tmp_path / "made", "train", generate=SMALL)
    assert source.lengths().tolist() == [len(source.load(index)[0][0]) for index in range(6)]


@pytest.mark.parametrize("task", ["listops", "text", "retrieval", "image", "pathfinder"])
def test_missing_downloads_are_named_with_their_place_and_origin(task, tmp_path):
    with pytest.raises(ValueError, match=r"looked for .* they come from") as error:
        open_lra(task, tmp_path, "test")
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("task", "split", "options", "message"),
    [
        ("list", "train", {}, "task must be one of image, listops"),
        ("text", "dev", {}, "split must be one of test, train, val; got 'dev'"),
        ("text", "train", {"generate": SMALL}, "generate is for listops; text is read from files"),
        ("image", "train", {"max_length": 9}, "max_length is for text and retrieval; image is never cut"),
    ],
)
def test_mistakes_name_the_rule(task, split, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        open_lra(task, tmp_path, split, **options)
