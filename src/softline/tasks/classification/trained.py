"""Use a trained model: load it; evaluate a classifier at several image sizes, name what is on an image."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from softline.backbones.creation import set_image_size
from softline.data.images import in_order, open_source
from softline.data.images.single import read_image
from softline.engine.evaluate import Evaluation, evaluate
from softline.errors import UserError
from softline.tasks import Classification
from softline.tasks.classification.build import image_dataset
from softline.tasks.images import Notify, eval_image_transform, leave_out_corrupt, log
from softline.tasks.loading import Trained


@dataclass(frozen=True)
class Prediction:
    name: str
    """The image's."""
    classes: list[str]
    """The likeliest first."""
    probabilities: list[float]


def evaluate_sizes(
    trained: Trained,
    source: str,
    accelerator: Accelerator,
    *,
    sizes: Sequence[int] | None = None,
    split: str = "val",
    root: str | None = None,
    batch_size: int = 64,
    workers: int = 0,
    skip_corrupt: bool = False,
    notify: Notify = log.info,
    progress: Callable[[int, int | None], None] = lambda *_: None,
) -> Iterator[tuple[int, Evaluation]]:
    """Accuracy on images of each size, as in Table 6 of the SOFT paper; the size it was trained for by default."""
    images = open_source(source, split, root=root)
    if skip_corrupt:
        images = leave_out_corrupt(images, split, notify)
    classes = _check_classes(trained, images.classes, source)
    if images.classes and images.classes != classes:
        images = in_order(images, classes)
    trained.model.to(accelerator.device)
    for size in sizes or [trained.settings["image_size"]]:
        settings = {**trained.settings, "image_size": size}
        # resized positions cannot be sized back
        model = copy.deepcopy(trained.model)
        set_image_size(model, trained.name, size)
        dataset = image_dataset(
            images, eval_image_transform(settings), mode=settings["mode"], rank=accelerator.process_index
        )
        task = Classification(model, classes, val_set=dataset)
        result = evaluate(task, model, accelerator, batch_size=batch_size, workers=workers, progress=progress)
        assert result is not None, "nothing stops it"
        yield size, result


def predict(trained: Trained, paths: Sequence[str], *, top: int = 5) -> Iterator[Prediction]:
    """The likeliest classes of each image."""
    transform = eval_image_transform(trained.settings)
    trained.model.eval()
    for path in paths:
        image = read_image(path, trained.settings["mode"])
        with torch.no_grad():
            logits: Tensor = trained.model(transform(image).unsqueeze(0))[0]
        probabilities = logits.float().softmax(0)
        best = probabilities.topk(min(top, len(probabilities)))
        labels = [trained.classes[i] if trained.classes else str(i) for i in best.indices.tolist()]
        yield Prediction(path, labels, best.values.tolist())


def _check_classes(trained: Trained, found: tuple[str, ...], source: str) -> tuple[str, ...]:
    """Those of the data, which must be the model's."""
    count = int(getattr(trained.model, "num_classes", len(trained.classes)))
    if trained.classes and found and set(found) != set(trained.classes):
        missing, extra = sorted(set(trained.classes) - set(found)), sorted(set(found) - set(trained.classes))
        raise UserError(
            f"the classes of {source} are not those the model was trained for: "
            f"missing {', '.join(missing[:10]) or 'none'}; unknown {', '.join(extra[:10]) or 'none'}"
        )
    if found and len(found) != count:
        raise UserError(f"{source} has {len(found)} classes, the model {count}")
    # the model's, in its order
    return trained.classes or found or tuple(str(index) for index in range(count))
