import io
import sys

import pytest
import torch

from softline.cli import main
from softline.cli.progress import Progress
from softline.cli.table import format_table
from softline.cli.terminal import EscapingStream, controlled, escaping, lines, one_line

EVIL = "evil\x1b[31m\r\n\u202ename\x07\u2066\x9b\udcff"
ESCAPED = r"evil\x1b[31m\r\n\u202ename\x07\u2066\x9b\udcff"


def test_controls_are_escaped_and_letters_are_not():
    assert one_line(EVIL) == ESCAPED
    assert one_line("Nyström 中文 Ελληνικά עברית 🙂 ±") == "Nyström 中文 Ελληνικά עברית 🙂 ±"
    assert lines("a\tb\nc\x1bd") == "a\tb\nc\\x1bd"


def test_everything_printed_is_escaped():
    before = sys.stdout
    with escaping():
        assert controlled(sys.stdout) is before
        assert sys.stdout == before
        with escaping():
            assert controlled(sys.stdout) is before
    assert sys.stdout is before


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "é\\x1b±"), ("ascii", "\\xe9\\x1b\\xb1")])
def test_characters_that_a_terminal_lacks_are_escaped(encoding, shown):
    buffer = io.BytesIO()
    stream = EscapingStream(io.TextIOWrapper(buffer, encoding=encoding))
    assert stream.write("é\x1b±") == 3
    stream.flush()
    assert buffer.getvalue().decode(encoding) == shown


def test_cells_of_a_table_stay_on_their_line():
    assert format_table(["class"], [[EVIL], ["b"]]).splitlines() == ["class", ESCAPED, "b"]


def test_a_bar_controls_the_terminal_and_its_text_does_not(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("softline.cli.progress._size_of", lambda _: (100, 24))
    with Progress(EscapingStream(terminal)) as progress:
        progress.show("", EVIL, done=1, total=2)
    assert "\r" in terminal.getvalue()
    assert ESCAPED in terminal.getvalue()
    assert EVIL not in terminal.getvalue()


def test_errors_about_files_are_one_line(capsys):
    assert main(["train", f"{EVIL}.yaml"]) == 2
    assert capsys.readouterr().err == f"softline train: error: no such recipe file: {ESCAPED}.yaml\n"


def test_unknown_arguments_are_escaped(capsys):
    with pytest.raises(SystemExit):
        main(["models", "a", "b\x1b[31m"])
    assert "unrecognized arguments: b\\x1b[31m" in capsys.readouterr().err


def test_names_of_classes_are_escaped(trained, tmp_path, capsys):
    content = torch.load(trained / "run/best.pt", weights_only=True)
    content["facts"]["classes"] = ["dark\x1b[2J\u202e", "light\x9b"]
    torch.save(content, tmp_path / "best.pt")
    assert main(["predict", str(tmp_path / "best.pt"), str(trained / "data/val/dark/000.png")]) == 0
    printed = capsys.readouterr().out
    assert r"dark\x1b[2J\u202e" in printed
    assert "\x1b" not in printed
    assert "\x9b" not in printed
