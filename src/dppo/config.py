"""The whole configuration of a run: one frozen model, checked before any process starts.

Names are CleanRL's where CleanRL has one. Sizes that follow from others are properties, never settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from dppo.errors import ConfigError, counted, unknown_name


def _whole_number(value: Any) -> Any:
    """Let `1e6` and `1_000_000` stand for a whole number."""
    if isinstance(value, str):
        for number in (int, float):
            try:
                value = number(value)
                break
            except ValueError:
                continue
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return value


Count = Annotated[int, BeforeValidator(_whole_number)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


# Settings that mean something only where there are actors.
OF_ACTORS = (
    "address",
    "cpus_per_actor",
    "actor_gpus",
    "actor_resources",
    "segment_timeout_s",
    "max_actor_restarts",
    "dashboard",
)
OF_LEARNERS = ("learner_cpus", "learner_gpus")


class Config(BaseModel):
    """Settings of one training run."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    # The task
    env_id: str | Callable[..., Any] = Field(
        description="Gymnasium id, `module:Name-v0`, `module:factory`, or (in Python) a callable that returns an env."
    )
    env_kwargs: dict[str, Any] = Field(
        default={}, description="Arguments for the environment, as JSON: '{\"g\": 9.8}'."
    )
    total_timesteps: Count = Field(
        default=500_000, gt=0, description="Env steps to train for, over all environments (1e6 is accepted)."
    )
    seed: Count = Field(default=1, ge=0, description="Everything random in the run follows from it.")

    # Collecting: N samplers of E environments, T steps each, hosted by M actors
    num_actors: Count = Field(
        default=0,
        ge=0,
        description="Ray actors that host the samplers; 0 collects in this process without Ray. Changes the time, "
        "never the result, where --num-samplers is given (or preset).",
    )
    num_samplers: Count | None = Field(
        default=None,
        gt=0,
        description="Samplers N, each with its own environments; part of the learning problem. "
        "Default: as many as actors, at least 1.",
    )
    envs_per_sampler: Count = Field(default=1, gt=0, description="Environments E of each sampler, stepped together.")
    num_steps: Count = Field(default=128, gt=0, description="Steps T of one segment, per environment.")

    # PPO
    learning_rate: Finite = Field(default=2.5e-4, gt=0, description="Adam's step size at the start.")
    anneal_lr: bool = Field(default=True, description="Let the learning rate fall linearly to zero.")
    gamma: Finite = Field(default=0.99, ge=0, le=1, description="Discount per env step.")
    gae_lambda: Finite = Field(default=0.95, ge=0, le=1, description="Lambda of generalised advantage estimation.")
    update_epochs: Count = Field(default=4, gt=0, description="Epochs K: passes over each batch.")
    minibatch_size: Count | None = Field(
        default=None, gt=0, description="Rows M of a minibatch, at most. Default: a quarter of the batch."
    )
    norm_adv: bool = Field(default=True, description="Standardise advantages within each minibatch.")
    clip_coef: Finite = Field(default=0.2, gt=0, lt=1, description="How far a probability ratio may usefully move.")
    clip_vloss: bool = Field(default=False, description="Clip the value loss round the old value, as OpenAI's code.")
    ent_coef: Finite = Field(default=0.01, ge=0, description="Weight of the entropy bonus.")
    vf_coef: Finite = Field(default=0.5, ge=0, description="Weight of the value loss.")
    max_grad_norm: Finite = Field(default=0.5, gt=0, description="Limit of the gradient's global norm.")
    target_kl: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Stop the epochs of an update when approximate KL passes this."
    )
    norm_obs: bool = Field(default=False, description="Normalise observations by their running mean and deviation.")
    norm_reward: bool = Field(
        default=False, description="Divide rewards by the running deviation of the discounted return."
    )

    # The model
    hidden_sizes: tuple[Annotated[int, Field(gt=0)], ...] = Field(
        default=(64, 64), description="Hidden layers of the policy trunk, and of the value trunk."
    )
    activation: Literal["tanh", "relu"] = Field(default="tanh", description="Between hidden layers.")
    dtype: Literal["float32", "float64"] = Field(
        default="float32", description="Precision of the model; float64 is for comparing implementations."
    )
    learner_threads: Count = Field(
        default=1,
        gt=0,
        description="CPU threads of SGD. Results are reproducible for a given number; more pays from about a million "
        "parameters.",
    )

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="cpu", description="Where SGD runs; auto: on a GPU if there is one. Actors act on the CPU in any case."
    )
    micro_batch_size: Count | None = Field(
        default=None,
        gt=0,
        description="Rows of a minibatch to go through the model at once; gradients are added up. For minibatches that "
        "do not fit into memory.",
    )
    num_learners: Count = Field(
        default=0,
        ge=0,
        description="Ray actors that share the SGD of each minibatch; 0 trains in this process. Pays for large models. "
        "Results are reproducible for a given number.",
    )

    # Where things run
    address: str | None = Field(
        default=None,
        description="Address of a running Ray cluster (`auto`, or host:port). Default: $RAY_ADDRESS, else Ray starts "
        "here.",
    )
    cpus_per_actor: Finite = Field(default=1.0, gt=0, description="Logical CPUs that an actor takes from Ray.")
    actor_resources: dict[str, float] = Field(
        default={}, description="Other Ray resources that an actor takes, as JSON: '{\"licence\": 1}'."
    )
    actor_gpus: Finite = Field(default=0.0, ge=0, description="GPUs that an actor takes from Ray, for its simulator.")
    learner_cpus: Finite = Field(default=1.0, gt=0, description="Logical CPUs that a learner takes from Ray.")
    learner_gpus: Finite = Field(default=0.0, ge=0, description="GPUs that a learner takes from Ray.")
    segment_timeout_s: Finite = Field(
        default=600.0,
        gt=0,
        description="Longest time for one segment (the first one includes making the environments). A later actor "
        "counts as hung: it is killed and replaced.",
    )
    max_actor_restarts: Count = Field(
        default=5, ge=0, description="How often in a row an actor may be replaced without delivering a segment."
    )
    replay: bool = Field(
        default=True,
        description="Bring a lost sampler back by replaying its actions; off: its open episodes are abandoned.",
    )
    dashboard: bool = Field(default=False, description="Ray's dashboard on the Ray started here (needs ray[default]).")

    # What it leaves behind
    name: str = Field(default="ppo", min_length=1, description="Name of the experiment, part of the run's folder.")
    run_dir: Path | None = Field(default=None, description="Folder of the run. Default: runs/ENV__NAME__sSEED__TIME.")
    checkpoint_interval_s: Finite = Field(
        default=60.0,
        ge=0,
        description="Seconds between checkpoints (one is always written at the end); 0: each iteration.",
    )
    keep_checkpoints: Count = Field(default=3, gt=0, description="Newest checkpoints to keep, beside the best one.")
    progress: Literal["auto", "live", "plain", "off"] = Field(
        default="auto", description="A live panel, plain lines, or nothing; auto: live on a terminal."
    )

    # ------------------------------------------------------------------ what follows from the settings

    @property
    def samplers(self) -> int:
        """N: samplers of the run."""
        return self.num_samplers or max(1, self.num_actors)

    @property
    def batch_size(self) -> int:
        """B = N * E * T: env steps of one iteration."""
        return self.samplers * self.envs_per_sampler * self.num_steps

    @property
    def minibatches_per_epoch(self) -> int:
        """Minibatches that an epoch is cut into: no row is left out, sizes differ by one at most."""
        return math.ceil(self.batch_size / (self.minibatch_size or math.ceil(self.batch_size / 4)))

    @property
    def minibatch_rows(self) -> int:
        """Rows of the largest minibatch."""
        return math.ceil(self.batch_size / self.minibatches_per_epoch)

    @property
    def iterations(self) -> int:
        """Iterations of the run; the last one may go past `total_timesteps` by less than a batch."""
        return math.ceil(self.total_timesteps / self.batch_size)

    def learning_rate_at(self, iteration: int) -> float:
        """Adam's step size in an iteration, 0 <= iteration < iterations (detail 4)."""
        return self.learning_rate * (1 - iteration / self.iterations) if self.anneal_lr else self.learning_rate

    @property
    def env_name(self) -> str:
        """The environment as a person would write it."""
        if isinstance(self.env_id, str):
            return self.env_id
        return f"{getattr(self.env_id, '__module__', '?')}:{getattr(self.env_id, '__qualname__', repr(self.env_id))}"

    def hosting(self) -> list[list[int]]:
        """The sampler ids of each actor; with 0 actors, one list for this process."""
        hosts = max(1, self.num_actors)
        return [list(range(self.samplers))[host::hosts] for host in range(hosts)]

    def sizes_in_words(self) -> str:
        """What batch, segments, minibatches and updates come to, in one sentence."""
        per_epoch = self.minibatches_per_epoch
        minibatches = "1 minibatch" if per_epoch == 1 else f"{per_epoch} minibatches"
        return (
            f"{counted(self.iterations, 'iteration')} of {self.batch_size:,} steps ({self._factors()}), each trained "
            f"for {counted(self.update_epochs, 'epoch')} of {minibatches} of up to {self.minibatch_rows:,} rows: "
            f"{counted(self.iterations * self.update_epochs * per_epoch, 'SGD step')} in all."
        )

    def _factors(self) -> str:
        """What a batch is made of."""
        return (
            f"{counted(self.samplers, 'sampler')} x {counted(self.envs_per_sampler, 'env')} x "
            f"{counted(self.num_steps, 'step')}"
        )

    def hosting_in_words(self) -> str:
        """Who hosts the samplers, in one sentence."""
        if self.num_actors == 0:
            return "Collecting in this process; --num-actors 8 spreads it over Ray actors."
        fewest, most = divmod(self.samplers, self.num_actors)
        if not most:
            if self.num_actors == 1:
                return f"1 Ray actor hosts {counted(fewest, 'sampler')}."
            return f"{self.num_actors} Ray actors host {counted(fewest, 'sampler')} each."
        return (
            f"{self.num_actors} Ray actors host {self.samplers} samplers unevenly: {most} of them {fewest + 1}, the "
            f"others {fewest}; the others wait for these."
        )

    # ------------------------------------------------------------------ what cannot be

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        self._check_sizes()
        self._check_shares()
        self._check_effects()
        return self

    def _check_sizes(self) -> None:
        factors = self._factors()
        if self.batch_size < 2:
            raise ValueError(
                f"num_steps={self.num_steps} makes a batch of {self.batch_size} step ({factors}): nothing to learn "
                f"from. Raise num_steps; 128 is usual."
            )
        if self.minibatch_size is not None and self.minibatch_size > self.batch_size:
            raise ValueError(
                f"minibatch_size={self.minibatch_size} is larger than the batch of {self.batch_size} steps "
                f"({factors}). Use at most {self.batch_size}, or raise num_steps."
            )
        if self.norm_adv and self.batch_size // self.minibatches_per_epoch < 2:
            setting = f"minibatch_size={self.minibatch_size}" if self.minibatch_size else f"num_steps={self.num_steps}"
            raise ValueError(
                f"{setting} makes {self.minibatches_per_epoch} minibatches of the batch of {self.batch_size} rows, "
                f"some of one row, whose advantage cannot be standardised. Use a minibatch_size of at least "
                f"{min(3, self.batch_size)} (64 is usual), or --no-norm-adv."
            )
        if (self.address or "").startswith("ray://"):
            raise ValueError(
                f"address={self.address}: Ray Client is not supported. Run dppo on a node of the cluster with "
                f"--address auto, or give the head's host:port (6379 by default)."
            )
        for name, amount in self.actor_resources.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory") or not 0 < amount < math.inf:
                raise ValueError(
                    f"actor_resources={self.actor_resources}: {name}={amount} is no custom resource with a positive "
                    f"amount. Use --cpus-per-actor for CPUs; name others as the cluster does."
                )
        if self.num_actors > self.samplers:
            raise ValueError(
                f"num_actors={self.num_actors} is more than the {self.samplers} samplers there are to host: "
                f"{self.num_actors - self.samplers} would idle. Use at most {self.samplers}, or raise num_samplers "
                f"(which makes the batch larger)."
            )
        if self.total_timesteps < self.batch_size:
            raise ValueError(
                f"total_timesteps={self.total_timesteps} is less than one batch of {self.batch_size} steps "
                f"({factors}). Raise it, or lower num_steps."
            )

    def _check_shares(self) -> None:
        """Each learner gets as many samplers, and as many rows of each minibatch, as the others."""
        learners = self.num_learners
        if learners and self.device != "cpu" and not self.learner_gpus:
            raise ValueError(
                f"device={self.device}: learners on Ray see the GPUs that they ask for, and ask for none. Give "
                f"--learner-gpus 1, or --device cpu."
            )
        if self.learner_gpus > 1 or (learners > 1 and 0 < self.learner_gpus < 1):
            raise ValueError(
                f"learner_gpus={self.learner_gpus:g}: a learner trains on one GPU, and several cannot share one. Use 1."
            )
        if learners and self.learner_threads > max(1.0, self.learner_cpus):
            raise ValueError(
                f"learner_threads={self.learner_threads} is more than the learner_cpus={self.learner_cpus:g} that a "
                f"learner takes from Ray. Give --learner-cpus {self.learner_threads}."
            )
        if learners <= 1:
            return
        if self.samplers % learners:
            low = self.samplers // learners * learners
            near = [str(n) for n in (low, low + learners) if n >= max(1, self.num_actors)]
            raise ValueError(
                f"num_learners={learners} cannot share {self.samplers} samplers evenly. Use num_samplers="
                f"{' or '.join(near)}, or another number of learners."
            )
        rows, per_epoch = self.batch_size // learners, self.minibatches_per_epoch
        if rows % per_epoch:
            divisors = [n for n in range(1, max(1, rows // 2) + 1) if rows % n == 0]
            best = sorted(divisors, key=lambda n: abs(n - per_epoch))[:2]
            raise ValueError(
                f"minibatch_size={self.minibatch_size or self.minibatch_rows}: {per_epoch} minibatches do not divide "
                f"the {rows} rows of each of {learners} learners. Use minibatch_size="
                f"{' or '.join(str(self.batch_size // n) for n in sorted(best, reverse=True))}."
            )

    def _check_effects(self) -> None:
        """A setting that would change nothing is a misunderstanding: say so now."""
        for setting, without_effect, reason in (
            *(
                (name, self.num_actors == 0, "num_actors=0 has no actors and no Ray. Give --num-actors")
                for name in OF_ACTORS
            ),
            *(
                (name, self.num_learners == 0, "num_learners=0 trains in this process. Give --num-learners")
                for name in OF_LEARNERS
            ),
            ("num_learners", self.num_actors == 0, "num_actors=0 keeps everything in this process. Give --num-actors"),
            (
                "micro_batch_size",
                (self.micro_batch_size or 0) >= math.ceil(self.minibatch_rows / max(1, self.num_learners)),
                f"a minibatch has {self.minibatch_rows} rows. Use a smaller one, or leave it out",
            ),
            ("learner_gpus", self.device == "cpu", "device=cpu trains on the CPU. Give --device cuda"),
            ("dashboard", self.address is not None, "a cluster that runs has its own dashboard. Leave it out"),
            ("clip_vloss", self.vf_coef == 0, "vf_coef=0 leaves the value loss out. Leave it out, or raise vf_coef"),
            ("activation", not self.hidden_sizes, "hidden_sizes is empty. Leave it out"),
            (
                "target_kl",
                self.update_epochs * self.minibatches_per_epoch == 1,
                "an update of one SGD step has nothing to stop. Leave it out, or raise update_epochs",
            ),
        ):
            if without_effect and getattr(self, setting) != type(self).model_fields[setting].default:
                raise ValueError(f"{setting}={getattr(self, setting)} has no effect: {reason}.")


# Settings that may differ when a run is resumed: none of them changes what is learnt.
FREE_ON_RESUME = frozenset(
    {*OF_ACTORS, *OF_LEARNERS, "num_actors", "run_dir", "checkpoint_interval_s", "keep_checkpoints", "progress"}
)

# Settings that may differ too, and change results in their last bits, or the order of rows: not what is learnt.
CLOSE_ON_RESUME = frozenset({"num_learners", "device", "micro_batch_size", "learner_threads"})


def make_config(settings: dict[str, Any]) -> Config:
    """A checked configuration.

    Raises:
        ConfigError: one line for each setting that is wrong, with the value, the reason and the remedy.
    """
    try:
        return Config(**settings)
    except ValidationError as error:
        lines: dict[Any, str] = {}
        for one in error.errors(include_url=False):
            lines.setdefault(one["loc"][:1], _in_words(one))  # of a union's errors the first says enough
        raise ConfigError("\n".join(lines.values())) from None


REMEDIES = {  # by the beginning of pydantic's error type
    "greater_than": "Use a larger one.",
    "less_than": "Use a smaller one.",
    "finite_number": "Use a finite number.",
    "int_": "Use a whole number, 1000 or 1e3.",
    "float_": "Use a number.",
    "bool_": "Use true or false.",
    "literal_error": "Use one of these.",
    "dict_": "Use `name: value` pairs.",
    "tuple_": "Use a list.",
}


def _in_words(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"][:1] + tuple(i for i in error["loc"][1:] if isinstance(i, int)))
    if not path:
        return str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        return unknown_name("setting", path, Config.model_fields)
    if error["type"] == "missing":
        return f"{path} is missing. Give it."
    remedy = next((text for start, text in REMEDIES.items() if error["type"].startswith(start)), "")
    return f"{path}={error['input']!r}: {_lower(error['msg'])}. {remedy}".rstrip()


def _lower(text: str) -> str:
    text = text.removeprefix("Value error, ").removeprefix("Input ")
    return text[:1].lower() + text[1:]


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a YAML or TOML file, not yet checked.

    Raises:
        ConfigError: the file cannot be read, or holds no settings.
    """
    try:
        text = path.read_text(encoding="utf8")
        if path.suffix == ".toml":
            data = _toml(text)
        else:
            data = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config={path}: cannot be read as settings: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"config={path}: holds {type(data).__name__}, not settings. Write `name: value` lines.")
    return {key.replace("-", "_"): value for key, value in data.items() if key != "versions"}


def _toml(text: str) -> Any:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        raise ValueError("TOML needs Python 3.11 or newer; write YAML") from None
    return tomllib.loads(text)
