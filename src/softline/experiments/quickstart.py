"""The quick start: one small network, trained with several attentions on the images of the package."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softline.attention.hooks import without_attention
from softline.data.images import ImageSource, open_source
from softline.engine import distributed
from softline.engine.checkpoint import LAST
from softline.engine.events import Started
from softline.engine.reading import load_recipe
from softline.engine.trained import Evaluator
from softline.experiments.compare import Comparison, NotifyRuns, compare
from softline.experiments.presets import attention_variants
from softline.experiments.runs import Finished
from softline.tasks.loading import load_trained

RECIPE = "quickstart"
TITLE = "Linear attention, first look"


@dataclass(frozen=True)
class QuickstartRuns:
    """The trained networks of a quick start."""

    comparison: Comparison
    checkpoints: dict[str, Path]
    """Last checkpoints by attention, without those that diverged before the first."""
    reused: list[str]
    """Attentions that an earlier quick start had trained, or begun to train."""


def train_attentions(
    attentions: Sequence[str],
    *,
    output: Path,
    seed: int = 0,
    overrides: Sequence[str] = (),
    jobs: int = 1,
    progress: NotifyRuns = lambda *_: None,
) -> QuickstartRuns:
    """Train the recipe ``quickstart`` with each attention, in ``output/<attention>/seed<k>``.

    overrides: keys of the recipe.
    """
    reused: list[str] = []

    def hear(name: str, seed: int, event: Any) -> None:
        if (isinstance(event, Finished) and event.reused) or (isinstance(event, Started) and event.start_step):
            reused.append(name)
        progress(name, seed, event)

    comparison = compare(
        load_recipe(RECIPE, overrides),
        attention_variants(attentions),
        seeds=[seed],
        output=output,
        jobs=jobs,
        progress=hear,
        title=TITLE,
    )
    paths = {row.name: output / row.name / f"seed{seed}" / LAST for row in comparison.rows}
    return QuickstartRuns(comparison, {name: path for name, path in paths.items() if path.exists()}, reused)


def validation_images(comparison: Comparison) -> ImageSource:
    """Open the images that the networks were validated on."""
    data = comparison.recipe["data"]
    source = open_source(data["source"], data["val_split"], root=data["root"])
    assert isinstance(source, ImageSource), "the images of the package can be read in any order"
    return source


def scores_without_attention(comparison: Comparison, checkpoints: Mapping[str, Path]) -> dict[str, float]:
    """Evaluate the trained networks with their attention switched off; see `without_attention`."""
    data = comparison.recipe["data"]
    evaluator = Evaluator(distributed.start(device="cpu"))
    scores = {}
    for name, path in checkpoints.items():
        # split and root are options of its task
        trained: Any = load_trained(str(path))
        with without_attention(trained.model):
            (measured,) = trained.evaluate(data["source"], evaluator, split=data["val_split"], root=data["root"])
        scores[name] = measured.result.metrics[comparison.metric]
    return scores
