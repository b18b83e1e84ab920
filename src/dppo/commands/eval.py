"""`dppo eval`: play with a trained policy."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any

import tyro

from dppo import streams
from dppo.commands.arguments import parse_quietly
from dppo.config import Config, make_config
from dppo.envs.make import check_env_id, describe_spaces, make_env
from dppo.errors import CheckpointError, ConfigError
from dppo.policy import Policy, evaluation_generator, load_policy
from dppo.run_folder import config_of
from dppo.streams import Stream

TELL_EVERY_S = 5.0


@dataclass(frozen=True)
class Flags:
    """Play with a trained policy, in this process, and print its returns."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """Folder of a run, or one of its checkpoints."""
    episodes: int = 100
    """Episodes to play."""
    seed: int = 0
    """Seed of these episodes; not that of the training."""
    stochastic: bool = False
    """Draw actions from the policy, as in training; otherwise the likeliest action is taken."""
    render: bool = False
    """Show the environment in a window."""


@dataclass(frozen=True)
class Played:
    """One evaluation episode."""

    episode_return: float
    length: int


def main(argv: list[str]) -> int:
    """Play, and print what the episodes came to; returns the exit code."""
    flags = parse_quietly(Flags, argv, "dppo eval")
    if flags.episodes < 1:
        raise ConfigError(f"episodes={flags.episodes}: there is nothing to play. Use at least 1.")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        policy = load_policy(flags.run)
    for warning in told:
        print(f"note: {warning.message}")
    config = make_config(config_of(flags.run))
    how = "drawing actions" if flags.stochastic else "taking the likeliest action"
    print(f"{config.env_name}, policy after {policy.state['global_step']:,} steps, {how}, {flags.episodes} episodes")
    played = evaluate(
        policy,
        config,
        episodes=flags.episodes,
        seed=flags.seed,
        stochastic=flags.stochastic,
        render=flags.render,
        tell=True,
    )
    returns = [one.episode_return for one in played]
    print(
        f"return {fmean(returns):.1f} +- {pstdev(returns):.1f} (from {min(returns):.1f} to {max(returns):.1f}), "
        f"length {fmean(one.length for one in played):.1f}"
    )
    return 0


def evaluate(
    policy: Policy,
    config: Config,
    *,
    episodes: int,
    seed: int = 0,
    stochastic: bool = False,
    render: bool = False,
    tell: bool = False,
) -> list[Played]:
    """Play `episodes` episodes in this process.

    Args:
        tell: print a line every few seconds.
    Raises:
        CheckpointError: the environment's spaces are not those that the policy was trained on.
    """
    check_env_id(config.env_id)
    env = make_env(config.env_id, config.env_kwargs | ({"render_mode": "human"} if render else {}))
    try:
        _check_spaces(policy, env, config)
        played: list[Played] = []
        told = time.monotonic()

        def tell_now_and_then(length: int, episode_return: float) -> None:
            nonlocal told
            if tell and time.monotonic() - told > TELL_EVERY_S:
                told = time.monotonic()
                mean = f", return {fmean(one.episode_return for one in played):.1f}" if played else ""
                print(
                    f"  {len(played)} of {episodes} episodes{mean}; the next has {length:,} steps and a return of "
                    f"{episode_return:.1f} so far",
                    flush=True,
                )

        for episode in range(episodes):
            played.append(_play(policy, env, seed, episode, stochastic, tell_now_and_then))
        return played
    finally:
        env.close()


def _play(
    policy: Policy, env: Any, seed: int, episode: int, stochastic: bool, tell: Callable[[int, float], None]
) -> Played:
    generator = evaluation_generator(seed, episode) if stochastic else None
    obs, _ = env.reset(seed=streams.integer(seed, Stream.EVALUATION, episode))
    episode_return, length, done = 0.0, 0, False
    while not done:
        action = policy.act(obs, generator=generator)
        obs, reward, terminated, truncated, _ = env.step(action)
        episode_return += float(reward)
        length += 1
        tell(length, episode_return)
        done = terminated or truncated
    return Played(episode_return, length)


def _check_spaces(policy: Policy, env: Any, config: Config) -> None:
    found = describe_spaces(env)
    if found.obs_shape != policy.spaces.obs_shape or type(found.actions) is not type(policy.spaces.actions):
        raise CheckpointError(
            f"{config.env_name} has observations {found.obs_shape} and {type(found.actions).__name__}, the policy was "
            f"trained on {policy.spaces.obs_shape} and {type(policy.spaces.actions).__name__}. Use the run's own."
        )
