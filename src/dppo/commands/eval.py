"""`dppo eval`: play episodes with a trained policy, or with a controller of the user's."""

import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, TextIO

from dppo.commands.flags import RENDER, TRUST, Parser, UsageError, parsed_json, print_lines
from dppo.config.parts.processes import EVAL_EPISODES
from dppo.errors import counted, printable
from dppo.files import user_path
from dppo.policies.controller import Controller
from dppo.policies.evaluation import evaluate
from dppo.records.observer import Evaluation
from dppo.records.terminal.figures import deviation, number
from dppo.records.terminal.streams import showing_log

PROG = "dppo eval"
USAGE = "RUN [--flag value ...]\nENV_ID --policy MODULE:NAME [--flag value ...]"
DESCRIPTION = (
    "Play episodes with a trained policy, or with a controller of your own, and print their mean return. RUN: a run's "
    "folder, or a checkpoint."
)
FLAGS = {
    "--policy NAME": "Play with this instead of the policy of a RUN: a controller, as module:name or file.py:name, or "
    "the folder of another run. The first word is then the environment, or a RUN that has one. A controller is a "
    "function action = f(obs), or a class or an object with act(obs), and perhaps reset().",
    "--episodes INT": f"Number of episodes. (default: {EVAL_EPISODES})",
    "--seed INT": "Seed of the episodes; those of a run's evaluations have the --seed of the run. (default: 0)",
    "--stochastic": "Sample actions from the policy, as in training. Without it, the most likely action is taken.",
    "--num-actors N": "Ray actors that play the episodes, with the same results in less time. (default: 0, in process)",
    "--info-keys KEY ...": "Names of numbers in the info of steps, to print their sum and mean in an episode, and the "
    "last one. (default: those of the run)",
    "--json": "Print the return, the length and these numbers of each episode as JSON.",
    "--render": RENDER,
    "--video FILE": "Write a video, such as out.mp4, of the first 9 episodes side by side.",
}
OF_RUN = {
    "--env-id ENV_ID": "Play in this environment instead of the run's own. Its spaces must be the same.",
    "--env-kwargs JSON": "Arguments of the environment, as JSON: '{\"g\": 9.8}'. They are added to those of the run's "
    "evaluations, --env-kwargs and --eval-env-kwargs of `dppo train`; another --env-id gets only these.",
    "--model MODULE:CLASS": "Use this class for the run's own network instead of the one that the checkpoint names.",
    "--trust": TRUST,
}
GROUPS = {"episodes": FLAGS, "environment and network": OF_RUN}
PARSER = Parser(PROG, USAGE, DESCRIPTION, GROUPS)


def main(argv: list[str]) -> int:
    """Play, and print mean and spread of the returns; return the exit code."""
    flags, word = PARSER.split_word(argv)
    deterministic = not flags.pop("stochastic", False)
    as_json = flags.pop("json", False)
    if "env_kwargs" in flags:
        flags["env_kwargs"] = parsed_json("env_kwargs", flags["env_kwargs"])
    policy, env = _policy_and_env(word, flags.pop("policy", None), flags.pop("env_id", None))
    notes = sys.stdout
    if as_json:
        notes = sys.stderr
    with showing_log(notes), warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_, **__: _print_note(str(message), notes)
        evaluation = evaluate(policy, env, deterministic=deterministic, **flags)
    if as_json:
        print(json.dumps(_as_json(evaluation), indent=1))
        return 0
    spread = deviation(evaluation.std_return, evaluation.mean_return)
    span = f"from {number(min(evaluation.returns))} to {number(max(evaluation.returns))}"
    line = f"return {number(evaluation.mean_return)} +- {spread} ({span}), length {evaluation.mean_length:.1f}"
    if evaluation.success_rate is not None:
        line += f", success {evaluation.success_rate:.1%}"
    print(line)
    if evaluation.left_out:
        total = counted(len(evaluation.left_out) + len(evaluation.returns), "episode")
        print(f"{len(evaluation.left_out)} of {total} left out: the environment failed in them")
    print_lines(*info_table(evaluation))
    return 0


def _policy_and_env(word: str, policy: str | None, env_id: str | None) -> tuple[Any, Any]:
    """Return the first two arguments of `evaluate`; raise UsageError if the words do not fit together.

    Args:
        word: the word beside the flags: a run, or with `policy` an environment.
        policy: a controller or a run, which plays.
        env_id: another environment than the run's.
    """
    is_run = user_path(word).exists()
    if policy is None:
        if not is_run and "/" not in word:
            raise UsageError(
                f"{word}: there is no such run. To play in an environment of this name, add --policy MODULE:NAME, "
                f"your controller, or --policy RUN."
            )
        return Path(word), env_id
    if env_id is not None:
        raise UsageError(
            f"--env-id {env_id}: with --policy, the environment is the first word, {word}. Leave it out."
        )
    env = Path(word) if is_run else word
    if not user_path(policy).exists():
        return Controller(policy), env
    if is_run:
        raise UsageError(
            f"{word}: is a run, and so is --policy {policy}. Write an environment in place of the first one."
        )
    return Path(policy), env


def _print_note(message: str, stream: TextIO) -> None:
    print(printable(f"note: {message}"), file=stream, flush=True)


def info_table(evaluation: Evaluation) -> list[str]:
    """Return the lines of a table of the numbers in the info: their sum, mean and last one in an episode.

    Each cell is the mean over the episodes, and their standard deviation.
    """
    if not evaluation.info:
        return []
    table = [["in an episode", "sum", "mean", "last"]]
    for key, infos in evaluation.info.items():
        row = [key, *map(_mean_and_deviation, zip(*infos, strict=True))]
        if len(infos) < len(evaluation.returns):
            row[0] += f" (in {len(infos)} of {counted(len(evaluation.returns), 'episode')})"
        table.append(row)
    widths = [max(len(row[column]) for row in table) for column in range(4)]
    return [
        f"{row[0]:<{widths[0]}}"
        + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in table
    ]


def _mean_and_deviation(numbers: Sequence[float]) -> str:
    return f"{fmean(numbers):.4g} +- {pstdev(numbers):.2g}"


def _as_json(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "env": evaluation.env_name,
        "mean_return": evaluation.mean_return,
        "std_return": evaluation.std_return,
        "returns": evaluation.returns,
        "lengths": evaluation.lengths,
        "success_rate": evaluation.success_rate,
        "left_out": evaluation.left_out,
        "info": {
            key: dict(zip(("sum", "mean", "last"), zip(*infos, strict=True), strict=True))
            for key, infos in evaluation.info.items()
        },
    }
