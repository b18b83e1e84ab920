"""Policy and critics of soft actor-critic: what each reads, and how a run announces them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch
from builders import make_config
from gymnasium import spaces

from dppo.config.resolve import facts_of, resolve
from dppo.envs.spaces import describe_spaces, with_critic_obs
from dppo.hosts.builders import build_trainer
from dppo.hosts.plans import trainer_plan
from dppo.hosts.sac import networks_in_words
from dppo.sac.inputs import CriticInputs
from dppo.sac.trainer import SACTrainer
from dppo.spaces.spaces import Spaces

NUMBERS = spaces.Box(-9.0, 9.0, (3,))
PARTS = spaces.Dict(
    speed=spaces.Box(-9.0, 9.0, (2, 2)),
    gear=spaces.Discrete(3, start=-1),
    switches=spaces.MultiBinary(2),
    station=spaces.Discrete(5000),
)
ACTIONS = spaces.Box(-2.0, 2.0, (2,))


class Plant(gym.Env[Any, Any]):
    """An environment that is only described."""

    action_space = ACTIONS

    def __init__(self, obs: spaces.Space[Any]) -> None:
        self.observation_space = obs


def described(obs: spaces.Space[Any]) -> Spaces:
    return describe_spaces(Plant(obs), action_bounds="squash")


def test_critics_read_all_leaves_and_categories_as_one_hot_codes() -> None:
    inputs = CriticInputs(described(PARTS), 1, torch.device("cpu"))
    obs = {
        "gear": torch.tensor([1, -1]),
        "speed": torch.arange(1.0, 9.0).view(2, 2, 2),
        "station": torch.tensor([4000, 3]),
        "switches": torch.eye(2, dtype=torch.int8),
    }
    actions = torch.tensor([[0.5], [0.25]])
    speeds = obs["speed"].flatten(1)
    gears = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    expected = torch.cat(
        [speeds, gears, torch.eye(2), torch.tensor([[4000.0], [3.0]]), actions], dim=1
    )
    assert torch.equal(inputs(obs, actions), expected)
    assert inputs.size == expected.shape[1]


@pytest.mark.parametrize(
    ("obs", "settings", "policy", "ending"),
    [
        (NUMBERS, {}, "an MLP with 8 x 9 relu units for the policy", "."),
        (
            PARTS,
            {"critic_obs": ("speed",)},
            "one-hot codes, the numbers as they are, joined into an MLP with 8 x 9 relu units for the policy",
            "; only they read speed.",
        ),
    ],
)
def test_a_run_announces_policy_and_critics_with_their_sizes(
    obs: spaces.Space[Any], settings: dict[str, Any], policy: str, ending: str
) -> None:
    sizes = {"hidden_sizes": (8, 9), "critic_sizes": (7, 6)}
    config = make_config({"env_id": "Plant-v0", "algo": "sac"} | sizes | settings)
    of_run = described(obs)
    if config.critic_obs:
        of_run = with_critic_obs(of_run, config.critic_obs)
    resolved, _ = resolve(config, facts_of(of_run.actions))
    trainer = build_trainer(trainer_plan(resolved), of_run)
    assert isinstance(trainer, SACTrainer)
    critics = len(trainer.learned_state()["critics.weights"])
    module = trainer.spec.module(0)
    of_policy = sum(
        parameter.numel()
        for name, parameter in module.named_parameters()
        if not name.startswith("value")
    )
    text = networks_in_words(config, of_run)
    assert text.startswith(f"Network: {policy}, {of_policy:,} parameters, because the observation ")
    critics_in_words = (
        f"two critics with 7 x 6 units, {critics:,} parameters, which also read the action{ending}"
    )
    assert text.endswith(critics_in_words)
    ppo = make_config({"env_id": "Plant-v0"})
    assert "for the value" in networks_in_words(ppo, described(NUMBERS))


def test_a_minibatch_has_the_rows_of_its_setting_however_small_the_batch_is() -> None:
    small = {"env_id": "Plant-v0", "algo": "sac", "num_samplers": 2, "num_steps": 20}
    assert make_config(small).sizes.minibatch_rows == 128
    assert make_config(small | {"minibatch_size": 32}).sizes.minibatch_rows == 32
