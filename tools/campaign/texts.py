"""Malformed YAML, JSON, archives, pickles and images that follow the rules of `grammar`, and links and pipes.

Each subject puts something malformed among sound fixtures and names the command that reads it. Some of it must be
refused. Of the rest, the command may make what it can: an odd value can be legitimate at some key.
"""

import copy
import io
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tools.campaign import grammar
from tools.campaign.files import FRESH_EVERY
from tools.campaign.fixtures import LONGER, copy_fixture, make_fixtures
from tools.campaign.interface import Outcome, Verdict, case_random
from tools.campaign.running import Finished, case_directory, judge, left_after_refusal, run

VAL_IMAGES = 20  # in fixtures/data/val
TASKS = ("classification", "detection", "segmentation", "sequence")
ESCAPE = "\x1b[31m"  # of the grammar's texts; a terminal would change its colour
# where a file that is malformed, and named by a checkpoint or a configuration, is expected to stay unread
ELSEWHERE = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "pretrained_url")


@dataclass
class Place:
    """Where a case lies: the sound fixtures, its own directory, and a file that only foreign code would create."""

    root: Path
    directory: Path

    @property
    def canary(self) -> Path:
        return self.directory / "canary"

    def copy(self, name: str) -> Path:
        target = self.directory / "in" / Path(name).name
        copy_fixture(self.root / name, target)
        return target

    def write(self, name: str, content: bytes) -> Path:
        target = self.directory / "in" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        return target

    def checkpoint(self, task: str = "classification") -> Path:
        return self.root / "runs" / task / "best.pt"


@dataclass(frozen=True)
class Case:
    """What was made and the command that reads it."""

    what: str
    command: tuple[object, ...]
    refused: bool = False  # whether the exit code must be 2
    samples: int | None = None  # number of samples that an evaluation must report if it accepts the data


Subject = Callable[[Random, Place], Case]


def _evaluate(checkpoint: Path, *further: object) -> tuple[object, ...]:
    return "evaluate", checkpoint, *further, "--json", "out.json"


def _predict(place: Place, checkpoint: Path) -> tuple[object, ...]:
    return "predict", checkpoint, place.root / "data/val/dark/000.png"


# texts


def malformed_recipe(random: Random, place: Place) -> Case:
    sound = (place.root / f"{random.choice(TASKS)}.yaml").read_text()
    what, text = grammar.odd_yaml(random, sound)
    path = place.write("recipe.yaml", text.replace("CANARY", str(place.canary)).encode())
    return Case(f"YAML with {what}", ("train", path, "--show"), refused=True)


def odd_recipe_value(random: Random, place: Place) -> Case:
    """Put an odd value at one of all keys of a recipe."""
    import yaml

    task = random.choice(TASKS)
    content = yaml.safe_load((place.root / f"{task}.full.yaml").read_text())
    what = grammar.alter(content, random)
    path = place.write("recipe.yaml", yaml.safe_dump(content).encode())
    return Case(f"recipe of {task}: {what}", ("train", path, "--show"))


def wrong_type_in_training(random: Random, place: Place) -> Case:
    """Train with a value of a wrong type at one key; numbers that are merely large would train for long."""
    import yaml

    task = random.choice(TASKS)
    content = yaml.safe_load((place.root / f"{task}.full.yaml").read_text())
    path = random.choice([path for path in grammar.places(content) if path != ("output",)])
    value = random.choice([[], {}, [[]], {"a": 1}, "", "text", -1, -0.5, float("nan"), True, "\x1b[31m"])
    grammar.replace(content, path, value)
    content["output"] = "run"
    recipe = place.write("recipe.yaml", yaml.safe_dump(content).encode())
    return Case(f"training of {task} with {'.'.join(map(str, path))} = {value!r}", ("train", recipe))


def malformed_json(random: Random, place: Place) -> Case:
    """Replace a JSON file by one that cannot be read, or by one with an odd value."""
    compare = ("compare", "--attentions", "inline", "--recipe", place.root / "classification.yaml", "--output", "COPY")
    name, command = random.choice(
        [
            ("coco/annotations/instances_val.json", _evaluate(place.checkpoint("detection"), "COPY")),
            ("timm/config.json", ("predict", "COPY", place.root / "data/val/dark/000.png")),
            ("listops/listops.json", _evaluate(place.checkpoint("sequence"), "COPY")),
            ("compared/inline/seed0/result.json", compare),
            ("shards/_info.json", _evaluate(place.checkpoint(), "wds/shards", "--root", "COPY")),
        ]
    )
    top, _, inner = name.partition("/")
    copied = place.copy(top)
    sound = (copied / inner).read_bytes()
    unreadable = random.random() < 0.3
    what, content = (grammar.odd_json if unreadable else grammar.altered_json)(random, sound)
    (copied / inner).write_bytes(content)
    return Case(f"{name}: {what}", tuple(copied if word == "COPY" else word for word in command), refused=unreadable)


def coco_name(random: Random, place: Place) -> Case:
    """Let an annotated image lie outside the folder, or be no file."""
    folder = place.copy("coco")
    (folder / "val" / "pipe.png").unlink(missing_ok=True)
    os.mkfifo(folder / "val" / "pipe.png")
    (folder / "val" / "link.png").symlink_to(place.root / "coco/val/0.png")
    names = [
        str(place.root / "coco/val/0.png"), "../train/0.png", "../../../../etc/passwd", "/etc/passwd", "/dev/zero",
        "./../val/0.png", "pipe.png", "", ".", "..", "val", "0.png\0", "\x1b[31m.png", "x" * 5000, "link.png",
        "http://127.0.0.1:9/0.png", "file:///etc/passwd", "missing.png", "~/0.png",
    ]  # fmt: skip
    path = folder / "annotations/instances_val.json"
    content = json.loads(path.read_text())
    name = random.choice(names)
    content["images"][random.randrange(3)]["file_name"] = name
    path.write_text(json.dumps(content))
    return Case(f"COCO's file name {name[:50]!r}", _evaluate(place.checkpoint("detection"), folder), refused=True)


# archives and folders


def malformed_tar(random: Random, place: Place) -> Case:
    what, content = grammar.odd_tar(random, (place.root / "data.tar").read_bytes())
    path = place.write("data.tar", content)
    # an image with an odd name is an image; nothing else that is added may count
    samples = VAL_IMAGES + (what == grammar.ODD_NAME)
    return Case(f".tar with {what}", _evaluate(place.checkpoint(), path), samples=samples)


def _special(random: Random, path: Path, place: Place) -> str:
    """Put something that is no regular file at a path."""
    kind = random.choice(["pipe", "socket", "loop", "up", "out", "zero", "dangling", "directory", "unreadable"])
    links = {"loop": path.name, "up": "..", "out": str(place.root / "data/val/dark/000.png"), "zero": "/dev/zero"}
    links["dangling"] = "nowhere"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            # the path of a socket is limited to some hundred characters
            here = os.open(path.parent, os.O_RDONLY)
            server.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)
    elif kind == "directory":
        path.mkdir()
    elif kind == "unreadable":
        path.write_bytes(b"")
        path.chmod(0)
    else:
        path.symlink_to(links[kind])
    return kind


def special_file(random: Random, place: Place) -> Case:
    """Let a dataset contain links, pipes, sockets and directories, named as images or as folders."""
    name = random.choice(["data", "coco", "scenes", "lra"])
    folder = place.copy(name)
    choices = {
        "data": ["val/dark/x.png", "val/loop", "val/dark/loop", "train/x", "val/light/x.jpg"],
        "coco": ["val/x.png"],
        "scenes": ["val/x.png", "valannot/x.png", "val/x"],
        "lra": ["aclImdb/test/pos/x.txt", "aclImdb/test/pos/x"],
    }
    inner = random.choice(choices[name])
    kind = _special(random, folder / inner, place)
    task = {"data": "classification", "coco": "detection", "scenes": "segmentation", "lra": "reviews"}[name]
    samples = {"data": VAL_IMAGES, "coco": 3, "scenes": 3, "lra": 16}[name]
    return Case(f"{name}/{inner}: {kind}", _evaluate(place.checkpoint(task), folder), samples=samples)


def special_argument(random: Random, place: Place) -> Case:
    """Name a pipe, a socket, a directory or a link in the place of a file."""
    (place.directory / "in").mkdir()
    path = place.directory / "in" / random.choice(["x.pt", "x.png", "x.yaml", "x.tar", "x.pth"])
    kind = _special(random, path, place)
    image = place.root / "data/val/dark/000.png"
    command = random.choice(
        [
            ("predict", path, image), ("predict", place.checkpoint(), path), _evaluate(place.checkpoint(), path),
            ("train", path, "--show"), ("convert", path, "converted"), _evaluate(path, place.root / "data"),
            ("analyze", "heatmap", place.checkpoint(), "--images", path, "--output", "drawn"),
        ]
    )  # fmt: skip
    # a link to an image is an image where a single one is named
    image_link = kind == "out" and path in (command[2], command[-3])
    return Case(f"{kind} as {path.name} for {command[0]}", command, refused=not image_link and kind != "out")


def malformed_image(random: Random, place: Place) -> Case:
    what, content = grammar.odd_image(random)
    inside = random.choice(["predict", "detect", "analyze", "folder", "tar"])
    if inside == "folder":
        folder = place.copy("data")
        (folder / "val/dark/x.jpg").write_bytes(content)
        return Case(f"{what} in a folder", _evaluate(place.checkpoint(), folder), samples=VAL_IMAGES + 1)
    path = place.write(f"x.{random.choice(['jpg', 'png', 'webp', 'eps', 'svg', 'gif'])}", content)
    if inside == "detect":
        return Case(f"{what} to detect in", ("predict", place.checkpoint("detection"), path, "--out", "drawn"))
    if inside == "analyze":
        command = ("analyze", "heatmap", place.checkpoint(), "--images", path, "--output", "drawn")
        return Case(f"{what} to analyse", command)
    return Case(f"{what} to classify", ("predict", place.checkpoint(), path))


# pickles and checkpoints


def _reader(random: Random, place: Place, content: bytes) -> tuple[object, ...]:
    """Write the content as a file of weights of some kind; return the command that reads it."""
    kind = random.choice(["checkpoint", "evaluated", "release", "bin", "resumed", "initial"])
    if kind == "release":
        return "convert", place.write("x.pth", content), "converted"
    if kind == "bin":
        folder = place.copy("timm_bin")
        (folder / "pytorch_model.bin").write_bytes(content)
        return _predict(place, folder)
    if kind == "resumed":
        folder = place.copy("interrupted")
        (folder / "last.pt").write_bytes(content)
        recipe = place.root / "classification.yaml"
        return "train", recipe, *LONGER, "--resume", "--output", folder
    path = place.write("x.pt", content)
    if kind == "initial":
        return "train", place.root / "classification.yaml", "--model.checkpoint", path, "--output", "run"
    return _predict(place, path) if kind == "checkpoint" else _evaluate(path, place.root / "data")


def malicious_pickle(random: Random, place: Place) -> Case:
    what, pickled = grammar.malicious_pickle(random, place.canary)
    zipped = random.random() < 0.8
    content = grammar.zip_of(pickled) if zipped else pickled
    command = _reader(random, place, content)
    return Case(f"{'zip' if zipped else 'bare'} pickle that calls {what}, for {command[0]}", command, refused=True)


def malformed_pickle(random: Random, place: Place) -> Case:
    what, pickled = grammar.odd_pickle(random)
    command = _reader(random, place, grammar.zip_of(pickled) if random.random() < 0.8 else pickled)
    return Case(f"pickle with {what}, for {command[0]}", command, refused=True)


def malformed_zip(random: Random, place: Place) -> Case:
    what, content = grammar.odd_zip(random, place.checkpoint().read_bytes())
    command = _reader(random, place, content)
    return Case(f"zip with {what}, for {command[0]}", command, refused=True)


def _saved(content: Any) -> bytes:
    import torch

    written = io.BytesIO()
    torch.save(content, written)
    return written.getvalue()


def _loaded(place: Place, task: str) -> Any:
    from softline.engine.checkpoint import load_checkpoint

    return load_checkpoint(place.checkpoint(task))


def altered_checkpoint(random: Random, place: Place) -> Case:
    """Replace or delete an entry of a checkpoint, at any depth of what is not a tensor."""
    task = random.choice(TASKS)
    content = _loaded(place, task)
    tensors = {name: content.pop(name) for name in ("state_dict", "state_dict_ema", "optimizer")}
    if random.random() < 0.3:
        name = random.choice([*content, *tensors])
        value = grammar.odd_value(random)
        content = {**content, **tensors, name: value}
        what = f"{name} = {repr(value)[:60]}"
    else:
        what = grammar.alter(content, random)
        content |= tensors
    path = place.write("x.pt", _saved(content))
    evaluated = _evaluate(path, *([place.root / "data"] if task == "classification" else []))
    return Case(f"checkpoint of {task}: {what}", random.choice([evaluated, _drawn(place, path, task)]))


def _drawn(place: Place, path: Path, task: str) -> tuple[object, ...]:
    drawn = ("--out", "drawn") if task in ("detection", "segmentation") else ()
    return *_predict(place, path), *drawn


def altered_weights(random: Random, place: Place) -> Case:
    """Spoil one tensor of a checkpoint, all of which must be noticed."""
    import torch

    task = random.choice(TASKS)
    content = _loaded(place, task)
    entry = "state_dict_ema" if content["state_dict_ema"] is not None else "state_dict"
    weights = dict(content[entry])
    floating = [name for name in weights if weights[name].is_floating_point() and weights[name].numel()]
    name = random.choice(floating)
    tensor = weights[name].clone()
    spoiled: dict[str, Callable[[], Any]] = {
        "NaN": lambda: torch.full_like(tensor, float("nan")),
        "one NaN": lambda: tensor.flatten().index_fill(0, torch.tensor([0]), float("nan")).view_as(tensor),
        "one infinity": lambda: tensor.flatten().index_fill(0, torch.tensor([0]), -float("inf")).view_as(tensor),
        "another shape": lambda: torch.zeros(*tensor.shape, 2),
        "fewer numbers": lambda: tensor.flatten()[: tensor.numel() // 2].clone(),
        "a list": lambda: tensor.tolist(),
        "nothing": lambda: None,
        "a text": lambda: "weights",
        "a sparse tensor": lambda: tensor.to_sparse(),
        "a tensor without numbers": lambda: torch.empty_like(tensor, device="meta"),
        "an expanded number": lambda: torch.zeros(()).expand(10**6, 10**6),
        "complex numbers": lambda: torch.complex(tensor, tensor),
    }
    what = random.choice([*spoiled, "missing", "renamed", "further"])
    if what in spoiled:
        weights[name] = spoiled[what]()
    elif what == "further":
        weights["more.weight"] = tensor
    else:
        del weights[name]
        if what == "renamed":
            weights[f"{name}2"] = tensor
    path = place.write("x.pt", _saved({**content, entry: weights}))
    evaluated = _evaluate(path, *([place.root / "data"] if task == "classification" else []))
    return Case(f"weights of {task}, {name}: {what}", evaluated, refused=True)


def reaching_out(random: Random, place: Place) -> Case:
    """Let the recipe in a checkpoint, or the configuration of a timm directory, name files and addresses.

    The named file is a malicious pickle, and the addresses would need the network.
    """
    _, pickled = grammar.malicious_pickle(random, place.canary)
    evil = str(place.write("evil.pth", grammar.zip_of(pickled)))
    option = random.choice(ELSEWHERE)
    value = random.choice(
        [evil, f"file:{evil}", True, {"file": evil}, {"url": "http://127.0.0.1:9/x"}, {"hf_hub_id": "nobody/nothing"},
         {"url": evil, "file": evil, "custom_load": True}]
    )  # fmt: skip
    name = random.choice(
        ["hf-hub:nobody/nothing", "hf_hub:nobody/nothing", f"local-dir:{Path(evil).parent}", "resnet18.a1_in1k",
         "timm/resnet18", f"{Path(evil).parent}", "vit_gigantic_patch14_224", "https://127.0.0.1:9/x"]
    )  # fmt: skip
    by_name = random.random() < 0.4
    what = f"model {name!r}" if by_name else f"option {option} = {value!r}"
    if random.random() < 0.5:
        folder = place.copy("timm")
        content = json.loads((folder / "config.json").read_text())
        if by_name:
            content["architecture"] = name
        else:
            content["model_args"][option] = value
            content["pretrained_cfg"] |= value if isinstance(value, dict) else {}
        (folder / "config.json").write_text(json.dumps(content))
        return Case(f"timm directory with {what}", _predict(place, folder))
    checkpoint = _loaded(place, "classification")
    recipe = copy.deepcopy(checkpoint["recipe"])
    if by_name:
        recipe["model"]["name"] = name
    elif random.random() < 0.3:
        recipe["model"]["checkpoint"] = evil
        what = "model.checkpoint = evil.pth"
    else:
        recipe["model"]["options"][option] = value
    path = place.write("x.pt", _saved({**checkpoint, "recipe": recipe}))
    command = random.choice([_predict(place, path), _evaluate(path, place.root / "data")])
    return Case(f"checkpoint with {what}", command)


SUBJECTS: dict[Subject, float] = {
    malformed_recipe: 1.5,
    odd_recipe_value: 1.0,
    wrong_type_in_training: 1.5,
    malformed_json: 2.0,
    coco_name: 0.5,
    malformed_tar: 1.0,
    special_file: 1.0,
    special_argument: 1.0,
    malformed_image: 2.0,
    malicious_pickle: 1.5,
    malformed_pickle: 1.0,
    malformed_zip: 0.5,
    altered_checkpoint: 2.0,
    altered_weights: 1.0,
    reaching_out: 1.5,
}


class Texts:
    name = "texts"
    unit = "malformed inputs"
    target = 1000
    share = 2.0
    subjects = SUBJECTS

    def prepare(self, work: Path) -> None:
        root = make_fixtures(work)
        for task in TASKS:
            path = root / f"{task}.full.yaml"
            if not path.exists():
                with case_directory(work, self.name, 0) as directory:
                    path.write_text(run(["train", str(root / f"{task}.yaml"), "--show"], directory).output)

    def run(self, seed: int, work: Path) -> Outcome:
        random = case_random(self.name, seed)
        (subject,) = random.choices(list(self.subjects), list(self.subjects.values()))
        with case_directory(work, self.name, seed) as directory:
            place = Place(work / "fixtures", directory)
            case = subject(random, place)
            arguments = [str(word) for word in case.command]
            finished = run(arguments, directory, fresh=random.random() < 1 / FRESH_EVERY)
            verdict, problem = _judge(case, finished, place)
        return Outcome(verdict, f"{case.what}: {problem}" if problem else case.what, finished.detail())


def _judge(case: Case, finished: Finished, place: Place) -> tuple[Verdict, str]:
    if place.canary.exists():
        return Verdict.EXECUTION, "executed foreign code"
    verdict = judge(finished)
    if verdict is not Verdict.SURVIVED:
        return verdict, ""
    if ESCAPE in finished.output + finished.errors:
        return Verdict.WRONG, "printed control characters of a file"
    if finished.code == 2:
        left = left_after_refusal(place.directory)
        return (Verdict.WRONG, f"left behind: {', '.join(left)}") if left else (verdict, "")
    if case.refused:
        return Verdict.WRONG, "accepted"
    if case.samples is not None:
        rows = json.loads((place.directory / "cwd" / "out.json").read_text())["rows"]
        samples = sum(row["samples"] for row in rows)
        if samples != case.samples:
            return Verdict.WRONG, f"{samples} samples instead of {case.samples}"
    return verdict, ""


KIND = Texts()
