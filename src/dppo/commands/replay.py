"""`dppo replay`: play an episode again in which an environment failed."""

import pdb
from pathlib import Path

from dppo.commands.flags import RENDER, TRUST, Parser, UsageError
from dppo.errors import EnvironmentFault

PROG = "dppo replay"
DESCRIPTION = (
    "Play the episode of an incident, such as runs/NAME/incidents/001, in this process: the run's environment, the "
    "same seed, the same actions. The exit code is 0 if the fault happens again, 1 if it does not."
)


def main(argv: list[str]) -> int:
    """Play the episode; return the exit code."""
    parser = Parser(PROG, "INCIDENT [--flag ...]", DESCRIPTION)
    parser.add_argument("--debug", action="store_true", help="Open pdb where the environment fails.")
    parser.add_argument("--render", action="store_true", help=RENDER)
    parser.add_argument("--trust", action="store_true", help=TRUST)
    flags, words = parser.split(argv)
    if len(words) != 1:
        raise UsageError(f"needs one incident, not {len(words)}. For example: {PROG} runs/NAME/incidents/001")

    from dppo.run.replay import replay

    debug = flags.pop("debug", False)
    try:
        steps = replay(Path(words[0]), **flags)
    except EnvironmentFault as fault:
        print(f"The fault happens again: {fault}")
        cause: BaseException = fault
        while debug and cause.__context__ is not None:
            cause = cause.__context__
        if debug:
            pdb.post_mortem(cause.__traceback__)
        return 0
    print(f"No fault in {steps:,} steps: it does not follow from the seed and the actions of the episode alone.")
    return 1
