"""The settings of soft actor-critic."""

from dataclasses import dataclass

from dppo.config.field import constant, setting


@dataclass(frozen=True, kw_only=True)
class SAC:
    """Soft actor-critic, the algorithm of algo=sac."""

    replay_rows: int | None = setting(None, gt=0)
    """Env steps that are kept to learn from, in memory and in each checkpoint; beyond that, the oldest are dropped;
    none: all of the run, up to 1,000,000."""
    gradient_steps: float = setting(1.0, gt=0, le=100)
    """Gradient steps per env step. 0.5 takes half of the time of updates, and up to twice the env steps; more than 1
    need fewer env steps on some tasks only."""
    learning_starts: int = setting(1000, ge=0)
    """Env steps before the first gradient step, which the new policy collects; with prior, gradient steps begin at
    once."""
    tau: float = setting(0.01, gt=0, le=1)
    """Share of the distance by which the target critics move toward the critics in each gradient step."""
    target_entropy: float = setting(-1.0, ge=-10, lt=0.69)
    """Entropy of the policy that the temperature is adapted to, in nats per component of an action within (-1, 1)."""
    critic_sizes: tuple[int, ...] = constant((128, 128), gt=0)
    """Units of the hidden layers of each of the two critics."""
    critic_learning_rate: float = setting(1e-3, gt=0)
    """Step size of Adam for the critics; the policy has learning_rate."""
