"""Restorer: brings the open episodes of environments that step one by one back, by a replay or by their own states."""

import numpy as np

from dppo.envs.activity import Phase, place_of
from dppo.envs.episode import CheckedEnv, ResetOptions
from dppo.envs.own_state import OwnStates, Proof, proofs_in, states_in
from dppo.envs.repairs import Repairs
from dppo.envs.sub_envs.port import SubEnvs
from dppo.errors import EnvironmentFault
from dppo.ppo.exchange.records import EnvLog, SamplerCarry

NO_REPLAY = "replay is off, or the environment is nondeterministic"


class Restorer:
    """Bring back the open episodes that a carry describes. Each method returns why that failed, "" if it did not."""

    def __init__(
        self,
        sub_envs: SubEnvs,
        repairs: Repairs,
        states: OwnStates | None,
        carry: SamplerCarry,
        log: EnvLog,
    ) -> None:
        """Prepare; `states` are the environments' own states, if they are kept."""
        self._sub_envs = sub_envs
        self._repairs = repairs
        self._states = states
        self._carry = carry
        self._log = log

    def restore(self, env: int, actions: np.ndarray | None, options: ResetOptions) -> str:
        """Bring back one episode, whose reset had these `options`; `actions`: [n, *A] since then, None: no replay."""
        states = self._states
        carry = self._carry
        if states is not None and carry.states is not None:
            problem = "" if carry.files is None else states.lost_files(states_in(carry)[env].state)
            if not problem:
                return self._restore_state(states, env, actions, options)
            if actions is None or len(actions) != carry.episode_lengths[env]:
                return f"{problem}; and {NO_REPLAY}"
            states.report_lost(problem, self._log)
        if actions is None:
            return NO_REPLAY
        return self._replay(env, actions, options)

    def _enter(self, phase: Phase, env: int, episode: int = 0) -> None:
        settings = self._sub_envs.settings
        settings.progress.enter(place_of(phase, settings.sampler_id, env), episode)

    def _replay(self, env: int, actions: np.ndarray, options: ResetOptions) -> str:
        episode = int(self._carry.episodes[env])
        self._enter(Phase.RESET, env, episode)
        settings = self._sub_envs.settings
        try:
            self._sub_envs.reset(env, episode, options)
            self._enter(Phase.REPLAY, env)
            for number, action in enumerate(settings.spaces.actions.each(actions), start=1):
                _, _, terminated, truncated, _ = self._sub_envs.envs[env].step(action)
                settings.progress.replay()
                if terminated or truncated:
                    return f"the replay ended after {number} of {len(actions)} steps"
        except EnvironmentFault as error:
            self._repairs.repair(self._sub_envs.envs[env], error, self._log, replayed=actions)
            return f"the replay failed: {error.message}"
        if self._sub_envs.envs[env].checksum() == int(self._carry.checksums[env]):
            return ""
        return (
            "the replay produced another observation or return: its code has changed, it is not deterministic given "
            "its seed, or keeps state across resets, which `get_state` and `set_state` would carry over"
        )

    def _restore_state(
        self, states: OwnStates, env: int, actions: np.ndarray | None, options: ResetOptions
    ) -> str:
        """Bring an environment to its own state in the carry.

        A replay that leads to the same state needs nothing else. Otherwise the state is set, and has to be proven.
        """
        carry = self._carry
        checked = self._sub_envs.envs[env]
        stored = states_in(carry)[env]
        self._enter(Phase.RESET, env, int(carry.episodes[env]))
        if states.demanded:
            problem = states.put(checked, stored)
            checked.options = options
            return problem
        problem = NO_REPLAY
        replayed = False
        if actions is not None and len(actions) == carry.episode_lengths[env]:
            problem = self._replay(env, actions, options)
            checked = self._sub_envs.envs[env]  # with standby copies, a reset changes the instance
            replayed = not problem
            if replayed and states.is_in(checked, stored.state):
                return ""
        proof = proofs_in(carry)[env]
        unproven = "no segment shows whether its own state is complete"
        if proof is not None:
            unproven = self._prove(states, checked, proof, stored.state)
            checked.options = options
        if not unproven:
            return ""
        if replayed and actions is not None:  # setting the state has undone the replay
            states.report_unproven(unproven, self._log)
            return self._replay(env, actions, options)
        return f"{problem}; and with its own state, {unproven}. env_state=own uses that state without a proof"

    def _prove(self, states: OwnStates, checked: CheckedEnv, proof: Proof, state: bytes) -> str:
        """Set the state from before the last segment, and repeat that segment, which must end in `state`."""
        problem = states.put(checked, proof.start)
        if problem:
            return problem
        env = checked.index
        settings = self._sub_envs.settings
        self._enter(Phase.REPLAY, env)
        try:
            for action in settings.spaces.actions.each(proof.actions):
                _, _, terminated, truncated, _ = checked.step(action)
                settings.progress.replay()
                if terminated or truncated:
                    checked.reset(checked.episode + 1, proof.options)
        except EnvironmentFault as error:
            self._repairs.repair(checked, error, self._log, replayed=proof.actions)
            return f"the last segment failed: {error.message}"
        carry = self._carry
        recorded = carry.episodes[env], carry.episode_lengths[env], carry.checksums[env]
        if (checked.episode, checked.length, checked.checksum()) != recorded:
            return "the last segment ends with another observation, return or episode"
        if states.is_in(checked, state):
            return ""
        return "get_state returns something else after the last segment"
