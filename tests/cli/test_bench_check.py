"""``softline bench check``."""

import json

import pytest

from softline.cli import main

BENCH = ["bench", "layers", "--sizes", "32", "--attentions", "softmax,inline", "--mode", "infer", "--rounds", "1"]


@pytest.fixture
def before(tmp_path, capsys):
    path = tmp_path / "before.json"
    assert main([*BENCH, "--no-memory", "--threads", "1", "--json", str(path)]) == 0
    capsys.readouterr()
    return path


def slower(path, factor):
    """Write the same results with the first case ``factor`` times as slow."""
    content = json.loads(path.read_text())
    first = content["rows"][0]
    first["milliseconds"] *= factor
    first["share"] /= factor
    first["rounds"] = [factor * time for time in first["rounds"]]
    other = path.with_name("other.json")
    other.write_text(json.dumps(content))
    return other


def test_two_files_are_compared_and_the_exit_code_tells(before, capsys):
    after = slower(before, 2)
    assert main(["bench", "check", str(before), str(after)]) == 1
    printed = capsys.readouterr().out
    assert "softmax  infer  32x32  2.00x" in printed
    assert "slower" in printed
    assert f"1 of 2 cases cost more than in {before}" in printed
    assert main(["bench", "check", str(after), str(before)]) == 0
    assert "none of 2 cases costs more" in capsys.readouterr().out
    assert main(["bench", "check", str(before), str(after), "--least", "150"]) == 0


def test_one_file_is_measured_again_on_this_machine(before, tmp_path, capsys):
    now = tmp_path / "now.json"
    # no machine is a thousand times as slow a moment later
    assert main(["bench", "check", str(slower(before, 1000)), "--json", str(now)]) in (0, 1)
    printed = capsys.readouterr().out
    assert "1 thread," in printed
    assert "0.00x" in printed
    again, first = (json.loads(path.read_text()) for path in (now, before))
    assert [row["case"] for row in again["rows"]] == ["softmax", "inline"]
    assert again["environment"]["threads"] == 1
    assert first["options"] == again["options"]


def test_mistakes_end_in_a_message(before, tmp_path, capsys):
    assert main(["bench", "check", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    assert main(["bench", "check", str(before), str(before), "--json", str(tmp_path / "x.json")]) == 2
    assert "--json is the file of a new measurement" in capsys.readouterr().err
    content = json.loads(before.read_text())
    before.write_text(json.dumps({**content, "command": "rm -rf /"}))
    assert main(["bench", "check", str(before)]) == 2
    assert "no result of softline bench" in capsys.readouterr().err
    before.write_text(json.dumps({**content, "rows": [{}]}))
    assert main(["bench", "check", str(before)]) == 2
    assert "before.json" in capsys.readouterr().err
