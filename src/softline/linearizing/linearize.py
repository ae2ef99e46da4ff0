"""Linearise a pretrained vision transformer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softline.linearizing.work import Linearized, NotifyStage
    from softline.replacing.replace import Queries
    from softline.tasks.linearization.recipe import Stage

COST_SIZES = (224, 512, 1024)


def linearize(
    source: str | Path,
    attention: str,
    *,
    data: str | Path,
    output: str | Path,
    root: str | None = None,
    labelled: bool = True,
    layers: int | str | Sequence[int | str] | None = None,
    softmax_layers: int | None = None,
    options: Mapping[str, Any] | None = None,
    queries: "Queries" = "mean",
    drop_position_bias: bool = False,
    stages: "Sequence[Stage]" = ("transfer", "finetune"),
    image_size: int | None = None,
    overrides: Sequence[str] = (),
    sizes: Sequence[int] | None = None,
    cost_sizes: Sequence[int] = COST_SIZES,
    progress: "NotifyStage" = lambda *_: None,
) -> "Linearized":
    """Give a pretrained classifier another attention, and train it to do what it did with its own.

    Two stages, each a training that can be interrupted and is continued when the function is called again: in
    ``transfer``, each new attention learns to return what the old one does; in ``finetune``, the whole network learns
    from the original's output. The model is measured after each. Under torchrun all processes call it.

    source: a checkpoint of a classifier, a directory that timm saved, or the name of a published model.
    attention: name of the new attention; see `softline.ATTENTIONS`.
    data: images; see `softline.data.images.open_source`.
    output: directory for the stages, and for linearized.json.
    root: where a timm.data name keeps its files.
    labelled: whether the images lie in class folders; otherwise only the agreement with the original is measured.
    layers: blocks whose attention is replaced, by index or pattern of names; None takes all.
    softmax_layers: most layers that keep their attention, those whose replacement, measured one by one, changes the
        output most; None keeps those alone that ``layers`` leaves out.
    options: of the attention.
    queries, drop_position_bias: see `softline.replace_attention`.
    stages: those to run; "finetune" alone starts from an earlier transfer in the directory if there is one.
    image_size: side of the images to learn from; defaults to the model's.
    overrides: keys of the recipes linearize_transfer and linearize_finetune as on the command line, such as
        ("--batch_size", "128", "--finetune.schedule.epochs", "20").
    sizes: sides of the validation images; defaults to the size of training, and those with 2 and 4 times the pixels.
    cost_sizes: sides of the images on which time and memory are measured; empty measures neither.
    progress: hears what happens.
    """
    # the extra ``train`` is needed from here on
    from softline.linearizing.plan import Plan
    from softline.linearizing.work import carry_out

    wanted = Plan(
        source=str(source),
        attention=attention,
        data=str(data),
        output=Path(output),
        root=root,
        labelled=labelled,
        layers=(layers,) if isinstance(layers, (int, str)) else None if layers is None else tuple(layers),
        softmax_layers=softmax_layers,
        options=options or {},
        queries=queries,
        drop_position_bias=drop_position_bias,
        stages=tuple(stages),
        image_size=image_size,
        overrides=tuple(overrides),
    )
    return carry_out(wanted, sizes=sizes, cost_sizes=cost_sizes, progress=progress)
