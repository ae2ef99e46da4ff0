"""Classify images with a file of `softline export`, by ONNX Runtime, NumPy and Pillow alone: no torch, no softline.

python onnx_only.py MODEL.onnx IMAGE [IMAGE ...]
"""

import json
import sys
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def prepare(path: str, about: dict[str, Any]) -> np.ndarray:
    """Resize an image so that the crop is a part of it, crop the centre, and normalise it: [1, C, H, W]."""
    settings = about["softline"]["description"]["settings"]
    if settings["crop_mode"] != "center":
        raise SystemExit(f"this example crops the centre, the network was trained for {settings['crop_mode']}")
    side, method = settings["image_size"], Image.Resampling[settings["interpolation"].upper()]
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file).convert(settings["mode"])
    short, wanted = min(image.size), int(side / settings["crop_pct"])
    image = image.resize([wanted if length == short else wanted * length // short for length in image.size], method)
    left, top = (round((length - side) / 2) for length in image.size)
    pixels = np.asarray(image.crop((left, top, left + side, top + side)), np.float32).reshape(side, side, -1)
    normalised = (pixels / 255 - np.float32(about["mean"])) / np.float32(about["std"])
    return np.ascontiguousarray(normalised.transpose(2, 0, 1)[None])


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def main(model: str, *paths: str) -> None:
    session = onnxruntime.InferenceSession(model)
    about = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
    if about.get("task") != "classification" or about["mean"] is None:
        raise SystemExit(f"{model} is no classifier of softline that takes normalised images")
    for path in paths:
        (logits,) = session.run(["logits"], {"images": prepare(path, about)})
        probabilities = softmax(logits[0])
        sys.stdout.write(f"{path}\n")
        for label in probabilities.argsort()[::-1][:5]:
            name = about["classes"][label] if about["classes"] else str(label)
            sys.stdout.write(f"{100 * probabilities[label]:8.4f} %  {name}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
