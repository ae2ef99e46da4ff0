import numpy as np
import torch
from PIL import Image

from softline.heads.masks import ObjectMasks
from softline.tasks.detection.drawing import draw_detections
from softline.tasks.drawing import BAND, OPACITY


def test_the_mask_of_the_best_object_covers_the_others_and_the_image_shines_through():
    height = BAND + 60
    pixels = np.random.default_rng(0).integers(0, 256, (height, 120, 3), dtype=np.uint8)
    boxes = torch.tensor([[10.0, 40, 70, height - 20], [40.0, 60, 110, height - 10]])
    found = {"boxes": boxes, "labels": torch.tensor([1, 0]), "scores": torch.tensor([0.9, 0.6])}
    colours = np.array([[255, 0, 0], [0, 0, 255]], dtype=np.uint8)
    masks = ObjectMasks(torch.ones(2, 1, 28, 28), boxes, (height, 120))
    drawn = np.array(draw_detections(Image.fromarray(pixels), found, ("a", "b"), colours, masks=masks))

    # left: the best object alone; middle: both; right: the other one; below: none
    for columns, colour in ((slice(15, 35), colours[1]), (slice(45, 65), colours[1]), (slice(75, 105), colours[0])):
        part = (slice(80, height - 30), columns)
        # rounded to the nearest number
        assert np.abs(drawn[part] - ((1 - OPACITY) * pixels[part] + OPACITY * colour)).max() < 0.5 + 1e-4
    np.testing.assert_array_equal(drawn[-5:], pixels[-5:])
