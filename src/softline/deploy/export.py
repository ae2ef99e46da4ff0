"""Export trained models to files that run without softline: ONNX, torch.export and AOTInductor."""

import copy
import io
import json
import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from PIL import Image
from torch import Tensor, nn
from torch.export import ExportedProgram

import softline
from softline.checks import check_integer, check_option
from softline.deploy import onnx_files, parity
from softline.deploy.quantizing import Int8, quantize
from softline.deploy.tracing import FromBytes, HalfPrecision, check_fixed, ranges, trace
from softline.engine.graph import BATCH, HEIGHT, LENGTH, WIDTH, Graph, Sizes, image_graph
from softline.engine.trained import Trained
from softline.errors import UserError
from softline.files import check_writable, write_bytes

Precision = Literal["fp32", "fp16"]
FORMATS = {".onnx": "ONNX", ".pt2": "torch.export"}
PACKAGE = "AOTInductor"


@dataclass(frozen=True)
class ExportReport:
    """What was exported, and how it compares with the original."""

    file: str
    format: str
    precision: str
    seconds: float
    """Time that the export took, without the comparison."""
    bytes: int
    operators: dict[str, int]
    """How often each operator occurs."""
    tolerance: float
    """Largest difference that is accepted."""
    input: dict[str, Any]
    """Name, axes and the range of their lengths."""
    rows: list[parity.ParityRow]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Written(NamedTuple):
    """A file that is not on the disk yet."""

    content: bytes
    operators: dict[str, int]
    run: Callable[[Tensor], Any]


def export(
    trained: Trained,
    to: str | Path,
    *,
    size: tuple[int, int] | None = None,
    length: int | None = None,
    batch: int | None = None,
    preprocess: bool = False,
    features: bool = False,
    precision: Precision = "fp32",
    int8: Int8 | None = None,
    calibration: Sequence[Image.Image] | None = None,
    package: bool = False,
    compiled: bool = False,
    rounds: int = parity.ROUNDS,
    notify: Callable[[str], None] = lambda _: None,
) -> ExportReport:
    """Export a trained model, compare the file with the original, and write it if they agree.

    trained: see `softline.load`.
    to: the file; its ending chooses the format, .onnx or .pt2.
    size: rows and columns of all images; by default any height and width can be given to the exported network.
    length: number of tokens of all sequences; by default any.
    batch: number of samples in every run; by default any.
    preprocess: take bytes [B, H, W, C] as in image files, and normalise them; resizing is left to the caller.
    features: the maps of the backbone's stages instead of the task's output.
    precision: "fp16" stores the weights in half; sums over tokens, distances and inverses stay in float32.
    int8: 8-bit weights of convolutions and linear layers, for .onnx; "static" also has 8-bit activations, whose range
        is found on the calibration inputs.
    calibration: images for static quantisation; by default the package's photographs.
    package: compile the network by AOTInductor into a .pt2 package for this kind of machine; needs a C++ compiler.
    compiled: also compare the time with torch.compile, which needs a C++ compiler and takes minutes for networks of any
        size.
    rounds: of the time measurement.
    notify: receives what is done, as text.
    """
    path = Path(to)
    check_options(path, precision=precision, int8=int8, package=package, rounds=rounds)
    check_writable(path)
    trained.model.eval()
    original = feature_graph(trained) if features else trained.graph()
    fixed = fixed_sizes(size, length, batch)
    check_fixed(original, fixed)
    if preprocess:
        original = _from_bytes(original)
    graph = original
    if precision == "fp16":
        graph = replace(graph, network=HalfPrecision(copy.deepcopy(graph.network)))
    shown = {"name": graph.input, "axes": list(graph.axes), "ranges": ranges(graph, fixed)}
    about = _about(trained, graph, fixed, shown, features=features, preprocess=preprocess)

    start = time.perf_counter()
    notify("recording the graph")
    program = trace(graph, fixed, onnx=path.suffix == ".onnx")
    file_format = PACKAGE if package else FORMATS[path.suffix]
    notify(f"writing {file_format}")
    if path.suffix == ".onnx":
        written = _onnx(program, graph, fixed, about, int8, calibration, notify)
    else:
        written = _torch(program, about, package=package)
    seconds = time.perf_counter() - start

    notify("comparing with the original")
    runs: dict[str, Callable[[Tensor], Any]] = {"eager": original.network, "exported": written.run}
    if compiled:
        runs["compiled"] = parity.compiled(original.network)
    rows = parity.compare(original, runs, parity.sizes_to_compare(original, fixed), rounds=rounds)
    tolerance = parity.TOLERANCES["int8" if int8 else precision]
    kind = f"int8 {int8}" if int8 else precision
    _check(rows, tolerance, kind)
    write_bytes(path, written.content)
    return ExportReport(
        file=str(path),
        format=file_format,
        precision=kind,
        seconds=seconds,
        bytes=len(written.content),
        operators=written.operators,
        tolerance=tolerance,
        input=shown,
        rows=rows,
    )


def check_options(path: Path, *, precision: str, int8: str | None, package: bool, rounds: int) -> None:
    """Check options before any work."""
    if path.suffix not in FORMATS:
        raise UserError(f"the file must end in .onnx (ONNX) or .pt2 (torch.export), got {str(path)!r}")
    check_option("precision", precision, get_args(Precision))
    check_integer("rounds", rounds, 1)
    if int8 is not None:
        check_option("int8", int8, get_args(Int8))
        if path.suffix != ".onnx":
            raise UserError(f"int8 is for .onnx files, got {str(path)!r}")
        if precision != "fp32":
            raise UserError(f"int8 starts from fp32, got precision {precision}")
    if package:
        if path.suffix != ".pt2":
            raise UserError(f"an AOTInductor package ends in .pt2, got {str(path)!r}")
        if not has_compiler():
            raise UserError("an AOTInductor package needs a C++ compiler, and there is neither g++ nor clang++")
    if path.suffix == ".onnx":
        # a missing package should be reported before the work
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401


def has_compiler() -> bool:
    """Whether torch finds a C++ compiler, which AOTInductor and torch.compile need on a CPU."""
    return shutil.which("g++") is not None or shutil.which("clang++") is not None


def fixed_sizes(size: tuple[int, int] | None, length: int | None, batch: int | None) -> dict[str, int]:
    fixed: dict[str, int] = {}
    if batch is not None:
        check_integer("batch", batch, 1)
        fixed[BATCH] = batch
    if size is not None:
        fixed |= {HEIGHT: size[0], WIDTH: size[1]}
    if length is not None:
        fixed[LENGTH] = length
    return fixed


class Stages(nn.Module):
    """The maps of a backbone's stages as a tuple, [B, C, H, W] each."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone: Any = backbone

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.backbone.forward_intermediates(images, intermediates_only=True))


def feature_graph(trained: Trained) -> Graph:
    """Describe the backbone of a trained model of images, which gives a map for each stage."""
    view = trained.view()
    backbone: Any = view.model
    if not hasattr(backbone, "forward_intermediates"):
        raise UserError(f"{trained.name} has no forward_intermediates, from which features are taken")
    settings, network = view.settings, Stages(backbone)
    with torch.no_grad():
        side = max(int(getattr(backbone, "min_size", 1)), 64)
        like = next(backbone.parameters())
        found = network(torch.zeros(1, len(settings["mean"]), side, side, device=like.device, dtype=like.dtype))
    return image_graph(
        network,
        # each stage has a grid of its own
        {f"stage{index}": (BATCH, None, f"rows{index}", f"columns{index}") for index in range(len(found))},
        size=(settings["image_size"], settings["image_size"]),
        least=int(getattr(backbone, "min_size", 1)),
        mean=settings["mean"],
        std=settings["std"],
        mode=settings["mode"],
    )


def _from_bytes(graph: Graph) -> Graph:
    if graph.mean is None or graph.std is None:
        raise UserError("preprocess is for networks that take normalised images; this one takes " + graph.input)
    mean, std, normalised = torch.tensor(graph.mean), torch.tensor(graph.std), graph.sample

    def sample(sizes: Sizes, images: Sequence[Image.Image] = ()) -> Tensor:
        pixels = normalised(sizes, images) * std.reshape(-1, 1, 1) + mean.reshape(-1, 1, 1)
        return (255 * pixels).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()

    network = FromBytes(graph.network, graph.mean, graph.std)
    axes = (BATCH, HEIGHT, WIDTH, None)
    return replace(graph, network=network, input="pixels", axes=axes, sample=sample, mean=None, std=None)


def _about(
    trained: Trained, graph: Graph, fixed: Sizes, shown: dict[str, Any], *, features: bool, preprocess: bool
) -> dict[str, Any]:
    """Return the metadata of a file: an entry for softline, and what other programs need."""
    described = {} if features else trained.describe(fixed)
    return {
        onnx_files.KEY: {
            "format": onnx_files.FORMAT,
            "version": softline.__version__,
            "task": trained.task,
            "features": features,
            "preprocess": preprocess,
            "input": shown,
            "description": described,
        },
        "model": trained.name,
        "task": "features" if features else trained.task,
        "classes": list(trained.classes),
        "mean": graph.mean,
        "std": graph.std,
        "size": {axis: fixed.get(axis, length) for axis, length in graph.usual.items()},
    }


def _onnx(
    program: ExportedProgram,
    graph: Graph,
    fixed: Sizes,
    about: dict[str, Any],
    int8: Int8 | None,
    calibration: Sequence[Image.Image] | None,
    notify: Callable[[str], None],
) -> Written:
    content = onnx_files.write_onnx(program, graph, about)
    if int8 is not None:
        notify(f"quantising ({int8})")
        content = quantize(content, int8, calibration=_inputs(graph, fixed, calibration) if int8 == "static" else ())
    session = onnx_files.start_session(content)
    run = onnx_files.OnnxNetwork(session, list(graph.axes), ranges(graph, fixed), "the exported network")
    return Written(content, onnx_files.count_operators(content), run)


def _inputs(graph: Graph, fixed: Sizes, images: Sequence[Image.Image] | None) -> Iterator[Tensor]:
    """Make inputs for calibration."""
    if images is None:
        yield graph.sample({BATCH: 2, **graph.usual, **fixed})
        return
    batch = fixed.get(BATCH, 1)
    if len(images) < batch:
        raise UserError(f"calibration needs at least {batch} images, as many as a batch has, got {len(images)}")
    for first in range(0, len(images) - batch + 1, batch):
        yield graph.sample({**graph.usual, **fixed, BATCH: batch}, images[first : first + batch])


def _torch(program: ExportedProgram, about: dict[str, Any], *, package: bool) -> Written:
    counted = Counter(str(node.target) for node in program.graph.nodes if node.op == "call_function")
    operators = dict(counted.most_common())
    if package:
        with tempfile.TemporaryDirectory() as directory:
            made = torch._inductor.aoti_compile_and_package(program, package_path=f"{directory}/model.pt2")
            content = Path(made).read_bytes()
            run: Any = torch._inductor.aoti_load_package(made)
        return Written(content, operators, run)
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={"softline.json": json.dumps(about)})
    content = file.getvalue()
    return Written(content, operators, torch.export.load(io.BytesIO(content)).module())


def _check(rows: Sequence[parity.ParityRow], tolerance: float, kind: str) -> None:
    worst = max(rows, key=lambda row: row.difference)
    if not worst.difference <= tolerance:
        amount = f"by {worst.difference:.2g} of the largest output"
        if math.isinf(worst.difference):
            amount = "in the shape of its outputs, or by numbers that are not finite,"
        raise UserError(
            f"the exported network differs from the original {amount} at {worst.sizes}; {kind} may differ by "
            f"{tolerance:g}. Nothing was written"
        )
