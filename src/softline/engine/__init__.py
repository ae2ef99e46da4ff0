"""The training loop and what it asks of a task: recipes, loading, checkpoints, processes, events. Needs the extra
``train``."""
