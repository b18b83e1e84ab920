"""Every setting, in seven frozen records; each component gets the records that it needs, whole.

They are plain dataclasses because they travel to actors, which must not import pydantic. Names are CleanRL's where it
has one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

from dppo.config.conditions import (
    DEFAULT_NETWORK,
    MAYBE_MEMORY,
    ON_GPU,
    OWN_NETWORK,
    OWN_RAY,
    RATE_NOT_ANNEALED,
    REWARDS_NOT_NORMALISED,
    REWARDS_NOT_SIGNS,
    SEVERAL_EPOCHS,
    SEVERAL_SGD_STEPS,
    SMALLER_THAN_MINIBATCH,
    WITH_ACTORS,
    WITH_ENTROPY,
    WITH_HIDDEN_LAYERS,
    WITH_LEARNERS,
    WITH_MEMORY,
    WITH_NORMALISER,
    WITH_VALUE_LOSS,
)
from dppo.config.setting import KEY, About, When, metadata, setting

USUAL_SEQUENCE = 16  # steps of a sequence, where num_steps is a multiple of it


@dataclass(frozen=True, kw_only=True)
class Env:
    """The environment."""

    env_id: str | Callable[..., Any] = field(
        metadata=metadata(
            "The environment: a Gymnasium id (CartPole-v1); module:Name-v0, an id that importing the module "
            "registers; module:factory, a function or class that returns an environment; or, in Python, any callable "
            "that does. Modules are found in the current folder and among installed packages."
        )
    )
    env_kwargs: dict[str, Any] = setting({}, "Keyword arguments of the environment, as JSON: '{\"g\": 9.8}'.")
    on_bad_step: Literal["raise", "drop"] = setting(
        "raise",
        "What an invalid observation, reward or flag does: raise ends the run; drop abandons the episode, counts it as "
        "an incident and starts a new one.",
        resume="free",
    )
    drop_obs: tuple[str, ...] = setting(
        (),
        "Parts of a Dict or Tuple observation to leave out, by name: mission; robot.mission for a part of a part.",
        branch=False,
    )

    @property
    def env_name(self) -> str:
        """Return the environment's id, or the import path of a callable."""
        return _import_path(self.env_id)


def _import_path(named: Any) -> str:
    """Return `module:name` of a class or function, and a string unchanged."""
    if isinstance(named, str):
        return named
    return f"{getattr(named, '__module__', '?')}:{getattr(named, '__qualname__', repr(named))}"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """N samplers of E environments, T steps each."""

    num_samplers: int = setting(
        8,
        "Samplers N, each with its own environments. Part of the learning problem: with the same N, any number of "
        "actors gives the same result.",
        gt=0,
    )
    envs_per_sampler: int = setting(1, "Environments E of each sampler, stepped one after the other.", gt=0)
    num_steps: int = setting(128, "Steps T of each environment in one iteration.", gt=0)
    overlap: bool = setting(
        False,
        "Collect while learning: actors use the weights from before the update. Policy lag is exactly one, which the "
        "loss corrects for, but which changes what is learnt. Results stay reproducible and independent of the number "
        "of actors.",
    )

    @property
    def batch_size(self) -> int:
        """Return B = N * E * T, the env steps of one iteration."""
        return self.num_samplers * self.envs_per_sampler * self.num_steps


@dataclass(frozen=True, kw_only=True)
class PPO:
    """The algorithm."""

    learning_rate: float = setting(2.5e-4, "Step size of Adam at the start.", gt=0)
    anneal_lr: bool = setting(True, "Lower the learning rate linearly to zero over the run.")
    desired_kl: float | None = setting(
        None,
        "Adapt the learning rate before each SGD step: lower it if the approximate KL exceeds twice this, raise it if "
        "it is below half of this; none: never.",
        gt=0,
        when=(RATE_NOT_ANNEALED, SEVERAL_SGD_STEPS),
    )
    gamma: float = setting(0.99, "Discount factor per env step.", ge=0, le=1)
    gae_lambda: float = setting(0.95, "Lambda of generalised advantage estimation.", ge=0, le=1)
    update_epochs: int = setting(4, "Epochs K: passes over each batch.", gt=0)
    minibatch_size: int | None = setting(
        None, "Largest number of rows of a minibatch; none: a quarter of the batch.", gt=0
    )
    norm_adv: bool = setting(True, "Standardise advantages within each minibatch.")
    recompute_advantages: bool = setting(
        False,
        "Recompute advantages and returns before each further epoch, with the values of the current network.",
        when=(SEVERAL_EPOCHS,),
    )
    clip_coef: float = setting(0.2, "Clipping range of the probability ratio.", gt=0, lt=1)
    anneal_clip: bool = setting(False, "Lower the clipping range linearly to zero over the run.")
    clip_vloss: bool = setting(
        False, "Clip the value loss around the old value, as OpenAI Baselines does.", when=(WITH_VALUE_LOSS,)
    )
    ent_coef: float = setting(0.01, "Weight of the entropy bonus.", ge=0)
    anneal_ent: bool = setting(
        False, "Lower the weight of the entropy bonus linearly to zero over the run.", when=(WITH_ENTROPY,)
    )
    vf_coef: float = setting(0.5, "Weight of the value loss.", ge=0)
    max_grad_norm: float = setting(0.5, "Largest global norm of the gradient.", gt=0)
    target_kl: float | None = setting(
        None,
        "Skip the remaining epochs of an update once the approximate KL exceeds this; none: never.",
        gt=0,
        when=(SEVERAL_SGD_STEPS,),
    )
    norm_obs: bool = setting(
        False, "Normalise observations by their running mean and standard deviation.", branch=False
    )
    norm_reward: bool = setting(
        False, "Divide rewards by the running standard deviation of the discounted return.", branch=False
    )
    freeze_norm_after: int | None = setting(
        None,
        "Stop updating the statistics of norm_obs and norm_reward after this many env steps; 0 on a branch keeps those "
        "of the run it starts from; none: never.",
        ge=0,
        when=(WITH_NORMALISER,),
    )
    sign_reward: bool = setting(False, "Learn from the sign of each reward: -1, 0 or 1.")
    clip_reward: float | None = setting(
        None, "Clip each reward to plus or minus this; none: do not.", gt=0, when=(REWARDS_NOT_SIGNS,)
    )
    scale_reward: float = setting(
        1.0, "Multiply each reward by this, after clipping.", gt=0, when=(REWARDS_NOT_NORMALISED,)
    )

    def minibatches_of(self, rows: int, steps: int = 1) -> int:
        """Return the number of minibatches of `rows`: no row is left out, and sizes differ by at most one sequence.

        Args:
            steps: of a sequence; minibatches consist of whole ones.
        """
        sequences = rows // steps
        most = math.ceil(sequences / 4) if self.minibatch_size is None else max(1, self.minibatch_size // steps)
        return math.ceil(sequences / most)

    @property
    def annealed(self) -> tuple[str, ...]:
        """The settings that fall linearly to zero over the run."""
        schedules = {"learning_rate": self.anneal_lr, "clip_coef": self.anneal_clip, "ent_coef": self.anneal_ent}
        return tuple(name for name, falls in schedules.items() if falls)

    def after(self, share: float) -> PPO:
        """Return these settings as they are after this share of the run, 0 <= share < 1 (detail 4)."""
        now = {name: getattr(self, name) * (1 - share) for name in self.annealed}
        return dataclasses.replace(self, **now) if now else self

    def learning_rate_after(self, share: float) -> float:
        """Return the step size of Adam after `share` of the run, 0 <= share < 1 (detail 4)."""
        return self.learning_rate * (1 - share) if self.anneal_lr else self.learning_rate


@dataclass(frozen=True, kw_only=True)
class Network:
    """The policy and value networks."""

    model: str | Callable[..., Any] | None = setting(
        None,
        "A network of your own, as module:Class (in Python, also the class itself): a torch.nn.Module, built with "
        "(spaces, head_size), that maps observations to head and values; see examples/own_network.py. Default: a "
        "network that fits the observations.",
        branch=False,
    )
    model_kwargs: dict[str, Any] = setting(
        {},
        "Further keyword arguments of the model's class, as JSON: '{\"units\": 32}'.",
        branch=False,
        when=(OWN_NETWORK,),
    )
    hidden_sizes: tuple[int, ...] = setting(
        (64, 64),
        "Units of the hidden layers, the same for policy and value. None follow the encoder of a single image.",
        gt=0,
        branch=False,
        when=(DEFAULT_NETWORK,),
    )
    activation: Literal["tanh", "relu"] = setting(
        "tanh", "Activation between hidden layers.", branch=False, when=(DEFAULT_NETWORK, WITH_HIDDEN_LAYERS)
    )
    image_encoder: Literal["auto", "nature", "impala", "flatten"] = setting(
        "auto",
        "Layers that read images: the CNN of the Nature paper, that of IMPALA, or none (flatten); auto: nature, and "
        "impala below 36 x 36 pixels.",
        branch=False,
        when=(DEFAULT_NETWORK,),
    )
    image_features: int | None = setting(
        None,
        "Units of the last layer of an image's encoder; none: 512 for nature, 256 for impala.",
        gt=0,
        branch=False,
        when=(DEFAULT_NETWORK,),
    )
    trunk: Literal["auto", "shared", "separate"] = setting(
        "auto",
        "Whether policy and value share all layers but the last; auto: shared if there are images.",
        branch=False,
        when=(DEFAULT_NETWORK,),
    )
    layer_norm: bool = setting(
        False,
        "Normalise the inputs of each activation between hidden layers over the layer's units.",
        branch=False,
        when=(DEFAULT_NETWORK, WITH_HIDDEN_LAYERS),
    )
    memory: Literal["none", "gru", "lstm"] = setting(
        "none",
        "Memory of past observations between the hidden layers and the outputs: a GRU or an LSTM, whose state starts "
        "from zero in each episode.",
        branch=False,
        when=(DEFAULT_NETWORK,),
    )
    memory_size: int = setting(64, "Units of the memory.", gt=0, branch=False, when=(WITH_MEMORY,))
    sequence_length: int | None = setting(
        None,
        "Steps of the sequences that a network with memory learns from; must divide num_steps. Gradients do not reach "
        "further back. A network of your own with memory needs it; none: the largest divisor of num_steps up to 16.",
        gt=0,
        when=(MAYBE_MEMORY,),
    )
    dtype: Literal["float32", "float64"] = setting(
        "float32", "Precision of the networks; float64 is for comparing implementations.", branch=False
    )

    def sequence_steps(self, num_steps: int) -> int:
        """Return L, the steps of the sequences that minibatches consist of; 1 without memory."""
        if self.memory == "none" and self.model is None:
            return 1
        if self.sequence_length is not None or self.model is not None:
            return self.sequence_length or 1
        return max(steps for steps in range(1, USUAL_SEQUENCE + 1) if num_steps % steps == 0)

    @property
    def model_name(self) -> str | None:
        """Return the import path of the user's network; None for the default network."""
        return None if self.model is None else _import_path(self.model)


@dataclass(frozen=True, kw_only=True)
class Actors:
    """Collecting on Ray."""

    num_actors: int = setting(
        0,
        "Ray actors that host the samplers, at most one per sampler; 0 collects in this process, without Ray. "
        "Changes the time, never the result.",
        resume="free",
        ge=0,
    )
    address: str | None = setting(
        None,
        "Address of a running Ray cluster, auto or host:port. Default: $RAY_ADDRESS if it is set; else Ray is started "
        "on this machine.",
        resume="free",
        when=(WITH_ACTORS,),
    )
    cpus_per_actor: float = setting(
        1.0, "Logical CPUs that Ray reserves for each actor.", resume="free", when=(WITH_ACTORS,), gt=0
    )
    actor_gpus: float = setting(
        0.0, "GPUs that Ray reserves for each actor, for its simulator.", resume="free", when=(WITH_ACTORS,), ge=0
    )
    actor_resources: dict[str, float] = setting(
        {},
        "Other resources that Ray reserves for each actor, as JSON: '{\"licence\": 1}'.",
        resume="free",
        when=(WITH_ACTORS,),
    )
    segment_timeout_s: float = setting(
        600.0,
        "Longest time in seconds for one segment. An actor that takes longer counts as hung: it is killed and "
        "replaced.",
        resume="free",
        when=(WITH_ACTORS,),
        gt=0,
    )
    max_actor_restarts: int = setting(
        5,
        "Replacements of an actor in a row that deliver no segment, after which the run stops.",
        resume="free",
        when=(WITH_ACTORS,),
        ge=0,
    )
    replay: bool = setting(
        True, "Rebuild a lost sampler by replaying its actions; without it, its open episodes are abandoned."
    )
    dashboard: bool = setting(
        False,
        "Start the dashboard of the Ray that is started on this machine (needs ray[default]).",
        resume="free",
        when=(WITH_ACTORS, OWN_RAY),
    )


@dataclass(frozen=True, kw_only=True)
class Learners:
    """Training, in this process or on several Ray actors."""

    num_learners: int = setting(
        0,
        "Ray actors that share the SGD of each minibatch; 0 trains in this process. Worthwhile for large networks. "
        "Results are reproducible for a given number.",
        resume="close",
        when=(When(WITH_ACTORS.holds, "num_actors=0 runs everything in this process. Use num_actors=1 or more"),),
        ge=0,
    )
    learner_threads: int = setting(
        1,
        "CPU threads of SGD; more than one is worthwhile from about a million parameters. Results are reproducible "
        "for a given number.",
        resume="close",
        gt=0,
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "cpu", "Device of SGD; auto: a GPU if there is one. Actors always use the CPU.", resume="close"
    )
    micro_batch_size: int | None = setting(
        None,
        "Rows of a minibatch that pass through the network at once, for minibatches that do not fit into memory; their "
        "gradients are summed; none: all rows.",
        resume="close",
        when=(SMALLER_THAN_MINIBATCH,),
        gt=0,
    )
    learner_cpus: float = setting(
        1.0, "Logical CPUs that Ray reserves for each learner.", resume="free", when=(WITH_LEARNERS,), gt=0
    )
    learner_gpus: float = setting(
        0.0, "GPUs that Ray reserves for each learner.", resume="free", when=(WITH_LEARNERS, ON_GPU), ge=0
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """Length, folder and checkpoints of the run."""

    total_timesteps: int = setting(
        500_000, "Env steps to train for, summed over all environments; 1e6 is accepted.", resume="raised", gt=0
    )
    seed: int = setting(1, "Seed of every random number of the run.", ge=0)
    name: str = setting("ppo", "Name of the experiment, used in the name of the run's folder.", min_length=1)
    run_dir: Path | None = setting(None, "Folder of the run. Default: runs/ENV__NAME__sSEED__TIME.", resume="free")
    checkpoint_interval_s: float = setting(
        60.0,
        "Seconds between checkpoints; 0: one in each iteration. One is always written at the end.",
        resume="free",
        ge=0,
    )
    keep_checkpoints: int = setting(
        3, "Number of newest checkpoints to keep, besides the best one.", resume="free", gt=0
    )
    progress: Literal["auto", "live", "plain", "off"] = setting(
        "auto", "A live panel, plain lines or nothing; auto: the panel on a terminal, else lines.", resume="free"
    )

    def iterations_of(self, batch_size: int) -> int:
        """Return the number of iterations; the last may exceed `total_timesteps` by less than one batch."""
        return math.ceil(self.total_timesteps / batch_size)


PARTS: dict[str, type] = {
    "env": Env,
    "sampling": Sampling,
    "ppo": PPO,
    "network": Network,
    "actors": Actors,
    "learners": Learners,
    "run": Run,
}


@cache
def settings_by_name() -> dict[str, dataclasses.Field[Any]]:
    """Return the dataclass field of every setting, in the order of the parts."""
    return {field.name: field for part in PARTS.values() for field in dataclasses.fields(part)}


def about(name: str) -> About:
    """Return the metadata of a setting."""
    found: About = settings_by_name()[name].metadata[KEY]
    return found


def default_of(name: str) -> Any:
    """Return the default of a setting, or `dataclasses.MISSING` if it has none."""
    field = settings_by_name()[name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@cache
def types_by_name() -> dict[str, Any]:
    """Return the type of every setting."""
    return {name: hint for part in PARTS.values() for name, hint in get_type_hints(part).items()}
