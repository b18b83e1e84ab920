"""The settings of soft actor-critic, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SACSettings:
    """Settings of a `SACTrainer`."""

    gamma: float = 0.99
    """Discount factor per env step."""
    learning_rate: float = 5e-4
    """Step size of Adam for the policy."""
    critic_learning_rate: float = 1e-3
    temperature_learning_rate: float = 3e-4
    """Step size of Adam for the logarithm of the temperature: slow, so that exploration lasts."""
    initial_temperature: float = 0.02
    """Weight of the entropy before the first gradient step, for normalized rewards."""
    tau: float = 0.01
    """Part of the way that the target critics move to the critics in each gradient step."""
    max_grad_norm: float = 1.0
    minibatch_size: int = 128
    """Rows of a gradient step, over all ranks."""
    gradient_steps: float = 1.0
    """Gradient steps per env step."""
    replay_rows: int = 1_000_000
    """Most rows that all ranks keep together."""
    first_rows: int = 1000
    """Rows of all ranks before the first gradient step."""
    num_critics: int = 2
    critic_sizes: tuple[int, ...] = (128, 128)
    """Units of each hidden layer of a critic."""
    n_step: int = 3
    """Most rewards that a target adds up before it uses the target critics."""
    least_extension: float = 0.5
    """Least probability that a target adds up a later reward, however unlikely its action has become."""
    target_entropy: float = -1.0
    """Target of the entropy, in nats per component of an action, within (-1, 1)."""
    controller_iterations: int = 0
    """Iterations that a controller collects; over as many afterwards, the policy is held near its clone."""
    clone_weight: float = 10.0
    """Weight of the squared distance from the controller's actions in the policy's loss, at the end of these
    iterations."""
    sign_reward: bool = False
    clip_reward: float | None = None
    scale_reward: float = 1.0
    device: str = "cpu"

    def clone_weight_at(self, iteration: int) -> float:
        """Return the weight of the distance from the controller after the controller's iterations: it falls to 0."""
        if self.controller_iterations == 0:
            return 0.0
        share = 2.0 - iteration / self.controller_iterations
        return self.clone_weight * min(1.0, max(0.0, share))

    def gradient_steps_between(self, step: int, later_step: int) -> int:
        """Return the number of gradient steps that are due between two env steps; none is lost to rounding."""
        return math.floor(later_step * self.gradient_steps) - math.floor(step * self.gradient_steps)
