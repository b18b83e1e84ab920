"""The parameters of a module: drawn from a seed, and kept in one flat vector; and process-wide settings of torch."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dppo.errors import ConfigError

ZerosLike = Callable[[Tensor], Tensor]
MOST_DRAWS = 20  # of a module, to find two with equal weights


class FlatParameters:
    """Parameters of a module as views of one vector, with their gradients as views of another.

    The gradient's norm, its clipping and its sum over learners, Adam, and a snapshot are then one operation each.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], zeros_like: ZerosLike | None = None) -> None:
        """Move `parameters`, all of a module, into one vector; `zeros_like` allocates that of the gradients."""
        parameters = list(parameters)
        self.weights = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in parameters]))
        self.gradient = (zeros_like or torch.zeros_like)(self.weights.detach())
        self.weights.grad = self.gradient
        sizes = [parameter.numel() for parameter in parameters]
        pieces = zip(parameters, self.weights.data.split(sizes), self.gradient.split(sizes), strict=True)
        for parameter, weights, gradient in pieces:
            parameter.data, parameter.grad = weights.view_as(parameter), gradient.view_as(parameter)


def drawn(make: Callable[[], nn.Module], seed: int, dtype: str) -> nn.Module:
    """Return what `make` builds on the CPU, with weights drawn from `seed`; torch's global generator stays unchanged.

    Weights are drawn in float32 for every dtype, as those of the default network.
    """
    with torch.random.fork_rng(devices=[]), default_dtype(torch.float32):
        torch.default_generator.manual_seed(seed)
        module = make()
    of = getattr(torch, dtype)
    return module._apply(lambda tensor: tensor.to(of) if tensor.is_floating_point() else tensor)  # complex ones stay


def settled(draw: Callable[[], nn.Module], name: str) -> nn.Module:
    """Draw until the same weights have come out twice: a thread of an environment may draw from the generator, too.

    Raise ConfigError, with the `name` of the module, if the weights differ each time.
    """
    seen: set[bytes] = set()
    for _ in range(MOST_DRAWS):
        module = draw()
        weights = [parameter.detach().numpy().tobytes() for parameter in module.parameters()]
        digest = hashlib.sha256(b"".join(weights)).digest()
        if digest in seen:
            return module
        seen.add(digest)
    raise ConfigError(
        f"model={name}: its initial weights differ each time, in {MOST_DRAWS} builds from one seed. Draw them from "
        f"torch's generator, not from NumPy or uninitialized memory, and let no thread of an environment draw from it."
    )


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the parameters of `module`, in its order."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Make `dtype` the default of new tensors, whatever an environment or program in this process has set.

    The same with the CPU as the default device, oneDNN, autocast of the CPU and inference mode, which are off.
    """
    before = torch.get_default_dtype()
    default = torch.set_default_dtype, dtype, before
    if not torch._C._get_mkldnn_enabled():
        return _as_usual(default, (torch._C._set_mkldnn_enabled, True, False))
    # A default device is a mode on this stack; to ask for the device takes 3 us, in each step of an actor.
    if torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled() or torch._C._len_torch_function_stack():
        return _as_usual(default)
    return nullcontext() if before == dtype else _meanwhile(default)


def exact_on(threads: int) -> AbstractContextManager[None]:
    """Use so many threads in the calling thread, and full float32 products, whatever an environment has set."""
    threads_before = torch.get_num_threads()
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set for one backend alone, and has no name
        precision = ""
    if (threads_before, precision) == (threads, "highest"):
        return nullcontext()
    exactly = torch.set_float32_matmul_precision, "highest", precision or "highest"
    return _meanwhile((torch.set_num_threads, threads, threads_before), exactly)


@contextmanager
def _as_usual(*settings: tuple[Callable[[Any], None], Any, Any]) -> Iterator[None]:
    with (
        torch.inference_mode(mode=False),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        _meanwhile(*settings),
    ):
        yield


@contextmanager
def _meanwhile(*settings: tuple[Callable[[Any], None], Any, Any]) -> Iterator[None]:
    """Call each setter with the value for now, and then with that from before, which an environment may rely on."""
    for set_to, now, _ in settings:
        set_to(now)
    try:
        yield
    finally:
        for set_to, _, before in settings:
            set_to(before)
