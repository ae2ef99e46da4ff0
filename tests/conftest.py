import os

import pytest
import torch

# for the tests that import onnxruntime themselves, as users do; softline sets it
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# workers share the cores, and bitwise results must not depend on how many workers there are; the commands that tests
# start have one thread too
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
