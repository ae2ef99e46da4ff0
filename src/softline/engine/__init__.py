"""Train and evaluate: recipes, the training loop, checkpoints. Needs the extra ``train``."""
