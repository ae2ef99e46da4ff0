"""What may be printed: text from files, recipes and checkpoints must not control the terminal.

Names of classes and files can contain anything. An escape sequence would change colours, the title or earlier lines of
a terminal; characters that set the direction of writing would make a line read differently. They are printed as Python
writes them, ``\\x1b`` or ``\\u202e``. Letters of all scripts are printed as they are.
"""

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

# of controls, of text direction, of lines, and halves of characters, as in names of files that are not UTF-8
_DIRECTION = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_CONTROLS = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029{_DIRECTION}\ud800-\udfff]")
_CONTROLS_AND_LINES = re.compile(rf"[\x00-\x1f\x7f-\x9f\u2028\u2029{_DIRECTION}\ud800-\udfff]")


def one_line(text: str) -> str:
    """Escape what would control the terminal or begin another line."""
    return _CONTROLS_AND_LINES.sub(_escape, text)


def lines(text: str) -> str:
    """Escape what would control the terminal, except the ends of lines and tabulators."""
    return _CONTROLS.sub(_escape, text)


def _escape(found: "re.Match[str]") -> str:
    return found[0].encode("unicode_escape").decode()


class EscapingStream(io.TextIOBase):
    """Writes to another stream what `lines` makes of a text, and characters that its encoding lacks as escapes.

    controlled: the other stream, for bars and other things that do control the terminal.
    """

    def __init__(self, controlled: TextIO) -> None:
        self.controlled = controlled

    def __eq__(self, other: object) -> bool:
        # tqdm asks whether a stream is that of its bars
        return self.controlled is (other.controlled if isinstance(other, EscapingStream) else other)

    def __hash__(self) -> int:
        return hash(self.controlled)

    def write(self, text: str) -> int:
        shown = lines(text)
        encoding = self.controlled.encoding
        if encoding is not None and not shown.isascii():
            shown = shown.encode(encoding, "backslashreplace").decode(encoding)
        self.controlled.write(shown)
        return len(text)

    def flush(self) -> None:
        self.controlled.flush()

    def isatty(self) -> bool:
        return self.controlled.isatty()

    def fileno(self) -> int:
        return self.controlled.fileno()

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        """Leave the other stream open: it is not ours."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.controlled.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.controlled.errors

    @property
    def buffer(self) -> Any:
        return self.controlled.buffer


def controlled(stream: TextIO) -> TextIO:
    """Return the stream whose terminal may be controlled."""
    return stream.controlled if isinstance(stream, EscapingStream) else stream


@contextmanager
def escaping() -> Iterator[None]:
    """Escape everything that is printed."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_escaping(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _escaping(stream: Any) -> Any:
    # there is no stream where a program has no console
    return stream if stream is None or isinstance(stream, EscapingStream) else EscapingStream(stream)
