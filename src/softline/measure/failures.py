"""Why something could not be measured, in one line."""

import re

# what building or running a model may raise over its size, its options or its memory
CASE_ERRORS = (
    RuntimeError,
    ValueError,
    AssertionError,
    MemoryError,
    TypeError,
    AttributeError,
    IndexError,
    KeyError,
    ZeroDivisionError,
)
OUT_OF_MEMORY = "out of memory"
LONGEST = 300


def failure_text(error: BaseException) -> str:
    """The error's text, or that memory ran out, whichever allocator says so."""
    text = str(error)
    # of torch's allocators, which have no type of their own on a CPU
    no_memory = re.search(r"(can't allocate|not enough|out of) memory", text)
    if isinstance(error, MemoryError) or no_memory:
        return OUT_OF_MEMORY
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return first if len(first) <= LONGEST else _without_middle(first)


def _without_middle(text: str) -> str:
    """What is wrong stands at the start, what was meant at the end."""
    half = (LONGEST - 5) // 2
    return f"{text[: LONGEST - 5 - half]} ... {text[-half:]}"
