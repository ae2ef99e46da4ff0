"""The frame of the adversarial campaign, and a small part of it with fixed seeds."""

import io
import json
import re
import tarfile
import zipfile
from pathlib import Path
from random import Random

import pytest
import torch
from onnx.helper import make_graph, make_model
from PIL import Image
from safetensors.torch import save

import softline
from softline.errors import UserError
from tests.deploy.test_hostile_onnx import small_model
from tests.tools.scripted import SCRIPTED, Scripted, load
from tools.campaign import __main__ as command
from tools.campaign import commands, damage, exported, files, grammar, graphs, running, schedule, texts
from tools.campaign.interface import Kind, Outcome, Verdict, worst
from tools.campaign.ledger import Ledger, counts, failures, table
from tools.campaign.running import Finished, judge, left_after_refusal, left_files, run
from tools.campaign.schedule import Campaign, attempt

MISBEHAVING = "tests.tools.misbehaving"


def campaign(work: Path, *names: str, **options: int) -> Campaign:
    return Campaign(load(names), Ledger(work / "ledger.jsonl"), work, **options)


def ignore(entry: object) -> None:
    """Report nothing."""


# commands


@pytest.mark.parametrize(
    ("way", "verdict"),
    [
        ("fine", Verdict.SURVIVED),
        ("refuse", Verdict.SURVIVED),
        ("silent", Verdict.WRONG),
        ("code", Verdict.TRACEBACK),
        ("crash", Verdict.TRACEBACK),
        ("killed", Verdict.TRACEBACK),
        ("hang", Verdict.HANG),
        ("grow", Verdict.HANG),
        ("system", Verdict.EXECUTION),
        ("catch", Verdict.EXECUTION),
        ("exec", Verdict.EXECUTION),
        ("connect", Verdict.REQUEST),
        ("resolve", Verdict.REQUEST),
        ("process", Verdict.WRONG),
    ],
)
def test_what_a_command_does_decides_its_verdict(tmp_path, monkeypatch, way, verdict):
    monkeypatch.setattr(running, "_EXIT_LIMIT", 0.5)
    limits = {"time_limit": 2.0 if way == "hang" else 60.0, "memory_limit": 2**28}
    finished = run([way], tmp_path, module=MISBEHAVING, **limits)
    assert judge(finished) is verdict, finished.detail()


@pytest.mark.parametrize("way", ["catch", "connect", "crash", "refuse"])
def test_fresh_processes_are_judged_alike(tmp_path, way):
    forked = run([way], tmp_path / "forked", module=MISBEHAVING)
    fresh = run([way], tmp_path / "fresh", module=MISBEHAVING, fresh=True)
    assert judge(fresh) is judge(forked)
    assert fresh.code == forked.code
    assert [event.split()[0] for event in fresh.events] == [event.split()[0] for event in forked.events]


def test_what_a_refusing_command_leaves_is_found(tmp_path):
    run(["file"], tmp_path, module=MISBEHAVING)
    assert left_files(tmp_path) == left_after_refusal(tmp_path) == ["cwd/left"]
    (tmp_path / "cwd" / "left" / "log.jsonl").touch()
    assert left_after_refusal(tmp_path) == []


def test_a_running_command_can_be_killed(tmp_path):
    started = running.launch(["hang"], tmp_path, module=MISBEHAVING)
    assert started.poll() is None
    assert started.signal(9)
    finished = started.wait()
    assert (finished.code, started.signal(9)) == (-9, False)


def test_the_worst_verdict_counts():
    assert worst([Verdict.SURVIVED, Verdict.TRACEBACK, Verdict.EXECUTION]) is Verdict.EXECUTION
    assert worst([]) is Verdict.SURVIVED


# the campaign


def test_faults_of_cases_become_outcomes_and_the_campaign_goes_on(tmp_path):
    campaign(tmp_path, "steady", "faulty", cases=4).run(2, load, ignore)
    entries = Ledger(tmp_path / "ledger.jsonl").entries
    found = {(entry.kind, entry.seed): entry.verdict for entry in entries}
    bad = {("faulty", 1): Verdict.WRONG, ("faulty", 2): Verdict.TRACEBACK, ("faulty", 3): Verdict.TRACEBACK}
    assert found == {(kind, seed): Verdict.SURVIVED for kind in ("steady", "faulty") for seed in range(4)} | bad
    what = {entry.seed: entry.what for entry in entries if entry.kind == "faulty"}
    assert what[2] == "ValueError in the case's own process"
    assert what[3] == "the process of the case ended with code 3"
    assert (tmp_path / "steady").exists()


def test_a_case_that_does_not_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "CASE_LIMIT", 3.0)
    campaign(tmp_path, "sleepy", cases=2).run(2, load, ignore)
    found = {entry.seed: entry.verdict for entry in Ledger(tmp_path / "ledger.jsonl").entries}
    assert found == {0: Verdict.HANG, 1: Verdict.SURVIVED}


def test_a_kind_that_cannot_be_prepared_ends_the_campaign(tmp_path):
    with pytest.raises(RuntimeError, match="unprepared cannot be prepared: RuntimeError"):
        campaign(tmp_path, "unprepared", cases=1).run(1, load, ignore)


def test_a_killed_campaign_goes_on_after_its_last_whole_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = Ledger(path)
    for seed in (0, 2):
        first.add("steady", seed, Outcome(Verdict.SURVIVED, "done"), 1.0)
    with path.open("a") as file:
        file.write('{"kind": "steady", "se')
    again = campaign(tmp_path, "steady", cases=4)
    assert [again.next_case() for _ in range(3)] == [("steady", 1), ("steady", 3), None]
    again.ledger.add("steady", 1, Outcome(Verdict.WRONG, "not done", "why"), 1.0)
    assert [(entry.seed, entry.verdict, entry.detail) for entry in Ledger(path).entries] == [
        (0, Verdict.SURVIVED, ""),
        (2, Verdict.SURVIVED, ""),
        (1, Verdict.WRONG, "why"),
    ]


def test_another_seed_means_other_cases(tmp_path):
    assert campaign(tmp_path, "steady", cases=1, seed=3).next_case() == ("steady", 3_000_000)


def test_cases_go_to_the_kind_farthest_from_its_target_then_by_share(tmp_path, monkeypatch):
    kinds = {"many": Scripted("many", target=30), "few": Scripted("few", target=10, share=3.0)}
    chosen = Campaign(kinds, Ledger(tmp_path / "ledger.jsonl"), tmp_path, seconds=1.0)

    def case() -> str:
        name, seed = chosen.next_case()
        chosen._running[name] -= 1
        chosen.ledger.add(name, seed, Outcome(Verdict.SURVIVED, ""), 1.0)
        return name

    assert sorted(case() for _ in range(40)) == ["few"] * 10 + ["many"] * 30
    # 30 and 10 seconds until here; three times as many for the larger share from now on
    further = [case() for _ in range(120)]
    assert further.count("few") == pytest.approx(110, abs=2)


def test_the_table_counts_what_was_tried(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for seed, verdict in enumerate([Verdict.SURVIVED, Verdict.SURVIVED, Verdict.HANG, Verdict.WRONG]):
        ledger.add("steady", seed, Outcome(verdict, "what", tried=2), 30.0)
    (row,) = counts(ledger, [SCRIPTED["steady"]])
    assert (row["tried"], row["survived"], row["hang"], row["wrong"], row["request"]) == (8, 4, 1, 1, 0)
    assert table([row]).splitlines()[1].split() == ["steady", "cases", "8", "10", "4", "0", "0", "1", "0", "1", "2.0"]
    assert [entry.seed for entry in failures(ledger.entries)] == [2, 3]


def test_the_command_runs_prints_repeats_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "NAMES", ("steady", "faulty"))
    monkeypatch.setattr(command, "load_kinds", load)
    work = ["--work", str(tmp_path)]
    assert (
        command.main(["--kinds", "faulty", "--cases", "2", "--jobs", "1", "--json", f"{tmp_path}/t.json", *work]) == 1
    )
    printed = capsys.readouterr().out
    assert "python -m tools.campaign --repeat faulty:1" in printed
    content = json.loads((tmp_path / "t.json").read_text())
    assert content["rows"][0]["tried"] == 4
    assert content["failures"][0]["repeat"] == "python -m tools.campaign --repeat faulty:1"
    assert "torch" in content["environment"]
    assert command.main(["--table", "--kinds", "faulty", *work]) == 1
    assert capsys.readouterr().out == printed
    assert command.main(["--repeat", "faulty:1", *work]) == 1
    what = next(entry.what for entry in Ledger(tmp_path / "ledger.jsonl").entries if entry.seed == 1)
    assert capsys.readouterr().out == f"wrong: {what}\nall of it\n"
    with pytest.raises(SystemExit):
        command.main(["--repeat", "faulty", *work])


# damage


def files_of_formats() -> dict[str, tuple[bytes, int]]:
    """Files, and how many parts each has."""
    png, packed, archive = io.BytesIO(), io.BytesIO(), io.BytesIO()
    Image.new("RGB", (4, 4)).save(png, format="PNG")
    with zipfile.ZipFile(packed, "w") as written:
        written.writestr("a", b"1")
        written.writestr("b", b"2")
    with tarfile.open(fileobj=archive, mode="w") as written:
        written.addfile(tarfile.TarInfo("a"))
    return {
        # IHDR, IDAT, IEND
        "png": (png.getvalue(), 3),
        # two entries, two in the directory, the end
        "zip": (packed.getvalue(), 5),
        "tar": (archive.getvalue(), 20),
        # the header and two tensors
        "safetensors": (save({"a": torch.zeros(2), "b": torch.zeros(3)}), 3),
        "text": (b"a\nb\nc\n", 3),
        # the version, the graph with its name, the version of the operators
        "onnx": (make_model(make_graph([], "g", [], []), ir_version=10).SerializeToString(), 4),
    }


@pytest.mark.parametrize("name", files_of_formats())
def test_damage_knows_where_the_parts_of_a_file_begin(name):
    content, parts = files_of_formats()[name]
    found = damage.boundaries(content)
    assert {0, len(content)} <= set(found)
    assert len([place for place in found if 0 < place < len(content) or (place == 0 and name in ("zip", "tar"))]) in (
        parts,
        parts - 1,
    )


@pytest.mark.parametrize("name", files_of_formats())
def test_damage_is_a_function_of_the_seed(name):
    content, _ = files_of_formats()[name]
    first = [damage.damage(content, Random(seed), other=content[::-1]) for seed in range(200)]
    assert first == [damage.damage(content, Random(seed), other=content[::-1]) for seed in range(200)]
    # most of a .tar file is zeros, many of which can be damaged without a change
    assert sum(damaged.content == content for damaged in first) < 40
    kinds = {re.sub(r"\d+", "", damaged.what).split(",")[0] for damaged in first}
    assert len(kinds) >= 9


@pytest.mark.parametrize("content", [b"", b"x"])
def test_nothing_can_be_damaged(content):
    for seed in range(300):
        damage.damage(content, Random(seed))


def test_images_of_a_sound_tar_are_counted():
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name in ("./train/a/0.png", "./val/a/0.png", "./val/b/1.png"):
            member = tarfile.TarInfo(name)
            member.size = 600
            archive.addfile(member, io.BytesIO(bytes(600)))
    content = written.getvalue()
    member = 3 * 512
    assert files.tar_count(content) == 2
    # a whole member can be cut out; anything else is noticed
    assert files.tar_count(content[:member] + content[2 * member :]) == 1
    assert files.tar_count(content[: 2 * member]) is None
    assert files.tar_count(content[:member] + content[member + 512 :]) is None
    assert files.tar_count(b"x" + content[1:]) is None


@pytest.mark.parametrize(
    ("promise", "samples", "metrics", "verdict"),
    [
        (files.Promise.RESULT, 3, 0.5, Verdict.SURVIVED),
        (files.Promise.RESULT, 3, 0.6, Verdict.WRONG),
        (files.Promise.COUNT, 3, 0.6, Verdict.SURVIVED),
        (files.Promise.COUNT, 2, 0.5, Verdict.WRONG),
        (files.Promise.ANY, 2, 0.6, Verdict.SURVIVED),
    ],
)
def test_another_result_for_a_damaged_file_is_wrong(tmp_path, promise, samples, metrics, verdict):
    (tmp_path / "cwd").mkdir()
    rows = [{"samples": samples, "metrics": {"top1": metrics}}]
    (tmp_path / "cwd" / "out.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "file").write_bytes(b"damaged")
    kind = files.Format("", "", "", "evaluate", promise)
    finished = Finished((), 0, "", "", ())
    assert files._judge(kind, finished, tmp_path, tmp_path / "file", [3, [{"top1": 0.5}]])[0] is verdict


# grammars


def test_malformed_inputs_are_functions_of_the_seed(tmp_path):
    for make in (
        grammar.odd_value,
        grammar.odd_image,
        grammar.odd_pickle,
        lambda random: grammar.malicious_pickle(random, tmp_path / "canary"),
        lambda random: grammar.odd_yaml(random, "a: 1\nb: 2\n"),
        lambda random: grammar.odd_json(random, b'{"a": [1, 2]}'),
        lambda random: grammar.altered_json(random, b'{"a": [1, 2]}'),
        commands.malformed,
    ):
        made = [repr(make(Random(seed))) for seed in range(40)]
        assert made == [repr(make(Random(seed))) for seed in range(40)]
        assert len(set(made)) > 8


def test_every_command_and_sub_command_is_asked():
    words = set(commands.command_parsers())
    assert {("train",), ("models",), ("explore",), ("bench", "memory"), ("analyze", "heatmap")} <= words
    asked = {next((words for words in (tuple(line[:2]), tuple(line[:1])) if words in commands.command_parsers()), ())
             for line in (commands.malformed(Random(seed)) for seed in range(1000))}  # fmt: skip
    assert words <= asked


def test_a_malicious_pickle_would_be_noticed(tmp_path):
    """Load one as softline never does."""
    made = [grammar.malicious_pickle(Random(seed), tmp_path / "x") for seed in range(200)]
    what, content = next((what, content) for what, content in made if what == "os.mkdir")
    path = tmp_path / "x.pt"
    path.write_bytes(grammar.zip_of(content))
    torch.load(path, weights_only=False)
    case = texts.Case(what, (), refused=True)
    place = texts.Place(tmp_path, tmp_path)
    (tmp_path / "x").rename(place.canary)
    assert texts._judge(case, Finished((), 2, "", "error: no", ()), place)[0] is Verdict.EXECUTION


def test_every_hostile_onnx_file_is_refused(tmp_path):
    sound, path, seen = small_model().SerializeToString(), tmp_path / "model.onnx", set()
    for seed in range(120):
        what, content = graphs.hostile_onnx(Random(seed), sound, tmp_path / "canary")
        assert graphs.hostile_onnx(Random(seed), sound, tmp_path / "canary") == (what, content)
        seen.add(what)
        path.write_bytes(content)
        with pytest.raises(UserError):
            softline.load(path)
    assert len(seen) > 20
    assert not (tmp_path / "canary").exists()


def test_onnx_files_are_damaged_altered_and_hostile(tmp_path):
    (tmp_path / "exported").mkdir()
    for task in texts.TASKS:
        (tmp_path / "exported" / f"{task}.onnx").write_bytes(small_model().SerializeToString())
    for subject in exported.SUBJECTS:
        place = texts.Place(tmp_path, tmp_path / subject.__name__)
        made = [subject(Random(seed), place) for seed in range(30)]
        assert made == [subject(Random(seed), place) for seed in range(30)]
        assert len({case.what for case in made}) > 15
        assert {case.command[0] for case in made} == {"predict", "evaluate"}


# the campaign itself, in small


def run_fixed(kind: Kind, seeds: range, work: Path) -> list[str]:
    """Return what failed."""
    kind.prepare(work)
    outcomes = {seed: attempt(kind, seed, work) for seed in seeds}
    return [
        f"{outcome.verdict}: python -m tools.campaign --repeat {kind.name}:{seed}\n{outcome.what}\n{outcome.detail}"
        for seed, outcome in outcomes.items()
        if outcome.verdict is not Verdict.SURVIVED
    ]


def test_fixed_seeds_of_files_and_texts_survive(tmp_path):
    failed = run_fixed(files.KIND, range(10), tmp_path) + run_fixed(texts.KIND, range(20), tmp_path)
    assert not failed, "\n\n".join(failed)


def test_fixed_seeds_of_command_lines_survive(tmp_path):
    failed = run_fixed(commands.KIND, range(24), tmp_path)
    assert not failed, "\n\n".join(failed)
