"""The settings of the environment and of its samplers."""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dppo.config.field import constant, free, setting
from dppo.errors import ConfigError
from dppo.user_code import import_path

SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def rate_of(name: str, text: str, example: str) -> tuple[int, float]:
    """Return number and seconds of a rate such as 10/h; raise ConfigError, with an example, for another text."""
    match = re.fullmatch(r"([1-9]\d{0,8})/(s|min|h|d)", text)
    if match is None:
        raise ConfigError(
            f"{name}={text}: must be a number of at least 1 in a time (s, min, h or d), or unlimited. Use one such as "
            f"{example}.",
            setting=name,
        )
    return int(match[1]), SECONDS[match[2]]


def rate_above(per_hour: float) -> str:
    """Return a rate as the text of a setting, which allows twice as many an hour, rounded up to a digit."""
    unit = 10 ** math.floor(math.log10(per_hour))
    rate = max(1.0, math.ceil(2 * per_hour / unit) * unit)
    return f"{rate:.0f}/h" if rate < 1e9 else "unlimited"  # of nine digits at most, see `rate_of`


@dataclass(frozen=True, kw_only=True)
class Env:
    """The environment."""

    env_id: str | Callable[..., Any]
    """The environment: a Gymnasium id (CartPole-v1); module:Name-v0, an id that importing the module registers;
    module:factory, a function or class that returns an environment; or, in Python, any callable that does. Modules are
    found in the current folder and among installed packages."""
    env_kwargs: dict[str, Any] = setting({})
    """Keyword arguments of the environment, as JSON: '{"g": 9.8}'."""
    wrappers: tuple[str | Callable[..., Any], ...] = ()
    """Wrappers of the environment, the first one innermost, before frames are prepared: module:Wrapper, a class or
    function that takes an environment and returns one; in Python also the class or function itself."""
    on_env_fault: Literal["auto", "raise", "rebuild"] = free("auto")
    """Reaction to an environment that raises, or returns an invalid observation, reward, flag or mask. raise ends the
    run; rebuild closes this environment, makes it again and starts its next episode, while the others go on; auto:
    raise in the first 100 env steps of the run, then rebuild. With rebuild, floats beyond the limits of their space are
    invalid, too."""
    env_faults: str = free("10/h")
    """Highest rate of environment faults that a run survives: 10/h, 3/min, 100/d; or unlimited. A higher rate ends the
    run."""
    env_state: Literal["auto", "own", "off"] = free("auto")
    """Rebuild of an environment that has get_state() and set_state(state). own: set the state that it had after the
    last segment, without a replay, and without a proof that the state is complete; auto: replay the actions of its
    episode; if that leads to another state, set the state before the last segment and repeat that segment, which proves
    the state; off: replay only."""
    state_folder: Path | None = free(None)
    """A folder on a disk that all actors see, below which environments may write the files that get_state() returns as
    paths; by default only below their scratch_dir. Files on the file system of the run folder are kept without a
    copy."""
    running_statistics: Literal["refuse", "allow"] = free("refuse")
    """Wrappers that normalize by running statistics of their own, such as Gymnasium's NormalizeObservation. refuse
    them, unless they are frozen; allow: each sampler, evaluation and resumed run then has other statistics."""
    replay_limit: int | None = setting(None, gt=0)
    """Truncate each training episode after this many env steps, as a time limit does, so that a lost sampler never has
    to replay more. For episodes that last long or never end; env_state=own needs no replay."""
    drop_obs: tuple[str, ...] = constant(())
    """Parts of a Dict or Tuple observation to leave out, by name: mission; robot.mission for a part of a part."""
    obs_dtype: Literal["float32", "float64"] = constant("float32")
    """Dtype in which float64 observations are stored, sent and normalized, and with float64 also integers of a Box
    beyond 2**24. float64 is for numbers such as 1e9 + 0.1 and 1e9 + 0.2, which float32 cannot tell apart."""
    action_bounds: Literal["auto", "clip", "squash", "rescale"] = constant("auto")
    """Map of continuous actions into the bounds of their Box. clip; rescale: clip to [-1, 1], then map linearly;
    squash: tanh, then map linearly; auto: clip if the bounds are infinite, or symmetric and about [-1, 1], otherwise
    rescale. Elements with an infinite bound are only clipped. With algo=sac: squash."""
    action_mask: Literal["auto", "info", "off"] = constant("auto")
    """Source of masks of the allowed actions. info: the item action_mask of the info of reset and step; auto: a part
    action_mask of a Dict observation, or the method action_masks() of the environment, if there is one."""
    info_keys: tuple[str, ...] = free(())
    """Numbers in the info of env steps to report: the mean, lowest and highest value of each in an iteration."""
    action_repeat: int = setting(1, gt=0)
    """Number of times that each action is repeated in one env step, which returns the sum of the rewards and the last
    observation; of a game with `atari`, the maximum of the last two frames. An action mask counts for the first
    repetition. Games ALE/*: 4."""
    grayscale: bool = constant(False)
    """Turn images [height, width, 3] of bytes gray. Games ALE/*: on."""
    resize: tuple[int, ...] = constant((), gt=0)
    """Height and width to which images are resized, by OpenCV. Games ALE/*: 84 84."""
    frame_stack: int = constant(1, gt=0)
    """Latest observations that the policy sees as one, oldest first; an episode starts with copies of its first. Frames
    of images are stored and sent once each. Games ALE/*: 4."""
    atari: Literal["raw", "game", "life"] = constant("raw")
    """Preparation of games of the Arcade Learning Environment: game, with no-ops at the start; life, with FIRE at the
    start of each life, whose loss ends an episode for learning only; raw: none, and none of these defaults. Games
    ALE/*: life."""

    @property
    def fault_budget(self) -> tuple[int, float]:
        """Return the faults that the run survives, and in how many seconds; raise ConfigError for another form."""
        if self.env_faults == "unlimited":
            return sys.maxsize, math.inf
        return rate_of(
            "env_faults", self.env_faults, "10/h, or `on_env_fault=raise` to survive none"
        )

    @property
    def most_steps(self) -> int | None:
        """Return the steps of the environment, repeated actions included, that `replay_limit` allows an episode."""
        return self.replay_limit and self.replay_limit * self.action_repeat

    @property
    def env_name(self) -> str:
        """The environment's id, or the import path of a callable."""
        return import_path(self.env_id)

    @property
    def wrapper_names(self) -> tuple[str, ...]:
        return tuple(map(import_path, self.wrappers))


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """N samplers of E environments, T steps each."""

    num_samplers: int = setting(8, gt=0, le=10**6)
    """Samplers N, each with its own environments: part of the learning problem, whatever the number of actors."""
    envs_per_sampler: int = setting(1, gt=0, le=10**6)
    """Environments E of each sampler, stepped one after the other."""
    num_steps: int = setting(64, gt=0)
    """Steps T of each environment in one iteration."""
    noise: Literal["white", "pink", "wide"] = setting("white")
    """Exploration noise of continuous actions. white: independent in each env step. pink: correlated over several env
    steps. wide, only with algo=sac: white, but in every fourth stretch of 1,024 env steps of each environment, the
    actions spread over the whole of their bounds, and each is held for up to 32 env steps."""
    overlap: bool = False
    """Collect while learning: actors use the weights from before the update. The same as policy_lag=1."""
    policy_lag: int = setting(0, ge=0)
    """Updates K by which the policy that collects may lag behind the newest one: segment k is collected with policy
    max(0, k - K). 0: collect and learn in turns. With 1 or more, actors collect while the learner updates, and none
    waits for the slowest. The loss corrects for the lag, but the lag changes what is learned. Results stay reproducible
    and independent of the number of actors."""
    env_threads: bool = free(False)
    """Step the samplers of a process side by side, each in a thread of its own: for simulators that wait, for a
    process, a socket or a device. A few actors then do the work of many. Changes the time, never the result."""
    standby_envs: int = free(0, ge=0)
    """Further copies of each environment, which reset for the next episodes in the background while one plays: for slow
    resets. 1 is enough if a reset is no longer than an episode. Each copy takes the memory and the licence of a
    simulator. Changes the time, never the result, if each episode follows from the seed of its reset."""
    licences: int | None = free(None, gt=0)
    """Maximum number of environments that exist at once, over all actors. Environments of a lost process count until
    the process is gone. A run needs N x E x (1 + standby_envs), and eval_actors more with eval_every. none: no
    limit."""
    start_rate: str = free("unlimited")
    """Maximum rate at which environments are made, over all actors: 2/s, 10/min. For simulators whose start loads a
    server or a disk."""

    prior: str | Callable[..., Any] | None = None
    """Your own controller, to start from: module:controller, a function action = f(obs), or a class with reset and act;
    in Python also the function or class itself. It collects the first iterations, with noise. The policy is cloned from
    its actions, and the values or critics learn from its rewards. At first, training stays near the clone. The
    controller's actions must depend only on the observations since its reset."""
    prior_steps: int | None = setting(None, gt=0)
    """Env steps that prior collects, in whole iterations: a few episodes at least; none: a tenth of total_timesteps, at
    most 20,000."""
    prior_noise: float | None = setting(None, gt=0, le=1)
    """Standard deviation of the noise around continuous actions of prior, and of the cloned policy at first: a share of
    half the distance between the bounds, or a number for an action without bounds; none: 0.03 if the learning rate
    adapts to it, by desired_kl or with reuse, otherwise 0.1. Choices of prior are replaced in 1 of 10 steps."""

    @property
    def prior_name(self) -> str | None:
        """Return the import path of the controller to start from; None without one."""
        if self.prior is None:
            return None
        return import_path(self.prior)

    @property
    def envs_of_sampler(self) -> int:
        return self.envs_per_sampler * (1 + self.standby_envs)

    @property
    def most_hosted(self) -> int:
        if self.licences is None:
            return sys.maxsize
        return self.licences // self.envs_of_sampler

    @property
    def start_s(self) -> float:
        """Return the seconds that the environments of a sampler take to start one after the other."""
        return self.start_interval_s * self.envs_of_sampler

    @property
    def start_interval_s(self) -> float:
        """Return the seconds between the starts of two environments; raise ConfigError if `start_rate` is no rate."""
        if self.start_rate == "unlimited":
            return 0.0
        number, seconds = rate_of("start_rate", self.start_rate, "2/s")
        return seconds / number

    @property
    def lag(self) -> int:
        """K, which `overlap` and `policy_lag` set."""
        return max(self.policy_lag, int(self.overlap))

    @property
    def batch_size(self) -> int:
        """B = N * E * T, the env steps of one iteration."""
        return self.num_samplers * self.envs_per_sampler * self.num_steps
