"""The tasks of the Long Range Arena (https://arxiv.org/abs/2011.04006), by name.

Their files, below a directory such as the benchmark's ``lra_release``:

- listops: ``listops-1000/basic_{train,val,test}.tsv``, unless they are generated
- text: ``aclImdb/{train,test}/{neg,pos}/*.txt``
- retrieval: ``tsv_data/new_aan_pairs.{train,eval,test}.tsv``
- image: ``cifar-10-batches-py/``, or images as ``{train,test}/<class>/*.png``
- pathfinder: ``pathfinder32/curv_contour_length_14/{imgs,metadata}/``
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from softline.checks import check_option
from softline.data.sequences import listops, pixels, text
from softline.data.sequences.interface import Notify, SequenceSource, Split
from softline.data.sequences.listops import ListOpsSettings, read_listops_tsv
from softline.data.sequences.listops_cache import open_listops
from softline.data.sequences.pixels import open_grey_images, open_pathfinder
from softline.data.sequences.text import LRA_ORIGIN, missing_download, open_aan, open_imdb
from softline.errors import UserError

LraTask = Literal["listops", "text", "retrieval", "image", "pathfinder"]
LRA_TASKS: tuple[LraTask, ...] = get_args(LraTask)


class LraForm(NamedTuple):
    """What all sequences of a task have in common; see `SequenceForm`."""

    classes: tuple[str, ...]
    vocabulary: int
    max_length: int
    parts: int = 1


PIXELS = pixels.CIFAR_SIDE * pixels.CIFAR_SIDE
FORMS: dict[LraTask, LraForm] = {
    "listops": LraForm(listops.CLASSES, listops.VOCABULARY, listops.MAX_LENGTH),
    "text": LraForm(text.SENTIMENTS, text.VOCABULARY, text.MAX_LENGTH),
    "retrieval": LraForm(text.PAIR_CLASSES, text.VOCABULARY, text.MAX_LENGTH, parts=2),
    "image": LraForm(pixels.CIFAR_CLASSES, text.VOCABULARY, PIXELS),
    "pathfinder": LraForm(pixels.PATHFINDER_CLASSES, text.VOCABULARY, PIXELS),
}
"""The benchmark's own data: ListOps of up to 2,000 tokens, CIFAR-10, and Pathfinder with images of 32 x 32 pixels."""


def open_lra(
    task: LraTask,
    root: Path,
    split: Split,
    *,
    max_length: int | None = None,
    generate: ListOpsSettings | None = None,
    make: bool = True,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
    notify: Notify = lambda _: None,
) -> SequenceSource:
    """Open the sequences of a split.

    max_length: number of bytes to which the texts of text and retrieval are cut; defaults to the benchmark's 4000.
    generate: settings with which the expressions of listops are generated and cached in ``root``, or found there.
    make: False does not generate, and raises an error if they are not found.
    workers: number of processes that generate.
    progress: called with the number of generated expressions and the total.
    """
    check_option("task", task, LRA_TASKS)
    check_option("split", split, get_args(Split))
    if generate is not None and task != "listops":
        raise UserError(f"generate is for listops; {task} is read from files")
    if max_length is not None and task not in ("text", "retrieval"):
        raise UserError(f"max_length is for text and retrieval; {task} is never cut")
    if generate is not None:
        return open_listops(
            root, split, settings=generate, make=make, workers=workers, progress=progress, notify=notify
        )
    if task == "listops":
        return read_listops_tsv(_listops_file(root, split))
    given = {} if max_length is None else {"max_length": max_length}
    if task == "text":
        return open_imdb(root, split, **given)
    if task == "retrieval":
        return open_aan(root, split, **given)
    return open_grey_images(root, split) if task == "image" else open_pathfinder(root, split)


def has_listops_files(root: Path) -> bool:
    """Whether ``root`` has the benchmark's own expressions."""
    return any(place.is_file() for place in _listops_places(root, "train"))


def _listops_places(root: Path, split: Split) -> list[Path]:
    name = f"basic_{split}.tsv"
    return [root / name, root / "listops-1000" / name, root / "lra_release" / "listops-1000" / name]


def _listops_file(root: Path, split: Split) -> Path:
    places = _listops_places(root, split)
    for place in places:
        if place.is_file():
            return place
    origin = f"{LRA_ORIGIN}, or can be generated (data.generate)"
    raise missing_download("ListOps expressions", split, places, origin)
