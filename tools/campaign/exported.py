"""Exported files from outside: damaged, with altered metadata, or hostile, and given to the commands that open them.

An ONNX file has no checksums: damage that leaves a sound file may change its numbers. Hostile files must be refused.
"""

from functools import partial
from pathlib import Path
from random import Random

from tools.campaign import grammar
from tools.campaign.damage import damage
from tools.campaign.fixtures import make_exported
from tools.campaign.graphs import altered_metadata, hostile_onnx
from tools.campaign.texts import TASKS, Case, Place, Subject, Texts

NAME = "model\x1b[31m.onnx"
"""Of the file, which messages mention."""


def _command(random: Random, place: Place, task: str, content: bytes) -> tuple[object, ...]:
    path = place.write(NAME, content)
    image = place.root / "data/val/dark/000.png"
    # what the metadata says about data is a name without a place
    data = {"classification": "data", "detection": "coco", "segmentation": "scenes", "sequence": "listops"}
    if task == "sequence" or random.random() < 0.4:
        return "evaluate", path, place.root / data[task], "--json", "out.json"
    return "predict", path, image


def _sound(random: Random, place: Place) -> tuple[str, bytes]:
    task = random.choice(TASKS)
    return task, (place.root / "exported" / f"{task}.onnx").read_bytes()


def damaged(random: Random, place: Place) -> Case:
    task, sound = _sound(random, place)
    _, other = _sound(random, place)
    done = damage(sound, random, other=other if other != sound else b"")
    return Case(f"{task}.onnx: {done.what}", _command(random, place, task, done.content))


def altered(random: Random, place: Place) -> Case:
    """Put an odd value into the metadata, or make it no JSON."""
    task, sound = _sound(random, place)
    unreadable = random.random() < 0.15
    alter = partial(grammar.odd_json if unreadable else grammar.altered_json, random)
    what, content = altered_metadata(random, sound, alter)
    return Case(f"metadata of {task}.onnx: {what}", _command(random, place, task, content), refused=unreadable)


def hostile(random: Random, place: Place) -> Case:
    task, sound = _sound(random, place)
    what, content = hostile_onnx(random, sound, place.canary)
    command = _command(random, place, task, content)
    # of the size of any tensor: reading it would be noticed by the file that is then accepted
    place.write("weights.bin", bytes(10**5))
    return Case(f"{task}.onnx with {what}", command, refused=True)


SUBJECTS: dict[Subject, float] = {damaged: 3.0, altered: 2.0, hostile: 2.0}


class Exported(Texts):
    name = "exported"
    unit = "ONNX files"
    target = 500
    share = 1.0
    subjects = SUBJECTS

    def prepare(self, work: Path) -> None:
        make_exported(work)


KIND = Exported()
