"""`dppo eval`: play with a trained policy."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from dppo import streams
from dppo.commands.parser import Parser, UsageError, asks_for_help, one_word
from dppo.commands.settings_flags import TRUST
from dppo.config import Config
from dppo.config.trust import NAMING, code_named_by, require_trust
from dppo.envs.make import check_env_id, close_all, make_env
from dppo.envs.spaces import describe_spaces
from dppo.errors import CheckpointError, ConfigError
from dppo.policy import Policy, evaluation_generator, read
from dppo.records.run_folder import config_of
from dppo.streams import Stream

PROG = "dppo eval"
TELL_EVERY_S = 5.0


def make_parser() -> Parser:
    """Return the parser of this command's flags."""
    parser = Parser(
        PROG,
        "RUN [--flag value ...]",
        "Play episodes with a trained policy, in this process, and print their returns. RUN is the folder of a run, or "
        "one of its checkpoints.",
    )
    parser.add_argument("--episodes", type=int, metavar="INT", help="Episodes to play. (default: 100)")
    parser.add_argument(
        "--seed", type=int, metavar="INT", help="Seed of these episodes; not that of the training. (default: 0)"
    )
    parser.add_argument(
        "--stochastic",
        action="store_true",
        help="Draw actions from the policy, as in training; without it, the likeliest action is taken.",
    )
    parser.add_argument("--render", action="store_true", help="Show the environment in a window.")
    parser.add_argument(
        "--env-id",
        metavar="ENV_ID",
        help="Play in this environment instead of the one that the settings of RUN name; its spaces must be the same.",
    )
    parser.add_argument(
        "--model",
        metavar="MODULE:CLASS",
        help="Use this class for the run's own network instead of the one that RUN names.",
    )
    parser.add_argument("--trust", action="store_true", help=TRUST)
    return parser


def _settings(run: Path, model_name: str | None, named: dict[str, str], *, trust: bool) -> dict[str, Any]:
    """Return the settings of a run, with the code that the user names in place of the run's own.

    Args:
        model_name: the network that the checkpoint names: that one is imported.

    Raises:
        ConfigError: they name code, and the user neither names it nor trusts them.
    """
    settings = config_of(run) | {"model": model_name}
    if not trust:
        require_trust(settings, named, run)
    settings |= named
    for action in code_named_by(settings).values():
        print(f"{run} {action}.", flush=True)
    return settings


@dataclass(frozen=True)
class Played:
    """One evaluation episode."""

    episode_return: float
    length: int


def main(argv: list[str]) -> int:
    """Play, and print mean and spread of the returns; return the exit code."""
    parser = make_parser()
    if asks_for_help(argv):
        parser.print_help()
        return 0
    flags, words = parser.split(argv)
    path = one_word(words, "RUN", PROG)
    if path is None:
        raise UsageError(f"which RUN? For example: {PROG} runs/...")
    run, episodes, stochastic = Path(path), flags.get("episodes", 100), "stochastic" in flags
    if episodes < 1:
        raise ConfigError(f"episodes={episodes}: must be at least 1.")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = read(run)
    for warning in told:
        print(f"note: {warning.message}")
    named = {name: flags[name] for name in NAMING if name in flags}
    if "model" in named and found.model_name is None:
        raise ConfigError(f"model={named['model']}: has no effect: {run} has the default network. Leave it out.")
    config = Config(**_settings(run, found.model_name, named, trust="trust" in flags))
    policy = found.policy(named.get("model"))
    how = "drawing actions" if stochastic else "taking the likeliest action"
    print(f"{config.env_name}, policy after {policy.state['global_step']:,} steps, {how}, {episodes} episodes")
    played = evaluate(
        policy,
        config,
        episodes=episodes,
        seed=flags.get("seed", 0),
        stochastic=stochastic,
        render="render" in flags,
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
        close_all([env])


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
    found = describe_spaces(env, drop_obs=config.drop_obs)
    if not policy.spaces.same_observations(found) or type(found.actions) is not type(policy.spaces.actions):
        raise CheckpointError(
            f"{config.env_name} has observations {found.obs} and {type(found.actions).__name__}, the policy was "
            f"trained on {policy.spaces.obs} and {type(policy.spaces.actions).__name__}. Use the run's own."
        )
