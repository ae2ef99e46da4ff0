"""Tasks: a model with its data, loss and metrics, for the engine to train and evaluate."""

from softline.tasks.classification import Classification
from softline.tasks.task import Loss, Task

__all__ = ["Classification", "Loss", "Task"]
