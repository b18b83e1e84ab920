"""A fingerprint of numerics: hashes of small computations, through the operations that a run uses."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo.errors import ClusterError
from dppo.numerics.arithmetic import as_usual, limit_blas
from dppo.numerics.portable import cpu_facts, numpy_is_portable

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Probe:
    """The sizes of the computations, as in a run's network."""

    rows: int
    """Environments that act together."""
    widths: tuple[int, ...]
    """Units of the hidden layers."""
    images: bool = False
    """Include convolutions."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Hashes of the results of a process, and the machine on which it computed them."""

    node: str
    cpu: str
    versions: dict[str, str]
    results: dict[str, str]
    """Hashes of results by the name of the operation; of torch only where the process uses torch."""

    def summary(self) -> dict[str, str]:
        """Return the CPU, and one hash of all results: equal where runs are equal to the last bit."""
        return {
            "cpu": self.cpu,
            "numerics": hashlib.sha256(str(self.results).encode()).hexdigest()[:16],
        }

    def differences(self, other: Fingerprint) -> str:
        """Describe the results and versions of `other` that differ from these; "" if no result differs.

        Only results that both fingerprints contain are compared.
        """
        differing = [
            name
            for name, result in self.results.items()
            if name in other.results and other.results[name] != result
        ]
        if not differing:
            return ""
        description = f"different last bits in {' and '.join(differing)}"
        for package, own_version in self.versions.items():
            other_version = other.versions.get(package, own_version)
            if other_version != own_version:
                description += f", {package} {other_version} instead of {own_version}"
        return description

    def explanation(self, now: Fingerprint) -> str:
        """Describe how the results of this process, `now`, differ from those of a run, and why; "" if they do not."""
        differences = self.differences(now)
        if not differences:
            return ""
        if (self.cpu, self.versions) != (now.cpu, now.versions):
            return f"this machine, {now.cpu}, computes {differences}, compared with {self.cpu} in the run."
        code = ("portable", "native")
        remedy = "Set DPPO_NUMERICS=native before dppo or Python starts."
        if not numpy_is_portable():
            code = ("native", "portable")
            remedy = "Use numerics=portable; in Python, call dppo.portable_numerics() before NumPy is imported."
        return (
            f"this process computes {differences}, on the same type of CPU: NumPy has {code[0]} code here, and had "
            f"{code[1]} code in the run. {remedy}"
        )


@dataclass(frozen=True, slots=True)
class Expected:
    """The numerics of the process that drives a run, which all of its processes must have."""

    probe: Probe
    own: Fingerprint
    """The fingerprint of the driver; checkpoints store it under this name."""
    refuse: bool
    """Refuse processes whose results differ."""

    def problem(self, *, torch: bool) -> str:
        """Describe how the results of this process differ; "" if they do not. Raise ClusterError if `refuse` is set."""
        local = fingerprint(self.probe, torch=torch)
        differences = self.own.differences(local)
        if not differences:
            return ""
        fact = f"node {local.node} ({local.cpu}) computes {differences}, compared with {self.own.node} ({self.own.cpu})"
        if self.refuse:
            raise ClusterError(
                f"{fact}. Use one type of CPU, `numerics=portable` or `on_other_cpu=warn`"
            )
        return f"{fact}: the result depends on which process runs where (docs/REPRODUCIBILITY.md)"


def fingerprint(probe: Probe, *, torch: bool) -> Fingerprint:
    """Compute a fingerprint in a few milliseconds; `torch` loads torch and includes its operations."""
    versions = {"numpy": np.__version__, "libc": " ".join(platform.libc_ver())}
    with as_usual(), limit_blas(1):
        hashes = {name: _hash(compute(probe)) for name, compute in NUMPY.items()}
    if torch:
        from dppo.numerics.torch_modes import torch_as_usual

        versions["torch"] = version("torch")
        with as_usual(), torch_as_usual():
            hashes |= {name: _hash(results) for name, results in _torch_results(probe).items()}
    return Fingerprint(platform.node(), cpu_name(), versions, hashes)


def cpu_name() -> str:
    """Return the name of this CPU, with family and model if known: numerical libraries choose their code by them."""
    lines = cpu_facts().partition("\n\n")[0].splitlines()
    facts = {}
    for line in lines:
        name, _, value = line.partition(":")
        facts[name.strip()] = value.strip()
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    return f"{facts['model name']} (family {facts.get('cpu family')}, model {facts.get('model')})"


def _numbers(*shape: int) -> np.ndarray:
    """Return float64 numbers between -2 and 2, equal on all machines: PCG64 and a product round alike everywhere."""
    return np.random.Generator(np.random.PCG64(sum(shape))).random(shape) * 4 - 2


def _hash(results: list[Any]) -> str:
    data = b"".join(np.ascontiguousarray(result).tobytes() for result in results)
    return hashlib.sha256(data).hexdigest()[:12]


def _products(probe: Probe) -> list[Any]:
    products = []
    for inputs, outputs in pairwise((4, *probe.widths, 2)):
        weight = _numbers(outputs, inputs).astype("f4")
        for num_rows in (probe.rows, 256):
            products.append(_numbers(num_rows, inputs).astype("f4") @ weight.T)
    products.append(_numbers(8, 33) @ _numbers(33, 5))
    return products


def _functions(probe: Probe) -> list[Any]:
    results = []
    for dtype in ("f4", "f8"):
        x = _numbers(259).astype(dtype)
        results += [
            function(x) for function in (np.tanh, np.exp, np.sin, np.cos, np.expm1, np.cbrt)
        ]
        results += [function(np.abs(x)) for function in (np.log, np.log1p, np.sqrt)]
        results.append(np.arctan2(x, x[::-1]))
    return results


def _sums(probe: Probe) -> list[Any]:
    return [_numbers(1027).sum(), _numbers(1027).astype("f4").var(), _numbers(64, 9).mean(0)]


def _random_numbers(probe: Probe) -> list[Any]:
    return [np.random.default_rng(0).normal(size=999)]


def _c_functions(probe: Probe) -> list[Any]:
    functions = (math.sin, math.cos, math.exp, math.tanh, math.atan)
    return [
        [function(50 * x) for function in functions for x in _numbers(999)],
        [math.pow(abs(x), 1.7) + math.log(abs(x)) for x in _numbers(99)],
    ]


NUMPY: dict[str, Callable[[Probe], list[Any]]] = {
    "NumPy's matrix products": _products,
    "NumPy's exp, log, sin": _functions,
    "NumPy's sums": _sums,
    "NumPy's random numbers": _random_numbers,
    "the C library's sin, exp, pow": _c_functions,
}
"""Operations of actors and of environments; the last also decides what most simulators in Python compute."""


def _torch_results(probe: Probe) -> dict[str, list[Tensor]]:
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the number of threads changes the last bits of products
    x = _tensor(259)
    rows = _tensor(64, 6)
    results = {
        "torch's exp, log, tanh": [
            x.exp(),
            x.abs().log(),
            x.tanh(),
            x.sigmoid(),
            x.erf(),
            x.abs().sqrt(),
        ],
        "torch's sums and softmax": [
            x.sum(),
            rows.mean(0),
            rows.std(),
            rows.log_softmax(1),
            rows.logsumexp(1),
        ],
        "torch's matrix products": [
            _tensor(64, width) @ _tensor(width, 33) for width in (4, *probe.widths)
        ],
        "torch's layer norm": [torch.nn.functional.layer_norm(rows, (6,))],
        "torch's Adam": [_adam(_tensor(300), _tensor(300))],
        "torch's QR decomposition": [torch.linalg.qr(_tensor(16, 16))[0]],
    }
    if probe.images:
        results |= _convolutions()
    torch.set_num_threads(num_threads)
    return results


def _convolutions() -> dict[str, list[Tensor]]:
    """Return the results of a convolution, and of oneDNN's matrix product, which the layer behind it uses."""
    import torch

    pixels = _tensor(4, 3, 36, 36).requires_grad_()
    kernel = _tensor(16, 3, 8, 8).requires_grad_()
    output = torch.nn.functional.conv2d(pixels, kernel, stride=4)
    gradients = torch.autograd.grad(output, (pixels, kernel), _tensor(4, 16, 8, 8))
    results = {"torch's convolutions": [output.detach(), *gradients]}
    if torch.backends.mkldnn.is_available():
        dense = torch.ops.mkldnn._linear_pointwise
        results["oneDNN's matrix products"] = [
            dense(_tensor(64, 256), _tensor(33, 256), None, "none", [], "")
        ]
    return results


def _tensor(*shape: int) -> Tensor:
    import torch

    return torch.from_numpy(_numbers(*shape)).float()


def _adam(weights: Tensor, gradient: Tensor) -> Tensor:
    """Do one step as `FlatAdam` does, without loading `torch.optim.Adam`, which takes two seconds."""
    from torch.optim.adam import adam

    adam(
        [weights],
        [gradient],
        exp_avgs=[weights.new_zeros(300)],
        exp_avg_sqs=[weights.new_ones(300)],
        max_exp_avg_sqs=[],
        state_steps=[weights.new_ones(())],
        fused=True,
        amsgrad=False,
        beta1=0.9,
        beta2=0.999,
        lr=1e-3,
        weight_decay=0.0,
        eps=1e-5,
        maximize=False,
    )
    return weights
