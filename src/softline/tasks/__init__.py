"""The tasks, a package each; a package owns its recipe keys, construction, loss, metrics, evaluation and prediction.

pyproject.toml declares them as entry points of the group ``softline.tasks``, which is where the engine finds them.
"""
