"""Draw docs/dense.jpg: python tools/draw_examples.py SEGMENTER OUT.jpg (needs scikit-image and scikit-learn).

RetinaNet and Mask R-CNN learn three photographs of scikit-image by heart, whose outlines are given here, and draw what
they find; SEGMENTER, a checkpoint of `softline train camvid_small`, draws on one of scikit-learn's that it has never
seen. The photographs are free: astronaut (NASA, public domain), chelsea (Stefan van der Walt, CC0), coffee (Rachel
Michetti, CC0), china (Daniel Buechele, CC BY 2.0).
"""

import argparse
import json
import tempfile
from pathlib import Path

import skimage
import sklearn.datasets
from PIL import Image

from softline.engine.reading import load_recipe
from softline.engine.train import train
from softline.tasks.loading import load_trained

CLASSES = ("person", "cat", "cup", "spoon")
# x, y, x, y, ... of each object
OUTLINES = {
    "astronaut": {
        "person": "180 60 200 25 240 15 285 35 302 80 295 120 262 135 255 175 300 215 345 260 360 345 330 365 290 420 "
        "280 512 20 512 25 400 35 320 60 260 115 215 120 170 180 150 155 110 160 75"
    },
    "chelsea": {
        "cat": "30 40 60 0 400 0 365 70 365 120 345 190 310 250 280 290 200 300 0 300 0 180 35 140",
    },
    "coffee": {
        "cup": "175 110 190 60 230 30 290 18 350 30 390 60 402 100 400 150 385 235 350 270 300 285 255 285 235 310 200 "
        "300 200 260 225 230 185 170",
        "spoon": "405 70 422 68 420 85 395 200 405 270 390 310 360 325 330 310 325 280 345 255 375 235 385 215",
    },
}
HEIGHT = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("segmenter", help="a checkpoint of camvid_small")
    parser.add_argument("figure", type=Path, help="the file to write, such as docs/dense.jpg")
    parser.add_argument("--epochs", type=int, default=200, help="steps of the detectors (default: 200)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_photographs(root)
        boxes = find(root, "coco128_retinanet", options.epochs, "astronaut")
        masks = find(root, "coco128_mask_rcnn", options.epochs, "coffee")
        china = root / "china.png"
        Image.fromarray(sklearn.datasets.load_sample_image("china.jpg")).save(china)
        side_by_side(boxes, masks, draw(options.segmenter, china)).save(options.figure, quality=88)


def write_photographs(root: Path) -> None:
    """In COCO's format."""
    (root / "train2017").mkdir()
    (root / "annotations").mkdir()
    images, annotations = [], []
    for number, (name, outlines) in enumerate(OUTLINES.items(), 1):
        photograph = Image.fromarray(getattr(skimage.data, name)())
        photograph.save(root / "train2017" / f"{name}.png")
        size = {"width": photograph.width, "height": photograph.height}
        images.append({"id": number, "file_name": f"{name}.png", **size})
        for label, text in outlines.items():
            outline = [float(part) for part in text.split()]
            xs, ys = outline[::2], outline[1::2]
            box = [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": CLASSES.index(label) + 1,
                    "segmentation": [outline],
                    "bbox": box,
                    "area": box[2] * box[3],
                    "iscrowd": 0,
                }
            )
    categories = [{"id": number, "name": name} for number, name in enumerate(CLASSES, 1)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / "annotations" / "instances_train2017.json").write_text(json.dumps(content))


def find(root: Path, name: str, epochs: int, photograph: str) -> Image.Image:
    """What a detector draws that has learnt the photographs."""
    given = [f"--data.source={root}", f"--output={root / name}", "--batch_size=3", f"--schedule.epochs={epochs}"]
    given += [f"--eval_every={epochs}", "--device=cpu"]
    train(load_recipe(name, given))
    return draw(str(root / name / "last.pt"), root / "train2017" / f"{photograph}.png")


def draw(checkpoint: str, image: Path) -> Image.Image:
    return load_trained(checkpoint).predict(image).draw()


def side_by_side(*images: Image.Image) -> Image.Image:
    scaled = [
        image.resize((image.width * HEIGHT // image.height, HEIGHT), Image.Resampling.LANCZOS) for image in images
    ]
    figure = Image.new("RGB", (sum(image.width for image in scaled) + 8 * (len(scaled) - 1), HEIGHT), "white")
    left = 0
    for image in scaled:
        figure.paste(image, (left, 0))
        left += image.width + 8
    return figure


if __name__ == "__main__":
    main()
