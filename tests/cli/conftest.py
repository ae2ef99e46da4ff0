import pytest

from softline.engine.train import train
from tests.engine.small import RECIPE, small_recipe, write_images


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A directory with data, recipe.yaml and a run of one epoch; not to be changed."""
    root = tmp_path_factory.mktemp("trained")
    write_images(root)
    (root / "recipe.yaml").write_text(RECIPE.format(root=root))
    train(small_recipe(root, "--schedule.epochs=1"))
    return root
