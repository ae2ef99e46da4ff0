import subprocess
import sys


def test_import_brings_no_optional_package():
    """Neither triton nor anything of the extras; what timm itself imports is not counted."""
    code = (
        "import sys, timm\n"
        "before = set(sys.modules)\n"
        "import softline\n"
        "optional = {'triton', 'gradio', 'onnx', 'onnxruntime', 'matplotlib', 'accelerate', 'rich'}\n"
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before} & optional))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
