"""How much memory a network needs for an image, found without allocating or computing anything."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from softline.errors import UserError
from softline.layers.bands import shrunk_bands
from softline.process import available_memory

# no network of softline's or timm's has needed as much: images that would fit even so are not looked at more closely
MOST_BYTES_OF_A_PIXEL = 2048
# pixels
LARGE_IMAGE = 2**20

# footprints that were found, by the size of the image
_KNOWN: WeakKeyDictionary[nn.Module, dict[tuple[int, int], int]] = WeakKeyDictionary()


def check_image_memory(
    network: nn.Module,
    run: Callable[[Tensor], object],
    size: tuple[int, int],
    *,
    what: str,
    instead: str,
    exists: bool = False,
) -> None:
    """Refuse an image that the network needs more memory for than is available.

    run: runs the network on images [1, 3, H, W].
    size: rows and columns of the image.
    exists: the memory of the image itself does not count, see `footprint`.
    what: what an error calls the image.
    instead: what the user can do about it.
    """
    available = available_memory()
    height, width = size
    if available is None or height * width * MOST_BYTES_OF_A_PIXEL <= available or _device(network).type != "cpu":
        return
    known = _KNOWN.setdefault(network, {})
    if size not in known:
        known[size] = footprint(run, size, exists=exists)
    needed = known[size]
    if needed > available:
        raise UserError(
            f"{what} of {width} x {height} pixels needs about {needed / 1e9:.1f} GB of memory, and "
            f"{available / 1e9:.1f} GB are available: {instead}"
        )


@torch.no_grad()
def footprint(run: Callable[[Tensor], object], size: tuple[int, int], *, exists: bool = False) -> int:
    """Return about how many bytes all tensors have that exist at once while ``run`` is called with an image.

    The parameters do not count. What a library allocates inside one operation is not seen. A large image is represented
    by a smaller one.

    exists: the image [1, 3, H, W] does not count either, because it already exists in some form.
    """
    side = max(math.isqrt(size[0] * size[1] // LARGE_IMAGE), 1)
    with FakeTensorMode(allow_non_fake_inputs=True), shrunk_bands(1 / side**2), _Living() as living:
        shape = (1, 3, *(max(length // side, 1) for length in size))
        run(torch.empty(1).expand(shape) if exists else torch.empty(shape))
    return side**2 * living.peak


class _Living(TorchDispatchMode):
    """Adds up the tensors that exist."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.storages.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.storages = {key: kept for key, kept in self.storages.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return result


def _device(network: nn.Module) -> torch.device:
    return next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
