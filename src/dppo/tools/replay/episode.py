"""Play an episode of a run again, in this process: a recorded one, or that of an incident up to its fault."""

import json
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from dppo import streams
from dppo.config import Config
from dppo.config.trust import require_trust
from dppo.envs.activity import ActivityRecord, Phase, place_of
from dppo.envs.checks.faults import making
from dppo.envs.closing import close_in_time
from dppo.envs.episode import GroupSettings
from dppo.envs.instance import Instance
from dppo.envs.kinds import joint_kind
from dppo.envs.preparation import Preparation, make_prepared
from dppo.envs.rows.serial import SerialRows
from dppo.envs.silence import SilenceWatch, of_one
from dppo.errors import CheckpointError, DppoError, EnvironmentFault, counted
from dppo.files import check_kind
from dppo.hosts.builders import spaces_of
from dppo.hosts.plans import sampler_plan
from dppo.log import logger
from dppo.numerics.portable import limit_blas
from dppo.policies.wanted import check_display
from dppo.ppo.distributions.simple import distribution_of
from dppo.process_state.borders import dppo_computes, guarded_steps
from dppo.records.files.episodes import (
    INTEGERS,
    SEVERAL_ROWS,
    RecordedEpisode,
    nothing_recorded,
    packed,
    read_episodes,
)
from dppo.records.files.run_files import INCIDENT, check_run_files, read_run_file
from dppo.records.files.run_folder import settings_to_resume
from dppo.signals import ending_on_signals
from dppo.spaces.actions import Actions
from dppo.streams import Stream
from dppo.tools.video import Video

_Step = tuple[int, float, bool]
"""A checksum of an observation, the reward before it, and whether the episode is over."""


class NotTheSame(DppoError):
    """An episode that differs from that of the run, or in which no fault happens again."""


def replay(
    path: Path,
    episode: str | None = None,
    *,
    trust: bool = False,
    render: bool = False,
    video: Path | None = None,
    pause: Callable[[], object] = lambda: None,
) -> str:
    """Make the environment of a run, and repeat the actions of an episode; return a sentence about it.

    Args:
        path: the folder of a run; or without `episode`, an incident of one.
        episode: its number, or sampler, environment and index as in 3/0/17.
        render: show it in a window; `video` is the file for a video of it.
        pause: is called before the first step.

    Raises:
        ConfigError: the run's environment is not trusted, or cannot be shown.
        CheckpointError: there is no such episode.
        EnvironmentFault: the environment fails again; the cause is its context.
        NotTheSame: as its name says.
    """
    if video is not None:
        Video.check(video, render=render)
    run = path.absolute() if episode else next(iter(path.absolute().parents[1:2]), path.absolute())
    check_run_files(run)
    of = _recorded(run, episode) if episode else _read(path)
    if not of.alone:
        raise CheckpointError(f"{run}: is of {SEVERAL_ROWS}: none can be played again.")
    settings = settings_to_resume(run)
    require_trust({"env_kwargs": {}} | settings | {"model": None}, (), run, trust=trust)
    config = Config(**settings)
    if render:
        check_display()
    mode = "human" if render else "rgb_array" if video else None
    seen = list[_Step]()
    activity = ActivityRecord()

    def progress() -> str:
        return f"{max(0, len(seen) - 1):,} of {counted(of.length, 'step')} played"

    with (
        dppo_computes(),
        limit_blas(1),  # one core, as in the run
        ending_on_signals(progress) as check_signals,
        SilenceWatch(activity, of_one(config.env_name)),
        closing(_Again(config, of, check_signals, mode, activity)) as again,
    ):
        pause()
        with guarded_steps(f"a step or reset of {config.env_name}"):
            film = None if video is None else Video(video, again.env, repeat=config.action_repeat)
            again.play(film, seen)
    return f"Episode {episode}: {counted(of.length, 'step')}, return {of.episode_return:g}, equal to the last bit."


class _Again:
    """An episode in an environment of its own."""

    def __init__(
        self,
        config: Config,
        of: RecordedEpisode,
        check_signals: Callable[[], None],
        mode: str | None = None,
        activity: ActivityRecord | None = None,
    ) -> None:
        """Make the environment, with this render_mode; call `check_signals` in each step."""
        self._check_signals = check_signals
        self._activity = activity or ActivityRecord()
        self._activity.enter(place_of(Phase.MAKE))
        instance = Instance(
            of.sampler_id,
            of.env,
            seed=streams.integer(config.seed, Stream.EPISODES, of.sampler_id, 0, 0),  # as in the run
            num_rows=config.envs_per_sampler,  # so that several rows are refused below, in better words
            max_steps=config.most_steps,
            render_mode=mode,
        )
        with making(config.env_name):
            self.env = make_prepared(config.env_id, config.env_kwargs, Preparation.by_attributes(config), instance)
        self._config, self._of = config, of
        try:
            if joint_kind(self.env):
                raise CheckpointError(f"{config.env_name} is {SEVERAL_ROWS}: none can be played again.")
            spaces = spaces_of(sampler_plan(config), self.env)
            limits = bool(of.error)  # observations of an episode that went on were not refused
            group = GroupSettings(config.env_name, spaces, lambda env, episode: of.seed, limits=limits)
            self._one = SerialRows([self.env], group).envs[0]
            self._actions = spaces.actions.each(_actions_of(of, spaces.actions))
        except BaseException:
            self.close()
            raise
        self._activity.enter(place_of(Phase.IDLE))

    def steps(self) -> Iterator[_Step]:
        """Play; yield a checksum of each observation, the reward before it, and whether the episode is over."""
        self._activity.enter(place_of(Phase.RESET), self._of.episode)
        self._one.reset(self._of.episode, self._of.options)
        yield zlib.crc32(self._one.last_obs.tobytes()), 0.0, False
        for action in self._actions:
            self._activity.enter(place_of(Phase.STEP), self._of.episode, self._one.length)
            _, reward, terminated, truncated, _ = self._one.step(action)
            self._check_signals()
            yield zlib.crc32(self._one.last_obs.tobytes()), reward, terminated or truncated
            if terminated or truncated:
                return

    def play(self, film: Video | None, seen: list[_Step]) -> None:
        """Play, adding each step to `seen`; write the film if the episode is the same.

        Raises EnvironmentFault or NotTheSame.
        """
        of, one, difference = self._of, self._one, ""
        try:
            for step in self.steps():
                seen.append(step)
                if film is not None:
                    film.add()
        except EnvironmentFault as fault:
            if of.error:
                if film is not None:
                    film.write()
                raise
            difference = f"it fails: {fault.message.rstrip('.')}"
        if of.error:
            steps = counted(one.length, "step")
            raise NotTheSame(
                f"No fault in {steps}: it does not follow from the seed and the actions of the episode alone."
            )
        same = of.length, of.episode_return, of.checksum, True
        if not difference and (one.length, one.episode_return, one.checksum(), seen[-1][2]) != same:
            difference = f"it has return {one.episode_return!r} after {counted(one.length, 'step')}"
            difference += "" if seen[-1][2] else ", and goes on"
            other = one.episode_return == of.episode_return and one.checksum() != of.checksum
            difference += ", and another last observation" if other else ""
        if difference:
            then = f"It had return {of.episode_return!r} after {counted(of.length, 'step')}; now {difference}."
            raise NotTheSame(f"Episode {of.name} is not the same again. {then} {self._cause(seen)}")
        if film is not None:
            film.write()

    def _cause(self, seen: list[_Step]) -> str:
        """Play once more, and say where two replays differ."""
        logger.info("playing once more, to see where two replays differ")
        with closing(_Again(self._config, self._of, self._check_signals, activity=self._activity)) as again:
            pairs, found = enumerate(zip_longest(seen, again.steps())), None
            with suppress(EnvironmentFault):  # as before, or it is the difference
                found = next(((step, *pair) for step, pair in pairs if pair[0] != pair[1]), None)
        if found is None:
            return "Two replays are equal: look for state that earlier episodes leave behind, and for other versions."
        step, one, other = found
        rewards = f"the reward: {one[1]!r} and {other[1]!r}" if one and other and one[1] != other[1] else ""
        what = rewards or ("the observation" if one and other else "that one is over")
        where = f"step {step:,}" if step else "the reset"
        return f"Two replays differ first in {where}, in {what}: the environment does not follow from its seed."

    def close(self) -> None:
        """Close the environment."""
        self._activity.enter(place_of(Phase.CLOSE))
        close_in_time([self.env])


def _actions_of(of: RecordedEpisode, space: Actions) -> np.ndarray:
    """Return the actions of an episode; raise CheckpointError if they are damaged, or not of this space."""
    with suppress(KeyError, MemoryError, TypeError, ValueError, zlib.error):
        actions = of.actions()
        if actions.shape[1:] == distribution_of(space).action_shape:
            return actions
    raise CheckpointError(f"episode {of.name}: its actions are damaged, or do not fit the environment.")


def _recorded(run: Path, wanted: str) -> RecordedEpisode:
    """Return the episode of this number or name; raise CheckpointError, with the nearest ones, if it is missing."""
    episodes, wanted = read_episodes(run), wanted.replace(",", "")
    if found := [one for one in episodes if wanted in (one.name, str(one.number))]:
        return found[-1]
    if not episodes:
        raise CheckpointError(nothing_recorded(run))
    numbers = [one.number for one in episodes if one.number]
    if wanted.isdecimal() and numbers:
        near = sorted(numbers, key=lambda one: abs(one - float(wanted)))[:2]
        wanted += f": the nearest are {' and '.join(map(str, sorted(near)))}. It"
    raise CheckpointError(
        f"episode={wanted} is not among the {len(episodes):,} that are recorded. --episodes lists them, and "
        f"`record_episodes` chooses them."
    )


def _read(folder: Path) -> RecordedEpisode:
    """Return the episode of an incident; raise CheckpointError if it is not there."""
    try:
        check_kind(folder, stat.S_IFDIR)
        values = json.loads(read_run_file(folder / INCIDENT))
        dtype = {"int64": np.int64, "float32": np.float32, "float64": np.float64}[values["dtype"]]
        place: dict[str, Any] = {name: int(values[name]) for name in INTEGERS[:4]}
        actions = np.array(values["actions"], dtype)
        more = {"packed": packed(actions), "error": "a fault", "options": values.get("options")}
        return RecordedEpisode(**place, length=len(actions), **more)
    except (KeyError, OSError, OverflowError, RecursionError, TypeError, ValueError) as error:
        reason = "holds no actions of an episode, as where an actor died or hung, or one row of several failed"
        reason += ". See report.txt beside it"
        reason = str(error.strerror) if isinstance(error, OSError) else reason
        which = "Faults in steps can be played: RUN/incidents/001, or a run and `episode=NUMBER`."
        raise CheckpointError(f"{folder / INCIDENT}: {reason}. {which}") from None
