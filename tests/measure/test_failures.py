import pytest
import torch

from softline.measure.failures import OUT_OF_MEMORY, failure_text


def caused(error: BaseException) -> BaseException:
    """An error that another one has caused."""
    try:
        raise ValueError("images of 9 x 9 pixels") from error
    except ValueError as found:
        return found


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError(), OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"), OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] not enough memory: you tried to allocate 9 bytes"), OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), OUT_OF_MEMORY),
        (caused(RuntimeError("can't allocate memory: you tried to allocate 9 bytes")), OUT_OF_MEMORY),
        (caused(KeyError("x")), "images of 9 x 9 pixels"),
        (ValueError("a size\nand more"), "a size"),
        (AssertionError(), "AssertionError"),
        (ValueError("x" * 500 + "?"), "x" * 148 + " ... " + "x" * 146 + "?"),
    ],
)
def test_failures_are_one_line(error, text):
    assert failure_text(error) == text
