"""One process or many: accelerate connects them, and torch's DDP or FSDP2 shares the model among them."""

import inspect
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn
from torch.distributed import DistError, DistNetworkError
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from softline.engine.recipe import Precision, Strategy
from softline.errors import UserError

T = TypeVar("T")

# checkpoints hold whole tensors, gathered on the first process: they do not depend on how many there were
_GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
_ONE = StateDictOptions(full_state_dict=True)

# newer versions of torch have another name for it
_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _ARGUMENTS else "broadcast_buffers"


def is_on_cpu(device: str) -> bool:
    """Return whether a recipe's device is the CPU on this machine."""
    return device == "cpu" or not torch.accelerator.is_available()


def start(*, precision: Precision = "fp32", device: str = "auto") -> Accelerator:
    """Join the other processes, if torchrun or ``accelerate launch`` started several."""
    on_cpu = is_on_cpu(device)
    if on_cpu and precision == "fp16":
        raise UserError("precision fp16 needs a GPU: use bf16 or fp32 on the CPU")
    # accelerate has no public way to start again with another precision
    AcceleratorState._reset_state()
    try:
        return Accelerator(
            # without this, accelerate leaves processes that have no GPU alone
            cpu=on_cpu,
            mixed_precision={"fp32": "no"}.get(precision, precision),
            step_scheduler_with_optimizer=False,
        )
    except DistNetworkError as error:
        raise UserError(_network_message(str(error))) from error


def share(accelerator: Accelerator, model: nn.Module, strategy: Strategy) -> nn.Module:
    """Prepare the model for training on all processes; with one process it stays the same object."""
    if accelerator.num_processes == 1:
        shared: nn.Module = accelerator.prepare_model(model)
        return shared
    return copy(accelerator, model) if strategy == "ddp" else shard(accelerator, model)


def copy(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Give every process a copy of the model."""
    device = accelerator.device
    # each process updates its own batch norm statistics; `average_buffers` averages them
    options: dict[str, Any] = {_SYNC_BUFFERS: False}
    return DistributedDataParallel(model.to(device), device_ids=None if device.type == "cpu" else [device], **options)


def shard(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shard each block, and then the rest of the model, over the processes."""
    model = model.to(accelerator.device)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for name, module in model.named_modules():
        if re.search(r"(?:^|\.)blocks\.\d+$", name):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def sync_batch_norms(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Let the model's batch norms see the images of all processes in training."""
    if accelerator.num_processes == 1:
        return model
    if accelerator.device.type == "cpu":
        raise UserError(
            f"model.sync_batch_norm needs a GPU for each of the {accelerator.num_processes} processes: on the CPU, "
            "train in one, or let each have its own by --model.sync_batch_norm false"
        )
    synchronised: nn.Module = convert_sync_batchnorm(model)
    return synchronised


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def gather_model(model: nn.Module) -> dict[str, Any]:
    """Return the whole state dict on the first process, and an empty one on the others. All must call it."""
    return get_model_state_dict(model, options=_GATHER) if _several() else _whole(model)


def spread_model(model: nn.Module, state_dict: dict[str, Any]) -> None:
    """Load the state dict that the first process has."""
    set_model_state_dict(model, state_dict, options=_SPREAD if _several() else _ONE)


def gather_optimizer(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return dict(get_optimizer_state_dict(model, optimizer, options=_GATHER if _several() else _ONE))


def spread_optimizer(model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
    set_optimizer_state_dict(model, optimizer, state, options=_SPREAD if _several() else _ONE)


def place() -> tuple[int, int]:
    """Return the index of this process, and the number of processes."""
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if _several() else (0, 1)


def local_main_process_first() -> AbstractContextManager[None]:
    """Let one process of each machine run the block before the others, which then find what it has made."""
    return PartialState().local_main_process_first() if _several() else nullcontext()


@contextmanager
def in_first_process(context: AbstractContextManager[Any]) -> Iterator[None]:
    """Enter the context in the first process alone; if that fails, it fails in all. All must call it."""
    with ExitStack() as stack:
        failure: str | None = None
        if place()[0] == 0:
            try:
                stack.enter_context(context)
            except (UserError, OSError) as error:
                if not _several():
                    raise
                failure = str(error)
        failure = broadcast_object(failure)
        if failure is not None:
            raise UserError(failure)
        yield


def gather_lists(items: list[T]) -> list[T]:
    """Join the lists of all processes, in every process. All must call it."""
    if not _several():
        return items
    lists: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(lists, items)
    return [item for part in lists for item in part]


def average_buffers(model: nn.Module) -> None:
    """Average the batch norm statistics of all processes. All must call it."""
    if not _several():
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            torch.distributed.all_reduce(buffer)
            buffer /= torch.distributed.get_world_size()


def whole(tensor: Tensor) -> Tensor:
    """Return the value of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def broadcast_object(value: Any) -> Any:
    """Return the value that the first process has."""
    if not _several():
        return value
    box = [value]
    torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def first_of(text: str | None, *, prefer: str) -> str | None:
    """Return a text that any process has, if possible one that starts with ``prefer``. All must call it."""
    given = [text for text in gather_lists([text]) if text is not None]
    return next((text for text in given if text.startswith(prefer)), given[0] if given else None)


def any_of(flag: bool) -> bool:
    """Return whether the flag is set in any process. All must call it."""
    return any(gather_lists([flag]))


def fails_first() -> bool:
    """Return True in the first process that calls it: that one prints an error which several processes have."""
    try:
        store = _store()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return store is None or store.add(f"softline/failed/{attempt}", 1) == 1
    except DistError:
        # printed twice is better than not at all
        return True


def lost_another(error: BaseException) -> bool:
    """Return whether the error only says that another process ended."""
    closed = re.search(
        r"connection (closed|reset|refused)|broken pipe|socket (closed|timeout)", str(error), re.IGNORECASE
    )
    return _several() and isinstance(error, RuntimeError) and closed is not None


def _store() -> Any:
    """Return the key-value store that all processes share, if there is one."""
    if _several():
        # torch has no public name for the store of the default process group
        return torch.distributed.distributed_c10d._get_default_store()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    # torchrun has one before the processes have connected
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    connect: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]
    return connect(host, port, is_master=False, timeout=timedelta(seconds=10))


def _several() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _whole(model: nn.Module) -> dict[str, Any]:
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def _network_message(text: str) -> str:
    port = re.search(r"port:? (\d+)", text)
    if re.search(r"EADDRINUSE|address already in use", text, re.IGNORECASE):
        name = f"port {port[1]}" if port else "the port"
        return f"{name} is in use by another program: give torchrun another one by --master-port, or --standalone"
    return f"the processes could not reach each other: {text.splitlines()[0]}"
