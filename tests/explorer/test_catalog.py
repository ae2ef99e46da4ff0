import os

import pytest

from softline.attention import ATTENTIONS
from softline.explorer.catalog import FRESH, OWN, find_choices


def test_every_best_checkpoint_below_a_directory_is_offered_before_fresh_models(tmp_path):
    for run in ("one", "two/seed0"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "best.pt").touch()
        (tmp_path / run / "last.pt").touch()
    (tmp_path / "no file" / "best.pt").mkdir(parents=True)
    os.mkfifo(tmp_path / "best.pt")
    choices = find_choices([str(tmp_path)])
    fresh = [f"{name} (untrained)" for name in FRESH]
    assert list(choices) == [str(tmp_path / "one"), str(tmp_path / "two" / "seed0"), *fresh]
    assert choices[str(tmp_path / "one")].text == str(tmp_path / "one" / "best.pt")


def test_a_checkpoint_named_twice_is_offered_once(tmp_path):
    (tmp_path / "last.pt").touch()
    trained = [choice for choice in find_choices([str(tmp_path / "last.pt")] * 2).values() if choice.trained]
    assert [choice.label for choice in trained] == [str(tmp_path / "last.pt")]


def test_only_fresh_models_take_another_attention():
    fresh = find_choices([])["softpp_tiny (untrained)"]
    assert fresh.attentions == (OWN, *ATTENTIONS)
    assert fresh.with_attention(OWN) == "softpp_tiny"
    assert fresh.with_attention("inline") == "softpp_tiny:attention=inline"
    with pytest.raises(ValueError, match="nonsense"):
        fresh.with_attention("nonsense")


def test_a_trained_model_keeps_its_attention(tmp_path):
    (tmp_path / "best.pt").touch()
    choice = next(iter(find_choices([str(tmp_path)]).values()))
    assert choice.attentions == (OWN,)
    with pytest.raises(ValueError, match="inline"):
        choice.with_attention("inline")


def test_directories_without_checkpoints_and_missing_ones_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no best\.pt in .* or below"):
        find_choices([str(tmp_path)])
    with pytest.raises(ValueError, match=r"no such checkpoint or directory: .*missing"):
        find_choices([str(tmp_path / "missing")])
