from itertools import pairwise

import numpy as np
import torch

from softline.data.sequences.interface import SequenceSamples, length_groups
from softline.data.sequences.listops import ListOpsSettings
from softline.data.sequences.lra import open_lra

SMALL = ListOpsSettings(samples=(6, 3, 2), min_length=5, max_length=40)


def test_samples_are_tensors_by_index_and_by_epoch(tmp_path):
    samples = SequenceSamples(open_lra("listops", tmp_path / "made", "val", generate=SMALL))
    (tokens,), label = samples[1]
    (later,), same = samples[(7, 1)]
    assert tokens.tolist() == later.tolist()
    assert tokens.dtype == torch.int64
    assert label == same
    assert len(samples) == 3


def test_groups_are_alike_in_length_and_of_whole_batches():
    lengths = np.random.default_rng(0).integers(5, 500, 1000)
    groups = np.array(length_groups(lengths, batch_size=4))
    assert np.bincount(groups).tolist() == [143, 143, 143, 143, 143, 143, 142]
    bounds = [(lengths[groups == group].min(), lengths[groups == group].max()) for group in range(7)]
    assert all(high <= low for (_, high), (low, _) in pairwise(bounds))
    assert length_groups(lengths, batch_size=999) == [0] * 1000
