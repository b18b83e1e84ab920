"""RunState: what a run is between two iterations, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from dppo.errors import printable
from dppo.ppo.exchange.records import Episode, PolicySnapshot
from dppo.ppo.exchange.scales import ValueScale
from dppo.run.learner import ActingPolicy, PPOLearner

Arrays = dict[str, np.ndarray]
# an adapted learning rate, the segments kept for reuse or a clone, the clone of a controller, and the env steps kept
# for replay
NOT_BRANCHED = ("learning_rate", "rate_factor", "kept", "clone", "rows")
# env, index, return, length and success: enough for the metrics of recent episodes
EPISODE_FIELDS = 5


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything that the iterations to come depend on, besides the settings: the content of a checkpoint.

    | part | owner |
    |---|---|
    | weights, optimizer | the trainers |
    | statistics of the normalizers | the learner |
    | carries of the samplers, actions of their open episodes, steps that were given up | the ledger |
    | older policies that collect segments already (policy lag) | the learner |
    | options of environments' resets | the observers |
    | counters, recent episodes, incidents, faults | the learner |
    """

    arrays: dict[str, Arrays]
    """Part -> arrays by name."""
    values: dict[str, Any]
    """JSON values."""

    @classmethod
    def capture(cls, learner: PPOLearner) -> RunState:
        """Take the state of a run between two iterations. Later iterations do not change it."""
        trainers = learner.trainers
        arrays = {
            "model": trainers.spec.unflatten(trainers.weights()),
            "optimizer": trainers.state(),
            "normalizer": learner.statistics.arrays(),
            "samplers": learner.ledger.arrays(learner.iteration),
        }
        values = {
            "iteration": learner.iteration,
            "global_step": learner.global_step,
            "episodes": learner.episodes,
            "recent": [astuple(episode)[:EPISODE_FIELDS] for episode in learner.recent],
            "incidents": dict(learner.incidents),
            "env_faults": dict(learner.env_faults.counts),
        }
        given_up = learner.ledger.given_up_before(learner.iteration)
        if given_up:
            values["given_up"] = given_up
        if learner.inherited_freeze is not None:
            values["freeze_norm_after"] = learner.inherited_freeze
        state = cls(arrays, values)
        state._capture_env_options(learner)
        state._capture_older_policies(learner)
        return state

    def restore(self, learner: PPOLearner) -> None:
        """Continue this run with a new learner, whose samplers are rebuilt by their first request.

        Raises errors of any kind if the state, which may be a stranger's, does not fit.
        """
        self._load_trainers(learner, self.arrays["optimizer"])
        values = self.values
        learner.iteration = values["iteration"]
        learner.global_step = values["global_step"]
        learner.episodes = values["episodes"]
        learner.inherit_freeze(values.get("freeze_norm_after"))
        learner.recent.extend(_episode(*fields) for fields in values["recent"])
        learner.incidents.update(_counts(values["incidents"]))
        learner.env_faults.counts.update(_counts(values.get("env_faults", {})))
        learner.ledger.load(self.arrays["samplers"], learner.iteration)
        learner.ledger.load_given_up(values.get("given_up", []))
        self._restore_policies(learner)

    def branch_off(self, learner: PPOLearner) -> None:
        """Begin a new run with the weights, the optimizer state and the normalizer statistics of this one."""
        arrays = self.arrays["optimizer"]
        names = [name for name in arrays if name.partition(".")[0] not in NOT_BRANCHED]
        self._load_trainers(learner, {name: arrays[name] for name in names})

    def _load_trainers(self, learner: PPOLearner, optimizer: Arrays) -> None:
        trainers = learner.trainers
        trainers.load(trainers.spec.flatten(self.arrays["model"]), optimizer)
        learner.statistics = learner.statistics.loaded(self.arrays["normalizer"])
        learner.value_scale = ValueScale.from_state(optimizer)

    def _capture_env_options(self, learner: PPOLearner) -> None:
        """Store the options of the policies to come, and of the current policy, which may differ."""
        options = learner.env_options()
        if options is None:
            return
        current: dict[str, Any] | None = options
        for policy in learner.policies.values():
            if policy.snapshot.version == learner.iteration:
                current = policy.snapshot.env_options
                break
        self.values["env_options"] = options
        self.values["options_current"] = current

    def _capture_older_policies(self, learner: PPOLearner) -> None:
        """Store the policies that collect segments and are not the current one, which is "model"."""
        for index, (snapshot, statistics) in learner.policies.items():
            if snapshot.version == learner.iteration:
                continue
            name = _part_of_policy(index - learner.iteration)
            self.arrays[name] = {"weights": snapshot.weights, **statistics.arrays()}
            self.values[f"version_{name}"] = snapshot.version
            if snapshot.env_options is not None:
                self.values[f"options_{name}"] = snapshot.env_options
            if snapshot.value_scale is not None:
                self.values[f"value_scale_{name}"] = astuple(snapshot.value_scale)

    def _restore_policies(self, learner: PPOLearner) -> None:
        for ahead in range(learner.policy_lag):
            name = _part_of_policy(ahead)
            if name in self.arrays:
                learner.policies[learner.iteration + ahead] = self._older_policy(name, learner)
        snapshot = replace(learner.snapshot(), env_options=self.values.get("options_current"))
        current = ActingPolicy(snapshot, learner.statistics)
        for ahead in range(learner.policy_lag + 1):
            learner.policies.setdefault(learner.iteration + ahead, current)

    def _older_policy(self, name: str, learner: PPOLearner) -> ActingPolicy:
        arrays = self.arrays[name]
        learner.trainers.spec.unflatten(arrays["weights"])  # which raises if they do not fit
        statistics = learner.statistics.loaded(arrays)
        scale = self.values.get(f"value_scale_{name}")
        snapshot = PolicySnapshot(
            self.values[f"version_{name}"],
            arrays["weights"],
            statistics.obs_scale(),
            None if scale is None else ValueScale(*scale),
            self.values.get(f"options_{name}"),
        )
        return ActingPolicy(snapshot, statistics)


def _part_of_policy(ahead: int) -> str:
    """Return the name of the policy that collects the segments `ahead` of the current ones."""
    return f"in_flight_{ahead}" if ahead else "in_flight"


def _episode(env: Any, index: Any, total: Any, length: Any, success: Any) -> Episode:
    if success is not None:
        success = bool(success)
    return Episode(int(env), int(index), float(total), int(length), success)


def _counts(stored: Mapping[str, Any]) -> dict[str, int]:
    return {printable(name): int(count) for name, count in stored.items()}
