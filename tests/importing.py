"""Ways to import softline and timm, each in a process of its own; run as a script by test_import.py.

The processes are forks of one that has imported torch, which takes longest.
"""

import multiprocessing
import os
import sys
import traceback

if __name__ == "__mp_main__":
    # what a spawned process does before it gets its work
    import softline  # noqa: F401

WAYS = {
    "timm first": "import timm, softline",
    # packages ask whether timm is installed long before anybody imports it
    "softline first": """
import softline, importlib.util
assert importlib.util.find_spec("timm").origin
import timm.models
""",
    # here timm is imported by a module that the backbones import as well
    "a module of softline first": "from softline.weights.releases import RELEASES\nassert RELEASES",
    "reloading": """
import importlib, softline
importlib.reload(softline)
from timm import create_model
importlib.reload(softline)
importlib.reload(sys.modules["timm"])
""",
    "an import that fails": """
import softline
sys.modules["torchvision"] = None
try:
    import timm
except ImportError:
    pass
del sys.modules["torchvision"]
for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
    del sys.modules[name]
""",
    "public names": """
import softline
assert "softpp" in softline.ATTENTIONS
assert softline.ops.softmax_attention
from softline import create_attention, layers
from softline.attention import create_attention as same
assert create_attention is same is softline.create_attention
from softline import *
assert "softpp_micro" in backbones.MODEL_NAMES
assert not {"gradio", "onnxruntime", "matplotlib", "accelerate", "jsonargparse"} & set(sys.modules)
""",
}
CHECK = """
import timm
assert timm.create_model("softpp_micro").num_classes == 1000
assert type(timm.__spec__.loader).__name__ == type(timm.__loader__).__name__ == "SourceFileLoader"
assert not any(type(finder).__module__ == "softline" for finder in sys.meta_path), "the finder has done its work"
"""


def create_by_name(name):
    import timm

    return timm.create_model(name).num_classes


def succeeds(code):
    """Run the code in a fork of this process."""
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1] == 0
    try:
        exec(code, {"sys": sys})
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    import torch
    import torchvision  # noqa: F401

    torch.set_num_threads(1)
    failed = [name for name, code in WAYS.items() if not succeeds(code + CHECK)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        failed += [] if pool.apply(create_by_name, ("softpp_micro",)) == 1000 else ["a spawned process"]
    sys.exit(", ".join(failed) or 0)
