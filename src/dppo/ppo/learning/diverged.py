"""The error of an update whose gradient is not finite."""

from __future__ import annotations

from torch import Tensor

from dppo.errors import TrainingDiverged
from dppo.ppo.learning.batch import Batch


def diverged(minibatch: Batch, number: int, pi_loss: Tensor, v_loss: Tensor, norm: float) -> TrainingDiverged:
    """Return an error that describes the minibatch.

    Args:
        number: of the SGD step in its update: 0, 1, ...
        norm: of the gradient.
    """
    facts = []
    leaves = minibatch.obs if isinstance(minibatch.obs, dict) else {"": minibatch.obs}
    columns = {f"obs {name}".rstrip(): leaf for name, leaf in leaves.items()}
    for name, column in (columns | {"advantages": minibatch.advantages, "returns": minibatch.returns}).items():
        facts.append(f"{name} from {float(column.min()):.3g} to {float(column.max()):.3g}")
    return TrainingDiverged(
        f"SGD step {number} of this update has policy loss {pi_loss.item():.3g}, value loss "
        f"{v_loss.item():.3g} and gradient norm {norm:.3g}; the weights from before it are kept. The "
        f"minibatch of {len(minibatch)} rows has {', '.join(facts)}. Lower learning_rate, or turn on norm_obs and "
        f"norm_reward if these numbers are large."
    )
