"""Every setting, in seven frozen records and in a flat one; each component gets the records that it needs, whole.

They are plain dataclasses because they travel to actors, which must not import pydantic. Names follow CleanRL where it
has one.
"""

import ast
import dataclasses
import inspect
import math
from functools import cache, cached_property
from itertools import pairwise
from types import NoneType
from typing import Any, get_args, get_type_hints

from dppo.config.field import About
from dppo.config.parts.env import Env, Sampling
from dppo.config.parts.ppo import PPO, Network, ResolvedPPO, annealed, annealed_settings, reuse_clip_factor
from dppo.config.parts.processes import Actors, Learners, Run

__all__ = [
    "PPO",
    "Actors",
    "Env",
    "Learners",
    "Network",
    "ResolvedPPO",
    "Run",
    "Sampling",
    "annealed",
    "annealed_settings",
    "reuse_clip_factor",
]

PARTS: dict[str, type] = {part.__name__.lower(): part for part in (Env, Sampling, PPO, Network, Actors, Learners, Run)}

USUAL_SEQUENCE = 16  # steps of a sequence, where num_steps is a multiple of it
USUAL_MINIBATCH, MOST_MINIBATCHES = 64, 32  # rows; of an epoch, beyond which a policy moves too far for one batch


@cache
def names_of(part: str) -> tuple[str, ...]:
    """Return the names of the settings of a part."""
    return tuple(field.name for field in dataclasses.fields(PARTS[part]))


@cache
def settings_by_name() -> dict[str, dataclasses.Field[Any]]:
    """Return the dataclass field of every setting, in the order of the parts."""
    return {field.name: field for part in PARTS.values() for field in dataclasses.fields(part)}


def about(name: str) -> About:
    """Return the metadata of a setting."""
    about: About = settings_by_name()[name].metadata.get("about", About())
    return about


@cache
def help_by_name() -> dict[str, str]:
    """Return the help of every setting: the docstring below it, which only the source has."""
    records: list[Any] = [ast.parse(inspect.getsource(part)).body[0] for part in PARTS.values()]
    pairs = [pair for record in records for pair in pairwise(record.body)]
    texts = {ast.unparse(one.target): text.value.value for one, text in pairs if isinstance(one, ast.AnnAssign)}
    return {name: " ".join(text.split()) for name, text in texts.items()}


def default_of(name: str) -> Any:
    """Return the default of a setting, or `dataclasses.MISSING` if it has none."""
    field = settings_by_name()[name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


@cache
def types_by_name() -> dict[str, Any]:
    """Return the type of every setting."""
    return {name: hint for part in PARTS.values() for name, hint in get_type_hints(part).items()}


def may_be_none(name: str) -> bool:
    """Return whether None is a value of the setting, which is written `none`."""
    return NoneType in get_args(types_by_name().get(name))


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run that follow from its settings."""

    iterations: int
    """The last may exceed `total_timesteps` by less than one batch."""
    sequence_length: int
    """L, the steps of the sequences that minibatches consist of; 1 without memory."""
    minibatches_per_epoch: int
    """They leave no row out, and differ by at most one sequence."""
    minibatch_rows: int
    """Rows of the largest minibatch."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class FlatSettings(Env, Sampling, PPO, Network, Actors, Learners, Run):
    """Every setting as an attribute, with the sizes derived from them; `Config` adds the checks."""

    @cached_property
    def sizes(self) -> Sizes:
        """Return the sizes that follow from these settings."""
        length = self.sequence_length or 1
        if self.model is None and self.memory == "none":
            length = 1
        elif self.model is None and self.sequence_length is None:
            length = max(steps for steps in range(1, USUAL_SEQUENCE + 1) if self.num_steps % steps == 0)
        sequences = max(1, self.batch_size // length)
        most = max(1, (self.minibatch_size or max(USUAL_MINIBATCH, self.batch_size // MOST_MINIBATCHES)) // length)
        minibatches = math.ceil(sequences / most)
        if self.minibatch_size is None and self.num_learners > 1:  # they share each minibatch evenly
            own = max(1, sequences // self.num_learners)
            minibatches = max(count for count in range(1, minibatches + 1) if own % count == 0)
        rows = math.ceil(sequences / minibatches) * length
        return Sizes(math.ceil(self.total_timesteps / self.batch_size), length, minibatches, rows)

    @property
    def most_actors(self) -> int:
        """Return the largest number of actors of the run, each of which hosts a sampler; 0 in process."""
        return min(self.actor_bounds[1], self.num_samplers)

    @property
    def evaluators(self) -> int:
        """Return the environments of evaluations that exist at once, each on an actor of its own if the run has any."""
        return 0 if self.eval_every is None else self.eval_actors

    @property
    def iterations(self) -> int:
        """Return the number of iterations of the run."""
        return self.sizes.iterations

    @property
    def has_memory(self) -> bool:
        """Return whether the network has memory; one of your own does if `sequence_length` is set."""
        return self.memory != "none" or self.sequence_length is not None

    def __repr__(self) -> str:
        """Show the settings that differ from their defaults."""
        shown = [name for name in settings_by_name() if getattr(self, name) != default_of(name)]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"
