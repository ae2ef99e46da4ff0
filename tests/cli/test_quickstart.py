"""`softline quickstart`, whose result is the report."""

import argparse
import re
import sys

from softline.cli import main, quickstart

SMALL = {
    "overrides": ["--schedule.epochs=0.02", "--schedule.warmup_epochs=0", "--eval_batch_size=500"],
    "image_sizes": (16, 32),
    "jobs": 1,
}


def test_it_ends_with_the_path_of_its_report_and_can_be_repeated(tmp_path, capsys):
    output = tmp_path / "runs" / "first"
    options = argparse.Namespace(output=output, seed=0, attentions=["softmax", "inline"], json=None)
    quickstart.run(options, **SMALL)
    report = output / "report.html"
    said = capsys.readouterr().out
    assert said.strip().endswith(str(report))
    assert (output / "quickstart.json").is_file()
    html = report.read_text()
    assert len(html) < 1_500_000
    assert len(re.findall('<svg class="map"', html)) == 5 * 3

    # without its report it is unfinished: what is trained is kept, and the new report says so
    report.unlink()
    quickstart.run(options, **SMALL)
    assert "unfinished" in capsys.readouterr().out
    assert "softmax and InLine had been trained by an earlier command" in report.read_text()


def test_an_earlier_report_is_kept(tmp_path):
    output = tmp_path / "quickstart"
    assert quickstart.free_directory(output) == output
    for name in ("quickstart", "quickstart-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.html").touch()
    assert quickstart.free_directory(output) == tmp_path / "quickstart-3"


def test_an_unknown_attention_ends_in_a_message(tmp_path, capsys):
    assert main(["quickstart", "--output", str(tmp_path / "x"), "--attentions", "softmax,sofpp"]) == 2
    assert "attention" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_without_matplotlib_it_ends_in_a_message(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["quickstart", "--output", str(tmp_path / "x")]) == 2
    assert "matplotlib: pip install 'softline[train]'" in capsys.readouterr().err
