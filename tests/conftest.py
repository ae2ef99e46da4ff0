import pytest
import torch

# workers share the cores, and bitwise results must not depend on how many workers there are
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
