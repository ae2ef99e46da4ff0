import re
from pathlib import Path

import pytest

from softline.backbones import MODEL_NAMES
from softline.measure.catalog import REPORTED_GMACS, REPORTED_TOP1, describe, list_models

MODELS_PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_models_are_described_without_computing_them():
    card = describe("softpp_micro")
    assert (card.image_size, card.reported_top1, card.reported_gmacs) == (32, None, None)
    assert 0.7e6 < card.parameters < 0.8e6
    assert 5e6 < card.macs < 1e7
    assert set(REPORTED_GMACS) <= set(REPORTED_TOP1) < set(MODEL_NAMES)


# billions of multiply-adds with and without Newton's iteration, what the paper reports, and the number of heads in all
# SOFT blocks
COUNTED = {
    "soft_tiny": (2.122, 1.929, 1.9, 1 * 2 + 2 * 4 + 3 * 10),
    "softpp_small": (5.049, 4.441, 4.5, 2 * 3 + 2 * 6 + 5 * 12 + 2 * 24),
    "soft_medium": (10.145, 8.785, 8.7, 2 * 3 + 2 * 6 + 18 * 12 + 2 * 24),
    "softpp_large": (17.055, 15.241, 15.4, 2 * 4 + 2 * 8 + 18 * 16 + 2 * 32),
}


@pytest.mark.parametrize("name", COUNTED)
def test_operations_of_soft_are_counted_with_and_without_newton(name):
    macs, without, reported, heads = COUNTED[name]
    card = describe(name)
    assert card.reported_gmacs == reported
    assert card.macs / 1e9 == pytest.approx(macs, abs=5e-4)
    assert (card.macs - card.newton_macs) / 1e9 == pytest.approx(without, abs=5e-4)
    assert without == pytest.approx(reported, rel=0.02)
    # two products of 49 x 49 matrices in each of 20 steps, and A^2 for the start
    assert card.newton_macs == 41 * 49**3 * heads


def test_operations_in_the_documentation_are_those_counted():
    rows = re.findall(r"^\| `(soft_\w+)`, `(softpp_\w+)` \| (.*) \|$", MODELS_PAGE.read_text(), flags=re.MULTILINE)
    assert [row[0] for row in rows] == ["soft_tiny", "soft_small", "soft_medium", "soft_large"]
    for soft, softpp, cells in rows:
        counted = COUNTED.get(soft) or COUNTED[softpp]
        assert [float(cell.removesuffix(" G")) for cell in cells.split(" | ")] == [
            pytest.approx(value, abs=0.006) for value in counted[:3]
        ]


@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"])
def test_operations_of_inline_are_those_reported(name):
    card = describe(name)
    assert card.newton_macs == 0
    assert card.macs / 1e9 == pytest.approx(REPORTED_GMACS[name], abs=0.05)


def test_patterns_choose_models():
    assert list_models("*_micro") == ["inline_micro", "soft_micro", "softpp_micro"]
    with pytest.raises(ValueError, match="no model matches 'vit_"):
        list_models("vit_*")
