"""Kills, tensors, the explorer and long use: a small part of the campaign with fixed seeds, and that it can fail."""

import json
import shutil
import tempfile
from pathlib import Path
from random import Random

import pytest
import torch

from softline import ops
from softline.engine.checkpoint import BEST, LAST
from tools.campaign import exporting, kills, soak, tensors
from tools.campaign.interface import Verdict, case_random
from tools.campaign.running import Finished


@pytest.fixture
def work():
    """A directory with a short name: local sockets in it, by which loading processes talk, have short names only."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as directory:
        yield Path(directory)


# kills

NAME = "classification, loading process, average"


@pytest.fixture(scope="module")
def prepared():
    """Data and the undisturbed run of one setting; not to be changed."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as root:
        kills.prepare(Path(root), {NAME: kills.SETTINGS[NAME]})
        yield Path(root)


@pytest.fixture
def run(prepared, tmp_path):
    """A copy of the undisturbed run."""
    return shutil.copytree(kills.reference(prepared, NAME), tmp_path / "run")


@pytest.mark.parametrize(
    "disturb", [kills.killed, kills.killed_while_writing, kills.killed_after_saving, kills.killed_while_suspended]
)
def test_killed_run_ends_as_if_nothing_had_happened(prepared, work, monkeypatch, disturb):
    monkeypatch.setattr(kills, "ALONE", {disturb: 1})
    monkeypatch.setattr(kills, "MOST_KILLS", 1)
    monkeypatch.setattr(kills, "FRESH", 0)
    # these random numbers disturb it after a third of its time
    outcome = kills.Case(NAME, kills.SETTINGS[NAME], prepared, work, Random(2)).run()
    assert outcome.verdict is Verdict.SURVIVED, outcome.detail
    assert outcome.tried == 1


def test_undisturbed_runs_do_not_differ(prepared, run):
    assert kills.difference(kills.reference(prepared, NAME), run) is None


def change_one_bit(run):
    content = torch.load(run / LAST, weights_only=True)
    name, weight = next(iter(content["state_dict"].items()))
    weight.view(torch.int32).view(-1)[0] ^= 1
    torch.save(content, run / LAST)
    return f"last.pt differs in state_dict.{name}"


def change_optimizer(run):
    content = torch.load(run / BEST, weights_only=True)
    content["optimizer"]["state"][next(iter(content["optimizer"]["state"]))]["step"] += 1
    torch.save(content, run / BEST)
    return "best.pt differs in optimizer.state"


def repeat_step(run):
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (run / "log.jsonl").write_text("".join([*lines, next(line for line in lines if '"stepped"' in line)]))
    return "log.jsonl: stepped steps"


def change_metric(run):
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    next(line for line in lines if line["event"] == "evaluated")["metrics"]["accuracy"] = 0.123
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return "log.jsonl: evaluated steps"


def leave_partial(run):
    (run / ".last.pt.x1y2").touch()
    return "the directory has"


@pytest.mark.parametrize("change", [change_one_bit, change_optimizer, repeat_step, change_metric, leave_partial])
def test_changed_run_is_noticed(prepared, run, change):
    expected = change(run)
    found = kills.difference(kills.reference(prepared, NAME), run)
    assert found is not None
    assert found.startswith(expected)


# exports


@pytest.fixture(scope="module")
def small_export():
    """A classifier and its undisturbed export; not to be changed."""
    with tempfile.TemporaryDirectory(prefix="campaign-") as root:
        exporting.prepare(Path(root))
        yield Path(root)


@pytest.mark.parametrize(
    "disturb",
    [exporting.stopped, exporting.disk_filled, pytest.param(exporting.killed_while_writing, marks=pytest.mark.slow)],
)
def test_disturbed_export_leaves_the_earlier_file_or_a_whole_one(small_export, tmp_path, monkeypatch, disturb):
    monkeypatch.setattr(exporting, "DISTURBANCES", {disturb: 1})
    monkeypatch.setattr(exporting, "FRESH", 0)
    monkeypatch.setattr(exporting, "AGAIN", 0)
    outcome = exporting.Case(small_export, tmp_path, Random(4)).run()
    assert outcome.verdict is Verdict.SURVIVED, outcome.detail
    assert "earlier file" in outcome.what


@pytest.mark.parametrize(
    ("leave", "code", "problem"),
    [
        (lambda target: target.write_bytes(b"half"), -9, "the file has 4 bytes"),
        (lambda target: target.unlink(), -9, "the file has nothing"),
        (lambda target: None, 0, "the file has 15 bytes"),
        (lambda target: (target.parent / ".model.onnx.x1").touch(), 130, "left behind: .model.onnx.x1"),
    ],
)
def test_wrong_end_of_an_export_is_noticed(tmp_path, monkeypatch, leave, code, problem):
    (tmp_path / "whole.onnx").write_bytes(b"whole")
    (tmp_path / "seconds.json").write_text("1.0")
    (tmp_path / "command" / "cwd").mkdir(parents=True)
    monkeypatch.setattr(exporting, "launch", lambda *_, **__: None)

    def disturb(case, started):
        leave(case.target)
        return Finished((), code, "", "", ()), "disturbed"

    if code == -9:
        monkeypatch.setattr(exporting, "killed", disturb)
    monkeypatch.setattr(exporting, "DISTURBANCES", {disturb: 1})
    monkeypatch.setattr(exporting, "AGAIN", 0)
    outcome = exporting.Case(tmp_path, tmp_path, Random(4)).run()
    assert outcome.verdict is Verdict.WRONG
    assert problem in outcome.detail


# tensors


@pytest.mark.parametrize("seed", range(8))
def test_adversarial_tensors(seed, tmp_path):
    outcome = tensors.KIND.run(seed, tmp_path)
    assert outcome.verdict is Verdict.SURVIVED, outcome.detail
    assert outcome.tried == 25


def test_every_operator_and_every_attention_is_tried(tmp_path):
    assert {"soft", "inline", "hydra", "softmax"} <= set(tensors.OPERATORS)
    names = [*tensors.OPERATORS, *(f"module {name}" for name in tensors.MODULES)]
    outcome = tensors.judge_all(names, case_random("tensors", 0))
    assert outcome.verdict is Verdict.SURVIVED, outcome.detail


def raise_error(out):
    raise TypeError("a fault")


def shift_largest(out):
    """An error of one part in a thousand."""
    return out + 1e-3 * out.detach().abs().max()


@pytest.mark.parametrize(
    ("wrong", "verdict", "reason"),
    [
        (shift_largest, Verdict.WRONG, "differs from the definition"),
        (lambda out: out.double() if out.dtype == torch.float16 else out.half(), Verdict.WRONG, "expected"),
        (lambda out: out[..., :-1], Verdict.WRONG, "expected"),
        (lambda out: out / 0.0, Verdict.WRONG, "not finite"),
        (lambda out: out + 1, Verdict.WRONG, "rows of masked tokens are not 0"),
        (raise_error, Verdict.TRACEBACK, "a fault"),
    ],
)
def test_wrong_operator_is_noticed(monkeypatch, wrong, verdict, reason):
    right = ops.inline_attention
    monkeypatch.setattr(ops, "inline_attention", lambda *tensors, **options: wrong(right(*tensors, **options)))
    outcome = tensors.judge_all(["inline"] * 40, case_random("tensors", 0))
    assert outcome.verdict is verdict
    assert reason in outcome.detail


def test_operator_that_reads_masked_tokens_is_noticed(monkeypatch):
    right = ops.gaussian_attention

    def careless(q, k, v, *, key_mask=None):
        out = right(q, k, v, key_mask=key_mask)
        # zero unless it is NaN
        leaked = v.sum(-2, keepdim=True) * 0
        return out if key_mask is None else (out + leaked).masked_fill(~key_mask[:, None, :, None], 0)

    monkeypatch.setattr(ops, "gaussian_attention", careless)
    outcome = tensors.judge_all(["gaussian"] * 20, case_random("tensors", 0))
    assert "what masked tokens hold changes the result" in outcome.detail


# the explorer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("gradio")
    from tools.campaign import explorer

    with explorer.start(tmp_path_factory.mktemp("explorer")) as server:
        yield server


def test_malformed_requests_leave_the_explorer_as_it_was(server):
    from tools.campaign import explorer

    outcome = explorer.try_requests(server, explorer.draw(case_random("explorer", 0), server, 50))
    assert outcome.verdict is Verdict.SURVIVED, outcome.detail
    assert outcome.tried == 50


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("HTTP/1.1 200 OK\r\n\r\nfine", None),
        ("HTTP/1.1 403 Forbidden\r\n\r\n", None),
        ("HTTP/1.1 507 Insufficient Storage\r\n\r\n", None),
        ("HTTP/1.1 500 Internal Server Error\r\n\r\n", Verdict.TRACEBACK),
        ("HTTP/1.1 200 OK\r\n\r\n{token}", Verdict.WRONG),
        ("HTTP/1.1 200 OK\r\n\r\nhttp://foreign.example/", Verdict.WRONG),
        ("", Verdict.HANG),
    ],
)
def test_wrong_answer_is_noticed(server, answer, verdict):
    from tools.campaign import explorer

    request = explorer.Request("a request", b"")
    fault = explorer.bad_answer(server, request, answer.format(token=server.token).encode())
    assert (None if fault is None else fault[0]) is verdict


def test_traceback_and_leftover_files_of_the_server_are_noticed(server, monkeypatch):
    from tools.campaign import explorer

    logged = server.running.log.stat().st_size
    with server.running.log.open("a") as file:
        file.write("Traceback (most recent call last):\n")
    left = server.running.folder.parent / "left"
    left.touch()
    monkeypatch.setitem(server.before, "threads", -1000)
    found = explorer.bad_state(server, logged)
    assert [verdict for verdict, _ in found] == [Verdict.TRACEBACK, Verdict.HANG, Verdict.WRONG]
    left.unlink()


# long use


def test_long_use_needs_no_more_than_short_use(work):
    outcome = soak.soak(0, 1, work, warm_up=1)
    assert outcome.verdict is Verdict.SURVIVED, outcome.detail
    assert outcome.tried == 1


def used(count=9, **growing):
    """Measurements of rounds in which some numbers grow each time."""
    usual = {"bytes": 10**9, "descriptors": 6, "threads": 1, "temporary files": 0}
    return [{name: number + growing.get(name, 0) * index for name, number in usual.items()} for index in range(count)]


def test_growth_is_noticed():
    assert soak.growth(used()) is None
    assert soak.growth(used(bytes=10**5)) is None
    assert soak.growth(used(bytes=4 * 10**6)) == "bytes grew from 1,000,000,000 to 1,024,000,000"
    assert soak.growth(used(descriptors=1)) == "descriptors grew from 6 to 12"
    varying = used()
    varying[-1]["threads"] = 5
    assert soak.growth(varying) is None
