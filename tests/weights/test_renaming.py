import pytest
import torch
from torch import nn

from softline.weights.renaming import check_keys, key_map, rename_keys

RULES = [
    (r"^block(?P<stage>\d+)\.(?P<block>\d+)\.", "stages.{stage}.blocks.{block}."),
    (r"relative_position_index$", None),
    (r"\.residual\.0\.", ".local.hidden."),
]


def test_keys_are_renamed_by_every_rule_that_fits_and_stages_count_from_0():
    weights = {"block1.2.attn.residual.0.weight": torch.ones(1), "head.bias": torch.zeros(1)}
    renamed = rename_keys(weights, RULES)
    assert list(renamed) == ["stages.0.blocks.2.attn.local.hidden.weight", "head.bias"]
    assert renamed["head.bias"] is weights["head.bias"]


@pytest.mark.parametrize("other", ["kv", "v"])
def test_separate_projections_become_one_with_queries_first(other):
    weights = {f"block2.0.attn.{other}.bias": torch.tensor([3.0, 4.0]), "block2.0.attn.q.bias": torch.tensor([1.0])}
    renamed = rename_keys(weights, RULES)
    assert {key: value.tolist() for key, value in renamed.items()} == {"stages.1.blocks.0.attn.qkv.bias": [1, 3, 4]}


def test_queries_without_keys_and_values_stay_alone():
    assert list(rename_keys({"block1.0.attn.q.weight": torch.ones(1)}, RULES)) == ["stages.0.blocks.0.attn.q.weight"]


def test_the_map_of_keys_tells_where_each_went_and_which_are_not_needed():
    expected = {
        "block1.0.attn.q.weight": "stages.0.blocks.0.attn.qkv.weight",
        "block1.0.attn.kv.weight": "stages.0.blocks.0.attn.qkv.weight",
        "block1.0.attn.relative_position_index": None,
        "head.weight": "head.weight",
    }
    assert key_map({name: torch.ones(1) for name in expected}, RULES) == expected


def test_every_kind_of_misfit_is_counted_and_named():
    model = nn.Linear(3, 2)
    check_keys(model, model.state_dict(), "a line")
    wrong = {"weight": torch.ones(2, 4), **{f"more.{number}": torch.ones(1) for number in range(4)}}
    message = (
        r"not a state dict of a line: 1 missing: bias; 4 unexpected: more\.0, more\.1, more\.2, \.\.\.; "
        r"1 of another shape: weight \(2, 4\) \(expected \(2, 3\)\)"
    )
    with pytest.raises(ValueError, match=message):
        check_keys(model, wrong, "a line")
