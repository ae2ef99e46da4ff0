"""``import softline`` is cheap, and yet timm knows softline's models, whichever of the two is imported first."""

import subprocess
import sys
import textwrap

import pytest

LIGHT = """
import sys, softline
assert not {"torch", "timm", "numpy", "PIL"} & set(sys.modules)
"""


def run(code):
    """Run Python code in a process of its own, which must succeed, and return what it prints."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "imports",
    [
        "import timm, softline",
        f"{LIGHT}\nfrom timm import create_model",
        f"{LIGHT}\nimport torch\nimport timm.models",
        # packages ask whether timm is installed long before anybody imports it
        f"{LIGHT}\nfrom importlib.util import find_spec\nassert find_spec('timm').origin",
        # timm is imported by a module that the backbones themselves import
        "import softline.layers.blocks",
        "from softline.weights.releases import RELEASES\nassert RELEASES",
        f"{LIGHT}\nimport importlib\nimportlib.reload(softline)\nimport timm\nimportlib.reload(softline)\n"
        "importlib.reload(timm)",
    ],
)
def test_timm_knows_the_models(imports):
    printed = run(
        f"""
{imports}
import sys, timm
print(type(timm.create_model("softpp_micro")).__name__, type(timm.__spec__.loader).__name__)
assert not any(type(finder).__module__ == "softline" for finder in sys.meta_path), "the finder has done its work"
"""
    )
    assert printed.split() == ["SoftTransformer", "SourceFileLoader"] or printed.split()[1] == "SourceFileLoader"


def test_a_spawned_process_knows_the_models(tmp_path):
    (tmp_path / "spawning.py").write_text(
        textwrap.dedent(
            """
            import multiprocessing
            import softline

            def create(name):
                import timm
                return timm.create_model(name, depths=[1, 1, 1, 1])

            if __name__ == "__main__":
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    print(pool.apply(create, ("softpp_micro",)).num_classes)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "spawning.py")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1000"), done.stderr


def test_softline_can_be_imported_without_timm():
    run(
        """
        import sys
        sys.modules["timm"] = None
        import softline
        assert softline.__version__
        try:
            import timm
        except ModuleNotFoundError:
            sys.exit(0)
        sys.exit("timm was found")
        """
    )


def test_public_names_are_imported_when_they_are_used():
    run(
        f"""{LIGHT}
assert {{"ATTENTIONS", "create_attention", "backbones", "ops", "measure"}} <= set(dir(softline))
assert "torch" not in sys.modules
assert "softpp" in softline.ATTENTIONS
assert softline.ops.softmax_attention
from softline import create_attention, layers
from softline.attention import create_attention as same
assert create_attention is same is softline.create_attention
assert not hasattr(softline, "nothing")
from softline import *
assert "softpp_micro" in backbones.MODEL_NAMES
"""
    )


def test_a_failed_import_of_timm_can_be_repeated():
    """The models are registered by the import that succeeds."""
    run(
        f"""{LIGHT}
sys.modules["torchvision"] = None
try:
    import timm
except ImportError:
    pass
del sys.modules["torchvision"]
for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
    del sys.modules[name]
import timm
timm.create_model("softpp_micro")
"""
    )


def test_import_brings_no_optional_package():
    printed = run(
        """
        import sys, timm
        before = set(sys.modules)
        import softline
        optional = {"triton", "gradio", "onnx", "onnxruntime", "matplotlib", "accelerate", "jsonargparse"}
        print(sorted({name.split(".")[0] for name in set(sys.modules) - before} & optional))
        """
    )
    assert printed.strip() == "[]"
