"""softline without its extras: torch, torchvision, timm and what they bring, and none of the optional packages."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest

from softline.cli.messages import EXTRAS

# parts of softline with modules that need an extra, and the extras that they may need; all others need none
NEEDS = {
    "deploy": ("train",),
    "linearizing": {"train"},
    "engine": {"train"},
    "tasks": {"train", "dense"},
    "experiments": {"train"},
    "analysis": {"train"},
    "report": {"train"},
    "explorer": {"train", "explore"},
}

# python imports it at its start, in every process
HIDE = f"""
import sys


class Without:
    # a finder as it would be if these packages were not installed
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        hidden = name.partition(".")[0] in {sorted(EXTRAS)}
        return None if hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run Python code in a base install; return the JSON that it prints last."""
    root = tmp_path_factory.mktemp("base")
    (root / "sitecustomize.py").write_text(HIDE)
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])

    def in_process(code, *arguments):
        command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return in_process


def test_every_module_is_there_or_misses_a_package_of_an_extra(run):
    missing = run(
        """
        import importlib, json
        from pathlib import Path
        import softline

        missing = {}
        root = Path(softline.__file__).parent
        for file in sorted(root.rglob("*.py")):
            parts = [part for part in file.relative_to(root.parent).with_suffix("").parts if part != "__init__"]
            if parts[-1] == "__main__":
                continue
            try:
                importlib.import_module(".".join(parts))
            except ModuleNotFoundError as error:
                missing[".".join(parts)] = error.name
        print(json.dumps(missing))
        """
    )
    unexpected = {
        module: package
        for module, package in missing.items()
        if EXTRAS.get(package.split(".")[0]) not in NEEDS.get(module.split(".")[1], ())
    }
    assert unexpected == {}
    assert {module.split(".")[1] for module in missing} == set(NEEDS), "some of NEEDS need nothing"


RUN_COMMANDS = """
import contextlib, io, json, os, shlex, sys
import timm, torch
from softline.cli import main

os.chdir(sys.argv[1])
torch.save(timm.create_model("soft_release_tiny").state_dict(), "official.pth")
results = {}
for command in sys.argv[2:]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(shlex.split(command))
    results[command] = code, out.getvalue(), err.getvalue()
print(json.dumps(results))
"""
WORKING = {
    "models 'softpp_micro'": "softpp_micro",
    "convert official.pth converted --model soft_release_tiny": "soft_release_tiny: converted",
    "bench layers --sizes 32 --rounds 1 --attentions inline --mode infer": "the matrix product reaches",
    "bench ops --ops softmax --tokens 16 --rounds 1 --no-memory": "train",
    "bench models inline_micro:drop_rate=1e-1 --sizes 32 --rounds 1 --no-memory": "inline_micro:drop_rate=1e-1",
}
NEEDING = {
    "quickstart": "train",
    "train quickstart": "train",
    "evaluate official.pth embedded": "train",
    "predict official.pth image.png": "train",
    "export official.pth --to model.onnx": "train",
    "linearize official.pth --attention inline --data images": "train",
    "compare --attentions softpp": "train",
    "lra --small": "train",
    "analyze cost": "train",
    "bench layers --figure costs.png": "train",
    "models --dense": "train",
    "explore": "explore",
}


def test_commands_run_or_say_which_extra_they_need(run, tmp_path):
    results = run(RUN_COMMANDS, tmp_path, *WORKING, *NEEDING)
    for command, expected in WORKING.items():
        code, out, err = results[command]
        # slow machines also see the progress
        said = [line for line in err.splitlines() if not re.match(r"\[\d+/\d+\] ", line)]
        assert (code, said) == (0, []), command
        assert expected in out
    for command, extra in NEEDING.items():
        code, _, err = results[command]
        start = f"softline {command.split()[0]}: error: this needs "
        assert code == 2, command
        assert err.startswith(start), command
        assert err.endswith(f": pip install 'softline[{extra}]'\n")
        assert EXTRAS[err.removeprefix(start).split(":")[0]] == extra
        assert err.count("\n") == 1
