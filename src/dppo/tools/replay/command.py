"""`dppo replay`: play an episode of a run again: a recorded one, or one in which an environment failed."""

import pdb
import sys
from pathlib import Path
from typing import Any

from dppo.commands.flags import RENDER, TRUST, Parser, UsageError, in_flags, print_lines
from dppo.errors import EnvironmentFault
from dppo.invocation import command
from dppo.records.files.episodes import SUB_ENVS, nothing_recorded, read_episodes
from dppo.records.files.lock import training_notes
from dppo.records.files.run_files import check_run_files
from dppo.records.terminal.streams import showing_log

PROG = "dppo replay"
USAGE = "RUN --episode NUMBER [--flag ...]\nRUN --episodes\nINCIDENT [--flag ...]"
DESCRIPTION = (
    "Play an episode again in this process: the run's environment, the same seed, the same actions. Of a RUN, a "
    "training episode that it has recorded; of an INCIDENT, such as runs/NAME/incidents/001, the one that failed. The "
    "exit code is 0 if the episode is the same to the last bit, or its fault happens again; else 1."
)
FLAGS = {
    "--episode NUMBER": "The episode of a RUN, by a number of --episodes: 1234.",
    "--episodes": "List the recorded episodes of a RUN, and play none.",
    "--debug": "Open pdb where the environment fails; in an episode of a RUN also before its first step.",
    "--render": RENDER,
    "--video FILE": "Write a video, such as out.mp4, if it is the same.",
    "--trust": TRUST,
}


def main(argv: list[str]) -> int:
    """Play the episode, or list those that are recorded; return the exit code."""
    parser = Parser(PROG, USAGE, DESCRIPTION, {"options": FLAGS})
    flags, path = parser.split_word(argv, "RUN or INCIDENT", "runs/NAME --episodes")
    if flags.pop("episodes", False):
        if flags:
            raise UsageError(
                f"--{next(iter(flags))} has no effect with --episodes, which plays none. Leave it out."
            )
        return _list(Path(path))
    with showing_log(sys.stdout):
        return _play(Path(path), flags, debug=flags.pop("debug", False))


def _play(path: Path, flags: dict[str, Any], *, debug: bool) -> int:
    from dppo.tools.replay.episode import ReplayMismatch, replay

    if debug and "episode" in flags:
        flags["pause"] = pdb.set_trace
    try:
        print(replay(path, **flags))
    except ReplayMismatch as difference:
        print(difference)
        return 1
    except EnvironmentFault as fault:
        print(f"The fault happens again: {fault}")
        cause: BaseException = fault
        while debug and cause.__context__ is not None:
            cause = cause.__context__
        if debug:
            pdb.post_mortem(cause.__traceback__)
    return 0


def _list(run: Path) -> int:
    check_run_files(run)
    print_lines(*training_notes(run))
    episodes = read_episodes(run)
    if not episodes:
        print_lines(in_flags(nothing_recorded(run)))
        return 0
    print(f"{'number':>9}  {'sampler/env/episode':<20}{'return':>12}{'length':>9}{'env step':>14}")
    for episode in episodes:
        number = "fault"
        episode_return = ""
        if episode.number is not None:
            number = f"{episode.number:,}"
            episode_return = f"{episode.episode_return:.6g}"
        line = f"{number:>9}  {episode.name:<20}{episode_return:>12}{episode.length:>9,}{episode.global_step:>14,}"
        print(line)
    if all(episode.is_single for episode in episodes):
        playing = (
            f"{command('replay', run)} --episode NUMBER plays one, 3/0/17 instead of NUMBER any."
        )
        print(f"{len(episodes):,} recorded. {playing}")
    else:
        print(f"{len(episodes):,} recorded. They are of {SUB_ENVS}: none can be played again.")
    return 0
