"""The reason why something could not be measured, in one line."""

from softline.engine.machine import is_out_of_memory

# raised by models whose size, options or memory are wrong, while they are built or run
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
    """Return the first line of the error's text, or that memory ran out, whichever allocator says so."""
    text = str(error)
    # constructors that run out of memory are told to have refused their arguments
    if is_out_of_memory(error) or (error.__cause__ is not None and is_out_of_memory(error.__cause__)):
        return OUT_OF_MEMORY
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return first if len(first) <= LONGEST else _without_middle(first)


def _without_middle(text: str) -> str:
    """Shorten a text in the middle: the mistake is named at its start, the suggestion at its end."""
    half = (LONGEST - 5) // 2
    return f"{text[: LONGEST - 5 - half]} ... {text[-half:]}"
