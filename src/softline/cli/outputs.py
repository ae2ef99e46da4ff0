"""The files and directories that a command writes: checked before its work, and nobody else's while it works."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from softline.errors import UserError
from softline.files import check_writable
from softline.locks import hold_directory, hold_file
from softline.plotting.figures import FIGURE_ENDINGS


def check_outputs(*files: Path | None, figure: Path | None = None) -> None:
    """Raise what would go wrong when the command writes these files at its end; those that are None are not wanted."""
    _check_figure(figure)
    wanted = [path for path in (*files, figure) if path is not None]
    for path in wanted:
        check_writable(path)
    places = [path.resolve() for path in wanted]
    for path in wanted:
        if places.count(path.resolve()) > 1:
            raise UserError(f"two results would be written to {path}: name different files")


@contextmanager
def held_outputs(*files: Path | None, figure: Path | None = None, directory: Path | None = None) -> Iterator[None]:
    """Check the files, and keep other commands from writing to them and to the directory, which is created."""
    _check_figure(figure)
    with ExitStack() as stack:
        if directory is not None:
            stack.enter_context(hold_directory(directory))
        check_outputs(*files, figure=figure)
        for path in (*files, figure):
            if path is not None:
                stack.enter_context(hold_file(path))
        yield


def _check_figure(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix.lower() not in FIGURE_ENDINGS:
        raise UserError(f"--figure must end in {', '.join(FIGURE_ENDINGS)}; got {str(path)!r}")
    # a missing package should be reported before the work
    import matplotlib  # noqa: F401
