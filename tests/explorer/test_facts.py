import dataclasses

import pytest
from PIL import Image

from softline.explorer.budget import Duration
from softline.explorer.facts import answer_table, cost_line, details_table, message
from softline.explorer.view import Answer, Asked, Cost, Details

ANSWER = Answer(
    asked=Asked("model"),
    attentions=("its own",),
    layers=("stage 1, block 1 (softpp)",),
    heads=2,
    picture=Image.new("RGB", (4, 4)),
    tokens=3136,
    grid_size=(56, 56),
    residual=2.1e-6,
    mass=0.25,
    chance=9 / 3136,
    mean_mass=0.125,
    mean_chance=9 / 3136,
    trained=True,
    trained_size=28,
    predictions=(("<b>Bag</b>", 0.87), ("Shirt", 0.04)),
)


def test_the_table_says_what_is_shown():
    table = answer_table(ANSWER)
    for text in ("56 x 56", "2.1e-06", "25.0&nbsp;%", "12.5&nbsp;%", "by chance 0.29&nbsp;%", "trained at 28 x 28"):
        assert text in table
    assert "&lt;b&gt;Bag&lt;/b&gt; 87&nbsp;%, Shirt 4&nbsp;%" in table


def test_names_from_a_checkpoint_are_not_html():
    assert "<b>Bag" not in answer_table(ANSWER)
    assert "<script>" not in message("no such model: <script>")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"trained": False, "predictions": ()}, "this model is not trained, its weights are random"),
        ({"predictions": ()}, "this model has no class names"),
        ({"tokens": 3137}, "56 x 56 and a class token"),
        ({"mass": None, "mean_mass": None}, "all of it: there are no other patches"),
    ],
)
def test_what_is_missing_is_said(change, text):
    assert text in answer_table(dataclasses.replace(ANSWER, **change))


def test_no_residual_without_an_inverse():
    assert "Newton" not in answer_table(dataclasses.replace(ANSWER, residual=None))


def test_the_time_says_what_was_timed():
    cost = Cost(2_120_000_000, 2_120_000_000)
    assert "69 ms <small>whole model, median of 3 runs" in details_table(Details(cost, Duration(0.0687, 3)))
    assert "2.12 billion" in details_table(Details(cost, Duration(0.0687, 3)))
    assert "1,200 ms <small>whole model, one run" in details_table(Details(cost, Duration(1.2, 1)))
    assert details_table(None).count("...") == 2


@pytest.mark.parametrize(
    ("macs", "text"),
    [(4_930_000, "4.9 million"), (99_000_000, "99.0 million"), (100_000_000, "0.10 billion")],
)
def test_small_models_cost_millions(macs, text):
    assert f"<td>{text}</td>" in details_table(Details(Cost(macs, macs), Duration(0.01, 3)))
    assert f"<span>{text}</span>" in cost_line(224, [("A", Cost(macs, macs))])


def test_the_cost_line_compares_sizes_and_sides():
    line = cost_line(448, [("A", Cost(8 * 10**9, 2 * 10**9)), ("B", Cost(36 * 10**9, 3 * 10**9))])
    assert "448 x 448, 4x the pixels of 224 x 224" in line
    assert "8.00 billion <small>4x</small>" in line
    assert "36 billion <small>12x</small>" in line
    assert "<small>" not in cost_line(224, [("A", Cost(2 * 10**9, 2 * 10**9))])
    assert "<small>" not in cost_line(32, [("A", Cost(2 * 10**9, None))])
    assert cost_line(448, []) == ""
