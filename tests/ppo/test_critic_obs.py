"""Parts of an observation that only the value reads: the policy learns with them and acts without them."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from builders import make_config
from gymnasium import spaces

import dppo
from dppo.envs.spaces import describe_spaces, with_critic_obs
from dppo.errors import ConfigError
from dppo.ppo.networks.built_in import BuiltInSpec
from dppo.ppo.networks.layers import Layers


class Channel(gym.Env[Any, Any]):
    """A flow with sensors and a field, as of a simulation; the reward asks for an action opposite to the sensors."""

    def __init__(self) -> None:
        field = spaces.Dict(
            pressure=spaces.Box(-9.0, 9.0, (3, 4)), image=spaces.Box(0, 255, (8, 8, 1), np.uint8)
        )
        sensors = spaces.Box(-9.0, 9.0, (2,))
        self.observation_space = spaces.Dict(sensors=sensors, field=field)
        self.action_space = spaces.Box(-1.0, 1.0, (2,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self._observation(), {}

    def _observation(self) -> dict[str, Any]:
        sensors = self.np_random.uniform(-1, 1, 2)
        pressure = self.np_random.normal(size=(3, 4))
        image = np.full((8, 8, 1), self._steps, np.uint8)
        self._sensors = sensors.astype(np.float32)
        field = {"pressure": pressure.astype(np.float32), "image": image}
        return {"sensors": self._sensors, "field": field}

    def step(self, action: np.ndarray) -> Any:
        self._steps += 1
        distance = np.square(action + self._sensors).sum()
        truncated = self._steps == 10
        return self._observation(), -float(distance), False, truncated, {}


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    return make_config(
        {
            "env_id": Channel,
            "critic_obs": ("field",),
            "num_samplers": 2,
            "num_steps": 16,
            "total_timesteps": 64,
            "update_epochs": 1,
            "progress": "off",
            "run_dir": run_dir,
        }
        | changes
    )


def test_the_head_does_not_depend_on_what_only_the_value_reads() -> None:
    described = with_critic_obs(describe_spaces(Channel()), ["field/pressure"])
    assert described.critic_obs == ("field.pressure",)

    layers = Layers(image_encoder="grid", image_features=8, memory="gru", shared=False)
    network = BuiltInSpec(described, layers, "float32").module(0)
    obs = {}
    for name, leaf in described.leaves().items():
        obs[name] = torch.rand((1, 5, *leaf.shape))
    pressure = obs["field.pressure"]
    other_obs = obs | {"field.pressure": pressure + 1}
    state = torch.zeros((5, layers.state_size))
    starts = torch.zeros((1, 5), dtype=torch.bool)

    head, values, _ = network(obs, state, starts)
    other_head, other_values, _ = network(other_obs, state, starts)
    assert torch.equal(head, other_head)
    assert not torch.equal(values, other_values)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "algo": "sac",
            "update_epochs": None,
            "learning_starts": 0,
            "drop_obs": ("field.image",),
            "critic_sizes": (8,),
        },
        {"critic_obs": ("field.pressure", "field/image")},
        {"memory": "lstm"},
        pytest.param({"reuse": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_trained_policy_acts_with_and_without_the_field(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    config = settings(tmp_path / "run", **changes)
    run = dppo.train(config)
    policy = dppo.load_policy(run)

    def act(obs: Any) -> np.ndarray:
        acted = policy.act(obs)
        if not policy.state_size:
            return acted
        action, _ = acted
        return action

    observation, _ = Channel().reset(seed=3)
    sensors = observation["sensors"]
    action = act(observation)
    without_field = act({"sensors": sensors})
    batch_actions = act({"sensors": np.stack([sensors] * 4)})
    assert np.array_equal(action, without_field)
    assert batch_actions.shape == (4, 2)
    assert np.allclose(batch_actions, without_field)
    policy = pickle.loads(pickle.dumps(policy))  # as for a process that is spawned
    assert np.array_equal(act(observation), action)
    assert np.isnan(policy.outputs(observation).values)  # not of zeros in place of the field

    evaluated = dppo.evaluate(run, episodes=1)
    assert len(evaluated.returns) == 1

    longer = replace(config, total_timesteps=96)
    resumed = dppo.train(longer, resume=run.run_dir)
    assert resumed.global_step == 96


@pytest.mark.slow
def test_the_exported_policy_has_no_input_for_the_field(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    from dppo.tools.export.policies import export_onnx

    run = dppo.train(settings(tmp_path / "run"))
    file = tmp_path / "policy.onnx"
    export_onnx(run.run_dir, file)
    session = onnxruntime.InferenceSession(str(file))
    assert [value.name for value in session.get_inputs()] == ["obs.sensors"]

    observation = Channel().reset(seed=3)[0]
    sensors = observation["sensors"][None]
    (actions,) = session.run(["action"], {"obs.sensors": sensors})
    expected = dppo.load_policy(run).act(observation)
    assert np.allclose(actions[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"critic_obs": ("presure",)},
            "critic_obs=presure: is not.* sensors, field.pressure, field.image",
        ),
        ({"env_id": "CartPole-v1"}, "single array, which has no names"),
        (
            {"model": "own_network:Network"},
            "critic_obs=.* has no effect: it applies to the default",
        ),
    ],
    ids=str,
)
def test_names_that_do_not_fit_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        dppo.train(settings(tmp_path / "run", **changes))
