import pytest
import torch

from softline.measure.failures import OUT_OF_MEMORY, failure_text


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"), OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] not enough memory: you tried to allocate 9 bytes"), OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), OUT_OF_MEMORY),
        (ValueError("a size\nand more"), "a size"),
        (AssertionError(), "AssertionError"),
        (ValueError("x" * 500 + "?"), "x" * 148 + " ... " + "x" * 146 + "?"),
    ],
)
def test_failures_are_one_line(error, text):
    assert failure_text(error) == text
