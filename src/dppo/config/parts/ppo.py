"""The settings of the algorithm."""

from dataclasses import dataclass, fields

from dppo.config.field import setting


@dataclass(frozen=True, kw_only=True)
class PPO:
    """The algorithm."""

    learning_rate: float = setting(3e-4, "Step size of Adam at the start.", gt=0)
    anneal_lr: bool = setting(False, "Lower the learning rate linearly to zero over the run.")
    desired_kl: float | None = setting(
        None,
        "Adapt the learning rate before each SGD step: lower it if the approximate KL exceeds twice this, raise it if "
        "it is below half of this; none: never.",
        gt=0,
    )
    gamma: float = setting(0.99, "Discount factor per env step.", ge=0, le=1)
    gae_lambda: float = setting(0.95, "Lambda of generalized advantage estimation.", ge=0, le=1)
    update_epochs: int | None = setting(
        None,
        "Epochs K: passes over each batch; none: 20 for discrete actions without reuse, memory and lag, else 10.",
        gt=0,
        le=10**6,
    )
    minibatch_size: int | None = setting(
        None, "Largest number of rows of a minibatch; none: 64, or a 32nd of a batch of more than 2,048.", gt=0
    )
    reuse: int = setting(
        1,
        "Train on the batches of the last so many iterations, with importance weights (GePPO); 1: the newest alone.",
        gt=0,
    )
    norm_adv: bool = setting(True, "Standardize advantages within each minibatch.")
    adv_floor: float = setting(
        0.1,
        "Smallest deviation that norm_adv divides by where all rewards of a batch are equal and nothing terminates, as "
        "before the first reward: what is left of advantages there is noise. In the unit of norm_reward; needs it.",
        ge=0,
    )
    recompute_advantages: bool = setting(
        False, "Recompute advantages and returns before each further epoch, with the values of the current network."
    )
    clip_coef: float = setting(0.2, "Clipping range of the probability ratio.", gt=0, lt=1)
    anneal_clip: bool = setting(False, "Lower the clipping range linearly to zero over the run.")
    clip_vloss: bool = setting(False, "Clip the value loss around the old value, as OpenAI Baselines does.")
    ent_coef: float = setting(0.0, "Weight of the entropy bonus.", ge=0, le=1e6)
    anneal_ent: bool = setting(False, "Lower the weight of the entropy bonus linearly to zero over the run.")
    vf_coef: float = setting(0.5, "Weight of the value loss.", ge=0, le=1e6)
    max_grad_norm: float = setting(0.5, "Largest global norm of the gradient.", gt=0)
    target_kl: float | None = setting(
        None, "Skip the remaining epochs of an update once the approximate KL exceeds this; none: never.", gt=0
    )
    norm_obs: bool = setting(
        True,
        "Normalize floating-point observations by their running mean and standard deviation.",
        branch=False,
    )
    norm_obs_keys: tuple[str, ...] = setting(
        (),
        "Parts of a Dict or Tuple observation that norm_obs normalizes, by name: speed; robot.arm for a part of a "
        "part. Empty: all floating-point numbers.",
        branch=False,
    )
    norm_reward: bool = setting(
        True, "Divide rewards by the running standard deviation of the discounted return.", branch=False
    )
    norm_value: bool = setting(
        False,
        "Learn values in units of the running deviation of their targets (PopArt), for rewards of any size.",
        branch=False,
    )
    freeze_norm_after: int | None = setting(
        None,
        "Stop updating the statistics of norm_obs and norm_reward after this many env steps; 0 on a branch keeps those "
        "of the run it starts from; none: never.",
        ge=0,
    )
    sign_reward: bool = setting(False, "Learn from the sign of each reward: -1, 0 or 1.")
    clip_reward: float | None = setting(None, "Clip each reward to plus or minus this; none: do not.", gt=0)
    scale_reward: float = setting(1.0, "Multiply each reward by this, after clipping.", gt=0)

    def epochs(self, *, discrete: bool = False) -> int:
        """Return K; `discrete` if all actions are, and there is neither memory nor a policy lag."""
        return self.update_epochs or (20 if discrete and self.reuse == 1 else 10)

    def smallest_deviation(self, informed: bool) -> float | None:
        """Return the smallest deviation that the advantages of a batch are divided by; None: not at all."""
        if not self.norm_adv:
            return None
        return self.adv_floor if self.norm_reward and not informed else 0.0


ANNEALED = {"learning_rate": "anneal_lr", "clip_coef": "anneal_clip", "ent_coef": "anneal_ent"}


def annealed_settings(ppo: PPO) -> list[str]:
    """Return the names of the settings that fall linearly to zero over the run."""
    return [name for name, switch in ANNEALED.items() if getattr(ppo, switch)]


def annealed(ppo: PPO, share: float) -> PPO:
    """Return the settings as they are after this share of the run, 0 <= share < 1 (detail 4)."""
    now = {field.name: getattr(ppo, field.name) for field in fields(PPO)}  # never a `Config`, which is a PPO as well
    return PPO(**now | {name: now[name] * (1 - share) for name in annealed_settings(ppo)})
