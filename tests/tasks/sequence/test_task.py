import pytest
import torch
import torch.nn.functional as F

from softline.backbones.sequence import SequenceClassifier, SequenceEncoder
from softline.tasks.sequence.task import SequenceClassification


def task(parts: int = 1) -> SequenceClassification:
    torch.manual_seed(0)
    model = SequenceClassifier(SequenceEncoder(9, 16), 3, parts=parts)
    return SequenceClassification(model, ["a", "b", "c"], vocabulary=9, positions=16, parts=parts)


def test_sequences_are_padded_to_the_longest():
    tokens, labels = task().collate([((torch.tensor([3, 4]),), 2), ((torch.tensor([5, 6, 7]),), 0)])
    assert tokens.tolist() == [[[3, 4, 0]], [[5, 6, 7]]]
    assert labels.tolist() == [2, 0]


def test_both_sequences_of_a_sample_have_one_length():
    tokens, _ = task(2).collate([((torch.tensor([3]), torch.tensor([4, 5])), 1)])
    assert tokens.tolist() == [[[3, 0], [4, 5]]]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (((torch.tensor([9]),), 0), r"token ids must be 0 to 8 \(vocabulary\), got 9"),
        (((torch.tensor([-1]),), 0), r"token ids must be 0 to 8 \(vocabulary\), got -1"),
        (((torch.ones(17, dtype=torch.long),), 0), r"1 to 16 tokens \(positions\), got 17"),
        (((torch.ones(0, dtype=torch.long),), 0), r"1 to 16 tokens \(positions\), got 0"),
        (((torch.tensor([1]),), 3), "labels must be 0 to 2, got 3"),
        (((torch.tensor([1]), torch.tensor([1])), 0), "a sample must have 1 sequences, got 2"),
    ],
)
def test_samples_that_do_not_fit_the_model_are_refused(sample, message):
    with pytest.raises(ValueError, match=message):
        task().collate([sample])


def test_loss_and_metrics_are_cross_entropy_and_accuracy():
    sequences = task()
    batch = sequences.collate([((torch.arange(1, 5 + place),), place) for place in range(3)])
    sequences.model.eval()
    logits = sequences.model(batch[0])
    loss = sequences.loss(sequences.model, batch)
    assert loss.value.item() == pytest.approx(F.cross_entropy(logits, batch[1]).item())
    metrics = sequences.metrics()
    with torch.no_grad():
        sequences.update(metrics, sequences.model, batch, valid=2)
    right = (logits.argmax(1) == batch[1])[:2].float().mean().item()
    found = metrics.compute()
    assert found["accuracy"].item() == pytest.approx(right)
    assert found["loss"].item() == pytest.approx(F.cross_entropy(logits[:2], batch[1][:2]).item())


def test_facts_build_the_same_network_again():
    assert task(2).facts() == {"classes": ["a", "b", "c"], "vocabulary": 9, "positions": 16, "parts": 2}
