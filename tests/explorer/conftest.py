import pytest

from softline.engine.train import train
from tests.engine.small import small_recipe, write_images


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A classifier of two classes, trained for an epoch on images of 16 x 16 pixels."""
    root = tmp_path_factory.mktemp("explored")
    write_images(root)
    train(small_recipe(root, "--schedule.epochs=1"))
    return root / "run" / "best.pt"
