"""EnvGroup: the E environments of a sampler, stepped in turn; one that fails is replaced while the others go on."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dppo.envs.activity import Phase, place_of
from dppo.envs.checks.first_segment import FirstSegment
from dppo.envs.checks.returned import BadResult, Remedy
from dppo.envs.episode import SkippedStep
from dppo.envs.frames import LifeStack, Lives
from dppo.envs.guidance import Guidance
from dppo.envs.repairs import FaultPolicy, Repairs
from dppo.envs.restoring import NO_REPLAY
from dppo.envs.sub_envs.port import SubEnvs
from dppo.envs.threads import EnvThread
from dppo.errors import EnvironmentFault
from dppo.ppo.exchange.records import (
    EnvLog,
    FatalStep,
    Incident,
    IncidentKind,
    SamplerCarry,
    StepRows,
    TimeLimit,
)

WRONG_SPACE = Remedy(
    "", "Use `wrappers=dppo.envs.wrappers:no_limits`", "correct the observation or its space"
)


class EnvGroup:
    """Step E environments in turn, and reset each in the same step in which its episode ends.

    Every episode starts with `reset(seed=episode_seed(env, episode))`, so that any process can replay it.
    """

    def __init__(
        self, sub_envs: SubEnvs, policy: FaultPolicy, first_segment: FirstSegment | None = None
    ) -> None:
        """Take over the environments of `sub_envs`.

        Args:
            policy: decides which faults of environments the run survives.
            first_segment: its diagnostics; None: those of a network that reads float32.
        """
        self.sub_envs = sub_envs
        self.repairs = Repairs(policy, sub_envs.settings, sub_envs.make)
        self.num_envs = len(sub_envs.envs)
        settings = sub_envs.settings
        self.obs = settings.spaces.obs
        self.meter = settings.meter
        self._settings = settings
        self._progress = settings.progress
        self._places = [
            place_of(Phase.STEP, settings.sampler_id, env) for env in range(self.num_envs)
        ]
        self._envs = sub_envs.envs
        self._checks = sub_envs.envs[0].checks
        self._pack = self._checks.pack
        self._checks_segments = not settings.limits
        self._returned = settings.spaces.index_of_returned
        self._first_segment = first_segment or FirstSegment(
            settings.spaces, settings.owner, sampler_id=settings.sampler_id
        )
        self._reported_outside = False
        self._step_hooks: list[Callable[[StepRows, EnvLog], None]] = []
        """Called after each step; writes to its rows and its log."""
        if _counts_lives(sub_envs.envs[0].env):
            self._step_hooks.append(self._end_lives)
        if sub_envs.are_joint:
            self._step_hooks.append(self._follow_interruptions)

    def start(self, obs: np.ndarray, log: EnvLog) -> None:
        """Start the first episode of each environment: see `Environments`."""
        began = time.perf_counter()
        self._checks.pack = self._first_segment.watch(self._pack)
        for env in range(self.num_envs):
            obs[env] = self.begin_episode(env, 0, log)
        self.sub_envs.begin_segment(log)
        log.seconds += time.perf_counter() - began

    def step(self, rows: StepRows, log: EnvLog) -> None:
        """Step each environment, and reset those whose episode ends: see `Environments`."""
        began = time.perf_counter()
        actions, obs, rewards, terminated, truncated, valid = rows
        progress = self._progress
        for env, action in enumerate(self.sub_envs.inputs(actions)):
            checked = self._envs[env]
            progress.enter(self._places[env], checked.episode, checked.length)
            try:
                next_obs, rewards[env], ended, cut, info = checked.step(action)
            except (EnvironmentFault, SkippedStep) as error:
                rewards[env] = 0.0
                terminated[env] = False
                truncated[env] = True
                obs[env] = self._after_no_step(env, error, log)
                valid[env] = False
                continue
            progress.stepped()
            terminated[env] = ended
            truncated[env] = cut
            if ended or cut:
                if not ended:
                    final_obs = next_obs.astype(self.obs.base)
                    log.time_limits.append(TimeLimit(log.step, env, final_obs))
                log.episodes.append(checked.finished(info, log.step + 1))
                next_obs = self.begin_episode(env, checked.episode + 1, log)
            obs[env] = next_obs
        for complete in self._step_hooks:
            complete(rows, log)
        log.step += 1
        log.seconds += time.perf_counter() - began

    def _end_lives(self, rows: StepRows, log: EnvLog) -> None:
        """Let the loss of a life terminate for learning; the episode goes on."""
        _, _, _, terminated, _, _ = rows
        for env, checked in enumerate(self._envs):
            terminated[env] |= checked.env.lost_life

    def _follow_interruptions(self, rows: StepRows, log: EnvLog) -> None:
        """Begin the next episodes of sub-environments that were reset with all others of their environment."""
        _, obs, _, _, truncated, valid = rows
        for env, episode, lost_steps in self.sub_envs.interruptions():
            if lost_steps:
                log.incidents.append(self._abandoned_with_all(env, lost_steps))
                if valid[env]:
                    truncated[env] = True
                    log.time_limits.append(TimeLimit(log.step, env, obs[env].copy()))
            obs[env] = self.begin_episode(env, episode, log)

    def begin_episode(self, env: int, episode: int, log: EnvLog) -> np.ndarray:
        """Start an episode, and return its first observation; if that fails, start the next one."""
        try:
            return self._reset(env, episode, log)
        except EnvironmentFault as error:
            return self._replaced(env, error, log)

    def _reset(self, env: int, episode: int, log: EnvLog) -> np.ndarray:
        self._progress.enter(place_of(Phase.RESET, self._settings.sampler_id, env), episode)
        return self.sub_envs.reset(env, episode, log.options)

    def _after_no_step(
        self, env: int, error: EnvironmentFault | SkippedStep, log: EnvLog
    ) -> np.ndarray:
        """Return the observation that follows a step that failed, or that a sub-environment did not take."""
        if isinstance(error, EnvironmentFault):
            return self._replaced(env, error, log)
        error.__traceback__ = None  # its frames would hold the segment until cycles are collected
        self._progress.stepped()
        if error.is_last:
            return self.begin_episode(env, self._envs[env].episode + 1, log)
        return self._envs[env].last_obs

    def _replaced(self, env: int, error: EnvironmentFault, log: EnvLog) -> np.ndarray:
        """Make an environment that failed again, and start its next episode; raise EnvironmentFault to end the run."""
        max_in_a_row = self.repairs.policy.max_in_a_row
        for _ in range(max_in_a_row):
            self.repairs.repair(self._envs[env], error, log)
            try:
                return self._reset(env, self._envs[env].episode + 1, log)
            except EnvironmentFault as next_error:
                error = next_error
        message = (
            f"{error.message.rstrip('.')}. The {max_in_a_row} resets before it failed as well."
        )
        raise EnvironmentFault(message, error.remote_traceback, error.place)

    def _abandoned_with_all(self, env: int, lost_steps: int) -> Incident:
        text = (
            f"{self._settings.owner}, env {env}: abandoned episode {self._envs[env].episode} after {lost_steps} steps: "
            "all sub-environments were restarted"
        )
        return Incident(IncidentKind.EPISODE_ABANDONED, text, env=env, lost_steps=lost_steps)

    def check(self, obs: np.ndarray, log: EnvLog, *, first: bool) -> None:
        """Check the observations of a segment: see `Environments`."""
        restarts = self._settings.restarts
        while restarts:  # threads add further ones meanwhile
            log.incidents.append(restarts.pop(0))
        returned = obs[self._returned]
        # failed steps would shift the place of a value
        has_faults = any(incident.fault for incident in log.incidents)
        if self._checks_segments and not has_faults:
            try:
                self._checks.check_limits(returned)
            except BadResult as outside:
                far_outside = self._checks.far_outside(returned) if first else None
                is_wrong = far_outside is not None
                self._report(far_outside or outside, len(obs) - 1, log, space_is_wrong=is_wrong)
        if self.meter is not None:
            log.info = self.meter.take()
        if first:
            self._checks.pack = self._pack
            log.incidents += self._first_segment.take_findings(
                returned, offers_mask=self._envs[0].offers_mask
            )

    def _report(self, outside: BadResult, steps: int, log: EnvLog, *, space_is_wrong: bool) -> None:
        """Raise for floats beyond a limit of their space if `space_is_wrong`; else log them.

        A wrong space shows in the first segment, by numbers far outside. All others are reported, once, and used,
        because simulators overshoot.
        """
        row, env = outside.row
        checked = self._envs[env]
        later_ends = [
            episode for episode in log.episodes if episode.env == env and episode.end > row
        ]
        if later_ends:
            ended = later_ends[0]
            place = checked.place(ended.index, ended.length - ended.end + row)
        else:
            place = checked.place(checked.episode, checked.length - steps + row)
        message = f"{place} returned {outside}."
        if space_is_wrong:
            remedy = WRONG_SPACE.text(is_single=not self.sub_envs.are_joint)
            raise EnvironmentFault(f"{message} {remedy}.")
        if not self._reported_outside:
            text = f"{message} It is used as it is."
            log.incidents.append(Incident(IncidentKind.OUTSIDE_SPACE, text, env=env))
        self._reported_outside = True

    def restore(
        self, carry: SamplerCarry, actions: tuple[np.ndarray, ...], obs: np.ndarray, log: EnvLog
    ) -> list[Incident]:
        """Restore the open episodes that `carry` describes: see `Environments`."""
        began = time.perf_counter()
        incidents = []
        for env, reason in enumerate(self.sub_envs.restore(self, carry, actions, log)):
            if reason:
                episode = int(carry.episodes[env])
                length = int(carry.episode_lengths[env])
                text = f"abandoned episode {episode} after {length} steps and started a new one: {reason}"
                kind = IncidentKind.REPLAY_MISMATCH
                if reason == NO_REPLAY:
                    kind = IncidentKind.EPISODE_ABANDONED
                message = f"{self._settings.owner}, env {env}: {text}"
                incidents.append(Incident(kind, message, env=env, lost_steps=length))
                self.begin_episode(env, episode + 1, log)
            obs[env] = self.sub_envs.shown_obs(env)
        self.sub_envs.begin_segment(log)
        seconds = time.perf_counter() - began
        log.seconds += seconds
        self._progress.replay_s += seconds
        if self.meter is not None:
            self.meter.take()  # steps of a replay were measured before
        return incidents

    def avoid(self, fatal: Sequence[FatalStep]) -> None:
        """Let these steps count as faults: see `Environments`."""
        self.sub_envs.avoid(fatal)

    def follow(self, *, is_on: bool) -> None:
        """Let the controllers follow the episodes, or leave them off: see `Environments`."""
        self._guidance.is_on = is_on

    def intended(self) -> np.ndarray:
        """Return the actions that the controllers would take: see `Environments`."""
        return np.stack([self._guidance.intended[env] for env in range(self.num_envs)])

    @property
    def _guidance(self) -> Guidance:
        guidance = self._settings.guidance
        assert guidance is not None, "the environments have no controllers"
        return guidance

    def open_episodes(self, log: EnvLog) -> dict[str, Any]:
        """Describe the open episodes [E]: see `Environments`."""
        envs = self._envs
        arrays = {
            "episodes": np.array([env.episode for env in envs], np.int64),
            "episode_returns": np.array([env.episode_return for env in envs], np.float64),
            "episode_lengths": np.array([env.length for env in envs], np.int64),
            "checksums": np.array([env.checksum() for env in envs], np.uint32),
            **self.sub_envs.states(log),
        }
        options = [env.options for env in envs]
        if any(options):
            arrays["options"] = np.frombuffer(json.dumps(options).encode(), np.uint8)
        return arrays

    def close(self) -> None:
        """Close every environment, also if some fail to close."""
        self.sub_envs.close()


def _counts_lives(env: Any) -> bool:
    if isinstance(env, EnvThread):
        env = env.env
    return isinstance(env, Lives | LifeStack)
