import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from softline.engine import distributed
from softline.engine.evaluate import evaluate
from softline.errors import UserError
from softline.tasks.classification.task import Classification


class Rows(Dataset):
    """Images whose pixels are the logits."""

    def __init__(self, length, classes=7):
        numbers = torch.Generator().manual_seed(0)
        self.logits = torch.randn(length, classes, 1, 1, generator=numbers)
        self.labels = torch.randint(classes, (length,), generator=numbers)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.logits[index], int(self.labels[index])


def task_of(images):
    return Classification(nn.Flatten(), [str(label) for label in range(7)], val_set=images)


@pytest.mark.parametrize("batch_size", [1, 4, 19, 64])
@pytest.mark.parametrize("length", [1, 19])
def test_metrics_are_those_of_all_samples(length, batch_size):
    images = Rows(length)
    task = task_of(images)
    result = evaluate(task, task.model, distributed.start(), batch_size=batch_size)
    logits = images.logits.flatten(1)
    likeliest = logits.argsort(1, descending=True) == images.labels[:, None]
    assert result.samples == length
    assert result.metrics["top1"] == pytest.approx(likeliest[:, :1].sum().item() / length)
    assert result.metrics["top5"] == pytest.approx(likeliest[:, :5].sum().item() / length)
    assert result.metrics["loss"] == pytest.approx(F.cross_entropy(logits, images.labels).item(), rel=1e-6)
    assert result.per_second > 0


@pytest.mark.parametrize("training", [True, False])
def test_model_is_left_in_the_mode_it_was_in(training):
    seen = []

    class Watched(nn.Flatten):
        def forward(self, images):
            seen.append((self.training, torch.is_grad_enabled()))
            return super().forward(images)

    task = task_of(Rows(3))
    task.model = Watched().train(training)
    evaluate(task, task.model, distributed.start(), batch_size=2)
    assert seen == [(False, False)] * 2
    assert task.model.training == training


class Broken(Rows):
    def __getitem__(self, index):
        if index == 2:
            raise UserError("image 2 cannot be decoded") from OSError("broken data stream")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_error_about_the_data_keeps_its_words(workers):
    """A worker of torch's DataLoader would put its traceback into the text; here it is the cause."""
    task = task_of(Broken(4))
    with pytest.raises(UserError, match=r"^image 2 cannot be decoded$") as caught:
        evaluate(task, task.model, distributed.start(), batch_size=2, workers=workers)
    cause = str(caught.value.__cause__)
    assert "test_evaluate.py" in cause
    assert "OSError: broken data stream" in cause
