"""The parser of all commands: argparse without defaults, and with errors that suggest the flag that was meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from dppo.errors import DppoError, unknown_name

WIDTH = 80

# Our flags, and the names of the same thing in other libraries. Where two flags share a name, the first one that the
# command has is suggested.
ALIASES = {
    "--actors": "workers num-workers n-workers num-env-runners num-rollout-workers n-jobs num-cpus n-actors",
    "--num-actors": "workers num-workers n-workers num-env-runners num-rollout-workers n-jobs num-cpus n-actors",
    "--seeds": "n-seeds num-seeds repeats n-runs num-runs",
    "--out": "out-dir output output-dir outdir save-path",
    "--episodes": "n-eval-episodes eval-episodes num-episodes n-episodes num-eval-episodes",
    "--stochastic": "sample",
    "--env-id": "env env-name environment gym-id task",
    "--learning-rate": "lr step-size alpha",
    "--num-samplers": "n-envs num-envs num-env nenvs n-env",
    "--envs-per-sampler": "num-envs-per-worker num-envs-per-env-runner envs-per-worker envs-per-actor",
    "--num-steps": "n-steps rollout-length rollout-fragment-length rollout-steps horizon unroll-length nsteps",
    "--total-timesteps": "timesteps n-timesteps num-timesteps total-steps max-steps steps num-env-steps",
    "--update-epochs": "n-epochs num-epochs epochs num-sgd-iter k-epochs ppo-epoch ppo-epochs noptepochs",
    "--minibatch-size": "batch-size sgd-minibatch-size mini-batch-size num-minibatches num-mini-batch nminibatches "
    "train-batch-size",
    "--clip-coef": "clip clip-range clip-param clip-ratio eps-clip cliprange clip-eps",
    "--clip-vloss": "clip-range-vf vf-clip-param",
    "--ent-coef": "entropy-coeff entropy-coef entropy-cost entropy entropy-bonus",
    "--vf-coef": "vf-loss-coeff value-loss-coef value-coef value-coeff",
    "--gae-lambda": "lambda lam gae lambda-",
    "--gamma": "discount discount-factor",
    "--max-grad-norm": "grad-clip clip-grad gradient-clip",
    "--target-kl": "kl-target kl",
    "--norm-adv": "normalize-advantage normalize-advantages norm-advantage",
    "--norm-obs": "normalize-obs normalize-observations norm-observations obs-norm",
    "--norm-reward": "normalize-reward normalize-rewards norm-rewards reward-norm",
    "--hidden-sizes": "net-arch hidden-dims hidden-dim hidden-layers fcnet-hiddens hidden-size layers",
    "--model": "policy network",
    "--device": "cuda gpu num-gpus",
    "--name": "exp-name experiment-name run-name",
    "--run-dir": "logdir log-dir save-dir output-dir outdir save-path log-folder out",
    "--checkpoint-interval-s": "checkpoint-freq save-freq save-interval checkpoint-interval",
    "--segment-timeout-s": "timeout",
    "--progress": "verbose quiet progress-bar",
    "--resume": "load restore load-checkpoint checkpoint trained-agent",
}


class UsageError(DppoError):
    """An invalid command line."""

    exit_code = 2


class Parser(argparse.ArgumentParser):
    """Returns only the flags that were given, by name: an absent flag has no value, not even its default."""

    def __init__(self, prog: str, usage: str, description: str) -> None:
        """Build a parser without flags; each line of `usage` shows one way to use the command."""
        super().__init__(
            prog=prog,
            usage=f"\n{' ' * len('usage: ')}".join(f"{prog} {line}" for line in usage.splitlines()),
            description=description,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            add_help=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=28, width=WIDTH),
        )

    def error(self, message: str) -> NoReturn:
        """Raise the message that argparse would print as a `UsageError`."""
        raise UsageError(f"{message.removeprefix('argument ')}. `{self.prog} --help` lists the flags.")

    def split(self, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the flags that were given, and the words beside them; raise a UsageError if a flag is wrong."""
        dashed = [re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), word) for word in argv]  # --num_actors=8
        found, rest = self.parse_known_args(dashed)
        for word in rest:
            if re.match("--?[a-zA-Z]", word):
                raise UsageError(f"{self._unknown(word.partition('=')[0])} `{self.prog} --help` lists the flags.")
        return vars(found), rest

    def _unknown(self, flag: str) -> str:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        ours = [name for name, theirs in ALIASES.items() if flag.removeprefix("--") in theirs.split()]
        meant = next((name for name in ours if name in known), None)
        if meant is not None:
            return f"{flag} is not a known flag. Did you mean {meant}?"
        if "--env-id" in (flag, *ours):
            return f"{flag} is not a known flag: the environment has none, as in {self.prog} CartPole-v1."
        return unknown_name("flag", flag, known)


def asks_for_help(argv: Sequence[str]) -> bool:
    """Return whether help is asked for; the other words need not be valid then."""
    return any(word in ("-h", "--help") for word in argv)


def one_word(words: Sequence[str], name: str, prog: str) -> str | None:
    """Return the word beside the flags, or None if there is none; raise a UsageError if there are more."""
    if len(words) > 1:
        raise UsageError(
            f"unexpected argument {words[1]!r}: {prog} takes one {name}, here {words[0]!r}. Switches such as "
            f"--anneal-lr take no value."
        )
    return words[0] if words else None
