"""EnvGroup: the E environments of a sampler, stepped in turn; one that fails is replaced while the others go on."""

import json
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dppo.envs.activity import ActivityRecord, Phase, place_of
from dppo.envs.checks.observations import FirstSegment, SpaceChecks
from dppo.envs.checks.returned import BadResult
from dppo.envs.episode import CheckedEnv, InfoMeter
from dppo.envs.frames import LifeStack, Lives
from dppo.envs.make import close_all
from dppo.envs.own_state import OwnStates, Proof, offers_state
from dppo.envs.repairs import Repairs
from dppo.envs.threads import Standby
from dppo.errors import ConfigError, EnvironmentFault
from dppo.ppo.exchange.records import EnvLog, Incident, IncidentKind, SamplerCarry
from dppo.spaces.spaces import Spaces

WRONG_SPACE = (
    "Correct the observation, or widen the space; where you cannot change the environment, use "
    "`wrappers=dppo.envs.wrappers:no_limits`."
)


class EnvGroup:
    """Step E environments in turn, and reset each in the same step in which its episode ends.

    Every episode starts with `reset(seed=episode_seed(env, episode))`, so that any process can replay it.
    """

    _states: OwnStates | None = None  # see `keep_own_states`
    meter: InfoMeter | None = None
    """Watches the steps of the environments; None if none does."""

    def __init__(
        self,
        envs: list[Any],
        spaces: Spaces,
        *,
        episode_seed: Callable[[int, int], int],
        owner: str,
        sampler_id: int = 0,
        progress: ActivityRecord | None = None,
        repairs: Repairs | None = None,
        limits: bool = False,
        first_segment: FirstSegment | None = None,
        standby: int = 0,
    ) -> None:
        """Take over `envs`; raise EnvironmentFault if their spaces differ.

        Args:
            envs: E environments; or `EnvThread`s, and `standby` times E more, which reset for later episodes.
            episode_seed: of the index of the environment and of the episode.
            owner: prefix of error messages: "sampler 3 (CartPole-v1)".
            repairs: decides what becomes of an environment that fails; None: it ends the run.
            limits: an observation beyond a limit of its space is a fault, in each step.
            first_segment: its diagnostics; None: those of a network that reads float32.
        """
        self.num_envs, self.obs, self._spaces = len(envs) // (1 + standby), spaces.obs, spaces
        self._owner, self._sampler_id, self._stepping = owner, sampler_id, place_of(Phase.STEP, sampler_id)
        self._progress = progress or ActivityRecord()
        self._checks, self._limits = SpaceChecks(envs, spaces, owner, limits=limits), limits
        self._pack = self._checks.pack
        self._repairs = repairs or Repairs(envs.__getitem__, self._progress, sampler_id, raise_before=math.inf)
        checked = partial(CheckedEnv, owner=owner, spaces=spaces, checks=self._checks, episode_seed=episode_seed)
        self._envs = [checked(env, at % self.num_envs) for at, env in enumerate(envs)]
        self._all = self._envs.copy()
        taking_turns = Standby(self._envs, self.num_envs).reset if standby else None
        self._reset = taking_turns or (lambda env, episode, options: self._envs[env].reset(episode, options))
        self._first = first_segment or FirstSegment(spaces, owner, sampler_id=sampler_id)
        self._reported_outside = False
        has_lives = isinstance(envs[0].env if standby else envs[0], Lives | LifeStack)
        self._lives = range(self.num_envs if has_lives else 0)

    def keep_own_states(self, *, demanded: bool) -> None:
        """Take the states of the environments at the end of each segment, if all have `get_state` and `set_state`.

        `demanded`: raise ConfigError if they have not, and rebuild environments without a replay.
        """
        if all(offers_state(one.env) for one in self._all):
            self._states = OwnStates(self._owner, self._spaces.obs, demanded, notes_first=self._sampler_id == 0)
        elif demanded:
            raise ConfigError(
                "env_state=own: the environment has no get_state() and set_state(state). Add both, or use "
                "`env_state=auto`."
            )

    def set_states_at_once(self) -> None:
        """Rebuild environments from their own states without a proof, from now on."""
        if self._states is not None:
            self._states.demanded = True

    def checked(self, env: int) -> CheckedEnv:
        """Return an environment with its checks, to play an episode without starting the next one."""
        return self._envs[env]

    def start(self, obs: np.ndarray, log: EnvLog) -> None:
        """Start the first episode of each environment: see `Environments`."""
        began = time.perf_counter()
        self._checks.pack = self._first.watching(self._pack)
        for env in range(self.num_envs):
            obs[env] = self._begin_episode(env, 0, log)
        if self._states is not None:
            self._states.begin(self._envs)
        log.seconds += time.perf_counter() - began

    def step(
        self,
        actions: np.ndarray,
        obs: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        log: EnvLog,
    ) -> dict[int, np.ndarray]:
        """Step each environment, and reset those whose episode ends: see `Environments`."""
        began, final_obs = time.perf_counter(), dict[int, np.ndarray]()
        for env, action in enumerate(self._spaces.actions.each(actions)):
            self._progress.enter(self._stepping | env << 3, self._envs[env].episode, self._envs[env].length)
            try:
                seen, rewards[env], ended, cut, info = self._envs[env].step(action)
            except EnvironmentFault as error:
                rewards[env], terminated[env], truncated[env] = 0.0, False, True
                obs[env] = self._replaced(env, error, log)
                log.dropped.append(env)
                continue
            self._progress.stepped()
            terminated[env], truncated[env] = ended, cut
            if ended or cut:
                if not ended:
                    final_obs[env] = seen.astype(self.obs.base)
                log.episodes.append(self._envs[env].finished(info, log.step + 1))
                seen = self._begin_episode(env, self._envs[env].episode + 1, log)
            obs[env] = seen
        for env in self._lives:
            terminated[env] |= self._envs[env].env.lost  # for learning; the episode goes on
        log.step += 1
        log.seconds += time.perf_counter() - began
        return final_obs

    def _begin_episode(self, env: int, episode: int, log: EnvLog) -> np.ndarray:
        """Start an episode; if that fails, the next one."""
        self._progress.enter(place_of(Phase.RESET, self._sampler_id, env), episode)
        try:
            return self._reset(env, episode, log.options)
        except EnvironmentFault as error:
            return self._replaced(env, error, log)

    def _replaced(self, env: int, error: EnvironmentFault, log: EnvLog) -> np.ndarray:
        """Make an environment that failed anew, and start its next episode; raise EnvironmentFault to end the run."""
        for _ in range(self._repairs.most_in_a_row):
            self._repairs.repair(self._envs[env], error, log)
            try:
                self._progress.enter(place_of(Phase.RESET, self._sampler_id, env), self._envs[env].episode + 1)
                return self._reset(env, self._envs[env].episode + 1, log.options)
            except EnvironmentFault as again:
                error = again
        again_and_again = f"{error.message} The {self._repairs.most_in_a_row} resets before it failed as well."
        raise EnvironmentFault(again_and_again, error.remote_traceback, error.place)

    def check(self, obs: np.ndarray, log: EnvLog, *, first: bool) -> None:
        """Check the observations of a segment: see `Environments`."""
        returned = self._spaces.as_returned(obs)
        try:
            if not self._limits and not any(one.fault for one in log.incidents):  # which would move its place
                self._checks.check_limits(returned)
        except BadResult as outside:
            wrong = self._checks.far_outside(returned) if first else None
            self._report(wrong or outside, len(obs) - 1, log, wrong=wrong is not None)
        if first:
            self._checks.pack = self._pack
            log.incidents += self._first.findings(returned, offers_mask=self._envs[0].offers_mask)

    def _report(self, outside: BadResult, steps: int, log: EnvLog, *, wrong: bool) -> None:
        """Raise for floats beyond a limit of their space, if the space is `wrong`; else log them.

        A wrong space shows in the first segment, by numbers far outside. All others are reported, once, and used,
        because simulators overshoot.
        """
        row, env = outside.row
        one = self._envs[env]
        ended = next((past for past in log.episodes if past.env == env and past.end > row), None)
        place = (ended.index, ended.length - ended.end + row) if ended else (one.episode, one.length - steps + row)
        message = f"{one.place(*place)} returned {outside}."
        if wrong:
            raise EnvironmentFault(f"{message} {WRONG_SPACE}")
        if not self._reported_outside:
            log.incidents.append(Incident(IncidentKind.OUTSIDE_SPACE, f"{message} It is used as it is.", env=env))
        self._reported_outside = True

    def restore(
        self, carry: SamplerCarry, actions: tuple[np.ndarray, ...], obs: np.ndarray, log: EnvLog
    ) -> list[Incident]:
        """Restore the open episodes that `carry` describes: see `Environments`."""
        began = time.perf_counter()
        then = [None] * self.num_envs if carry.options is None else json.loads(carry.options.tobytes())
        incidents, states = [], [] if self._states is None else self._states.of(carry)
        for env in range(self.num_envs):
            episode, length = int(carry.episodes[env]), int(carry.episode_lengths[env])
            kind, reason = IncidentKind.EPISODE_ABANDONED, "replay is off, or the environment is nondeterministic"
            if states:
                kind = IncidentKind.REPLAY_MISMATCH
                reason = self._restored(env, carry, actions, then[env], log)
            elif actions:
                kind, reason = IncidentKind.REPLAY_MISMATCH, self._replay(env, carry, actions[env], then[env], log)
            if reason:
                lost = f"abandoned episode {episode} after {length} steps and started a new one: {reason}"
                incidents.append(Incident(kind, f"{self._owner}, env {env}: {lost}", env=env, lost_steps=length))
                self._begin_episode(env, episode + 1, log)
            obs[env] = self._envs[env].last_obs
        if self._states is not None:
            self._states.begin(self._envs)
        seconds = time.perf_counter() - began
        log.seconds += seconds
        self._progress.replay_s += seconds
        if self.meter is not None:
            self.meter.take()
        return incidents

    def _restored(
        self, env: int, carry: SamplerCarry, actions: tuple[np.ndarray, ...], options: Any, log: EnvLog
    ) -> str:
        """Bring an environment that has states of its own to the one in `carry`; return why not, "" if it is there.

        A replay that leads to the same state needs nothing else. Otherwise the state is set, and has to be proven.
        """
        own_states, one = self._states, self._envs[env]
        assert own_states is not None
        state = own_states.of(carry)[env]
        self._progress.enter(place_of(Phase.RESET, self._sampler_id, env), int(carry.episodes[env]))
        if own_states.demanded:
            reason = own_states.put(one, state, carry, env)
            one.options = options
            return reason
        can_replay = bool(actions) and len(actions[env]) == carry.episode_lengths[env]
        reason = "replay is off, or the environment is nondeterministic"
        if can_replay:
            reason = self._replay(env, carry, actions[env], options, log)
            if not reason and own_states.is_in(one, state):
                return ""
        proof = own_states.proofs_of(carry)[env]
        unproven = "no segment shows whether its own state is complete"
        if proof is not None:
            unproven = self._proven(one, proof, state, carry, log)
            one.options = options
        if not unproven:
            return ""
        if can_replay and not reason:  # setting the state has undone what the replay had done
            own_states.say_unproven(unproven, log)
            return self._replay(env, carry, actions[env], options, log)
        return f"{reason}; and with its own state, {unproven}. env_state=own uses that state without a proof"

    def _proven(self, one: CheckedEnv, proof: Proof, state: bytes, carry: SamplerCarry, log: EnvLog) -> str:
        """Set the state from before the last segment, and repeat that segment; return how its end differs."""
        own_states, env = self._states, one.index
        assert own_states is not None
        if problem := own_states.put_before(one, proof):
            return problem
        self._progress.enter(place_of(Phase.REPLAY, self._sampler_id, env))
        try:
            for action in self._spaces.actions.each(proof.actions):
                _, _, terminated, truncated, _ = one.step(action)
                self._progress.replay()
                if terminated or truncated:
                    one.reset(one.episode + 1, proof.options)
        except EnvironmentFault as error:
            self._repairs.repair(one, error, log, replayed=proof.actions)
            return f"the last segment failed: {error.message}"
        there = one.episode, one.length, one.checksum()
        if there != (carry.episodes[env], carry.episode_lengths[env], carry.checksums[env]):
            return "the last segment ends with another observation, return or episode"
        return "" if own_states.is_in(one, state) else "get_state returns something else after the last segment"

    def _replay(self, env: int, carry: SamplerCarry, actions: np.ndarray, options: Any, log: EnvLog) -> str:
        """Replay an episode; return how it differs from the first time, "" if it does not."""
        self._progress.enter(place_of(Phase.RESET, self._sampler_id, env), int(carry.episodes[env]))
        try:
            self._reset(env, int(carry.episodes[env]), options)
            self._progress.enter(place_of(Phase.REPLAY, self._sampler_id, env))
            for number, action in enumerate(self._spaces.actions.each(actions)):
                _, _, terminated, truncated, _ = self._envs[env].step(action)
                self._progress.replay()
                if terminated or truncated:
                    return f"the replay ended after {number + 1} of {len(actions)} steps"
        except EnvironmentFault as error:
            self._repairs.repair(self._envs[env], error, log, replayed=actions)
            return f"the replay failed: {error.message}"
        if self._envs[env].checksum() == int(carry.checksums[env]):
            return ""
        differs = "the replay produced another observation or return: it is not deterministic given its seed"
        return f"{differs}, or keeps state across resets, which `get_state` and `set_state` would carry over"

    def open_episodes(self, log: EnvLog) -> dict[str, Any]:
        """Describe the open episodes [E]: see `Environments`."""
        options = [one.options for one in self._envs]
        return {
            "episodes": np.array([one.episode for one in self._envs], np.int64),
            "episode_returns": np.array([one.episode_return for one in self._envs], np.float64),
            "episode_lengths": np.array([one.length for one in self._envs], np.int64),
            "checksums": np.array([one.checksum() for one in self._envs], np.uint32),
            **({} if self._states is None else self._states.take(self._envs, log)),
            **({"options": np.frombuffer(json.dumps(options).encode(), np.uint8)} if any(options) else {}),
        }

    def close(self) -> None:
        """Close every environment, also if some fail to close."""
        close_all([one.env for one in self._all if one.env is not None])
