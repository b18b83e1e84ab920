"""A fingerprint of numerics: hashes of small computations, through the operations that a run uses."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo.errors import ClusterError
from dppo.numerics.arithmetic import as_usual, torch_as_usual
from dppo.numerics.portable import cpu_facts, limit_blas

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Probe:
    """The sizes of the computations: those of a run's network."""

    rows: int  # environments that act together
    widths: tuple[int, ...]  # units of the hidden layers
    images: bool = False  # include convolutions


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Hashes of the results of a process, and the machine on which it computed them."""

    node: str
    cpu: str
    versions: dict[str, str]
    results: dict[str, str]
    """Hashes of results by the name of the operation; those of torch only where the process uses torch."""

    def summary(self) -> dict[str, str]:
        """Return the CPU, and one hash of all results: equal where runs are equal to the last bit."""
        return {"cpu": self.cpu, "numerics": hashlib.sha256(str(self.results).encode()).hexdigest()[:16]}

    def differences(self, other: Fingerprint) -> str:
        """Return what differs, in words: "" if all results that both have are equal."""
        names = [name for name, one in self.results.items() if other.results.get(name, one) != one]
        both = [(name, was, other.versions.get(name, was)) for name, was in self.versions.items()]
        versions = [f", {name} {now} instead of {was}" for name, was, now in both if now != was]
        return f"other last bits in {' and '.join(names)}{''.join(versions)}" if names else ""


@dataclass(frozen=True, slots=True)
class Expected:
    """The numerics that all processes of a run must have: those of the process that drives it."""

    probe: Probe
    own: Fingerprint
    refuse: bool

    def problem(self, *, torch: bool) -> str:
        """Return how this process computes otherwise: "" if it does not; raise ClusterError if that is refused."""
        found = fingerprint(self.probe, torch=torch)
        if not (difference := self.own.differences(found)):
            return ""
        fact = f"node {found.node} ({found.cpu}) computes {difference}, compared with {self.own.node} ({self.own.cpu})"
        if self.refuse:
            raise ClusterError(f"{fact}. Use one type of CPU, `numerics=portable` or `on_other_cpu=warn`")
        return f"{fact}: the result depends on which process runs where (docs/REPRODUCIBILITY.md)"


def fingerprint(probe: Probe, *, torch: bool) -> Fingerprint:
    """Compute a fingerprint in a few milliseconds; with `torch`, include its operations, which loads it."""
    versions = {"numpy": np.__version__, "libc": " ".join(platform.libc_ver())}
    with as_usual(), limit_blas(1):
        found = {name: _hash(compute(probe)) for name, compute in NUMPY.items()}
    if torch:
        versions["torch"] = version("torch")
        with as_usual(), torch_as_usual():
            found |= {name: _hash(results) for name, results in _torch_results(probe).items()}
    return Fingerprint(platform.node(), cpu_name(), versions, found)


def cpu_name() -> str:
    """Return the name of this CPU, with family and model where they are known: they decide which code runs."""
    lines = cpu_facts().partition("\n\n")[0].splitlines()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    return f"{facts['model name']} (family {facts.get('cpu family')}, model {facts.get('model')})"


def _numbers(*shape: int) -> np.ndarray:
    """Return float64 numbers between -2 and 2 that are the same everywhere: PCG64 and a product round alike."""
    return np.random.Generator(np.random.PCG64(sum(shape))).random(shape) * 4 - 2


def _hash(results: list[Any]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(one).tobytes() for one in results)).hexdigest()[:12]


def _products(probe: Probe) -> Iterator[np.ndarray]:
    for before, after in pairwise((4, *probe.widths, 2)):
        weight = _numbers(after, before).astype("f4")
        yield from (_numbers(rows, before).astype("f4") @ weight.T for rows in (probe.rows, 256))
    yield _numbers(8, 33) @ _numbers(33, 5)


def _functions(dtype: str) -> Iterator[np.ndarray]:
    x = _numbers(259).astype(dtype)
    yield from (function(x) for function in (np.tanh, np.exp, np.sin, np.cos, np.expm1, np.cbrt))
    yield from (function(np.abs(x)) for function in (np.log, np.log1p, np.sqrt))
    yield np.arctan2(x, x[::-1])


NUMPY: dict[str, Callable[[Probe], list[Any]]] = {
    "NumPy's matrix products": lambda probe: [*_products(probe)],
    "NumPy's exp, log, sin": lambda probe: [*_functions("f4"), *_functions("f8")],
    "NumPy's sums": lambda probe: [_numbers(1027).sum(), _numbers(1027).astype("f4").var(), _numbers(64, 9).mean(0)],
    "NumPy's random numbers": lambda probe: [np.random.default_rng(0).normal(size=999)],
    "the C library's sin, exp, pow": lambda probe: [
        [f(50 * x) for f in (math.sin, math.cos, math.exp, math.tanh, math.atan) for x in _numbers(999)],
        [math.pow(abs(x), 1.7) + math.log(abs(x)) for x in _numbers(99)],
    ],
}
"""Operations of actors and of environments; the last also decides what most simulators in Python compute."""


def _torch_results(probe: Probe) -> dict[str, list[Tensor]]:
    """Return the results of torch's operations on float32 numbers, by name."""
    import torch

    def some(*shape: int) -> Tensor:
        return torch.from_numpy(_numbers(*shape)).float()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products by several threads have other last bits
    x, rows = some(259), some(64, 6)
    found = {
        "torch's exp, log, tanh": [x.exp(), x.abs().log(), x.tanh(), x.sigmoid(), x.erf(), x.abs().sqrt()],
        "torch's sums and softmax": [x.sum(), rows.mean(0), rows.std(), rows.log_softmax(1), rows.logsumexp(1)],
        "torch's matrix products": [some(64, width) @ some(width, 33) for width in (4, *probe.widths)],
        "torch's layer norm": [torch.nn.functional.layer_norm(rows, (6,))],
        "torch's Adam": [_adam(some(300), some(300))],
        "torch's QR decomposition": [torch.linalg.qr(some(16, 16))[0]],
    }
    if probe.images:
        pixels, kernel = some(4, 3, 36, 36).requires_grad_(), some(16, 3, 8, 8).requires_grad_()
        output = torch.nn.functional.conv2d(pixels, kernel, stride=4)
        by_inputs = torch.autograd.grad(output, (pixels, kernel), some(4, 16, 8, 8))
        found["torch's convolutions"] = [output.detach(), *by_inputs]
        if torch.backends.mkldnn.is_available():  # the layer behind them
            dense = torch.ops.mkldnn._linear_pointwise
            found["oneDNN's matrix products"] = [dense(some(64, 256), some(33, 256), None, "none", [], "")]
    torch.set_num_threads(threads)
    return found


def _adam(weights: Tensor, gradient: Tensor) -> Tensor:
    """Do one step as `FlatAdam` does, without loading `torch.optim.Adam`, which takes two seconds."""
    from torch.optim.adam import adam

    first, second, steps = weights.new_zeros(300), weights.new_ones(300), weights.new_ones(())
    adam(
        [weights], [gradient], [first], [second], [], [steps], fused=True, amsgrad=False, beta1=0.9, beta2=0.999,
        lr=1e-3, weight_decay=0.0, eps=1e-5, maximize=False,
    )  # fmt: skip
    return weights
