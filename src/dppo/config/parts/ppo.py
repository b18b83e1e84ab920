"""The settings of the algorithm and of its networks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from dppo.config.field import constant, setting
from dppo.user_code import import_path

LOSSES = {"ppo": "dppo.ppo.learning.losses:ClippedLoss", "spo": "dppo.ppo.learning.spo:SPOLoss"}
"""The class of each value of `loss`; torch is imported with it."""


@dataclass(frozen=True, kw_only=True)
class PPO:
    """The algorithm."""

    algo: Literal["ppo", "sac"] = constant("ppo")
    """ppo, or soft actor-critic, which learns from all env steps so far: far fewer of them for continuous actions, more
    time for each. sac is not for discrete actions, images and memory."""
    learning_rate: float = setting(3e-4, gt=0)
    """Step size of Adam at the start. With algo=sac: 5e-4."""
    anneal_lr: bool = False
    """Learning rate schedule: lower the learning rate linearly to zero over the run."""
    desired_kl: float | None = setting(None, ge=0)
    """Adapt the learning rate before each SGD step: lower it if the approximate KL exceeds twice this, raise it if it
    is below half of this, with prior at most to learning_rate; 0: never; none: 0.01 with prior, continuous actions and
    reuse=1, because a clone has little noise, otherwise never."""
    gamma: float = setting(0.99, ge=0, le=1)
    """Discount factor per env step."""
    gae_lambda: float = setting(0.95, ge=0, le=1)
    """Lambda of generalized advantage estimation."""
    update_epochs: int | None = setting(None, gt=0, le=10**6)
    """Epochs K: passes over each batch; none: 20 for discrete actions without reuse, memory and lag, otherwise 10."""
    minibatch_size: int | None = setting(None, gt=0)
    """Largest number of rows of a minibatch; none: 64, or a 32nd of a batch of more than 2,048. With algo=sac: 128."""
    reuse: int = setting(1, gt=0)
    """Train on the batches of the last R iterations, with importance weights (GePPO); 1: the newest alone. Not with
    frame_stack."""
    norm_adv: bool | None = None
    """Standardize advantages within each minibatch; none: on, except for continuous actions with norm_reward and
    without norm_value. There the scale of rewards is already fixed, and standardizing would amplify the noise of
    uninformative batches."""
    adv_floor: float = setting(0.1, ge=0)
    """Smallest deviation by which norm_adv divides in batches without information, in which all rewards are equal and
    nothing terminates, as before the first reward. If the advantages of such a batch are smaller than half of it and
    all rewards are 0, discrete actions get an entropy bonus of up to 0.01. It needs norm_reward, and
    has its unit."""
    recompute_advantages: bool = False
    """Recompute advantages and returns before each further epoch, with the values of the current network."""
    loss: Literal["ppo", "spo"] = "ppo"
    """Loss of the policy: the clipped surrogate of PPO, or Simple Policy Optimization, which subtracts a quadratic
    penalty of the ratio instead."""
    clip_coef: float = setting(0.2, gt=0, lt=1)
    """Clipping range of the probability ratio."""
    anneal_clip: bool = False
    """Lower the clipping range linearly to zero over the run."""
    clip_vloss: bool = False
    """Clip the value loss around the old value, as OpenAI Baselines does."""
    ent_coef: float | None = setting(None, ge=0, le=1e6)
    """Weight of the entropy bonus; none: 0.01 for discrete actions with reuse and without memory, otherwise 0."""
    anneal_ent: bool = False
    """Lower the weight of the entropy bonus linearly to zero over the run."""
    vf_coef: float = setting(0.5, ge=0, le=1e6)
    """Weight of the value loss."""
    max_grad_norm: float = setting(0.5, gt=0)
    """Largest global norm of the gradient."""
    target_kl: float | None = setting(None, ge=0)
    """Skip the remaining epochs of an update once the approximate KL exceeds this; 0: never; none: 0.04 with continuous
    actions and without desired_kl, less with reuse (0.0064 with 4; with memory for all actions), otherwise never."""
    norm_obs: bool = constant(True)
    """Normalize floating-point observations by their running mean and standard deviation."""
    norm_obs_keys: tuple[str, ...] = constant(())
    """Parts of a Dict or Tuple observation that norm_obs normalizes, by name: speed; robot.arm for a part of a part.
    Empty: all floating-point numbers."""
    norm_reward: bool = constant(True)
    """Divide rewards by the running standard deviation of the discounted return."""
    norm_value: bool = constant(False)
    """Learn values in units of the running deviation of their targets (PopArt), for rewards of any size."""
    freeze_norm_after: int | None = setting(None, ge=0)
    """Stop updating the statistics of norm_obs and norm_reward after this many env steps; 0 on a branch keeps the
    statistics of the run it starts from; none: after the steps of prior, if there is one, and on a branch of such a run
    as there; otherwise never."""
    sign_reward: bool = False
    """Learn from the sign of each reward: -1, 0 or 1."""
    clip_reward: float | None = setting(None, gt=0)
    """Clip each reward to plus or minus this; none: do not."""
    scale_reward: float = setting(1.0, gt=0)
    """Multiply each reward by this, after clipping."""


@dataclass(frozen=True, kw_only=True)
class ResolvedPPO(PPO):
    """The algorithm of a run whose task is known: `resolve` has replaced the defaults that depend on it."""

    update_epochs: int
    norm_adv: bool
    ent_coef: float
    target_kl: float
    desired_kl: float

    def __post_init__(self) -> None:
        for name in ("update_epochs", "norm_adv", "ent_coef", "target_kl", "desired_kl"):
            assert getattr(self, name) is not None, f"{name} is open: resolve the settings first"


@dataclass(frozen=True, kw_only=True)
class Network:
    """The policy and value networks."""

    model: str | Callable[..., Any] | None = constant(None)
    """A network of your own, as module:Class (in Python, also the class itself): a torch.nn.Module, built with (spaces,
    head_size), that maps observations to head and values; see examples/own_network.py. Default: a network that fits the
    observations."""
    model_kwargs: dict[str, Any] = constant({})
    """Further keyword arguments of the model's class, as JSON: '{"units": 32}'."""
    hidden_sizes: tuple[int, ...] = constant((64, 64), gt=0)
    """Units of the hidden layers, the same for policy and value. Not used if a CNN reads the whole observation."""
    activation: Literal["tanh", "relu"] = constant("tanh")
    """Activation between hidden layers."""
    image_encoder: Literal["auto", "nature", "impala", "grid", "flatten"] = constant("auto")
    """Layers that read images: the CNN of the Nature paper (nature), the CNN of IMPALA, a small one over the bits of
    each byte (grid), or none (flatten); auto: nature, and grid below 36 x 36 pixels."""
    image_features: int | None = constant(None, gt=0)
    """Units of the last layer of an image's encoder; none: 512 for nature, 256 for impala, 128 for grid."""
    trunk: Literal["auto", "shared", "separate"] = constant("auto")
    """Layers of policy and value: shared (all but the last) or separate; auto: shared if there are images."""
    critic_obs: tuple[str, ...] = constant(())
    """Parts of a Dict or Tuple observation that only the value reads, or the critics of algo=sac, by name, such as the
    field of a simulation beside its sensors: the trained policy acts without them."""
    layer_norm: bool = constant(False)
    """Normalize the inputs of each activation between hidden layers over the layer's units."""
    state_dependent_std: bool = constant(False)
    """Let the standard deviation of continuous actions depend on the observation; otherwise it is a parameter. With
    algo=sac: on."""
    log_std_init: float | None = constant(None, ge=-20, le=2)
    """Log of the standard deviation of continuous actions at the start; none: -0.5 for two components or more, whose
    noise adds up, otherwise 0."""
    memory: Literal["none", "gru", "lstm"] = constant("none")
    """Memory of past observations behind the hidden layers: a GRU or an LSTM, from zero in each episode."""
    memory_size: int = constant(64, gt=0)
    """Units of the memory."""
    sequence_length: int | None = setting(None, gt=0)
    """Steps of the sequences that a network with memory learns from; must divide num_steps. Gradients do not reach
    further back. A network of your own with memory needs it; none: the largest divisor of num_steps up to 16."""
    dtype: Literal["float32", "float64"] = constant("float32")
    """Precision of the networks; float64 is for comparing implementations."""

    @property
    def model_name(self) -> str | None:
        """Return the import path of the user's network; None for the default network."""
        if self.model is None:
            return None
        return import_path(self.model)


SomePPO = TypeVar("SomePPO", bound=PPO)
ANNEALED = {"learning_rate": "anneal_lr", "clip_coef": "anneal_clip", "ent_coef": "anneal_ent"}


def annealed_settings(ppo: PPO) -> list[str]:
    """Return the names of the settings that fall linearly to zero over the run."""
    return [name for name, switch in ANNEALED.items() if getattr(ppo, switch)]


def annealed(ppo: SomePPO, share: float) -> SomePPO:
    """Return the settings as they are after this share of the run, 0 <= share < 1 (detail 4)."""
    now = {
        name: getattr(ppo, name) * (1 - share)
        for name, switch in ANNEALED.items()
        if getattr(ppo, switch)
    }
    return replace(ppo, **now)


def reuse_clip_factor(reuse: int) -> float:
    """Return the factor of `clip_coef` for an update of `reuse` batches: 1 without reuse (GePPO, eq. 9)."""
    return 2 / (reuse + 1)
