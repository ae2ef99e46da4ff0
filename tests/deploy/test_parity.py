"""Differences between an exported network and its original."""

import math

import pytest
import torch

from softline.deploy.parity import compare
from softline.engine.graph import BATCH, HEIGHT, IMAGE_AXES, WIDTH, Graph

SIZES = [{BATCH: 2, HEIGHT: 4, WIDTH: 4}]


def graph(outputs: dict[str, tuple[str | None, ...]]) -> Graph:
    network = torch.nn.Identity()
    usual = {HEIGHT: 4, WIDTH: 4}
    return Graph(
        network=network, input="images", axes=IMAGE_AXES, outputs=outputs, usual=usual, sample=lambda _: torch.ones(2)
    )


def difference(outputs, wanted, got) -> float:
    runs = {"eager": lambda _: wanted, "exported": lambda _: got}
    (row,) = compare(graph(outputs), runs, SIZES, rounds=1)
    return row.difference


def test_the_difference_is_relative_to_the_largest_output():
    wanted = torch.tensor([[1.0, -4.0], [2.0, 3.0]])
    assert difference({"logits": (BATCH, None)}, wanted, wanted + 0.2) == pytest.approx(0.05)
    assert difference({"logits": (BATCH, None)}, wanted, wanted * math.nan) == math.inf
    assert difference({"logits": (BATCH, None)}, wanted, wanted[:1]) == math.inf


def test_agreement_is_the_share_of_equal_classes():
    wanted, got = torch.tensor([[1.0, 2.0], [4.0, 3.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    (row,) = compare(
        graph({"logits": (BATCH, None)}), {"eager": lambda _: wanted, "exported": lambda _: got}, SIZES, rounds=1
    )
    assert row.agreement == 0.5


DETECTIONS = {"boxes": ("found", None), "scores": ("found",), "labels": ("found",)}
BOXES = torch.tensor([[0.0, 0, 10, 10], [20, 20, 40, 40], [5, 5, 9, 9], [1, 1, 2, 2]])
SCORES, LABELS = torch.tensor([0.9, 0.8, 0.8, 0.1]), torch.tensor([0, 1, 1, 0])


def test_objects_with_equal_scores_have_no_order():
    swapped = torch.tensor([0, 2, 1, 3])
    assert difference(DETECTIONS, (BOXES, SCORES, LABELS), (BOXES[swapped], SCORES, LABELS)) == 0


def test_moved_relabelled_or_missing_objects_differ():
    moved = BOXES.clone()
    moved[0, 2] += 4
    assert difference(DETECTIONS, (BOXES, SCORES, LABELS), (moved, SCORES, LABELS)) == pytest.approx(0.1)
    assert difference(DETECTIONS, (BOXES, SCORES, LABELS), (BOXES, SCORES, LABELS + 2)) == math.inf
    assert difference(DETECTIONS, (BOXES, SCORES, LABELS), (BOXES[:3], SCORES[:3], LABELS[:3])) == math.inf
    nothing = (BOXES[:0], SCORES[:0], LABELS[:0])
    assert difference(DETECTIONS, nothing, nothing) == 0


def test_which_of_the_last_scores_are_kept_is_arbitrary():
    tied = torch.full((4,), 0.01)
    assert difference(DETECTIONS, (BOXES, tied, LABELS), (BOXES + 50, tied, LABELS)) == 0
    assert difference(DETECTIONS, (BOXES, tied, LABELS), (BOXES, tied + 0.2, LABELS)) == pytest.approx(0.2)
