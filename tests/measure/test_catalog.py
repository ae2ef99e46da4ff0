import pytest

from softline.backbones import MODEL_NAMES
from softline.measure.catalog import REPORTED_TOP1, describe, list_models


def test_models_are_described_without_computing_them():
    card = describe("softpp_tiny")
    assert (card.image_size, card.reported_top1) == (224, 80.9)
    assert 12e6 < card.parameters < 14e6
    assert card.macs > 1e9
    assert set(REPORTED_TOP1) < set(MODEL_NAMES)


def test_patterns_choose_models():
    assert list_models("*_micro") == ["inline_micro", "soft_micro", "softpp_micro"]
    with pytest.raises(ValueError, match="no model matches 'vit_"):
        list_models("vit_*")
