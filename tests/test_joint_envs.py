"""Environments with sub-environments: vectors of Gymnasium's API, and PettingZoo's agents, which share a policy."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any, get_args

import gymnasium as gym
import numpy as np
import pytest
from builders import make_config
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from kinds import small
from matrix import AGENTS, THREE_SUB_ENVS, VECTOR
from remedies import executes
from worlds import joint
from worlds.acting import Masked
from worlds.observed import TEXTS

import dppo
from dppo import streams
from dppo.envs.episode import SkippedStep
from dppo.envs.instance import Instance
from dppo.envs.kinds import JointKind
from dppo.envs.make import make_env
from dppo.envs.sub_envs.choice import JOINT_ENVS
from dppo.errors import ConfigError, EnvironmentFault
from dppo.hosts.plans import sampler_plan
from dppo.hosts.sampler_builder import build_sampler
from dppo.ppo.exchange.records import EnvLog
from dppo.streams import Stream

THREE = THREE_SUB_ENVS | {"total_timesteps": 2 * 3 * 20 * 3}


def trained(folder: Path, **changes: Any) -> tuple[str, int]:
    result = dppo.train(small(folder, **THREE | changes))
    assert result.episodes >= 10
    assert result.incidents == {}
    return result.weights_sha256, result.global_step


@pytest.mark.parametrize(
    ("world", "kwargs", "settings"),
    [
        ("cartpole", {"kind": "sync"}, {}),
        ("cartpole", {"kind": "async"}, {}),
        ("cartpole", {"copy": False}, {}),
        ("cartpole", {"mode": "Disabled", "copy": False}, {}),
        ("masked", {}, {"action_mask": "info"}),
        ("everything", {}, {"drop_obs": TEXTS}),
    ],
    ids=str,
)
def test_a_vector_that_resets_single_environments_gives_the_weights_of_single_environments(
    world: str, kwargs: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    alone = trained(tmp_path / "single", env_id=f"worlds.joint:{world}", **settings)
    vector = VECTOR | {"env_kwargs": {"of": world} | kwargs} | settings
    assert trained(tmp_path / "vector", **vector) == alone


class Silent(joint.Agents):
    """Its infos are None."""

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        observations, _ = super().reset(seed)
        return observations, dict.fromkeys(self.agents)


class More(joint.Native):
    """Its observations have a part that is not in the space."""

    single_observation_space = gym.spaces.Dict(at=gym.spaces.Box(0, np.inf, (2,), np.float32))  # type: ignore[assignment]

    def _seen(self) -> Any:
        return {"at": super()._seen(), "extra": np.zeros(self.num_envs)}


def test_each_kind_of_joint_environment_has_a_class() -> None:
    assert JOINT_ENVS.keys() == set(get_args(JointKind))


def test_an_info_of_none_and_a_part_that_the_space_lacks() -> None:
    stepper = Stepper(Silent, 3)
    assert stepper.step(1, 2, 0) == ["1  1", "2  1", "0  1"]
    words = "returned an observation with the unexpected part 'extra'"
    with pytest.raises(EnvironmentFault, match=words):
        Stepper(lambda: More(2, "NextStep"), on_env_fault="raise")


def test_agents_that_return_the_same_arrays_again_have_equal_weights(tmp_path: Path) -> None:
    """The last observation of an episode, and what its info says, is that from before the next reset."""
    weights = set()
    for reuses in (False, True):
        agents = THREE | AGENTS | {"env_kwargs": {"reuses": reuses}}
        result = dppo.train(small(tmp_path / str(reuses), **agents))
        weights.add(result.weights_sha256)
        assert {row["charts/success_rate"] for row in result.metrics} == {1.0}
    assert len(weights) == 1


@pytest.mark.parametrize("kind", ["dict", "choices"])
def test_an_evaluation_gives_each_sub_environment_its_own_action(kind: str, tmp_path: Path) -> None:
    """Also where the number of sub-environments is not ours to choose, so that others move along."""
    env = {"env_id": "worlds.acting:Actuated", "env_kwargs": {"kind": kind}}
    result = dppo.train(small(tmp_path / "run", hidden_sizes=(8,), total_timesteps=80, **env))
    alone = dppo.evaluate(result, episodes=3)
    actions = {"of": f"actions:{kind}"}
    four = dppo.evaluate(result, "worlds.joint:four", env_kwargs=actions, episodes=3)
    assert four.returns == alone.returns
    assert four.lengths == alone.lengths


class Stepper:
    """The first sampler's group of an environment of this kind, with the arrays and the log that a sampler owns."""

    def __init__(self, env_id: Any, envs_per_sampler: int = 2, **settings: Any) -> None:
        sizes = {"envs_per_sampler": envs_per_sampler, "num_steps": 8, "num_samplers": 1}
        world = {"env_id": env_id, "on_env_fault": "rebuild"}
        config = make_config(world | sizes | settings)
        self.sampler = build_sampler(sampler_plan(config), 0)
        self.group = self.sampler.envs
        num_envs = self.group.num_envs

        self.obs = np.full(num_envs, 77, self.group.obs)
        rewards = np.full(num_envs, 777.0)
        terminated = np.ones(num_envs, bool)
        truncated = np.ones(num_envs, bool)
        self.valid = np.ones(num_envs, bool)
        self.results = self.obs, rewards, terminated, truncated, self.valid

        actions = np.zeros((8, num_envs), np.int64)
        self.log = EnvLog(index=1, actions=actions)
        self.group.start(self.obs, self.log)

    def step(self, *actions: int) -> list[str]:
        """Return for each its reward, how it ended, whether it was dropped, its final and its next observation."""
        self.valid[:] = True
        self.log.time_limits.clear()
        self.group.step((np.array(actions), *self.results), self.log)
        final_obs = {limit.env: limit.obs for limit in self.log.time_limits}
        lines = []
        for env, row in enumerate(zip(*self.results, strict=True)):
            obs, reward, terminated, truncated, valid = row
            line = f"{reward:g} " if valid else "dropped "
            if terminated:
                line += "t"
            if truncated:
                line += "c"
            if env in final_obs:
                line += f"({final_obs[env][0]:g})"
            lines.append(f"{line} {obs[0]:g}")
        return lines

    def episodes(self) -> list[tuple[int, int, int]]:
        """Return environment, index and length of each episode that has ended."""
        return [(episode.env, episode.index, episode.length) for episode in self.log.episodes]

    def incidents(self) -> list[tuple[str, int | None, int]]:
        """Return kind, environment and lost steps of each incident."""
        lines = []
        for incident in self.log.incidents:
            line = (incident.kind.value, incident.env, incident.lost_steps)
            lines.append(line)
        return lines


def test_a_sub_environment_that_is_reset_in_the_next_step_stands_still_there() -> None:
    stepper = Stepper(lambda: joint.Native(2, "NextStep"))
    assert stepper.step(0, 1) == ["0.5  1", "1.5  1"]
    assert stepper.step(2, 1) == ["2.5 t 0", "1.5  2"]
    assert stepper.step(3, 3) == ["dropped c 0", "3.5 c(3) 0"]  # its action has no effect
    assert stepper.step(0, 0) == ["0.5  1", "dropped c 0"]
    assert stepper.episodes() == [(0, 0, 2), (1, 0, 3)]

    returns = [episode.episode_return for episode in stepper.log.episodes]
    assert returns == [3.0, 6.5]
    still_open = stepper.group.open_episodes(stepper.log)
    assert still_open["episodes"].tolist() == [1, 1]
    assert still_open["episode_lengths"].tolist() == [1, 0]
    assert not stepper.sampler.spaces.deterministic  # so that nothing is replayed


def test_a_sub_environment_that_is_reset_in_the_same_step_has_its_final_observation_in_the_info() -> (
    None
):
    stepper = Stepper(lambda: joint.Native(2, "SameStep"))
    assert [stepper.step(0, 0) for _ in range(3)] == [
        ["0.5  1", "0.5  1"],
        ["0.5 t 0", "0.5  2"],
        ["0.5  1", "0.5 c(3) 0"],
    ]
    assert stepper.episodes() == [(0, 0, 2), (1, 0, 3)]
    assert all(episode.success for episode in stepper.log.episodes)


class Wrapped(joint.Native):
    """Its final observations are objects: each a whole one if `filled`, else each of their numbers."""

    def __init__(self, filled: bool) -> None:
        super().__init__(2, "SameStep")
        self._filled = filled

    def step(self, actions: Any) -> Any:
        *results, info = super().step(actions)
        if "final_obs" in info:
            observations = [*info["final_obs"]]
            info["final_obs"] = np.array(observations, dtype=object)
            if self._filled:
                info["final_obs"] = np.empty(2, dtype=object)
                info["final_obs"][:] = observations
        return *results, info


def test_final_observations_of_objects_are_refused_with_what_makes_them() -> None:
    stepper = Stepper(lambda: Wrapped(filled=False), on_env_fault="raise")
    stepper.step(0, 0)
    with pytest.raises(EnvironmentFault, match="of observations of one shape"):
        stepper.step(0, 0)

    stepper = Stepper(lambda: Wrapped(filled=True))
    stepper.step(0, 0)
    assert stepper.step(0, 0) == ["0.5 t 0", "0.5  2"]


def resets_later(mode: AutoresetMode) -> joint.Native:
    """Make a vector that resets in the following step, and declares `mode`."""
    env = joint.Native(2, "NextStep")
    env.metadata = {"autoreset_mode": mode}
    return env


@executes(
    "envs/sub_envs/vector.py: If it is reset in the following step, set metadata['autoreset_mode'] to"
)
def test_a_vector_that_declares_the_wrong_mode_is_told_the_right_one() -> None:
    wrong = Stepper(partial(resets_later, AutoresetMode.SAME_STEP), on_env_fault="raise")
    wrong.step(0, 0)
    with pytest.raises(EnvironmentFault, match="to AutoresetMode"):
        wrong.step(0, 0)
    right = Stepper(partial(resets_later, AutoresetMode.NEXT_STEP), on_env_fault="raise")
    assert [right.step(0, 0) for _ in range(2)][-1][0] == "0.5 t 0"


def agents_of(kind: type[joint.Agents]) -> tuple[Stepper, list[joint.Agents]]:
    """Return three sub-environments of such agents, and the environments that were made for them."""
    envs: list[joint.Agents] = []

    def make() -> joint.Agents:
        envs.append(kind())
        return envs[-1]

    return Stepper(make, 3), envs


def test_agents_are_sub_environments_and_those_that_are_gone_stand_still_until_the_next_episode_of_all() -> (
    None
):
    stepper, envs = agents_of(joint.Agents)
    steps = [stepper.step(1, 2, 0) for _ in range(9)]
    assert steps[1] == ["1  2", "2  2", "0  2"]
    assert steps[2] == ["1 t 0", "2  3", "0  3"]
    assert steps[3] == ["dropped c 0", "2  4", "0  4"]
    assert steps[4] == ["dropped c 0", "2 t 0", "0  5"]
    assert steps[7] == ["dropped c 0", "dropped c 0", "0 c(8) 0"]  # a new episode
    assert steps[8] == ["1  1", "2  1", "0  1"]
    assert stepper.episodes() == [(0, 0, 3), (1, 0, 5), (2, 0, 8)]

    first = streams.integer(1, Stream.EPISODES, 0, 0, 0)
    second = streams.integer(1, Stream.EPISODES, 0, 0, 1)
    assert envs[0].seeds == [first, second]


def test_steps_that_agents_do_not_take_keep_no_segment_in_memory() -> None:
    stepper, _ = agents_of(joint.Agents)
    gc.collect()
    gc.disable()
    try:
        for _ in range(6):
            stepper.step(1, 2, 0)
        skipped = [item for item in gc.get_objects() if isinstance(item, SkippedStep)]
        assert not any(error.__traceback__ for error in skipped)
    finally:
        gc.enable()


class Lingering(joint.Agents):
    """Its agents stay in its list after their end."""

    def step(self, actions: dict[str, Any]) -> Any:
        listed = self.agents
        self.agents = [agent for agent in listed if agent in actions]
        answer = super().step(actions)
        self.agents = listed
        return answer


def test_agents_that_are_listed_after_their_end_have_the_same_episodes() -> None:
    cleared, envs = agents_of(joint.Agents)
    listed, listed_envs = agents_of(Lingering)
    for _ in range(12):
        assert listed.step(1, 2, 0) == cleared.step(1, 2, 0)
    assert listed.episodes() == cleared.episodes()
    assert listed_envs[0].seeds == envs[0].seeds
    assert len(envs[0].seeds) == 2


class Returning(joint.Agents):
    """The first agent leaves after the first step of an episode of 4, and is listed again after the second one."""

    def step(self, actions: dict[str, Any]) -> Any:
        assert sorted(actions) == sorted(self.agents)
        self._steps += 1
        acted = self.agents
        listed = {1: ["bob", "cid"], 4: []}
        self.agents = listed.get(self._steps, self.possible_agents)

        observations = self._seen(self.possible_agents)
        over = {agent: agent in acted and agent not in self.agents for agent in observations}
        return (
            observations,
            dict.fromkeys(observations, 1.0),
            over,
            dict.fromkeys(observations, False),
            {agent: {} for agent in observations},
        )


def test_an_agent_that_comes_back_acts_again() -> None:
    stepper = Stepper(Returning, 3)
    for _ in range(2):
        steps = [stepper.step(1, 1, 1)[0] for _ in range(4)]
        assert steps == ["1 t 0", "dropped c 2", "1  3", "1 t 0"]


@pytest.mark.parametrize(
    ("env_id", "num_sub_envs", "line"),
    [
        (lambda: joint.Native(2, "NextStep", fails_at=2), 2, "0.5  1"),
        (lambda: joint.Native(2, "Disabled", obeys=True, fails_at=2), 2, "0.5  1"),
        (lambda: joint.Agents(fails_at=2), 3, "0  1"),
    ],
    ids=["autoreset", "mask", "agents"],
)
def test_an_exception_is_one_fault_after_which_all_sub_environments_begin_anew(
    env_id: Any, num_sub_envs: int, line: str
) -> None:
    stepper = Stepper(env_id, num_sub_envs)
    actions = [0] * num_sub_envs
    stepper.step(*actions)
    assert stepper.step(*actions) == ["dropped c 0"] * num_sub_envs
    assert stepper.step(*actions) == [line] * num_sub_envs

    raised, *abandoned = stepper.incidents()
    assert raised == ("env_raised", 0, 1)
    assert abandoned == [("episode_abandoned", env, 2) for env in range(1, num_sub_envs)]
    assert "OSError: the simulator is gone" in stepper.log.incidents[0].message

    still_open = stepper.group.open_episodes(stepper.log)
    assert still_open["episodes"].tolist() == [1] * num_sub_envs


class Blind(joint.Agents):
    """The observation of the second agent is not a number from the first step on."""

    def _seen(self, agents: list[str]) -> dict[str, np.ndarray]:
        observations = super()._seen(agents)
        if self._steps > 0 and "bob" in observations:
            observations["bob"][:] = np.nan
        return observations


def test_a_fault_of_any_agent_names_the_seed_that_all_of_them_were_reset_with() -> None:
    stepper, envs = agents_of(Blind)
    stepper.step(0, 0, 0)
    [fault] = [incident for incident in stepper.log.incidents if incident.fault is not None]
    assert fault.fault is not None
    assert fault.env == 1
    assert fault.fault.seed == envs[0].seeds[0]
    assert f"(seed {envs[0].seeds[0]}, step 1)" in fault.message


def test_a_sub_environment_between_two_episodes_loses_none_if_a_step_raises() -> None:
    """The second sub-environment has ended its episode, and would begin the next one in the step that raises."""
    stepper = Stepper(lambda: joint.Native(3, "NextStep", fails_at=4), 3)
    for _ in range(3):
        stepper.step(0, 0, 0)
    assert stepper.step(0, 0, 0) == ["dropped c 0"] * 3
    places = [(kind, env) for kind, env, _ in stepper.incidents()]
    assert places == [("env_raised", 0), ("episode_abandoned", 2)]
    assert stepper.episodes() == [(0, 0, 2), (1, 0, 3)]


class Odd(joint.Native):
    """An action of 3 makes the observation of its sub-environment invalid."""

    def step(self, actions: Any) -> Any:
        obs, *outcome = super().step(actions)
        obs[actions == 3] = np.nan
        return obs, *outcome


def test_an_invalid_sub_environment_is_reset_alone_where_the_vector_can_do_that() -> None:
    stepper = Stepper(lambda: Odd(2, "Disabled", obeys=True))
    assert stepper.step(3, 0) == ["dropped c 0", "0.5  1"]
    assert stepper.step(0, 0) == ["0.5  1", "0.5  2"]
    [(kind, env, _)] = stepper.incidents()
    assert (kind, env) == ("bad_step", 0)

    stepper = Stepper(lambda: Odd(2, "NextStep"))
    # the first one is cut off, and not lost
    assert stepper.step(0, 3) == ["0.5 c(1) 0", "dropped c 0"]
    assert stepper.step(0, 0) == ["0.5  1", "0.5  1"]


class Reusing(joint.Native):
    """Returns the same array each time, with new values."""

    def __init__(self, num_envs: int, mode: str) -> None:
        super().__init__(num_envs, mode)
        self.array = np.empty((num_envs, 2), np.float32)

    def _seen(self) -> Any:
        self.array[:] = super()._seen()
        return self.array


@pytest.mark.parametrize("kind", [joint.Native, Reusing])
def test_a_vector_that_resets_sub_environments_outside_of_the_mask_is_a_fault(kind: Any) -> None:
    with pytest.raises(
        EnvironmentFault, match="changed observations of sub-environments outside of the mask"
    ):
        Stepper(lambda: kind(2, "Disabled"), on_env_fault="raise")


# of EnvPool, whose reset takes no seed
ENVPOOL = {"config": {"seed": 1, "max_num_players": 1}}


@pytest.mark.parametrize(
    "attributes", [{"shared_memory": object()}, {"config": {"seed": None}}, ENVPOOL]
)
def test_attributes_that_a_vector_has_for_itself_change_nothing(attributes: dict[str, Any]) -> None:
    plain_env = joint.Native(2, "NextStep")
    other_env = joint.Native(2, "NextStep")
    vars(other_env).update(attributes)
    plain = Stepper(lambda: plain_env)
    other = Stepper(lambda: other_env)
    for _ in range(5):
        assert other.step(0, 1) == plain.step(0, 1)
    assert other.sampler.spaces.deterministic == plain.sampler.spaces.deterministic
    expected = [None] if attributes is ENVPOOL else plain_env.seeds
    assert other_env.seeds == expected
    assert plain_env.seeds != [None]


def masked_by_a_method(num_envs: int) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Masked, "method")] * num_envs)


def without_mode() -> Any:
    """A vector that does not say when it resets sub-environments."""
    env = joint.Native(1, "NextStep")
    env.metadata = {}
    return env


class MaskedNative(joint.Native):
    """A vector with a method of its own."""

    def action_masks(self) -> Any:
        return np.ones((self.num_envs, 4), bool)


class MaskedAgents(joint.Agents):
    """Has a method of its own for all agents."""

    def action_masks(self) -> Any:
        return {agent: np.ones(3, bool) for agent in self.agents}


UNREAD = r"action_mask=auto: the method action_masks\(\) of environments with sub-environments is not called. Return"
UNSAID = r"metadata\['autoreset_mode'\]=None, and it has to be one of AutoresetMode"
# tests/remedies/refused.py has others
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: MaskedNative(2, "NextStep"), {"envs_per_sampler": 2}, UNREAD),
    (MaskedAgents, {"envs_per_sampler": 3}, UNREAD),
    (joint.Agents, {}, "3 agents, each of which is a sub-environment. Use `envs_per_sampler=3`"),
    (lambda: joint.vector(1), {"wrappers": [gym.Wrapper]}, "wrappers: prepares single env"),
    (
        lambda: joint.Agents(odd=True),
        {"envs_per_sampler": 3},
        r"the observation_space of ann is Box\(.*\(5,\).* of bob",
    ),
    (without_mode, {}, UNSAID),
]


@pytest.mark.parametrize(
    ("env_id", "settings", "text"), REFUSED, ids=[text[:30] for _, _, text in REFUSED]
)
def test_what_does_not_fit_is_refused_and_closed(
    env_id: Any, settings: dict[str, Any], text: str
) -> None:
    closed: list[Any] = []

    def make() -> Any:
        env = env_id()
        env.close = lambda **_: closed.append(env)
        return env

    config = make_config({"env_id": make, "num_samplers": 1} | settings)
    with pytest.raises(ConfigError, match=text):
        build_sampler(sampler_plan(config), 0)
    assert len(closed) == 1


def test_a_method_for_masks_in_a_vector_is_left_alone_on_request() -> None:
    stepper = Stepper(lambda: masked_by_a_method(2), action_mask="off")
    assert stepper.sampler.spaces.mask is None


def test_a_factory_gets_the_number_of_sub_environments_and_a_seed_if_it_cannot_do_without() -> None:
    arguments: list[tuple[int, int, int]] = []

    def make(num_envs: int, seed: int, sampler_id: int) -> Any:
        arguments.append((num_envs, seed, sampler_id))
        return joint.vector(num_envs)

    settings = {"env_id": make, "envs_per_sampler": 4, "num_samplers": 2, "num_steps": 8, "seed": 7}
    plan = sampler_plan(make_config(settings))
    for sampler_id in range(2):
        build_sampler(plan, sampler_id).envs.close()
        seed = streams.integer(7, Stream.EPISODES, sampler_id, 0, 0)
        assert arguments.pop() == (4, seed, sampler_id)

    def with_defaults(num_envs: int = 2, seed: int = 9) -> Any:
        arguments.append((num_envs, seed, 0))
        return joint.cartpole()

    make_env(with_defaults, {}, Instance(num_sub_envs=4))
    assert arguments == [(2, 9, 0)]


KINDS: dict[str, dict[str, Any]] = {
    "agents": {},
    "late": {"late": True},
    "vector": {"kind": "sync"},
    "Native": {"mode": "NextStep"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_plays_all_agents_or_a_sub_environment(kind: str, tmp_path: Path) -> None:
    """The return of agents is the mean of theirs, as in the charts of training."""
    world = "agents" if kind == "late" else kind
    settings = THREE | {
        "env_id": f"worlds.joint:{world}",
        "env_kwargs": KINDS[kind],
        "eval_every": 1000,
        "eval_episodes": 2,
    }
    result = dppo.train(small(tmp_path / "run", **settings))
    assert "evaluation_fault" not in result.incidents

    played = dppo.evaluate(result, episodes=3, seed=1)
    again = dppo.evaluate(result, episodes=3, seed=1)
    assert played == again

    if kind == "Native":
        assert played.lengths == (2, 2, 2)
    elif kind == "vector":
        alone = dppo.evaluate(result, "worlds.joint:cartpole", env_kwargs={}, episodes=3, seed=1)
        assert played.returns == alone.returns
        assert played.lengths == alone.lengths
    else:  # agents leave after 3, 5 and 8 steps, and rewards are actions of 0, 1 or 2
        assert played.lengths == (8, 8, 8)
        for mean in played.returns:
            total = 3 * mean
            assert 0 < total <= 2 * 16
            assert total == pytest.approx(round(total))


@pytest.mark.proves("is a vector that resets its sub-environments by itself, such as EnvPool")
def test_a_vector_that_cannot_replay_says_so_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    native = {"env_id": "worlds.joint:Native", "env_kwargs": {"mode": "SameStep"}}
    dppo.train(small(tmp_path / "run", **THREE | native))
    text = (
        "resets sub-environments by itself: lost or resumed samplers start new episodes; EnvPool with its fixed "
        "seed starts its first ones again"
    )
    assert text in caplog.text
