"""Native vectors, which step many environments at once: dppo train vectors:pool --envs-per-sampler 16.

`num_envs` is `--envs-per-sampler`. Where a vector resets single sub-environments (Gymnasium's, and ale_py's), each
episode has a seed of its own, and is replayed after a loss. EnvPool is seeded when it is made, and cannot replay
episodes.
"""

from typing import Any


def pool(num_envs: int, seed: int, task: str = "Pong-v5") -> Any:
    """Return a vector of EnvPool: pip install envpool. Without the seed, all samplers would play alike."""
    import envpool

    return envpool.make_gymnasium(task, num_envs=num_envs, seed=seed, num_threads=1)


def atari(num_envs: int, game: str = "pong") -> Any:
    """Return a vector of ale_py, with the usual preparation of frames in C++."""
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv(
        game, num_envs=num_envs, num_threads=1, reward_clipping=True, episodic_life=True
    )


def processes(num_envs: int, env_id: str = "CartPole-v1") -> Any:
    """Return a vector of Gymnasium with a process for each environment."""
    import gymnasium

    return gymnasium.make_vec(env_id, num_envs, vectorization_mode="async")
