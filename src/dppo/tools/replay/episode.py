"""Play an episode of a run again, in this process: a recorded one, or an incident's episode up to its fault."""

import json
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

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
from dppo.envs.preparation import make_prepared
from dppo.envs.silence import SilenceWatch, name_env
from dppo.envs.sub_envs.serial import SerialSubEnvs
from dppo.errors import GIVEN_UP, CheckpointError, DppoError, EnvironmentFault, counted
from dppo.files import check_kind
from dppo.hosts.environments import spaces_of
from dppo.hosts.plans import sampler_plan
from dppo.log import logger
from dppo.numerics.arithmetic import limit_blas
from dppo.policies.arguments import check_display
from dppo.ppo.distributions.simple import distribution_of
from dppo.ppo.exchange.records import FatalStep
from dppo.process_state.borders import dppo_computes, guarded_steps
from dppo.records.files.episodes import (
    DTYPES,
    INTEGERS,
    SUB_ENVS,
    RecordedEpisode,
    nothing_recorded,
    packed,
    read_episodes,
)
from dppo.records.files.run_files import CONFIG, INCIDENT, check_run_files, read_run_file
from dppo.records.files.run_folder import check_stored_names, settings_to_resume
from dppo.signals import ending_on_signals
from dppo.spaces.actions import Actions
from dppo.streams import Stream
from dppo.tools.video import Video


class ReplayStep(NamedTuple):
    """A step of a replay; the first one is the reset."""

    obs_checksum: int
    reward: float
    """The reward before the observation."""
    is_last: bool


class ReplayMismatch(DppoError):
    """An episode that differs from the run's episode, or in which no fault happens again."""


def replay(
    path: Path,
    episode: str | None = None,
    *,
    trust: bool = False,
    render: bool = False,
    video: Path | None = None,
    pause: Callable[[], object] | None = None,
) -> str:
    """Make the environment of a run, and repeat the actions of an episode; return a sentence about it.

    Args:
        path: the folder of a run; or without `episode`, an incident of one.
        episode: its number, or sampler, environment and index as in 3/0/17.
        render: show it in a window.
        video: the file for a video of it.
        pause: is called before the first step. Only then a step that the run gave up is taken, to debug it.

    Raises:
        ConfigError: the run's environment is not trusted, or cannot be shown.
        CheckpointError: there is no such episode.
        EnvironmentFault: the environment fails again; the cause is its context.
        ReplayMismatch: the episode is not the same again.
    """
    if video is not None:
        Video.check(video, render=render)
    path = path.absolute()
    is_run = episode or (path / CONFIG).exists()
    run = path if is_run else _run_of_incident(path)
    check_run_files(run)
    recorded = _recorded(run, episode) if is_run else _recorded_by_incident(path)
    if not recorded.is_single:
        raise CheckpointError(f"{run}: is of {SUB_ENVS}: none can be played again.")
    check_stored_names(run)
    settings = settings_to_resume(run)
    stored = {"env_kwargs": {}} | settings | dict.fromkeys(("model", "prior", "baseline"))
    require_trust(stored, (), run, trust=trust, nameable=())
    config = Config(**settings)
    render_mode = None if video is None else "rgb_array"
    if render:
        check_display()
        render_mode = "human"
    steps = list[ReplayStep]()
    activity = ActivityRecord()

    def progress() -> str:
        return f"{max(0, len(steps) - 1):,} of {counted(recorded.length, 'step')} played"

    with (
        dppo_computes(),
        limit_blas(1),  # one core, as in the run
        ending_on_signals(progress) as check_signals,
        SilenceWatch(activity, name_env(config.env_name)),
        closing(_Replay(config, recorded, check_signals, activity, render_mode)) as player,
    ):
        player.begin(pause)
        with guarded_steps(f"a step or reset of {config.env_name}"):
            film = None if video is None else Video(video, player.env, repeat=config.action_repeat)
            player.play(film, steps)
    return _result(episode or recorded.name, recorded)


def _result(name: str, recorded: RecordedEpisode) -> str:
    """Describe a replay that was equal to the recorded episode."""
    if recorded.is_given_up:
        return (
            f"Episode {name} is the same until {recorded.last_place}, which the run gave up, because each process hung "
            f"or ended in it. It is left out here, too; with --debug it is taken."
        )
    facts = f"{counted(recorded.length, 'step')}, return {recorded.episode_return:g}"
    return f"Episode {name}: {facts}, equal to the last bit."


def _run_of_incident(path: Path) -> Path:
    if len(path.parents) > 1:
        return path.parents[1]
    return path


class _Replay:
    """A recorded episode in an environment of its own."""

    def __init__(
        self,
        config: Config,
        recorded: RecordedEpisode,
        check_signals: Callable[[], None],
        activity: ActivityRecord,
        render_mode: str | None = None,
    ) -> None:
        """Make the environment; call `check_signals` in each step."""
        self._config = config
        self._recorded = recorded
        self._check_signals = check_signals
        self._activity = activity
        self._activity.enter(place_of(Phase.MAKE))
        instance = Instance(
            recorded.sampler_id,
            recorded.env,
            # as in the run
            seed=streams.integer(config.seed, Stream.EPISODES, recorded.sampler_id, 0, 0),
            num_sub_envs=config.envs_per_sampler,  # so that sub-environments are refused below, in better words
            max_steps=config.most_steps,
            render_mode=render_mode,
            layout=config.layout,
        )
        with making(config.env_name):
            self.env = make_prepared(config.env, instance)
        self._activity.enter(place_of(Phase.BUILD))
        try:
            if joint_kind(self.env):
                raise CheckpointError(f"{config.env_name} is {SUB_ENVS}: none can be played again.")
            spaces = spaces_of(sampler_plan(config), self.env)
            # observations of an episode that went on were not refused
            limits = bool(recorded.error)
            group = GroupSettings(
                config.env_name, spaces, lambda env, episode: recorded.seed, limits=limits
            )
            self._episode = SerialSubEnvs([self.env], group).envs[0]
            self._actions = spaces.actions.each(_actions_of(recorded, spaces.actions))
        except BaseException:
            self.close()
            raise
        self._activity.enter(place_of(Phase.IDLE))

    def begin(self, pause: Callable[[], object] | None) -> None:
        """Call `pause`; without it, let a step or reset that the run gave up raise in place of being taken."""
        recorded = self._recorded
        if pause is not None:
            pause()
        elif recorded.is_given_up:
            self._episode.avoid(FatalStep(0, recorded.episode, recorded.length))

    def steps(self) -> Iterator[ReplayStep]:
        """Play, and yield the reset and each step."""
        episode = self._episode
        self._activity.enter(place_of(Phase.RESET), self._recorded.episode)
        episode.reset(self._recorded.episode, self._recorded.options)
        yield ReplayStep(zlib.crc32(episode.last_obs.tobytes()), 0.0, is_last=False)
        for action in self._actions:
            self._activity.enter(place_of(Phase.STEP), self._recorded.episode, episode.length)
            _, reward, terminated, truncated, _ = episode.step(action)
            self._check_signals()
            is_last = terminated or truncated
            obs_checksum = zlib.crc32(episode.last_obs.tobytes())
            yield ReplayStep(obs_checksum, reward, is_last)
            if is_last:
                return

    def play(self, film: Video | None, steps: list[ReplayStep]) -> None:
        """Play, adding each step to `steps`; write the film if the episode is the same.

        Raises EnvironmentFault or ReplayMismatch.
        """
        recorded = self._recorded
        fault = self._fault_after(film, steps)
        if fault is not None and recorded.error:
            if film is not None:
                film.write()
            if fault.place is not None and fault.place.error == GIVEN_UP:
                return
            raise fault
        failure = ""
        if fault is not None:
            failure = f"it fails: {fault.message.rstrip('.')}"
        if recorded.error:
            num_steps = counted(self._episode.length, "step")
            raise ReplayMismatch(
                f"No fault in {num_steps}: it does not follow from the seed and the actions of the episode alone."
            )
        difference = failure or self._difference(steps[-1])
        if difference:
            recorded_result = f"It had return {recorded.episode_return!r} after {counted(recorded.length, 'step')}"
            raise ReplayMismatch(
                f"Episode {recorded.name} is not the same again. {recorded_result}; now {difference}. "
                f"{self._find_cause(steps)}"
            )
        if film is not None:
            film.write()

    def _fault_after(self, film: Video | None, steps: list[ReplayStep]) -> EnvironmentFault | None:
        """Play, adding each step to `steps` and to the film; return the fault that ends it, if one does."""
        try:
            for step in self.steps():
                steps.append(step)
                if film is not None:
                    film.add()
        except EnvironmentFault as fault:
            return fault
        return None

    def _difference(self, last: ReplayStep) -> str:
        """Return how the episode that was played differs from the recorded one; "" if it is the same."""
        recorded = self._recorded
        episode = self._episode
        same_return = episode.episode_return == recorded.episode_return
        same_end = episode.checksum() == recorded.checksum
        if episode.length == recorded.length and same_return and same_end and last.is_last:
            return ""
        difference = (
            f"it has return {episode.episode_return!r} after {counted(episode.length, 'step')}"
        )
        if not last.is_last:
            difference += ", and goes on"
        if same_return and not same_end:
            difference += ", and another last observation"
        return difference

    def _find_cause(self, steps: list[ReplayStep]) -> str:
        """Play once more, and describe where two replays differ."""
        logger.info("playing once more, to see where two replays differ")
        player = _Replay(self._config, self._recorded, self._check_signals, self._activity)
        with closing(player), suppress(EnvironmentFault):  # as before, or it is the difference
            for number, (step, repeated) in enumerate(zip_longest(steps, player.steps())):
                if step != repeated:
                    return _first_difference(number, step, repeated)
        return "Two replays are equal: look for state that earlier episodes leave behind, and for other versions."

    def close(self) -> None:
        """Close the environment."""
        self._activity.enter(place_of(Phase.CLOSE))
        close_in_time([self.env])


def _first_difference(number: int, step: ReplayStep | None, repeated: ReplayStep | None) -> str:
    place = f"step {number:,}" if number else "the reset"
    if step is None or repeated is None:
        quantity = "that one is over"
    elif step.reward != repeated.reward:
        quantity = f"the reward: {step.reward!r} and {repeated.reward!r}"
    else:
        quantity = "the observation"
    return f"Two replays differ first in {place}, in {quantity}: the environment does not follow from its seed."


def _actions_of(recorded: RecordedEpisode, space: Actions) -> np.ndarray:
    """Return the actions of an episode; raise CheckpointError if they are damaged, or not of this space."""
    with suppress(KeyError, MemoryError, TypeError, ValueError, zlib.error):
        actions = recorded.actions()
        if not len(actions):  # the first reset failed; stored lists without elements have one axis
            actions = actions.reshape(0, *distribution_of(space).action_shape)
        if actions.shape[1:] == distribution_of(space).action_shape:
            return actions
    raise CheckpointError(
        f"episode {recorded.name}: its actions are damaged, or do not fit the environment."
    )


def _recorded(run: Path, query: str | None) -> RecordedEpisode:
    """Return the episode whose number or name is `query`; raise CheckpointError with the nearest if it is missing."""
    episodes = read_episodes(run)
    query = (query or "").replace(",", "")
    matches = [episode for episode in episodes if query in (episode.name, str(episode.number))]
    if matches:
        return matches[-1]
    if not episodes:
        raise CheckpointError(nothing_recorded(run))
    if not query:
        raise CheckpointError(
            f"{run}: is a run. Add `episode=NUMBER`, for one of its {len(episodes):,} recorded episodes, which "
            f"--episodes lists."
        )
    numbers = [episode.number for episode in episodes if episode.number]
    if query.isdecimal() and numbers:
        nearest = sorted(numbers, key=lambda number: abs(number - float(query)))[:2]
        names = " and ".join(map(str, sorted(nearest)))
        query += f": the nearest are {names}. It"
    raise CheckpointError(
        f"episode={query} is not among the {len(episodes):,} that are recorded. --episodes lists them, and "
        f"`record_episodes` chooses them."
    )


def _recorded_by_incident(folder: Path) -> RecordedEpisode:
    """Return the episode of an incident; raise CheckpointError if it is not there."""
    reason = (
        "holds no actions of an episode, as where an actor died or hung, or a sub-environment failed. See report.txt "
        "beside it"
    )
    try:
        check_kind(folder, stat.S_IFDIR)
        values = json.loads(read_run_file(folder / INCIDENT))
        actions = np.array(values["actions"], DTYPES[values["dtype"]])
        place: dict[str, Any] = {name: int(values[name]) for name in INTEGERS[:4]}
        return RecordedEpisode(
            **place,
            length=len(actions),
            packed=packed(actions),
            error=str(values.get("error") or "a fault"),
            options=values.get("options"),
        )
    except (KeyError, OSError, OverflowError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, OSError):
            reason = str(error.strerror)
        instead = "Faults in steps can be played: RUN/incidents/001, or a run and `episode=NUMBER`."
        raise CheckpointError(f"{folder / INCIDENT}: {reason}. {instead}") from None
