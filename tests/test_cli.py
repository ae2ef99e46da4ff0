import pytest

from softline import __version__
from softline.cli import main


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"softline {__version__}"
