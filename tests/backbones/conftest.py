from collections.abc import Callable
from functools import cache

import pytest
import timm
from torch import nn


@pytest.fixture(scope="session")
def described() -> Callable[[str], nn.Module]:
    """A registered model by its name, on the meta device: shapes without numbers. Not to be changed."""

    @cache
    def build(name: str) -> nn.Module:
        return timm.create_model(name, device="meta").eval()

    return build
