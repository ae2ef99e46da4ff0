"""Small files of every format that softline reads, made once per campaign in ``WORK/fixtures``.

data, data.tar     images in folders of two classes, of every format, and the same in a .tar file
coco, scenes       objects and semantic masks
listops            expressions that softline generated, with their checksums
lra                the Long Range Arena's files: listops-1000, aclImdb, tsv_data
runs/TASK          finished trainings: best.pt, last.pt, log.jsonl
interrupted        a training that was stopped in its second epoch
compared           a finished comparison of one variant
timm, timm_bin     directories that timm saved, with model.safetensors or pytorch_model.bin
release.pth, .safetensors    weights as the authors of InLine store them
classification.yaml, ...     the recipes
exported/TASK.onnx the classifier of timm and the models of the other tasks, if a kind needs them
"""

import fcntl
import hashlib
import io
import json
import shutil
import signal
import tarfile
import time
from pathlib import Path

from tests.engine.small import RECIPE, write_images
from tests.tasks.small_dense import DETECTION, MODEL, SEGMENTATION, write_coco, write_scenes
from tests.tasks.small_sequence import EXPRESSIONS
from tools.campaign.running import ROOT, case_directory, launch, run

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
CLASSES = ("dark", "light")
SMALL_ENCODER = "{attention: softpp, dim: 16, depth: 1, num_heads: 2, mlp_dim: 16}"
# for a training that is interrupted: 16 steps
LONGER = ("--batch_size", "4", "--schedule.epochs", "4")
INTERRUPTIONS = 10  # attempts
# of the Long Range Arena: the task, and the keys that differ
SEQUENCES = {
    "expressions": "{name: listops, source: ROOT/lra}",
    "reviews": "{name: text, source: ROOT/lra, max_length: 60}",
    "pairs": "{name: retrieval, source: ROOT/lra, max_length: 60}",
}


def make_fixtures(work: Path) -> Path:
    """Return the directory of the fixtures; make them if they are missing or softline has changed since."""
    root = work / "fixtures"
    mark = root / "made"
    work.mkdir(parents=True, exist_ok=True)
    # kinds that need them may be prepared at the same time
    with (work / "fixtures.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        version = _version()
        if not mark.exists() or mark.read_text() != version:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir()
            _make(root, work)
            mark.write_text(version)
    return root


def make_exported(work: Path) -> Path:
    """Return the directory of the fixtures, with ONNX files of all tasks."""
    import softline
    from softline.deploy.export import export

    root = make_fixtures(work)
    with (work / "exported.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (root / "exported").mkdir(exist_ok=True)
        for task in ("classification", "detection", "segmentation", "sequence"):
            source = root / "timm" if task == "classification" else root / "runs" / task / "best.pt"
            target = root / "exported" / f"{task}.onnx"
            if not target.exists():
                trained = softline.load(source)
                if task == "detection":
                    # it has hardly learned: which of its many unlikely objects are the best is arbitrary
                    trained.model.score_threshold = 0.5
                export(trained, target, rounds=1)
    return root


def _version() -> str:
    """Return a hash of softline's source and of this file."""
    paths = [*sorted((ROOT / "src" / "softline").rglob("*.py")), Path(__file__)]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def _make(root: Path, work: Path) -> None:
    _write_images(root)
    write_coco(root)
    write_scenes(root)
    _write_sequences(root / "lra")
    for name, text in _recipes(root).items():
        (root / f"{name}.yaml").write_text(text)
        _softline(work, "train", root / f"{name}.yaml", "--output", root / "runs" / name)
    _interrupt(root, work)
    _softline(
        work, "compare", "--attentions", "inline", "--recipe", root / "classification.yaml",
        "--output", root / "compared",
    )  # fmt: skip
    _write_weights(root)


def _softline(work: Path, *arguments: object) -> None:
    """Run a command that must succeed."""
    with case_directory(work, "fixtures", 0) as directory:
        finished = run([str(argument) for argument in arguments], directory, time_limit=600)
        if finished.code != 0:
            raise RuntimeError(finished.detail())


def _recipes(root: Path) -> dict[str, str]:
    classification = RECIPE.format(root=root) + "ema: {decay: 0.9}\nsave_every: 2\n"
    recipes = {"classification": classification}
    recipes["detection"] = (DETECTION + MODEL).replace("ROOT", str(root))
    recipes["segmentation"] = (SEGMENTATION + MODEL).replace("ROOT", str(root))
    samples, low, high = (part.partition("=")[2] for part in EXPRESSIONS)
    generated = f"{{samples: {samples}, min_length: {low}, max_length: {high}}}"
    data = {"sequence": f"{{name: listops, source: ROOT/listops, generate: {generated}}}", **SEQUENCES}
    recipes |= {name: _sequence(keys.replace("ROOT", str(root))) for name, keys in data.items()}
    return recipes


def _sequence(data: str) -> str:
    return f"""
task: sequence
output: run
batch_size: 8
model: {{name: lra_encoder, options: {SMALL_ENCODER}}}
data: {data}
optimizer: {{lr: 1.0e-3}}
schedule: {{epochs: 1}}
log_every: 1
"""


def _write_images(root: Path) -> None:
    from PIL import Image

    data = write_images(root, train=8, val=4, classes=CLASSES)
    for label in CLASSES:
        for kind in IMAGE_FORMATS:
            # the name is that of a format which folders are searched for; the content decides
            with Image.open(data / "val" / label / "000.png") as image:
                image.save(data / "val" / label / f"{kind.lower()}.jpg", format=kind)
    with tarfile.open(root / "data.tar", "w") as archive:
        archive.add(data, arcname=".")
    _write_shards(root, data)


def _write_shards(root: Path, data: Path) -> None:
    """Write the validation images as a shard of webdataset, and its description."""
    images = sorted((data / "val").rglob("*.png"))
    (root / "shards").mkdir()
    with tarfile.open(root / "shards" / "val-0.tar", "w") as archive:
        for index, path in enumerate(images):
            label = tarfile.TarInfo(f"{index}.cls")
            label.size = 1
            archive.add(path, arcname=f"{index}.png")
            archive.addfile(label, io.BytesIO(str(CLASSES.index(path.parent.name)).encode()))
    split = {"name": "validation", "num_samples": len(images), "filenames": ["val-0.tar"]}
    description = {"splits": {"validation": split | {"shard_lengths": [len(images)]}}}
    (root / "shards" / "_info.json").write_text(json.dumps(description))


def _write_sequences(folder: Path) -> None:
    lists = ["( ( ( [MAX 2 ) 9 ) ] )\t9", "( ( ( [MIN 4 ) 7 ) ] )\t4", "( ( ( [SM 8 ) 7 ) ] )\t5"]
    (folder / "listops-1000").mkdir(parents=True)
    (folder / "tsv_data").mkdir()
    for split, pairs in (("train", "train"), ("val", "eval"), ("test", "test")):
        lines = "".join(f"{line}\r\n" for line in ["Source\tTarget", *lists * 6])
        (folder / "listops-1000" / f"basic_{split}.tsv").write_text(lines, newline="")
        lines = "".join(f"{n % 2}.0\t{n}\t{n + 50}\ttext of {n}\tanother text {n}\n" for n in range(16))
        (folder / "tsv_data" / f"new_aan_pairs.{pairs}.tsv").write_text(lines)
    for split in ("train", "test"):
        for label, word in (("neg", "bad"), ("pos", "good")):
            (folder / "aclImdb" / split / label).mkdir(parents=True)
            for n in range(8):
                text = f"a {word} film, number {n}"
                (folder / "aclImdb" / split / label / f"{n}_{n}.txt").write_text(text)


def _interrupt(root: Path, work: Path) -> None:
    """Kill a training as soon as it has a checkpoint."""
    arguments = ["train", str(root / "classification.yaml"), *LONGER, "--output", str(root / "interrupted")]
    for _ in range(INTERRUPTIONS):
        shutil.rmtree(root / "interrupted", ignore_errors=True)
        with case_directory(work, "fixtures", 0) as directory:
            training = launch(arguments, directory)
            while training.poll() is None and not (root / "interrupted" / "last.pt").exists():
                time.sleep(0.005)
            killed = training.signal(signal.SIGKILL)
            training.wait()
        if killed:
            return
    raise RuntimeError("the training was not interrupted")


def _write_weights(root: Path) -> None:
    """Write directories as timm saves them, and a release."""
    import timm
    import torch
    from safetensors.torch import save_file
    from timm.models import save_for_hf

    from tests.support import fake_release

    torch.manual_seed(0)
    model = timm.create_model("softpp_micro", num_classes=2, img_size=16, embed_dims=[8, 8, 16, 16],
                              num_heads=[1, 1, 2, 2], depths=[1, 1, 1, 1])  # fmt: skip
    labels = {"num_classes": 2, "label_names": list(CLASSES)}
    arguments = {"embed_dims": [8, 8, 16, 16], "num_heads": [1, 1, 2, 2], "depths": [1, 1, 1, 1], "img_size": 16}
    for name, safe in (("timm", True), ("timm_bin", False)):
        save_for_hf(model, str(root / name), model_config=labels, model_args=arguments, safe_serialization=safe)
    fake_release("inline_deit_tiny", root / "release.pth")
    save_file(torch.load(root / "release.pth", weights_only=True)["model"], root / "release.safetensors")


def copy_fixture(fixture: Path, target: Path) -> None:
    """Copy a file or a directory for a case that changes it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if fixture.is_dir():
        shutil.copytree(fixture, target)
    else:
        shutil.copy(fixture, target)


def strict_json(content: bytes) -> bool:
    """Return whether this is JSON."""
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True
