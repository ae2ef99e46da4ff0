import re
from pathlib import Path

import pytest
import timm
import torch

from softline.heads.segmenters import upernet
from softline.measure.counting import count_operations
from softline.measure.dense_catalog import REPORTED, describe_dense

SEGMENTATION_PAGE = Path(__file__).parents[2] / "docs" / "tasks" / "segmentation.md"
# billions of multiply-adds, of them those of Newton's iteration, and the paper's
COUNTED = {
    "ade20k_upernet_softpp_small": (512, 235.0, 0.6, 237),
    "ade20k_upernet_softpp_medium": (512, 258.4, 1.4, 260),
    "ade20k_upernet_softpp_large": (512, 293.3, 1.8, 301),
    "cityscapes_upernet_softpp_small": (768, 525.5, 0.6, 545),
    "cityscapes_upernet_softpp_medium": (768, 577.1, 1.4, 607),
    "cityscapes_upernet_softpp_large": (768, 655.0, 1.8, 899),
}


@pytest.mark.parametrize("name", [name for name in REPORTED if name not in COUNTED])
def test_parameters_of_detectors_are_within_three_percent_of_the_papers(name):
    card = describe_dense(name)
    assert card.parameters / 1e6 == pytest.approx(card.reported_millions, rel=0.03)
    assert (card.image_size, card.operations, card.reported_gmacs) == (None, None, None)


# one of each size and dataset, since counting takes seconds
@pytest.mark.parametrize(
    "name", ["ade20k_upernet_softpp_small", "ade20k_upernet_softpp_large", "cityscapes_upernet_softpp_medium"]
)
def test_segmenters_are_described_beside_the_papers_numbers(name):
    card = describe_dense(name)
    size, macs, newton, reported = COUNTED[name]
    assert card.parameters / 1e6 == pytest.approx(card.reported_millions, rel=0.03)
    assert (card.image_size, card.reported_gmacs) == (size, reported)
    assert card.operations.macs / 1e9 == pytest.approx(macs, abs=0.06)
    assert card.operations.newton / 1e9 == pytest.approx(newton, abs=0.06)
    assert macs == pytest.approx(reported, rel=0.05)


@pytest.mark.parametrize(
    ("backbone", "options", "reported"),
    [("swin_tiny_patch4_window7_224", {"img_size": 512}, 236), ("convnext_tiny", {}, 235), ("convnext_base", {}, 293)],
)
def test_the_paper_counts_other_backbones_at_512(backbone, options, reported):
    """Rows of its Table 7 whose backbones leave no choice of what to count."""
    with torch.device("meta"):
        model = upernet(timm.create_model(backbone, features_only=True, **options), 150)
    counted = count_operations(model, torch.empty(1, 3, 512, 512, device="meta"))
    assert counted.macs / 1e9 == pytest.approx(reported, rel=0.01)


def test_the_documentation_has_these_numbers():
    rows = re.findall(
        r"^\| `(softpp_\w+)` \| (\d+) x \d+ \| (.*) \|$", SEGMENTATION_PAGE.read_text(), flags=re.MULTILINE
    )
    found = {
        (backbone, int(size)): tuple(float(cell.removesuffix(" G")) for cell in cells.split(" | "))
        for backbone, size, cells in rows
    }
    assert found == {(name.partition("upernet_")[2], row[0]): row[1:] for name, row in COUNTED.items()}
