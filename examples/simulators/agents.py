"""Agents of PettingZoo that share one policy: pip install mpe2; dppo train agents:make --envs-per-sampler 3.

Each agent is a row, so `--envs-per-sampler` is their number. They need equal spaces: supersuit.pad_observations_v0,
pad_action_space_v0 and agent_indicator_v0 help.
"""

from typing import Any


def make(agents: int = 3) -> Any:
    """Return the task in which agents spread over landmarks, without touching each other."""
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(N=agents, max_cycles=25)


def play(run: str, episodes: int = 10) -> float:
    """Return the mean return of the agents, with the policy that a run has trained; it acts for all at once."""
    import numpy as np

    import dppo

    policy, env, returns = dppo.load_policy(run), make(), []
    for episode in range(episodes):
        seen, _ = env.reset(seed=episode)
        total = 0.0
        while env.agents:
            names = list(env.agents)
            chosen = policy.act(np.stack([seen[name] for name in names]))
            seen, rewards, *_ = env.step(dict(zip(names, chosen, strict=True)))
            total += sum(rewards.values()) / len(names)
        returns.append(total)
    env.close()
    return float(np.mean(returns))
