"""The tables of linearised flower models come from their results."""

import json
from pathlib import Path

import pytest

from tools.linearize_flowers import COST_SIZES, SIZES, accuracy_table, cost_table, spread

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "figures" / "linearize_flowers.json"


def scores(*values, sizes=SIZES):
    pairs = zip(sizes, values, strict=False)
    return [{"size": size, "top1": value, "agreement": value / 2} for size, value in pairs]


def summary():
    steps = ("original", "replaced", "transferred", "finetuned")
    linearized = [
        {
            **{"kind": "linearize", "attention": "inline", "seed": seed, "passes": 10},
            "steps": {step: {"scores": found, "errors": {}} for step in steps},
        }
        for seed, found in enumerate([scores(0.5, 0.6, 0.7), scores(0.7)])
    ]
    scratch = [
        {"kind": "from_scratch", "attention": "inline", "seed": 0, "passes": 10, "scores": scores(0.4, 0.3, 0.2)}
    ]
    cost = [
        {"attention": "inline", "case": case, "size": size, "milliseconds": size / 10, "peak_bytes": size * 2**20}
        for size in COST_SIZES
        for case in ("original", "linearized")
    ]
    return {"rows": [*linearized, *scratch], "cost": cost}


def test_a_row_has_the_mean_and_the_deviation_of_the_seeds_that_were_measured_at_a_size():
    lines = accuracy_table(summary()).splitlines()
    assert lines[2] == "| teacher, softmax | | 50.0 | 60.0 | 70.0 | |"
    assert lines[5] == "| InLine, fine-tuned | 10 | 60.0 ± 14.1 | 60.0 | 70.0 | 30.0 ± 7.1 |"
    assert lines[4].startswith("| InLine, transferred | 1 | ")
    assert lines[3].startswith("| InLine, replaced | 0 | ")
    assert spread([0.5, 0.6, 0.7]) == "60.0 ± 10.0"


def test_costs_of_both_models_are_side_by_side():
    lines = cost_table(summary()).splitlines()
    assert lines[2].startswith("| teacher, softmax | 9.6, 96.0 | 13.6, 136.0 |")
    assert lines[3].startswith("| InLine | 9.6, 96.0 |")
    assert len(lines) == 4


@pytest.mark.skipif(not RESULTS.exists(), reason="not measured yet")
def test_the_page_shows_the_committed_results():
    page, results = (ROOT / "docs" / "linearize.md").read_text(), json.loads(RESULTS.read_text())
    assert accuracy_table(results) in page
    assert cost_table(results) in page
