"""One label for each image."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from softline.engine.task import Setup, TaskDefinition, check_classes, choose_classes, numbered
from softline.tasks.classification.recipe import ClassificationRecipe

if TYPE_CHECKING:
    from torch import nn

    from softline.tasks.classification.task import Classification
    from softline.tasks.classification.trained import Classifier

IMAGENET_CLASSES = 1000
C = TypeVar("C", bound=ClassificationRecipe)


class ClassificationDefinition(TaskDefinition[C]):
    """Of classification, and of tasks whose recipes have all of its keys."""

    recipe_type: type[C]

    def build(self, recipe: C, setup: Setup) -> "Classification":
        from softline.tasks.classification.build import build_classification

        return build_classification(recipe, setup)

    def check_facts(self, facts: Mapping[str, Any]) -> None:
        check_classes(facts)

    def network(self, recipe: C, facts: Mapping[str, Any]) -> "nn.Module":
        from softline.tasks.networks import build_model

        return build_model(recipe.without_weights().model, len(facts["classes"]), recipe.data.image_size)

    def known_facts(self, recipe: C, classes: Sequence[str] | None) -> dict[str, Any]:
        """Return the classes of Fashion-MNIST, of a directory named imagenet, or as many as model.options says."""
        from softline.data.images.fashion_mnist import CLASSES

        source, count = recipe.data.source, recipe.model.options.get("num_classes")
        what = f"data.source {source}"
        if source in ("embedded", "fashion-mnist"):
            return {"classes": choose_classes(classes, CLASSES, what)}
        if isinstance(count, int):
            return {"classes": choose_classes(classes, numbered(count), "model.options.num_classes")}
        known = numbered(IMAGENET_CLASSES) if Path(source).name == "imagenet" else None
        return {"classes": choose_classes(classes, known, what, fixed=False)}

    def trained(self, model: "nn.Module", recipe: C, facts: Mapping[str, Any]) -> "Classifier":
        from softline.tasks.classification.trained import Classifier
        from softline.tasks.images import image_settings

        return Classifier(recipe.model.name, model, facts["classes"], image_settings(model, recipe.data), recipe)

    def reopen(self, network: "nn.Module", described: Mapping[str, Any]) -> "Classifier":
        from softline.tasks.classification.trained import reopen_classifier

        return reopen_classifier(network, described)

    def settled(self, recipe: C) -> C:
        """Spell out the size, colours and crop of the model's images."""
        from softline.tasks.images import image_settings
        from softline.tasks.networks import build_model

        # how many classes there are does not matter to the images
        model = build_model(recipe.without_weights().model, 1, recipe.data.image_size)
        own = {key: value for key, value in image_settings(model, recipe.data).items() if key != "mode"}
        return recipe.replace(data=dataclasses.replace(recipe.data, **own))


class _Classification(ClassificationDefinition[ClassificationRecipe]):
    recipe_type = ClassificationRecipe


definition = _Classification()
