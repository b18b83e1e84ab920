"""The part of a fingerprint that torch computes; imported only where torch is used."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.adam import adam


def torch_results(numbers: Callable[..., np.ndarray], widths: Sequence[int], images: bool) -> dict[str, list[Tensor]]:
    """Return the results of torch's operations on float32 numbers from `numbers(*shape)`, by name."""

    def some(*shape: int) -> Tensor:
        return torch.from_numpy(numbers(*shape)).float()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products by several threads have other last bits
    x, rows = some(259), some(64, 6)
    found = {
        "torch's exp, log, tanh": [x.exp(), x.abs().log(), x.tanh(), x.sigmoid(), x.erf(), x.abs().sqrt()],
        "torch's sums and softmax": [x.sum(), rows.mean(0), rows.std(), rows.log_softmax(1), rows.logsumexp(1)],
        "torch's matrix products": [some(64, width) @ some(width, 33) for width in (4, *widths)],
        "torch's layer norm": [nn.functional.layer_norm(rows, (6,))],
        "torch's Adam": [_adam(some(300), some(300))],
        "torch's QR decomposition": [torch.linalg.qr(some(16, 16))[0]],
    }
    if images:
        found["torch's convolutions"] = _convolution(some(4, 3, 36, 36), some(16, 3, 8, 8), some(4, 16, 8, 8))
        if torch.backends.mkldnn.is_available():  # the layer behind them
            dense = torch.ops.mkldnn._linear_pointwise
            found["oneDNN's matrix products"] = [dense(some(64, 256), some(33, 256), None, "none", [], "")]
    torch.set_num_threads(threads)
    return found


def _adam(weights: Tensor, gradient: Tensor) -> Tensor:
    """Do one step as `FlatAdam` does, without loading `torch.optim.Adam`, which takes two seconds."""
    first, second, steps = torch.zeros_like(weights), torch.ones_like(weights), weights.new_ones(())
    adam(
        [weights], [gradient], [first], [second], [], [steps], fused=True, amsgrad=False, beta1=0.9, beta2=0.999,
        lr=1e-3, weight_decay=0.0, eps=1e-5, maximize=False,
    )  # fmt: skip
    return weights


def _convolution(pixels: Tensor, kernel: Tensor, by_output: Tensor) -> list[Tensor]:
    pixels, kernel = pixels.requires_grad_(), kernel.requires_grad_()
    output = nn.functional.conv2d(pixels, kernel, stride=4)
    return [output.detach(), *torch.autograd.grad(output, (pixels, kernel), by_output)]
