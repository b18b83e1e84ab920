"""`dppo eval`: play with a trained policy."""

import sys
import warnings
from contextlib import closing
from pathlib import Path
from statistics import fmean, pstdev

from dppo.commands.flags import RENDER, TRUST, Parser, parsed_json
from dppo.config.parts.processes import EVAL_EPISODES
from dppo.errors import printable
from dppo.policies.evaluation import evaluate
from dppo.records.terminal.streams import PatientStream, ShowLog

PROG = "dppo eval"
DESCRIPTION = "Play episodes with a trained policy, and print their mean return. RUN: a run's folder, or a checkpoint."
FLAGS = {
    "--episodes INT": f"Number of episodes. (default: {EVAL_EPISODES})",
    "--seed INT": "Seed of the episodes, independent of the training's. (default: 0)",
    "--stochastic": "Sample actions from the policy, as in training. Without it, the most likely action is taken.",
    "--num-actors N": "Ray actors that play the episodes, with the same results in less time. (default: 0, in process)",
    "--info-keys KEY ...": "Names of numbers in the info of steps, to print their sum and mean in an episode, and the "
    "last one. (default: those of the run)",
    "--render": RENDER,
    "--video FILE": "Write a video, such as out.mp4, of the first 9 episodes side by side.",
}
OF_RUN = {
    "--env-id ENV_ID": "Play in this environment instead of the run's own. Its spaces must be the same.",
    "--env-kwargs JSON": "Arguments of the environment, as JSON: '{\"g\": 9.8}'. They are added to those of the run, "
    "as with --eval-env-kwargs of `dppo train`; another --env-id gets only these.",
    "--model MODULE:CLASS": "Use this class for the run's own network instead of the one that the checkpoint names.",
    "--trust": TRUST,
}
PARSER = Parser(
    PROG, "RUN [--flag value ...]", DESCRIPTION, episodes=FLAGS, environment_and_network=OF_RUN
)


def main(argv: list[str]) -> int:
    """Play, and print mean and spread of the returns; return the exit code."""
    flags, run = PARSER.split_one(argv)
    deterministic = not flags.pop("stochastic", False)
    if "env_kwargs" in flags:
        flags["env_kwargs"] = parsed_json("env_kwargs", flags["env_kwargs"])
    env_id = flags.pop("env_id", None)
    with closing(ShowLog(PatientStream(sys.stdout).line)) as show_log, warnings.catch_warnings():
        show_log.start()
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_, **__: print(
            printable(f"note: {message}"), flush=True
        )
        played = evaluate(Path(run), env_id, deterministic=deterministic, **flags)
    span = f"(from {min(played.returns):.1f} to {max(played.returns):.1f}), length {played.mean_length:.1f}"
    print(f"return {played.mean_return:.1f} +- {played.std_return:.1f} {span}")
    for key, infos in played.info.items():
        totals = [info.total for info in infos]
        in_step = fmean(info.mean for info in infos)
        last = fmean(info.last for info in infos)
        in_episode = f"{fmean(totals):.4g} +- {pstdev(totals):.2g}"
        print(
            printable(
                f"{key}: in an episode {in_episode}, in a step {in_step:.4g}, in the last step {last:.4g}"
            )
        )
    return 0
