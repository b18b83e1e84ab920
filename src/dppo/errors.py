"""The exceptions that users may see."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

MAX_CHARACTERS = 50_000
LONG_LINE = re.compile("(?m)^(.{1000}).{1000,}(.{500})$")


def printable(text: str) -> str:
    """Return a text for a terminal: long parts left out, and control characters escaped, as it may come from a file."""
    if len(text) > MAX_CHARACTERS:
        half = MAX_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    text = LONG_LINE.sub(r"\1 ... \2", text)
    return "".join(
        char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in text
    )


class DppoError(Exception):
    """Base class of all errors that are reported to the user. The command line exits with `exit_code`."""

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(DppoError, ValueError):
    """An invalid setting, detected before training starts."""

    exit_code = 2

    def __init__(self, message: str = "", *, setting: str | None = None) -> None:
        super().__init__(message)
        self.setting = setting
        """The name of the setting, of the first one if there are several; None if the error is not about a setting."""


def refusals_of(checks: Iterable[Callable[[], object]]) -> Iterator["ConfigError"]:
    """Yield the ConfigErrors that checks raise, for `refuse`."""
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield error


def refuse(problems: Iterable[ConfigError]) -> None:
    """Raise a ConfigError with a line for each problem, if there are any, so that a user can mend all at once."""
    all_problems = list(problems)
    if all_problems:
        lines = dict.fromkeys(str(problem) for problem in all_problems)
        raise ConfigError("\n".join(lines), setting=all_problems[0].setting) from None


class CheckpointError(DppoError):
    """A checkpoint that is missing or damaged, or that belongs to a different run."""

    exit_code = 2


class NotBetter(CheckpointError):
    """A run with `never_worse` has no policy that is shown to be better than the baseline, which is to be used."""

    def __init__(self, message: str, comparison: Any) -> None:
        super().__init__(message)
        self.comparison = comparison
        """A `BaselineComparison`: how the best evaluation differs from the baseline; None if none has ended."""


class CheckpointNotWritten(CheckpointError):
    """A checkpoint could not be written, for example because the disk is full. Earlier ones are untouched."""

    exit_code = 1


GIVEN_UP = "hung or died"
"""`EnvFault.error` of a step that no process has survived, and that is not taken again."""


@dataclass(frozen=True, slots=True)
class EnvFault:
    """A fault of an environment: its place, and what is needed to play its episode again up to there.

    `env`, `episode` and `segment` are indices, `seed` is given to the episode's reset. `step` is 1, 2, ... within the
    episode, and 0 for its reset.
    """

    phase: str
    """"constructor", "reset" or "step"."""
    error: str
    """The name of the exception's class; "invalid" if the environment returned something invalid; `GIVEN_UP`."""
    traceback: str
    """Traceback of the user's code; "" for an invalid result."""
    env: int
    episode: int = 0
    seed: int = 0
    step: int = 0
    sampler_id: int = 0
    segment: int = 0
    actions: Any = None
    """NumPy array [step, *A], as sampled, of the whole episode if `complete`; the last action failed."""
    last_obs: str = ""
    """The observation before the step, shortened."""
    options: dict[str, Any] | None = None
    """Options of the episode's reset."""
    others: int = 0
    """Instances that the same process had when a constructor raised."""
    samplers_beside: int = 0
    """Samplers of which it had all environments then."""
    alone: bool = True
    """False for a sub-environment of an environment that steps several: its episode depends on the actions of all."""

    @property
    def complete(self) -> bool:
        """True if all actions since the reset are known, so that the episode can be played again."""
        return self.alone and self.actions is not None and len(self.actions) == self.step


class EnvironmentFault(DppoError):
    """The user's environment raised an exception, or returned an invalid observation or reward.

    The message names sampler, env, seed and step; `remote_traceback` is the traceback of the user's code.
    """

    def __init__(
        self, message: str, remote_traceback: str = "", place: EnvFault | None = None
    ) -> None:
        super().__init__(message, remote_traceback, place)
        self.message = message
        self.remote_traceback = remote_traceback
        self.place = place

    @property
    def in_constructor(self) -> bool:
        return self.place is not None and self.place.phase == "constructor"

    def with_instances(self, instances: int, samplers: int = 0) -> "EnvironmentFault":
        """Return this fault after adding to the counts of instances and samplers of the process, for a constructor."""
        if self.place is None or not self.in_constructor:
            return self
        place = replace(
            self.place,
            others=self.place.others + instances,
            samplers_beside=self.place.samplers_beside + samplers,
        )
        return EnvironmentFault(self.message, self.remote_traceback, place)

    def __str__(self) -> str:
        return printable(f"{self.message}\n{self.remote_traceback}".rstrip())


class TooManyFaults(EnvironmentFault):
    """Environments have failed more often than `env_faults` allows."""

    allowing_rate = ""
    """Value of `env_faults` with which the run would go on."""
    other_incidents: Sequence[Any] = ()
    """Those of the same iteration, from which the policy does not learn."""


class ControllerFault(DppoError):
    """A user's controller raised an exception, or returned an action outside the environment's action space.

    The message names controller, episode, seed and step; `remote_traceback` is the traceback of the user's code.
    """

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        super().__init__(message, remote_traceback)
        self.message = message
        self.remote_traceback = remote_traceback

    def __str__(self) -> str:
        return printable(f"{self.message}\n{self.remote_traceback}".rstrip())


class ClusterError(DppoError):
    """Ray cannot be reached or started, has too few resources for this run, or lost too many processes."""


class SegmentsLost(ClusterError):
    """The node that held some segments failed before the learners had fetched them. They can be collected again."""


class TrainingDiverged(DppoError):
    """A loss or gradient is not finite. The weights are those from before the failed minibatch."""


class OutOfMemory(DppoError):
    """The rows of an update do not fit into memory. The weights are those from before it."""


class GPUFailed(DppoError):
    """The GPU of an update has failed. The weights from before it are kept in this machine's memory."""


def in_gigabytes(size: float) -> str:
    """Format a number of bytes as `1.25 GB`."""
    return f"{size / 1e9:.3g} GB"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Write a count in words: `1 step`, or `1,024 steps`."""
    if number != 1:
        noun = plural or f"{noun}s"
    return f"{number:,} {noun}"


def unknown_name(kind: str, name: str, names: Collection[str], meant: Iterable[str] = ()) -> str:
    """Return `x is not a known setting. Did you mean y?`; y is the first of `meant` in `names`, or the closest name."""
    fact = f"{name} is not a known {kind}."
    alike = [candidate for candidate in meant if candidate in names]
    alike += difflib.get_close_matches(name, names, n=1)
    return f"{fact} Did you mean {alike[0]}?" if alike else fact
