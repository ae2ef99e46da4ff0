"""From a checkpoint, or the name of a published model, to a model that can be used.

Opening a file or a directory reads nothing else, and makes no request: the recipe in a checkpoint describes a network
and never a place from which something could be fetched.
"""

from pathlib import Path

from softline.backbones.creation import build_bounded
from softline.engine.checkpoint import load_checkpoint
from softline.engine.reading import read_recipe
from softline.engine.task import definition_of
from softline.engine.trained import Trained
from softline.errors import UserError
from softline.process import return_memory
from softline.tasks.classification.trained import load_directory, load_published
from softline.weights.renaming import check_keys


def load_trained(source: str) -> Trained:
    """Load a checkpoint of `train`, a directory that timm saved, or a model with published weights by its name."""
    # timm's own name of a directory
    path = Path(source.removeprefix("local-dir:"))
    if path.is_dir():
        if not (path / "config.json").is_file():
            inside = " (there is a best.pt in it)" if (path / "best.pt").is_file() else ""
            raise UserError(f"{path} is a directory without timm's config.json: name a checkpoint file{inside}")
        return load_directory(path)
    if path.exists() or path.suffix in (".pt", ".pth") or source.startswith("local-dir:"):
        trained = _load_checkpoint(path)
        # a checkpoint has three times the size of its network, which no later block fits
        return_memory()
        return trained
    # timm publishes classifiers
    return load_published(source)


def _load_checkpoint(path: Path) -> Trained:
    content = load_checkpoint(path)
    recipe, facts = read_recipe(content["recipe"], where=str(path)), content["facts"]
    definition = definition_of(recipe)
    weights = content["state_dict"] if content["state_dict_ema"] is None else content["state_dict_ema"]
    try:
        definition.check_facts(facts)
        model = build_bounded(lambda: definition.network(recipe, facts), weights)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    check_keys(model, weights, f"{recipe.model.name} ({path})")
    model.load_state_dict(weights)
    return definition.trained(model, recipe, facts)
