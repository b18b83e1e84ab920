"""A learning rate that adapts to the KL divergence between the old and the new policy."""

from __future__ import annotations

ADAPTED = "learning_rate"  # its name in the state of the optimiser
LOWEST, HIGHEST, FACTOR = 1e-5, 1e-2, 1.5


def adapted_rate(learning_rate: float, kl: float, desired_kl: float) -> float:
    """Return the learning rate for the next SGD step: lower if the policy moves too fast, higher if too slowly.

        kl > 2 desired: max(1e-5, rate / 1.5)        kl < desired / 2: min(1e-2, 1.5 rate)

    Source: rsl_rl, `algorithms/ppo.py`.
    """
    if kl > 2 * desired_kl:
        return max(LOWEST, learning_rate / FACTOR)
    if kl < desired_kl / 2:
        return min(HIGHEST, learning_rate * FACTOR)
    return learning_rate
