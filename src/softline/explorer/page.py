"""The page: gradio components, connected to `softline.explorer.view`.

Values reach the functions as the browser sends them (``preprocess=False``), so that they are checked here, with
messages for the visitor, rather than in gradio.
"""

import hashlib
import io
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import IO, Any, NoReturn

import gradio as gr
from PIL import Image

from softline.data.images.photographs import PHOTOGRAPHS, open_photograph
from softline.errors import UserError
from softline.explorer import facts
from softline.explorer.catalog import OWN
from softline.explorer.drawing import SIDE, draw_photograph
from softline.explorer.recent import Recent
from softline.explorer.storage import Storage
from softline.explorer.uploads import FORMATS, MAX_BYTES, MAX_PIXELS, RefusedImageError, read_upload
from softline.explorer.view import LEAST_SIZE, MOST_SIZE, USUAL_SIZE, Answer, Asked, Explorer, Photo, square_photo
from softline.files import write_whole

log = logging.getLogger(__name__)

BLUE = gr.themes.Color(
    name="softline",
    c50="#eef7fb",
    c100="#d5ebf4",
    c200="#a9d6e8",
    c300="#74bdd9",
    c400="#3d9dc2",
    c500="#0b6e99",
    c600="#0a658d",
    c700="#08557a",
    c800="#084866",
    c900="#083c55",
    c950="#052838",
)
MEAN = "mean of all"
FIRST_QUERY = (0.33, 0.36)
"""An eye of the cat, the inside of the cup."""
SIZE_STEP = 4
SESSION_SECONDS = 3600
"""How long a session remembers its upload."""
PHOTOS_BYTES = 256 * 2**20
"""Size of the uploaded photographs of all sessions in memory."""
QUEUE = "explorer"
"""One event runs at a time: two would share the cores."""
INTRODUCTION = (
    "<h1>What does a patch look at?</h1>"
    "<p>Click a point in the photograph or in a map. Each map shows how much weight the patch you clicked gives to "
    "every other patch of the image, in one attention layer of the model.</p>"
)
LIMITS = (
    f"At most {MAX_BYTES / 2**20:.0f} MB and {MAX_PIXELS / 1e6:.0f} million pixels; {', '.join(FORMATS)}. "
    "Models see the square in the middle. The image is sent only to the computer that runs this page."
)


@dataclass(frozen=True)
class Side:
    """The components of side A or B."""

    name: str
    model: gr.Dropdown
    attention: gr.Dropdown
    layer: gr.Dropdown
    head: gr.Dropdown
    picture: gr.Image
    answer: gr.HTML
    details: gr.HTML

    @property
    def asked(self) -> list[Any]:
        return [self.model, self.attention, self.layer, self.head]

    @property
    def shown(self) -> list[Any]:
        return [self.attention, self.layer, self.head, self.picture, self.answer, self.details]


@dataclass(frozen=True)
class Uploaded:
    """What a session remembers of the photograph that its visitor uploaded."""

    name: str
    key: str
    """Hash of the pixels."""


class Page:
    """The functions of the page, from values that the browser sends to updates of components.

    storage: the folder in which gradio stores uploads and finds pictures.
    """

    def __init__(self, explorer: Explorer, storage: Storage) -> None:
        self.explorer, self.storage = explorer, storage
        self.photos = {name: square_photo(name, open_photograph(name)) for name in PHOTOGRAPHS}
        # by hash: sessions come and go, and any number of them may hold a photograph
        self._uploads: Recent[str, Photo] = Recent(PHOTOS_BYTES, weigh=lambda photo: 3 * photo.image.width**2)

    def default_models(self) -> tuple[str, str]:
        """The first two checkpoints, filled up with fresh models if there are fewer."""
        labels = [label for label, choice in self.explorer.choices.items() if choice.trained]
        fresh = [label for label, choice in self.explorer.choices.items() if not choice.trained]
        usual = [label for name in ("softpp_tiny", "inline_pvt_tiny") for label in fresh if label.startswith(name)]
        first, second = [*labels, *usual][:2]
        return first, second

    def photo(self, name: Any, uploaded: Uploaded | None) -> Photo:
        if uploaded is not None and name == uploaded.name:

            def forgotten() -> NoReturn:
                raise UserError(f"{uploaded.name} is no longer kept: upload it again, or choose another photograph")

            return self._uploads.get(uploaded.key, forgotten)
        if not isinstance(name, str) or name not in self.photos:
            raise UserError(f"there is no photograph {name!r:.200}: choose another one, or upload one")
        return self.photos[name]

    def show_side(self, name: Any, uploaded: Uploaded | None, size: Any, query: Any, *asked: Any) -> list[Any]:
        """Update `Side.shown`; if there is no map, say why."""
        try:
            photo = self.photo(name, uploaded)
            answer = self.explorer.answer(read_asked(*asked), photo, read_size(size), query)
            picture = self._store(answer.picture)
        except (UserError, OSError) as error:
            return [*self._selectors_of_model(*asked), None, facts.message(str(error)), ""]
        details = self.explorer.known_details(answer.asked, read_size(size))
        return [
            *_selectors(answer, *asked[1:]),
            picture,
            facts.answer_table(answer),
            facts.details_table(details),
        ]

    def _selectors_of_model(self, model: Any, attention: Any, layer: Any, head: Any) -> list[Any]:
        """Like `_selectors`, for a model without a map, so that another attention or layer can be chosen."""
        choice = self.explorer.choices.get(model) if isinstance(model, str) else None
        if choice is None:
            return [gr.skip(), gr.skip(), gr.skip()]
        try:
            layers = self.explorer.layers(read_asked(model, attention, layer, head))
        except (UserError, OSError):
            # the side shows the reason
            layers = ()
        return [
            _attentions(choice.attentions, attention, OWN if choice.trained else attention),
            _layers(layers, layer, layer if _is_index(layer) and 0 <= layer < len(layers) else 0),
            # the number of heads is known only from weights
            gr.skip(),
        ]

    def show(self, name: Any, uploaded: Uploaded | None, size: Any, query: Any, *asked: Any) -> list[Any]:
        """Update the photograph and both sides."""
        try:
            picture: Any = self._store(draw_photograph(self.photo(name, uploaded).image, query))
        except (UserError, OSError) as error:
            gr.Warning(escape(str(error)))
            picture = gr.skip()
        half = len(asked) // 2
        sides = (asked[:half], asked[half:])
        return [picture, *(update for side in sides for update in self.show_side(name, uploaded, size, query, *side))]

    def _store(self, picture: Image.Image) -> str:
        """Write a picture to the folder that gradio serves; return its path.

        The write is atomic: gradio itself would write the same picture again while a browser reads it.
        """
        encoded = io.BytesIO()
        picture.save(encoded, format="JPEG")
        path = self.storage.folder / f"{hashlib.sha256(encoded.getbuffer()).hexdigest()}.jpeg"

        def write(file: IO[bytes]) -> None:
            file.write(encoded.getbuffer())

        with self.storage.reserve(encoded.tell()):
            write_whole(path, write)
        return str(path)

    def click(
        self, event: gr.EventData, name: Any, uploaded: Uploaded | None, size: Any, query: Any, *asked: Any
    ) -> list[Any]:
        """Move the query to where the visitor clicked; then as `show`."""
        try:
            query = read_click(event)
        except UserError as error:
            gr.Warning(escape(str(error)))
        return [query, *self.show(name, uploaded, size, query, *asked)]

    def receive(self, upload: Any) -> list[Any]:
        """Update the uploaded photograph and the list of photographs."""
        try:
            photo = self._read(upload)
        except RefusedImageError as error:
            gr.Warning(escape(str(error)))
            return [gr.skip(), gr.skip()]
        self._uploads.get(photo.key, lambda: photo)
        return [Uploaded(photo.name, photo.key), gr.Radio(choices=[*self.photos, photo.name], value=photo.name)]

    def _read(self, upload: Any) -> Photo:
        path = upload.get("path") if isinstance(upload, dict) else None
        if not isinstance(path, str) or not self.storage.owns(path):
            raise RefusedImageError("only files that were uploaded to this page are read")
        name = Path(str(upload.get("orig_name") or path)).name
        # uploads are removed after a while, also between these two lines
        missing = RefusedImageError(f"{name} did not arrive: upload it again")
        if not os.path.isfile(path):
            raise missing
        try:
            image = read_upload(Path(path), name=name)
        except OSError:
            raise missing from None
        # the prefix tells it from a photograph of the same name
        return square_photo(f"yours: {name}", image)

    def details(self, size: Any, *asked: Any) -> list[str]:
        """Update the slower numbers of both sides, and the comparison of their costs."""
        half = len(asked) // 2
        costs, tables = [], []
        for side, values in (("A", asked[:half]), ("B", asked[half:])):
            table = ""
            try:
                costs.append((side, self.explorer.cost(read_asked(*values), read_size(size))))
                table = facts.details_table(self.explorer.details(read_asked(*values), read_size(size)))
            except (UserError, OSError) as error:
                # the side shows the reason
                log.debug("no details of %s: %s", side, error)
            tables.append(table)
        return [*tables, facts.cost_line(read_size(size), costs) if costs else ""]


def read_asked(model: Any, attention: Any, layer: Any, head: Any) -> Asked:
    """Check the choices of one side."""
    for name, value in (("model", model), ("attention", attention)):
        if not isinstance(value, str):
            raise UserError(f"choose one {name}, got {value!r:.20}")
    if not _is_index(layer) or not (head == MEAN or _is_index(head)):
        raise UserError(f"layers and heads are numbers, got {layer!r:.20} and {head!r:.20}")
    return Asked(model, attention, layer, None if head == MEAN else head)


def read_size(size: Any) -> int:
    """Check the image size; one outside of the slider's range becomes the nearest in it, as the slider shows."""
    # None: nothing was typed
    number = LEAST_SIZE if size is None else size
    if isinstance(number, int | float) and not isinstance(number, bool):
        shown = min(max(number, LEAST_SIZE), MOST_SIZE)
        # NaN is not equal to itself
        if shown == shown // 1:
            return int(shown)
    raise UserError(f"the image size is a whole number of pixels, got {size!r:.20}")


def read_click(event: gr.EventData) -> tuple[float, float]:
    """The point (x, y) of a picture that was clicked, each coordinate from 0 to 1."""
    try:
        index = event.index
    except (AttributeError, TypeError):
        # a forged event carries no place
        index = None
    if not isinstance(index, list) or len(index) != 2 or not all(isinstance(part, int | float) for part in index):
        raise UserError(f"a click has two coordinates, got {index!r:.20}")
    x, y = index
    if not (0 <= x <= SIDE and 0 <= y <= SIDE):
        raise UserError(f"the click at {x!r:.20}, {y!r:.20} is outside of the picture")
    return x / SIDE, y / SIDE


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _selectors(answer: Answer, attention: Any, layer: Any, head: Any) -> list[Any]:
    """Update the lists of attentions, layers and heads to those of this model.

    attention, layer, head: the visitor's choices.
    """
    shown = answer.asked
    return [
        _attentions(answer.attentions, attention, shown.attention),
        _layers(answer.layers, layer, shown.layer),
        gr.update(choices=_heads(answer.heads), **_value(head, MEAN if shown.head is None else shown.head)),
    ]


def _attentions(names: Sequence[str], asked: Any, shown: Any) -> Any:
    return gr.update(choices=list(names), interactive=len(names) > 1, **_value(asked, shown))


def _layers(names: Sequence[str], asked: Any, shown: int) -> Any:
    return gr.update(choices=[(name, index) for index, name in enumerate(names)], **_value(asked, shown))


def _value(asked: Any, shown: Any) -> dict[str, Any]:
    """Set a list only if it differs from the visitor's choice: in the meantime the visitor may have chosen again."""
    return {} if asked == shown else {"value": shown}


def _heads(count: int) -> list[tuple[str, Any]]:
    return [(MEAN, MEAN), *((f"head {index + 1}", index) for index in range(count))]


# layout


def build_page(explorer: Explorer, storage: Storage) -> gr.Blocks:
    """Create the components of the page and connect them."""
    page = Page(explorer, storage)
    # without analytics gradio does not look for a newer version of itself
    with gr.Blocks(title="softline explorer", analytics_enabled=False) as blocks:
        gr.HTML(INTRODUCTION, elem_id="introduction")
        with gr.Row(elem_id="board"):
            with gr.Column(elem_id="photo-side", min_width=220):
                photos = gr.Radio(list(page.photos), value=next(iter(page.photos)), label="Photograph")
                upload = gr.UploadButton(
                    "Upload your own", file_types=["image"], size="sm", elem_id="upload", variant="secondary"
                )
                picture = _picture("Click a point", "photograph")
                gr.HTML(f'<p class="note">{LIMITS}</p>')
            sides = [_side(name, page, model) for name, model in zip("AB", page.default_models(), strict=True)]
            with gr.Column(elem_id="size-side", min_width=220):
                size = gr.Slider(
                    LEAST_SIZE,
                    MOST_SIZE,
                    value=USUAL_SIZE,
                    step=SIZE_STEP,
                    label="Image size in pixels",
                    info="The size that the models get: larger images have more patches and cost more.",
                    buttons=[],
                    elem_id="size",
                )
                cost = gr.HTML(elem_id="cost")
        uploaded = gr.State(None, time_to_live=SESSION_SECONDS)
        query = gr.State(FIRST_QUERY)
        _wire(blocks, page, photos, upload, picture, size, cost, sides, uploaded, query)
    return blocks


def _side(name: str, page: Page, model: str) -> Side:
    choice = page.explorer.choices[model]
    with gr.Column(elem_classes=["side", f"side-{name.lower()}"], min_width=220):
        gr.HTML(f"<h2>{name}</h2>")
        with gr.Row():
            chosen = gr.Dropdown(list(page.explorer.choices), value=model, label="Model", min_width=240, scale=3)
            attention = gr.Dropdown(
                list(choice.attentions),
                value=OWN,
                label="Attention",
                min_width=130,
                scale=2,
                interactive=not choice.trained,
            )
        with gr.Row():
            layer = gr.Dropdown([("first", 0)], value=0, label="Layer", min_width=240, scale=3, interactive=True)
            head = gr.Dropdown(_heads(0), value=MEAN, label="Head", min_width=130, scale=2, interactive=True)
        picture = _picture(f"Map of {name}", f"map-{name.lower()}")
        gr.HTML(facts.LEGEND)
        with gr.Column(elem_classes=["numbers"]):
            answer = gr.HTML(elem_id=f"answer-{name.lower()}")
            details = gr.HTML(elem_id=f"details-{name.lower()}")
    return Side(name, chosen, attention, layer, head, picture, answer, details)


def _picture(label: str, name: str) -> gr.Image:
    return gr.Image(
        label=label,
        elem_id=name,
        interactive=False,
        buttons=[],
        alt_text=label,
        elem_classes=["picture"],
    )


def _wire(
    blocks: gr.Blocks,
    page: Page,
    photos: gr.Radio,
    upload: gr.UploadButton,
    picture: gr.Image,
    size: gr.Slider,
    cost: gr.HTML,
    sides: Sequence[Side],
    uploaded: gr.State,
    query: gr.State,
) -> None:
    asked = [component for side in sides for component in side.asked]
    shown = [picture, *(component for side in sides for component in side.shown)]
    maps = [side.picture for side in sides]
    given = [photos, uploaded, size, query]
    options: dict[str, Any] = {
        "preprocess": False,
        "api_visibility": "private",
        "concurrency_id": QUEUE,
        "concurrency_limit": 1,
        "trigger_mode": "always_last",
    }

    def then_details(event: Any) -> None:
        outputs = [*(side.details for side in sides), cost]
        event.then(page.details, [size, *asked], outputs, show_progress="hidden", **options)

    changed = [blocks.load, photos.input, size.release]
    then_details(gr.on(changed, page.show, [*given, *asked], shown, show_progress_on=maps, **options))
    received = upload.upload(page.receive, [upload], [uploaded, photos], show_progress="hidden", **options)
    then_details(received.then(page.show, [*given, *asked], shown, show_progress_on=maps, **options))
    clicks = [target.select for target in (picture, *maps)]
    gr.on(clicks, page.click, [*given, *asked], [query, *shown], show_progress="hidden", **options)
    for side in sides:
        changed = [selector.input for selector in side.asked]
        inputs = [*given, *side.asked]
        then_details(gr.on(changed, page.show_side, inputs, side.shown, show_progress_on=[side.picture], **options))


def stylesheet() -> str:
    return (files("softline.explorer") / "page.css").read_text()


def script() -> str:
    return f"<script>{(files('softline.explorer') / 'page.js').read_text()}</script>"


def theme() -> gr.themes.Base:
    """Softline's colours and the system's fonts: gradio's own themes may download theirs."""
    return gr.themes.Base(
        primary_hue=BLUE,
        secondary_hue=BLUE,
        neutral_hue="slate",
        font=["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"],
        font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
        radius_size="md",
    ).set(
        # gradio's own greys are hard to read on white
        body_text_color_subdued="*neutral_600",
        block_info_text_color="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        block_info_text_color_dark="*neutral_300",
    )
