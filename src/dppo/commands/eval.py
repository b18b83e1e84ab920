"""`dppo eval`: play with a trained policy."""

import warnings
from contextlib import closing
from pathlib import Path

from dppo.commands.flags import RENDER, TRUST, Parser, parsed_json
from dppo.errors import printable
from dppo.policies.evaluation import evaluate
from dppo.records.terminal.view import ShowLog

PROG = "dppo eval"
DESCRIPTION = "Play episodes with a trained policy, and print their mean return. RUN: a run's folder, or a checkpoint."
EPISODES = 100
FLAGS = {
    "--episodes INT": f"Number of episodes. (default: {EPISODES})",
    "--seed INT": "Seed of the episodes, independent of the training's. (default: 0)",
    "--stochastic": "Sample actions from the policy, as in training. Without it, the most likely action is taken.",
    "--render": RENDER,
    "--video FILE": "Write a video, such as out.mp4, of the first 9 episodes side by side.",
}
OF_RUN = {
    "--env-id ENV_ID": "Play in this environment instead of the run's own. Its spaces must be the same.",
    "--env-kwargs JSON": "Arguments of the environment, as JSON, in place of all those of the run: '{\"g\": 9.8}'.",
    "--model MODULE:CLASS": "Use this class for the run's own network instead of the one that the checkpoint names.",
    "--trust": TRUST,
}
PARSER = Parser(PROG, "RUN [--flag value ...]", DESCRIPTION, episodes=FLAGS, environment_and_network=OF_RUN)


def main(argv: list[str]) -> int:
    """Play, and print mean and spread of the returns; return the exit code."""
    flags, run = PARSER.split_one(argv)
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
