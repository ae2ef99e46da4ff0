import pytest
import timm
import torch
from PIL import Image

from softline.analysis.subjects import Picture, Subject
from softline.tasks.images import image_settings


def make_subject(attention: str = "softpp", name: str = "softpp_micro", **options) -> Subject:
    torch.manual_seed(0)
    model = timm.create_model(name, attention=attention, num_classes=4, **options).eval()
    return Subject(attention, model, ("a", "b", "c", "d"), image_settings(model), trained=False)


def make_pictures(count: int = 2, size: tuple[int, int] = (40, 40)) -> list[Picture]:
    generator = torch.Generator().manual_seed(1)
    pictures = []
    for place in range(count):
        pixels = torch.randint(256, (size[1], size[0], 3), generator=generator, dtype=torch.uint8)
        pictures.append(Picture(f"picture {place}", Image.fromarray(pixels.numpy()), label=place % 4))
    return pictures


@pytest.fixture
def pictures() -> list[Picture]:
    return make_pictures()
