"""Tasks: a model with its data, loss and metrics, for the engine to train and evaluate."""

from softline.engine.task import Loss, Task
from softline.tasks.classification.task import Classification

__all__ = ["Classification", "Loss", "Task"]
