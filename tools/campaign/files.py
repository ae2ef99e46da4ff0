"""Damaged files: every format that softline reads, damaged at random and given to the command that reads it.

A command may refuse the file with exit code 2 and a message, and leaves nothing behind then. If it accepts the file,
its result is compared with that for the sound file as far as the format allows:

- ``RESULT``: the format has checksums, so that the result must be the same. These are the checkpoints (zip archives)
  and ListOps samples (SHA-256). The log of a run has none but decides nothing either.
- ``COUNT``: pixels have no checksum, and other pixels rightly give other predictions, but there must be as many images.
- ``ANY``: texts, JSON and safetensors have no checksum: another number is another, legitimate, file. JSON that cannot
  be parsed must be refused.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from random import Random
from typing import Any

from softline.files import write_json
from tools.campaign.damage import TAR_BLOCK, damage
from tools.campaign.fixtures import LONGER, copy_fixture, make_fixtures, strict_json
from tools.campaign.interface import Outcome, Verdict, case_random
from tools.campaign.running import Finished, case_directory, judge, left_after_refusal, run

FRESH_EVERY = 50  # one case of so many uses a process of its own


class Promise(Enum):
    """What must be the same if a damaged file is accepted."""

    RESULT = auto()
    COUNT = auto()
    ANY = auto()


@dataclass(frozen=True)
class Format:
    """Files of one format and the command that reads them.

    copied: the fixture, a file or a directory, that is copied for the case.
    damaged: glob pattern in that directory of the files of which one is damaged.
    command: IN is the copy, DAMAGED the damaged file, ROOT the directory of the sound fixtures.
    """

    name: str
    copied: str
    damaged: str
    command: str
    promise: Promise = Promise.ANY
    weight: float = 1.0  # how often it comes up

    def arguments(self, root: Path, copy: Path, damaged: Path) -> list[str]:
        places = {"IN": copy, "DAMAGED": damaged, "ROOT": root}
        text = re.sub(r"\b(IN|DAMAGED|ROOT)\b", lambda match: str(places[match[0]]), self.command)
        return text.split()

    def result(self, finished: Finished, directory: Path) -> Any:
        """Return the number of samples and the result of a successful command, as far as the promise is about them."""
        if self.promise is Promise.ANY:
            return None
        command = self.command.partition(" ")[0]
        if command == "convert":
            return 1, finished.output.splitlines()[-1]
        if command == "train":
            return 1, _trained(finished, directory)
        found = json.loads((directory / "cwd" / "out.json").read_text())
        if command == "predict":
            return len(found), [{key: row[key] for key in row if key != "name"} for row in found]
        return sum(row["samples"] for row in found["rows"]), [row["metrics"] for row in found["rows"]]


def _trained(finished: Finished, directory: Path) -> list[str]:
    """Return a hash of the weights after a training, and what it prints about its metrics."""
    from softline.engine.checkpoint import load_checkpoint

    weights = load_checkpoint(directory / "in" / "interrupted" / "last.pt")["state_dict"]
    content = b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
    best = [line for line in finished.output.splitlines() if line.startswith("best: ")]
    return [hashlib.sha256(content).hexdigest(), *best]


RUNS, CLASSIFIER, JSON = "ROOT/runs", "ROOT/runs/classification/best.pt", "--json out.json"
RESUME = f"train ROOT/classification.yaml {' '.join(LONGER)} --resume --output IN"
IMAGE = f"ROOT/data/val/dark/000.png {JSON}"
FORMATS = [
    Format("classifier", "runs/classification", "best.pt", f"evaluate DAMAGED ROOT/data {JSON}", Promise.RESULT),
    Format("detector", "runs/detection", "best.pt", f"evaluate DAMAGED {JSON}", Promise.RESULT),
    Format("segmenter", "runs/segmentation", "best.pt", f"evaluate DAMAGED {JSON}", Promise.RESULT),
    Format("sequence model", "runs/sequence", "best.pt", f"evaluate DAMAGED {JSON}", Promise.RESULT),
    Format("predicting classifier", "runs/classification", "last.pt", f"predict DAMAGED {IMAGE}", Promise.RESULT),
    Format(
        "predicting detector", "runs/detection", "last.pt", f"predict DAMAGED {IMAGE} --out drawn --score 0",
        Promise.RESULT,
    ),
    Format("checkpoint to resume", "interrupted", "last.pt", RESUME, Promise.RESULT),
    Format("log to resume", "interrupted", "log.jsonl", RESUME, Promise.RESULT),
    Format("pytorch_model.bin", "timm_bin", "pytorch_model.bin", f"predict IN {IMAGE}", Promise.RESULT),
    Format("timm's config.json", "timm", "config.json", f"predict IN {IMAGE}"),
    Format("timm's safetensors", "timm", "model.safetensors", f"predict IN {IMAGE}"),
    Format(
        "release", "release.pth", "", "convert IN converted --model inline_deit_tiny", Promise.RESULT, weight=0.3
    ),
    Format(
        "release's safetensors", "release.safetensors", "", "convert IN converted --model inline_deit_tiny", weight=0.3
    ),
    Format("recipe", "classification.yaml", "", "train IN --show"),
    Format(".tar of images", "data.tar", "", f"evaluate {CLASSIFIER} IN {JSON}", Promise.COUNT, weight=2.0),
    Format(
        "shard of images", "shards", "val-0.tar", f"evaluate {CLASSIFIER} wds/shards --root IN {JSON}", Promise.COUNT
    ),
    Format("description of shards", "shards", "_info.json", f"evaluate {CLASSIFIER} wds/shards --root IN {JSON}"),
    Format("images", "data", "val/*/*", f"evaluate {CLASSIFIER} IN {JSON}", Promise.COUNT),
    Format(
        "training images", "data", "train/*/*",
        "train ROOT/classification.yaml --data.source IN --schedule.epochs 1 --output run",
    ),
    Format("image to classify", "data", "val/dark/*", f"predict {CLASSIFIER} DAMAGED {JSON}", Promise.COUNT),
    Format(
        "image to detect in", "coco", "val/*.png", f"predict {RUNS}/detection/best.pt DAMAGED {JSON} --out drawn",
        Promise.COUNT,
    ),
    Format("image to analyse", "data", "val/dark/*", f"analyze heatmap {CLASSIFIER} --images DAMAGED --output drawn"),
    Format(
        "COCO's annotations", "coco", "annotations/instances_val.json", f"evaluate {RUNS}/detection/best.pt IN {JSON}"
    ),
    Format("COCO's images", "coco", "val/*", f"evaluate {RUNS}/detection/best.pt IN {JSON}", Promise.COUNT),
    Format("masks", "scenes", "valannot/*", f"evaluate {RUNS}/segmentation/best.pt IN {JSON}", Promise.COUNT),
    Format("ListOps samples", "listops", "val_*", f"evaluate {RUNS}/sequence/best.pt IN {JSON}", Promise.RESULT),
    Format(
        "ListOps description", "listops", "listops.json", f"evaluate {RUNS}/sequence/best.pt IN {JSON}", Promise.RESULT
    ),
    Format("expressions", "lra", "listops-1000/basic_val.tsv", f"evaluate {RUNS}/expressions/best.pt IN {JSON}"),
    Format("reviews", "lra", "aclImdb/test/*/*", f"evaluate {RUNS}/reviews/best.pt IN {JSON}", Promise.COUNT),
    Format("pairs of texts", "lra", "tsv_data/new_aan_pairs.eval.tsv", f"evaluate {RUNS}/pairs/best.pt IN {JSON}"),
    Format(
        "results of a comparison", "compared", "**/result.json",
        "compare --attentions inline --recipe ROOT/classification.yaml --output IN",
        weight=0.3,
    ),
]  # fmt: skip


class Files:
    name = "files"
    unit = "damaged files"
    target = 2000
    share = 3.0

    def prepare(self, work: Path) -> None:
        make_fixtures(work)

    def run(self, seed: int, work: Path) -> Outcome:
        random = case_random(self.name, seed)
        (kind,) = random.choices(FORMATS, [kind.weight for kind in FORMATS])
        root = work / "fixtures"
        sound = self._sound_result(kind, work)
        with case_directory(work, self.name, seed) as directory:
            copy, paths = _copy(kind, root, directory)
            path = random.choice(paths)
            what = _damage(path, random.choice(paths), random)
            arguments = kind.arguments(root, copy, path)
            finished = run(arguments, directory, fresh=random.random() < 1 / FRESH_EVERY)
            verdict, problem = _judge(kind, finished, directory, path, sound)
        text = f"{kind.name}, {path.name}: {what}"
        return Outcome(verdict, f"{text}: {problem}" if problem else text, finished.detail())

    def _sound_result(self, kind: Format, work: Path) -> Any:
        """Return the result for sound files, which the first case of the format finds out."""
        root = work / "fixtures"
        known = root / "sound" / f"{kind.name}.json"
        if not known.exists():
            with case_directory(work, "sound", os.getpid()) as directory:
                copy, paths = _copy(kind, root, directory)
                finished = run(kind.arguments(root, copy, paths[0]), directory)
                if finished.code != 0 or judge(finished) is not Verdict.SURVIVED:
                    raise RuntimeError(f"{kind.name} fails with sound files\n{finished.detail()}")
                known.parent.mkdir(exist_ok=True)
                write_json(known, kind.result(finished, directory))
        return json.loads(known.read_text())


def _judge(kind: Format, finished: Finished, directory: Path, path: Path, sound: Any) -> tuple[Verdict, str]:
    """Return the verdict, and the problem if the result is wrong."""
    verdict = judge(finished)
    if verdict is not Verdict.SURVIVED:
        return verdict, ""
    if finished.code == 2:
        left = left_after_refusal(directory)
        return (Verdict.WRONG, f"left behind: {', '.join(left)}") if left else (verdict, "")
    content = path.read_bytes()
    if path.suffix == ".json" and not strict_json(content):
        return Verdict.WRONG, "accepted JSON that cannot be parsed"
    if kind.promise is Promise.ANY:
        return verdict, ""
    found = json.loads(json.dumps(kind.result(finished, directory)))
    if kind.promise is Promise.RESULT and found != sound:
        return Verdict.WRONG, f"another result: {found} instead of {sound}"
    if kind.promise is Promise.COUNT and found[0] not in (sound[0], tar_count(content)):
        return Verdict.WRONG, f"another number of samples: {found[0]} instead of {sound[0]}"
    return verdict, ""


def _copy(kind: Format, root: Path, directory: Path) -> tuple[Path, list[Path]]:
    """Copy the fixture of a case; return the copy and the files in it that may be damaged."""
    copy = directory / "in" / Path(kind.copied).name
    copy_fixture(root / kind.copied, copy)
    found = copy.glob(kind.damaged) if kind.damaged else [copy]
    return copy, sorted(path for path in found if path.is_file())


def _damage(path: Path, other: Path, random: Random) -> str:
    """Damage a file, perhaps by parts of another one; return what was done."""
    sound = path.read_bytes()
    damaged = damage(sound, random, other=other.read_bytes() if other != path else b"")
    path.write_bytes(damaged.content)
    return damaged.what if damaged.content != sound else f"{damaged.what}, which changed nothing"


def tar_count(content: bytes) -> int | None:
    """Return the number of validation images of a .tar file that is complete and sound, otherwise None.

    Whole members can be cut out of an archive without a trace: that is another, sound, archive.
    """
    count, place = 0, 0
    while any(block := content[place : place + TAR_BLOCK]):
        stated = block[148:156].split(b"\0")[0].strip()
        if len(block) < TAR_BLOCK or not stated.isdigit():
            return None
        if sum(block[:148]) + 8 * 32 + sum(block[156:]) != int(stated, 8):
            return None
        size = int(block[124:136].rstrip(b"\0 ") or b"0", 8)
        count += block[156:157] in b"0\0" and b"/val/" in block[:100]
        place += TAR_BLOCK * (1 + -(-size // TAR_BLOCK))
    rest = content[place:]
    return count if len(rest) >= 2 * TAR_BLOCK and not any(rest) else None


KIND = Files()
