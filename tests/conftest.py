import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    # one thread a worker: workers share the cores
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
