"""`dppo eval`: play with a trained policy."""

import warnings
from contextlib import closing
from functools import partial
from pathlib import Path

from dppo.commands.flags import RENDER, TRUST, Parser, UsageError, one_word, parsed_json
from dppo.errors import printable
from dppo.policies.evaluation import evaluate
from dppo.records.terminal.view import ShowLog

PROG = "dppo eval"
DESCRIPTION = "Play episodes with a trained policy, and print their mean return. RUN: a run's folder, or a checkpoint."
EPISODES = 100


def make_parser() -> Parser:
    """Return the parser of this command's flags."""
    parser = Parser(PROG, "RUN [--flag value ...]", DESCRIPTION)
    group = parser.add_argument_group("episodes")
    add = partial(group.add_argument, metavar="INT", type=int)
    add("--episodes", help=f"Number of episodes. (default: {EPISODES})")
    add("--seed", help="Seed of the episodes, independent of the training's. (default: 0)")
    sampled = "Sample actions from the policy, as in training. Without it, the most likely action is taken."
    group.add_argument("--stochastic", action="store_true", help=sampled)
    group.add_argument("--render", action="store_true", help=RENDER)
    film = "Write a video, such as out.mp4, of the first 9 episodes side by side."
    group.add_argument("--video", metavar="FILE", help=film)
    group = parser.add_argument_group("environment and network")
    other = "Play in this environment instead of the run's own. Its spaces must be the same."
    group.add_argument("--env-id", metavar="ENV_ID", help=other)
    arguments = "Arguments of the environment, as JSON, in place of all those of the run: '{\"g\": 9.8}'."
    group.add_argument("--env-kwargs", metavar="JSON", help=arguments)
    own = "Use this class for the run's own network instead of the one that the checkpoint names."
    group.add_argument("--model", metavar="MODULE:CLASS", help=own)
    group.add_argument("--trust", action="store_true", help=TRUST)
    return parser


def main(argv: list[str]) -> int:
    """Play, and print mean and spread of the returns; return the exit code."""
    flags, words = make_parser().split(argv)
    run = one_word(words, "RUN", PROG)
    if run is None:
        raise UsageError(f"RUN is missing. For example: {PROG} runs/...")
    deterministic = not flags.pop("stochastic", False)
    if "env_kwargs" in flags:
        flags["env_kwargs"] = parsed_json("env_kwargs", flags["env_kwargs"])
    env_id = flags.pop("env_id", None)
    with closing(ShowLog(lambda text: print(text, flush=True))) as show_log, warnings.catch_warnings():
        show_log.start()
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_, **__: print(printable(f"note: {message}"), flush=True)
        played = evaluate(Path(run), env_id, deterministic=deterministic, **{"episodes": EPISODES} | flags)
    span = f"(from {min(played.returns):.1f} to {max(played.returns):.1f}), length {played.mean_length:.1f}"
    print(f"return {played.mean_return:.1f} +- {played.std_return:.1f} {span}")
    return 0
