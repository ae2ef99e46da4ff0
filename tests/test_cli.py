import json

import pytest

from softline import __version__
from softline.cli import main


def test_bench_prints_a_table_and_writes_json_and_a_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    paths = tmp_path / "rows.json", tmp_path / "figure.png"
    assert main(["bench", "--sizes", "64,32", "--json", str(paths[0]), "--figure", str(paths[1])]) == 0
    printed = capsys.readouterr().out
    for expected in ("32x32", "64x64", "softmax", "softpp", "inline", "vs softmax", "operations p ="):
        assert expected in printed
    written = json.loads(paths[0].read_text())
    assert [row["attention"] for row in written["rows"]] == ["softmax", "softpp", "inline"] * 2
    assert written["environment"]["softline"] == __version__
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    assert sorted(tmp_path.iterdir()) == sorted(paths)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attentions", "softmax,inlin"], "got 'inlin'; did you mean 'inline'?"),
        (["--sizes", "4"], "image size must be at least one patch of 8 pixels, got 4"),
        (["--sizes", "32", "--json", "/no/such/place/rows.json"], "no such directory: /no/such/place"),
    ],
)
def test_mistakes_end_in_a_message(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_sizes_that_are_no_numbers_end_in_a_message(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--sizes", "32,big"])
    assert stop.value.code == 2
    assert "expected whole numbers separated by commas, got '32,big'" in capsys.readouterr().err


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"softline {__version__}"
