import pytest

from softline.data.images import ImageSource, open_source


def test_sources_offer_one_interface(folder):
    assert isinstance(open_source("embedded", "train"), ImageSource)
    assert isinstance(open_source(str(folder), "train"), ImageSource)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("embeded", r"source 'embeded' does not exist; it must be a directory, a \.tar file, .*mean 'embedded'\?"),
        ("wbs/images", r"'wbs/images' does not exist; .*did you mean 'wds/'\?"),
        (
            "/no/such/place",
            r"'/no/such/place' does not exist; it must be a directory, a \.tar file, or one of embedded, ",
        ),
        ("torch/", "does not exist"),
        ("", "source must be a directory"),
        (__file__, r"test_sources\.py' is a file but not a \.tar file"),
    ],
)
def test_unknown_sources_are_refused_with_what_is_possible(source, message):
    with pytest.raises(ValueError, match=message):
        open_source(source, "train")


def test_root_is_refused_where_it_means_nothing(folder):
    with pytest.raises(ValueError, match=r"root \(/data\) is for fashion-mnist and timm's datasets"):
        open_source(str(folder), "train", root="/data")
