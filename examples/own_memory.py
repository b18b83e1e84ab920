"""Train a network of your own with memory on CartPole without velocities: python own_memory.py [STEPS]."""

import sys

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

import dppo


class PositionsOnly(gym.ObservationWrapper):
    """Leave the velocities out. What is left, [position of the cart, angle of the pole], must be remembered."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Return the first and the third number."""
        return observation[[0, 2]]


class Remembering(nn.Module):
    """A GRU for the policy and another for the value."""

    def __init__(self, spaces: dppo.Spaces, head_size: int, units: int = 32) -> None:
        """Make the layers. `state_size` tells dppo that the module has memory, and how much to keep of it."""
        super().__init__()
        self.cells = nn.ModuleList(nn.GRUCell(spaces.obs.shape[0], units) for _ in range(2))
        self.head, self.value = nn.Linear(units, head_size), nn.Linear(units, 1)
        nn.init.orthogonal_(self.head.weight, 0.01)  # at first, all actions are about as likely
        self.state_size = 2 * units

    def forward(self, obs: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return head [L, n, head_size], values [L, n] and the state [n, state_size] after L steps of n environments.

        `obs` is [L, n, 2] and `state` [n, state_size]; where `starts` [L, n] is True, an episode starts, and the state
        is zero. `dppo.over_time` takes care of that for a GRU or an LSTM.
        """
        of_policy, of_value = state.chunk(2, dim=1)
        hidden, of_policy = dppo.over_time(self.cells[0], obs, of_policy, starts)
        valued, of_value = dppo.over_time(self.cells[1], obs, of_value, starts)
        return (
            self.head(hidden),
            self.value(valued).squeeze(-1),
            torch.cat([of_policy, of_value], dim=1),
        )


if __name__ == "__main__":
    config = dppo.Config(
        env_id=PositionsOnly,
        model=Remembering,  # without it, --memory gru makes a network of dppo remember
        sequence_length=16,
        total_timesteps=int(sys.argv[1]) if len(sys.argv) > 1 else 200_000,
        learning_rate=2e-3,
        norm_obs=True,
        norm_reward=True,
    )
    result = dppo.train(config)
    policy, env = dppo.load_policy(result.run_dir), PositionsOnly()
    obs, _ = env.reset(seed=1)
    state, steps, over = None, 0, False
    while not over:
        action, state = policy.act(obs, state)  # None starts an episode
        obs, _, terminated, truncated, _ = env.step(action)
        steps, over = steps + 1, terminated or truncated
    print(f"The pole stood for {steps} steps.")
    print(f"Mean return after {result.global_step:,} steps: {result.episodic_return:.1f}")
