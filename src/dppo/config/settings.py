"""Settings of a run in eight parts, not checked against each other yet.

Importing this loads neither pydantic nor yaml: parts travel to actors.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

from dppo.config.algorithms import with_algorithm
from dppo.config.atari import with_atari
from dppo.config.groups import flattened, grouped
from dppo.config.parts import (
    PARTS,
    PPO,
    SAC,
    Actors,
    Env,
    Learners,
    Network,
    Run,
    Sampling,
    default_of,
    settings_by_name,
)
from dppo.config.sizes import Sizes, sizes_of

if TYPE_CHECKING:

    @dataclass(frozen=True, kw_only=True)
    class _FlatNames(Env, Sampling, PPO, SAC, Network, Actors, Learners, Run):
        """Config's keywords and attributes, for type checkers."""

        env: Env = ...  # type: ignore[assignment]
        sampling: Sampling = ...  # type: ignore[assignment]
        ppo: PPO = ...  # type: ignore[assignment]
        sac: SAC = ...  # type: ignore[assignment]
        network: Network = ...  # type: ignore[assignment]
        actors: Actors = ...  # type: ignore[assignment]
        learners: Learners = ...  # type: ignore[assignment]
        run: Run = ...  # type: ignore[assignment]

else:

    class _FlatNames:
        """Every attribute of a part, under its own name: `config.num_steps` is `config.sampling.num_steps`."""

    for part_name, part in PARTS.items():
        for name in [*part.__dataclass_fields__, *vars(part)]:
            if not name.startswith("_"):
                setattr(_FlatNames, name, property(attrgetter(f"{part_name}.{name}")))


@dataclass(frozen=True, init=False, repr=False)
class Settings(_FlatNames):
    """Settings that are valid each by itself; `Config` adds the checks across them."""

    env: Env
    sampling: Sampling
    ppo: PPO
    sac: SAC
    network: Network
    actors: Actors
    learners: Learners
    run: Run

    if not TYPE_CHECKING:  # type checkers see the keywords of _FlatNames

        def __init__(self, /, **settings: Any) -> None:
            # imports pydantic, which an actor must not load
            from dppo.config.values import validated

            values = validated(with_atari(with_algorithm(flattened(settings))))
            for name, values_of_part in grouped(values).items():
                object.__setattr__(self, name, PARTS[name](**values_of_part))

    @cached_property
    def sizes(self) -> Sizes:
        return sizes_of(self.sampling, self.ppo, self.network, self.learners, self.run)

    @property
    def iterations(self) -> int:
        return self.sizes.iterations

    @property
    def total_steps(self) -> int:
        """Env steps of all iterations: `total_timesteps`, rounded up to whole batches."""
        return self.iterations * self.batch_size

    @property
    def collected_by_prior(self) -> int:
        """Return the iterations that a controller collects at the start; 0 without one."""
        if self.sampling.prior is None:
            return 0
        return self.sizes.prior_iterations + self.sampling.lag

    @property
    def scales_rewards(self) -> bool:
        """True if values are learned from changed rewards: normalized, by their sign, clipped or scaled."""
        return bool(
            self.ppo.norm_reward
            or self.ppo.norm_value
            or self.ppo.sign_reward
            or self.ppo.clip_reward
            or self.ppo.scale_reward != 1
        )

    @property
    def stored_iterations(self) -> int:
        """Return the largest number of iterations whose segments an update trains on."""
        if self.ppo.algo == "sac":  # its trainer keeps rows in a buffer of its own
            return 1
        return max(self.ppo.reuse, self.collected_by_prior)

    @property
    def most_actors(self) -> int:
        """Return the largest number of actors that can host a sampler each; 0 without actors."""
        return min(self.actors.actor_bounds[1], self.sampling.num_samplers)

    @property
    def evaluators(self) -> int:
        """Return the environments of evaluations that exist at once, each on an actor of its own if the run has any."""
        has_actors = self.actors.num_actors != 0
        return self.evaluators_with(has_actors=has_actors, threads=self.sampling.env_threads)

    def evaluators_with(self, *, has_actors: bool, threads: bool) -> int:
        """Return what `evaluators` would be with or without actors and threads."""
        if self.run.eval_every is None:
            return 0
        has_room = self.sampling.licences is None and self.layout.is_plain
        if threads and has_room and not has_actors:
            return min(self.sampling.num_samplers, self.run.eval_episodes)
        return self.run.eval_actors

    @property
    def has_memory(self) -> bool:
        """Return whether the network has memory. A network of the user's has one if `sequence_length` is set."""
        return self.network.memory != "none" or self.network.sequence_length is not None

    def __repr__(self) -> str:
        """Show the settings that differ from their defaults."""
        changed = [name for name in settings_by_name() if getattr(self, name) != default_of(name)]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"


def _refuse_assignment(settings: Settings, name: str, value: Any) -> NoReturn:
    raise FrozenInstanceError(
        f"{name}={value!r}: a Config does not change. Make a copy: dataclasses.replace(config, {name}={value!r})."
    )


Settings.__setattr__ = _refuse_assignment  # type: ignore[assignment]  # a frozen dataclass must not define it
