"""``import softline`` is cheap, and yet timm knows softline's models, whichever of the two is imported first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments):
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes")
def test_timm_knows_the_models_however_it_is_imported():
    run(str(Path(__file__).parent / "importing.py"))


def test_nothing_large_is_imported_and_timm_need_not_be_there():
    code = """
import sys
sys.modules["timm"] = None
import softline
assert softline.__version__
assert {"ATTENTIONS", "create_attention", "load", "build", "backbones", "ops", "measure"} <= set(dir(softline))
assert not hasattr(softline, "nothing")
print(sorted({"torch", "numpy", "PIL", "yaml"} & set(sys.modules)))
try:
    import timm
except ModuleNotFoundError:
    sys.exit(0)
sys.exit("timm was found")
"""
    assert run("-c", code).stdout.strip() == "[]"
