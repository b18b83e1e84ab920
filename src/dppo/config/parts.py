"""Every setting, in seven frozen records: what a component needs is handed to it whole.

Plain dataclasses, because they travel to actors, which must not import pydantic. Names are CleanRL's where it has one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

from dppo.config.setting import KEY, About, When, metadata, setting

WITH_ACTORS = When(
    lambda config: config.num_actors > 0, "num_actors=0 has no actors and no Ray. Use num_actors=1 or more"
)
WITH_LEARNERS = When(
    lambda config: config.num_learners > 0, "num_learners=0 trains in this process. Use num_learners=1 or more"
)
OWN_RAY = When(lambda config: config.address is None, "a running cluster has its own dashboard. Leave it out")
ON_GPU = When(lambda config: config.device != "cpu", "device=cpu trains on the CPU. Use device=cuda")
SMALLER_THAN_MINIBATCH = When(
    lambda config: (config.micro_batch_size or 0) < config.rows_of_a_learner,
    "a minibatch has {config.minibatch_rows} rows. Use a smaller one, or leave it out",
)
WITH_VALUE_LOSS = When(
    lambda config: config.vf_coef > 0, "vf_coef=0 leaves the value loss out. Leave it out, or raise vf_coef"
)
WITH_HIDDEN_LAYERS = When(lambda config: bool(config.hidden_sizes), "hidden_sizes is empty. Leave it out")
DEFAULT_NETWORK = When(
    lambda config: config.model is None, "model={config.model_name} has layers of its own. Leave it out"
)
OWN_NETWORK = When(
    lambda config: config.model is not None, "there is no model to pass it to. Give model, or leave it out"
)
SEVERAL_SGD_STEPS = When(
    lambda config: config.update_epochs * config.minibatches_per_epoch > 1,
    "an update of one SGD step has nothing to stop. Leave it out, or raise update_epochs",
)


@dataclass(frozen=True, kw_only=True)
class Env:
    """The environment."""

    env_id: str | Callable[..., Any] = field(
        metadata=metadata(
            "The environment: a Gymnasium id (CartPole-v1), module:Name-v0 (the module registers it), module:factory "
            "(a function or class that returns one), or, in Python, any callable that returns one."
        )
    )
    env_kwargs: dict[str, Any] = setting({}, "Arguments of the environment, as JSON: '{\"g\": 9.8}'.")
    drop_obs: tuple[str, ...] = setting(
        (),
        "Parts of a Dict or Tuple observation to leave out, by name: mission; robot.mission for a part of a part.",
        branch=False,
    )

    @property
    def env_name(self) -> str:
        """The environment's id; of a callable, its import path."""
        return _import_path(self.env_id)


def _import_path(named: Any) -> str:
    """Return `module:name` of a class or function; a name as it is."""
    if isinstance(named, str):
        return named
    return f"{getattr(named, '__module__', '?')}:{getattr(named, '__qualname__', repr(named))}"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The batch: N samplers of E environments, T steps each."""

    num_samplers: int = setting(
        8,
        "Samplers N, each with its own environments. Part of the learning problem: the same N gives the same result "
        "with any number of actors.",
        gt=0,
    )
    envs_per_sampler: int = setting(1, "Environments E of each sampler, stepped one after the other.", gt=0)
    num_steps: int = setting(128, "Steps T of one segment, per environment.", gt=0)
    overlap: bool = setting(
        False,
        "Collect while learning: actors make the next segments with the weights before the update. Policy lag is "
        "exactly one, which changes what is learnt; just as reproducible and independent of the number of actors.",
    )

    @property
    def batch_size(self) -> int:
        """B = N * E * T: env steps of one iteration."""
        return self.num_samplers * self.envs_per_sampler * self.num_steps


@dataclass(frozen=True, kw_only=True)
class PPO:
    """The algorithm."""

    learning_rate: float = setting(2.5e-4, "Adam's step size at the start.", gt=0)
    anneal_lr: bool = setting(True, "Lower the learning rate linearly to zero at --total-timesteps.")
    gamma: float = setting(0.99, "Discount per env step.", ge=0, le=1)
    gae_lambda: float = setting(0.95, "Lambda of generalised advantage estimation.", ge=0, le=1)
    update_epochs: int = setting(4, "Epochs K: passes over each batch.", gt=0)
    minibatch_size: int | None = setting(None, "Rows M of a minibatch, at most; none: a quarter of the batch.", gt=0)
    norm_adv: bool = setting(True, "Standardise advantages within each minibatch.")
    clip_coef: float = setting(0.2, "Clipping range of the probability ratio.", gt=0, lt=1)
    clip_vloss: bool = setting(
        False, "Clip the value loss around the old value, as OpenAI's code does.", when=(WITH_VALUE_LOSS,)
    )
    ent_coef: float = setting(0.01, "Weight of the entropy bonus.", ge=0)
    vf_coef: float = setting(0.5, "Weight of the value loss.", ge=0)
    max_grad_norm: float = setting(0.5, "Limit of the gradient's global norm.", gt=0)
    target_kl: float | None = setting(
        None, "Skip the remaining epochs of an update when approximate KL passes this.", gt=0, when=(SEVERAL_SGD_STEPS,)
    )
    norm_obs: bool = setting(False, "Normalise observations by their running mean and deviation.", branch=False)
    norm_reward: bool = setting(
        False, "Divide rewards by the running deviation of the discounted return.", branch=False
    )

    def minibatches_of(self, rows: int) -> int:
        """Return how many minibatches `rows` are cut into: no row is left out, sizes differ by one at most."""
        return math.ceil(rows / (self.minibatch_size or math.ceil(rows / 4)))

    def learning_rate_after(self, share: float) -> float:
        """Return Adam's step size after this share of the run, 0 <= share < 1 (detail 4)."""
        return self.learning_rate * (1 - share) if self.anneal_lr else self.learning_rate


@dataclass(frozen=True, kw_only=True)
class Network:
    """The policy and value networks."""

    model: str | Callable[..., Any] | None = setting(
        None,
        "A network of your own, as module:Class (in Python, also the class itself): a torch.nn.Module that is made "
        "with (spaces, head_size) and maps observations to head and values; see examples/own_network.py. Default: a "
        "network that fits the observations.",
        branch=False,
    )
    model_kwargs: dict[str, Any] = setting(
        {}, "Further arguments of the model's class, as JSON: '{\"units\": 32}'.", branch=False, when=(OWN_NETWORK,)
    )
    hidden_sizes: tuple[int, ...] = setting(
        (64, 64),
        "Hidden layers of the policy network, and of the value network; none behind a single image's encoder.",
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
    dtype: Literal["float32", "float64"] = setting(
        "float32", "Precision of the networks; float64 is for comparing implementations.", branch=False
    )

    @property
    def model_name(self) -> str | None:
        """The import path of the user's network; None for the default network."""
        return None if self.model is None else _import_path(self.model)


@dataclass(frozen=True, kw_only=True)
class Actors:
    """Collecting on Ray."""

    num_actors: int = setting(
        0,
        "Ray actors that host the samplers, at most one for each sampler; 0 collects in this process without Ray. "
        "Changes the time, never the result.",
        resume="free",
        ge=0,
    )
    address: str | None = setting(
        None,
        "Address of a running Ray cluster, auto or host:port. Default: $RAY_ADDRESS; without it, Ray starts here.",
        resume="free",
        when=(WITH_ACTORS,),
    )
    cpus_per_actor: float = setting(
        1.0, "Logical CPUs that an actor takes from Ray.", resume="free", when=(WITH_ACTORS,), gt=0
    )
    actor_gpus: float = setting(
        0.0, "GPUs that an actor takes from Ray, for its simulator.", resume="free", when=(WITH_ACTORS,), ge=0
    )
    actor_resources: dict[str, float] = setting(
        {}, "Other Ray resources that an actor takes, as JSON: '{\"licence\": 1}'.", resume="free", when=(WITH_ACTORS,)
    )
    segment_timeout_s: float = setting(
        600.0,
        "Longest time for one segment; the first one includes making the environments. An actor that takes longer "
        "counts as hung: it is killed and replaced.",
        resume="free",
        when=(WITH_ACTORS,),
        gt=0,
    )
    max_actor_restarts: int = setting(
        5,
        "Replacements of an actor in a row that deliver no segment, before the run stops.",
        resume="free",
        when=(WITH_ACTORS,),
        ge=0,
    )
    replay: bool = setting(
        True, "Rebuild a lost sampler by replaying its actions; --no-replay abandons its open episodes."
    )
    dashboard: bool = setting(
        False,
        "Start Ray's dashboard with the Ray started here (needs ray[default]).",
        resume="free",
        when=(WITH_ACTORS, OWN_RAY),
    )


@dataclass(frozen=True, kw_only=True)
class Learners:
    """SGD: here or on several Ray actors."""

    num_learners: int = setting(
        0,
        "Ray actors that share the SGD of each minibatch; 0 trains in this process. Pays for large networks. Results "
        "are reproducible for a given number.",
        resume="close",
        when=(When(WITH_ACTORS.holds, "num_actors=0 keeps everything in this process. Use num_actors=1 or more"),),
        ge=0,
    )
    learner_threads: int = setting(
        1,
        "CPU threads of SGD. More than one pays from about a million parameters. Results are reproducible for a given "
        "number.",
        resume="close",
        gt=0,
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "cpu", "Where SGD runs; auto: on a GPU if there is one. Actors always act on the CPU.", resume="close"
    )
    micro_batch_size: int | None = setting(
        None,
        "Rows of a minibatch that go through the network at once; gradients are added up. For minibatches that do not "
        "fit into memory.",
        resume="close",
        when=(SMALLER_THAN_MINIBATCH,),
        gt=0,
    )
    learner_cpus: float = setting(
        1.0, "Logical CPUs that a learner takes from Ray.", resume="free", when=(WITH_LEARNERS,), gt=0
    )
    learner_gpus: float = setting(
        0.0, "GPUs that a learner takes from Ray.", resume="free", when=(WITH_LEARNERS, ON_GPU), ge=0
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """The length of the run, and its folder."""

    total_timesteps: int = setting(
        500_000, "Env steps to train for, over all environments (1e6 is accepted).", resume="raised", gt=0
    )
    seed: int = setting(1, "Seed from which every random number of the run follows.", ge=0)
    name: str = setting("ppo", "Name of the experiment, part of the run's folder.", min_length=1)
    run_dir: Path | None = setting(None, "Folder of the run. Default: runs/ENV__NAME__sSEED__TIME.", resume="free")
    checkpoint_interval_s: float = setting(
        60.0, "Seconds between checkpoints (one is always written at the end); 0: each iteration.", resume="free", ge=0
    )
    keep_checkpoints: int = setting(3, "Newest checkpoints to keep, besides the best one.", resume="free", gt=0)
    progress: Literal["auto", "live", "plain", "off"] = setting(
        "auto", "A live panel, plain lines, or nothing; auto: live on a terminal.", resume="free"
    )

    def iterations_of(self, batch_size: int) -> int:
        """Return the iterations of the run; the last one may pass `total_timesteps` by less than a batch."""
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
    """Return what else is known of the setting `name`."""
    found: About = settings_by_name()[name].metadata[KEY]
    return found


def default_of(name: str) -> Any:
    """Return the default of a setting; `dataclasses.MISSING` where it has none."""
    field = settings_by_name()[name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@cache
def types_by_name() -> dict[str, Any]:
    """Return the type of every setting."""
    return {name: hint for part in PARTS.values() for name, hint in get_type_hints(part).items()}
