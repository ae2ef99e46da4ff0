"""From a checkpoint, or the name of a published model, to a model that can be used."""

from pathlib import Path

from softline.engine.checkpoint import load_checkpoint
from softline.engine.reading import read_recipe
from softline.engine.task import definition_of
from softline.engine.trained import Trained
from softline.errors import UserError
from softline.tasks.classification.trained import load_published
from softline.weights.renaming import check_keys


def load_trained(source: str) -> Trained:
    """Load a checkpoint of `train`, a directory that timm saved, or a model with published weights by its name."""
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = " (there is a best.pt in it)" if (path / "best.pt").is_file() else ""
            raise UserError(f"{path} is a directory without timm's config.json: name a checkpoint file{inside}")
        return load_published(f"local-dir:{path}")
    if path.is_file() or path.suffix in (".pt", ".pth"):
        return _load_checkpoint(path)
    # timm publishes classifiers
    return load_published(source)


def _load_checkpoint(path: Path) -> Trained:
    content = load_checkpoint(path)
    recipe = read_recipe(content["recipe"], where=str(path))
    definition = definition_of(recipe)
    model = definition.network(recipe, content["facts"])
    weights = content["state_dict"] if content["state_dict_ema"] is None else content["state_dict_ema"]
    check_keys(model, weights, f"{recipe.model.name} ({path})")
    model.load_state_dict(weights)
    return definition.trained(model, recipe, content["facts"])
