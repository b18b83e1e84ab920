"""User code may change what it is given: nothing that is given to it is used, or given, a second time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from kinds import small
from recorder import Recorder
from worlds.graded import RESETS, Graded
from worlds.models import Plain
from worlds.observed import World

import dppo
from dppo.config.parts import Env
from dppo.envs.preparation import make_prepared
from dppo.ppo.exchange.records import Episode
from dppo.tools.replay.episode import replay

BOX = gym.spaces.Box(-1, 1, (2,), np.float32)
SPACES: dict[str, gym.spaces.Space[Any]] = {
    "box": BOX,
    "dict": gym.spaces.Dict(arm=BOX, gear=gym.spaces.Discrete(3)),
    "dials": gym.spaces.MultiDiscrete([3, 3]),
}


class Scaling(World):
    """Scales its action, in place or in a copy."""

    observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)

    def __init__(self, kind: str = "box", in_place: bool = True) -> None:
        self.action_space = SPACES[kind]
        self._in_place = in_place

    def step(self, action: Any) -> Any:
        array = action["arm"] if isinstance(action, dict) else action
        if not self._in_place:
            array = array.copy()
        array *= 2
        if isinstance(action, dict) and self._in_place:
            action.clear()
        number = float(np.tanh(array.mean()))
        return super().step(number)

    def observation(self) -> Any:
        return self.at.astype(np.float32)


@pytest.mark.proves("changes its action in place, also with `--action-repeat`")
@pytest.mark.parametrize("kind", SPACES)
def test_an_environment_may_change_its_action_in_each_repeated_step(kind: str) -> None:
    action = SPACES[kind].sample()

    def rewards(in_place: bool) -> list[float]:
        kwargs = {"kind": kind, "in_place": in_place}
        env = make_prepared(Env(env_id=Scaling, env_kwargs=kwargs, action_repeat=3))
        env.reset(seed=1)
        steps = [env.step(action) for _ in range(2)]
        return [reward for _, reward, *_ in steps]

    assert rewards(in_place=True) == rewards(in_place=False)
    assert SPACES[kind].contains(action)


@pytest.mark.parametrize(
    "kind",
    [
        "dict",
        pytest.param("box", marks=pytest.mark.slow),
        pytest.param("dials", marks=pytest.mark.slow),
    ],
)
def test_an_environment_may_change_its_actions_in_a_run_which_is_recorded(
    kind: str, tmp_path: Path
) -> None:
    def trained(in_place: bool) -> dppo.Result:
        world = {
            "env_id": "test_copies:Scaling",
            "env_kwargs": {"kind": kind, "in_place": in_place},
        }
        return dppo.train(small(tmp_path / f"{in_place}", action_repeat=2, **world))

    changed = trained(in_place=True)
    assert changed.weights_sha256 == trained(in_place=False).weights_sha256
    assert "equal to the last bit" in replay(changed.run_dir, "1", trust=True)


class Greedy(dppo.Observer):
    """Sets an option, and empties all that it is given."""

    def on_start(self, run: dppo.RunInfo) -> None:
        self._run = run
        run.set_env(maps=[1, 2])

    def on_iteration(self, row: dict[str, float]) -> None:
        row.clear()
        self._run.env_options["maps"].clear()

    def on_episode(self, episode: Episode) -> None:
        if episode.options:
            episode.options["maps"].clear()


def test_an_observer_may_change_what_it_is_given(tmp_path: Path) -> None:
    RESETS.clear()
    recorder = Recorder()
    config = small(tmp_path / "run", env_id=Graded)
    result = dppo.train(config, observers=[Greedy(), recorder])
    assert len(RESETS) > 4
    for options in RESETS:
        assert options == {"maps": [1, 2]}
    iterations = [row["iteration"] for row in recorder.rows]
    assert iterations == [1, 2, 3]
    assert len(result.metrics) == 3


class Popping(Plain):
    """Takes its arguments out of the list."""

    def __init__(self, spaces: dppo.Spaces, head_size: int, sizes: list[int]) -> None:
        super().__init__(spaces, head_size, units=sizes.pop())


def test_a_network_may_change_its_arguments(tmp_path: Path) -> None:
    sizes = [7]
    network = {"model": Popping, "model_kwargs": {"sizes": sizes}, "norm_obs": False}
    config = small(tmp_path / "run", env_id="CartPole-v1", **network)
    assert dppo.train(config).iterations == 3
    assert sizes == [7]


def test_what_a_policy_returns_and_reads_may_be_changed(tmp_path: Path) -> None:
    result = dppo.train(small(tmp_path / "run", env_id=Scaling))
    policy = dppo.load_policy(result.run_dir)
    obs = np.ones(2, np.float32)
    first = policy.act(obs)
    before = first.copy()
    first *= 100
    assert obs.tolist() == [1, 1]
    again = policy.act(obs)
    assert again.tolist() == before.tolist()
