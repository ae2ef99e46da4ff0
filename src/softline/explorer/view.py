"""The content of the page without its components: heat maps and numbers of a model for one image and one query."""

import hashlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from PIL import Image
from torch import Tensor

from softline.analysis.heatmap import cell_at
from softline.analysis.locality import SIDE, is_larger
from softline.analysis.newton import layer_residual
from softline.analysis.subjects import Subject, open_subject
from softline.attention.multihead import RowReader
from softline.backbones.inspection import Layer, LayerInput
from softline.checks import check_option
from softline.errors import UserError
from softline.explorer.budget import MAX_TENSOR_BYTES, REPEAT_SECONDS, Duration, Need, check_need, duration, need
from softline.explorer.catalog import OWN, Choice
from softline.explorer.drawing import draw_map
from softline.explorer.recent import Recent
from softline.ops.inputs import divide
from softline.plotting.contrast import contrast

USUAL_SIZE = 224
LEAST_SIZE, MOST_SIZE = 28, 1024
SURE_SIZE = 256
"""Up to this size every model runs without being counted before."""
MODELS_KEPT = 8
VIEWS_BYTES = 768 * 2**20
QUERIES_SIDE = 10
"""A layer's mean is taken over at most this many queries squared."""
TOP = 3


@dataclass(frozen=True)
class Photo:
    """A square image."""

    name: str
    image: Image.Image
    key: str
    """Hash of the pixels."""


def square_photo(name: str, image: Image.Image) -> Photo:
    """The largest square in the middle of an image."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.convert("RGB").crop((left, top, left + side, top + side))
    return Photo(name, square, hashlib.sha256(square.tobytes()).hexdigest())


@dataclass(frozen=True)
class Asked:
    """The choices on one side of the page."""

    model: str
    """A label of the catalog."""
    attention: str = OWN
    layer: int = 0
    head: int | None = None
    """Index from 0; None is the mean of all heads."""


@dataclass(frozen=True)
class Answer:
    """The map of one query, and the numbers that come with it."""

    asked: Asked
    """What is shown: a missing layer is replaced by the first, a missing head by the mean."""
    attentions: tuple[str, ...]
    layers: tuple[str, ...]
    heads: int
    picture: Image.Image
    tokens: int
    grid_size: tuple[int, int]
    residual: float | None
    """Residual of Newton's iteration; None if the layer inverts no matrix."""
    mass: float | None
    """Share of this query's weights on the 3 x 3 patches around it; None if these are the whole grid."""
    chance: float
    """The same share for even weights."""
    mean_mass: float | None
    """Mean of ``mass`` over at most 10 x 10 queries spread over the layer's grid."""
    mean_chance: float
    trained: bool
    trained_size: int
    predictions: tuple[tuple[str, float], ...]
    """Classes and probabilities, the most probable first; empty unless the model is a trained classifier."""


@dataclass(frozen=True)
class Cost:
    """Multiply-adds for one image."""

    macs: int
    usual_macs: int | None
    """Multiply-adds at 224 x 224 pixels; None if the model does not accept this size."""


@dataclass(frozen=True)
class Details:
    """The numbers that take longer."""

    cost: Cost
    time: Duration


@dataclass
class View:
    """A model and what its layers are given for one image."""

    subject: Subject
    image: Tensor
    """The model's input [C, H, W]."""
    seen: list[LayerInput]
    logits: Tensor
    """[classes]"""
    readers: dict[int, RowReader] = field(default_factory=dict)
    masses: dict[int, Tensor] = field(default_factory=dict)

    def reader(self, layer: int) -> RowReader:
        if layer not in self.readers:
            _check_rows(self.seen[layer])
            # visitors look at one layer at a time
            self.readers = {layer: self.seen[layer].rows()}
        return self.readers[layer]

    def row(self, layer: int, token: int) -> Tensor:
        """The weights of one query [heads, N]."""
        return self.reader(layer)(torch.tensor([token]))[0, :, 0].float()

    def mean_mass(self, layer: int) -> Tensor:
        """The mean local mass of queries spread over a layer: [heads]."""
        if layer not in self.masses:
            given = self.seen[layer]
            cells = _spread(given.grid_size)
            rows = self.reader(layer)(torch.tensor([given.token(*cell) for cell in cells]))[0].float()  # [heads, R, N]
            masses = [_mass_around(given, rows[:, place], cell) for place, cell in enumerate(cells)]
            self.masses[layer] = torch.stack(masses).mean(0)
        return self.masses[layer]

    @property
    def bytes(self) -> int:
        return sum(given.x.numel() * given.x.element_size() for given in self.seen)


class Explorer:
    """Keeps models with the inputs of their layers, so that a click only reads one row of weights.

    choices: the models that visitors may choose, by label; no other model is opened.
    """

    def __init__(self, choices: Mapping[str, Choice]) -> None:
        self.choices = dict(choices)
        self._subjects: Recent[tuple[str, str], Subject] = Recent(MODELS_KEPT)
        self._views: Recent[tuple[str, str, str, int], View] = Recent(VIEWS_BYTES, weigh=lambda view: view.bytes)
        self._needs: dict[tuple[str, str, int], Need] = {}
        self._details: dict[tuple[str, str, int], Details] = {}
        # durations of long runs, which are not repeated only to be timed
        self._long: dict[tuple[str, str, int], Duration] = {}
        # one at a time: torch uses all cores for each
        self._lock = threading.RLock()

    @torch.no_grad()
    def answer(self, asked: Asked, photo: Photo, size: int, query: tuple[float, float]) -> Answer:
        """Compute the map of one query.

        size: side of the model's input in pixels.
        query: (x, y), each from 0 (left, top) to 1.
        """
        with self._lock:
            asked = self._fit_attention(asked)
            view = self._view(asked, photo, size)
            layer = asked.layer if 0 <= asked.layer < len(view.seen) else 0
            given = view.seen[layer]
            cell = cell_at(query, given.grid_size)
            weights = view.row(layer, given.token(*cell))  # [heads, N]
            head = asked.head if asked.head is not None and 0 <= asked.head < len(weights) else None
            shown = given.on_grid(_of_head(weights, head))
            has_others = is_larger(given.grid_size, SIDE)
            return Answer(
                asked=replace(asked, layer=layer, head=head),
                attentions=self.choices[asked.model].attentions,
                layers=_names(one.layer for one in view.seen),
                heads=len(weights),
                picture=draw_map(view.subject.shown(view.image), contrast(shown), cell),
                tokens=given.tokens,
                grid_size=given.grid_size,
                residual=layer_residual(given),
                mass=float(_of_head(_mass_around(given, weights, cell), head)) if has_others else None,
                chance=_window(cell, given.grid_size).sum().item() / given.tokens,
                mean_mass=float(_of_head(view.mean_mass(layer), head)) if has_others else None,
                mean_chance=_mean_chance(given),
                trained=view.subject.trained,
                trained_size=int(view.subject.settings["image_size"]),
                predictions=_predictions(view),
            )

    def layers(self, asked: Asked) -> tuple[str, ...]:
        """The names of a model's layers, as in `Answer`, without running it."""
        with self._lock:
            return _names(self._subject(self._fit_attention(asked)).layers)

    def details(self, asked: Asked, size: int) -> Details:
        """Measure what a model costs at a size."""
        with self._lock:
            check_size(size)
            asked = self._fit_attention(asked)
            key = (asked.model, asked.attention, size)
            if key not in self._details:
                self._check_need(asked, size)
                self._details[key] = Details(self.cost(asked, size), self._time(asked, size))
            return self._details[key]

    def cost(self, asked: Asked, size: int) -> Cost:
        """Count what a model costs at a size, even if that is too much to run it."""
        with self._lock:
            check_size(size)
            asked = self._fit_attention(asked)
            macs = self._need(asked, size).macs
            try:
                return Cost(macs, self._need(asked, USUAL_SIZE).macs)
            except UserError:
                # Linformer has a largest number of tokens
                return Cost(macs, None)

    def known_details(self, asked: Asked, size: int) -> Details | None:
        """The result of `details` if it is known already."""
        return self._details.get((asked.model, asked.attention, size))

    def _time(self, asked: Asked, size: int) -> Duration:
        key = (asked.model, asked.attention, size)
        if key not in self._long:
            model = self._subject(asked).model
            # the time does not depend on the image
            self._long[key] = duration(model, torch.zeros(1, self._channels(asked), size, size))
        return self._long[key]

    def _channels(self, asked: Asked) -> int:
        return 1 if self._subject(asked).settings["mode"] == "L" else 3

    def _fit_attention(self, asked: Asked) -> Asked:
        check_option("model", asked.model, self.choices)
        choice = self.choices[asked.model]
        if choice.trained:
            # the browser may still show the attention of the previous model
            return replace(asked, attention=OWN)
        check_option("attention", asked.attention, choice.attentions)
        return asked

    def _subject(self, asked: Asked) -> Subject:
        choice = self.choices[asked.model]

        def make() -> Subject:
            subject = open_subject(choice.with_attention(asked.attention))
            # both sides see the same pixels: the whole square
            return replace(subject, settings={**subject.settings, "crop_pct": 1.0})

        return self._subjects.get((asked.model, asked.attention), make)

    def _view(self, asked: Asked, photo: Photo, size: int) -> View:
        check_size(size)
        subject = self._subject(asked)

        def make() -> View:
            image = subject.prepare(photo.image, size)
            self._check_need(asked, size)
            begin = time.perf_counter()
            seen, logits = subject.look(image[None])
            seconds = time.perf_counter() - begin
            _check_finite(subject.name, seen)
            if seconds > REPEAT_SECONDS and size > USUAL_SIZE:
                self._long[asked.model, asked.attention, size] = Duration(seconds, runs=1)
            return View(subject, image, seen, logits[0])

        return self._views.get((asked.model, asked.attention, photo.key, size), make)

    def _check_need(self, asked: Asked, size: int) -> None:
        if size > SURE_SIZE:
            check_need(self._need(asked, size), name=self._subject(asked).name, size=size)

    def _need(self, asked: Asked, size: int) -> Need:
        key = (asked.model, asked.attention, size)
        if key not in self._needs:
            self._needs[key] = need(self._subject(asked).model, (self._channels(asked), size, size))
        return self._needs[key]


def check_size(size: int) -> None:
    """Refuse sizes that the slider does not offer."""
    if not LEAST_SIZE <= size <= MOST_SIZE:
        raise UserError(f"the image size must be from {LEAST_SIZE} to {MOST_SIZE} pixels, got {size}")


def _names(layers: Iterable[Layer]) -> tuple[str, ...]:
    return tuple(f"{layer.name} ({layer.operator})" for layer in layers)


def _check_rows(given: LayerInput) -> None:
    """Refuse N x N weights that are too large, if an attention cannot give single rows."""
    bytes_needed = 4 * given.tokens**2
    if not hasattr(given.layer.attention, "rows") and bytes_needed > MAX_TENSOR_BYTES:
        raise UserError(
            f"the weights of {given.layer.name} for {given.tokens:,} tokens take {bytes_needed / 2**30:,.1f} GiB, and "
            f"the limit of this page is {MAX_TENSOR_BYTES / 2**30:.0f}: choose a smaller size or a later layer"
        )


def _check_finite(name: str, seen: Sequence[LayerInput]) -> None:
    """Refuse a model whose tokens are not finite, as if its weights are damaged: its maps would mean nothing."""
    for given in seen:
        if not given.x.isfinite().all():
            raise UserError(f"{name} computes numbers that are not finite before {given.layer.name}")


def _of_head(values: Tensor, head: int | None) -> Tensor:
    """Select a head or average all of them: [heads, ...] -> [...]."""
    return values.mean(0) if head is None else values[head]


def _window(cell: tuple[int, int], grid_size: tuple[int, int]) -> Tensor:
    """The 3 x 3 tokens around a cell: bool [height, width]."""
    inside = torch.zeros(grid_size, dtype=torch.bool)
    row, column = (max(place - SIDE // 2, 0) for place in cell)
    inside[row : cell[0] + SIDE // 2 + 1, column : cell[1] + SIDE // 2 + 1] = True
    return inside


def _mass_around(given: LayerInput, weights: Tensor, cell: tuple[int, int]) -> Tensor:
    """The local mass of one query, as in `softline.analysis.locality.local_mass`: weights [heads, N] -> [heads]."""
    sizes = weights.abs()
    return divide(given.on_grid(sizes)[:, _window(cell, given.grid_size)].sum(-1), sizes.sum(-1))


def _spread(grid_size: tuple[int, int]) -> list[tuple[int, int]]:
    """All cells of a small grid; at most 10 x 10 cells, evenly spaced, of a larger one."""
    rows, columns = (
        [(2 * place + 1) * count // (2 * min(count, QUERIES_SIDE)) for place in range(min(count, QUERIES_SIDE))]
        for count in grid_size
    )
    return [(row, column) for row in rows for column in columns]


def _mean_chance(given: LayerInput) -> float:
    """The local mass of even weights, averaged over the same queries."""
    cells = _spread(given.grid_size)
    return sum(int(_window(cell, given.grid_size).sum()) for cell in cells) / len(cells) / given.tokens


def _predictions(view: View) -> tuple[tuple[str, float], ...]:
    classes = view.subject.classes
    if not classes:
        return ()
    best = view.logits.float().softmax(0).topk(min(TOP, len(classes)))
    return tuple(zip([classes[index] for index in best.indices.tolist()], best.values.tolist(), strict=True))
