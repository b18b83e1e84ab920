"""Arguments and progress of an evaluation."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from dppo.errors import ConfigError, EnvironmentFault, counted, refuse
from dppo.log import logger
from dppo.plugins import plugin
from dppo.policies.acting import PlaySettings
from dppo.policies.player import Player
from dppo.ppo.exchange.records import Episode
from dppo.records.terminal.figures import duration, number

REPORT_EVERY_S = 5.0
MAX_LOGGED_FAULTS = 10  # of the environment


@dataclass(frozen=True, slots=True)
class EvaluationArguments:
    """The arguments of `dppo.evaluate` that decide which episodes are played, and how they are shown."""

    episodes: int
    play: PlaySettings
    render: bool
    video: Path | None
    num_actors: int

    def check(self) -> None:
        """Raise ConfigError if something is invalid, or cannot be shown here."""
        refuse(self._invalid())
        if self.video is not None:
            plugin("video").check(self.video, render=self.render)
        if self.render:
            check_display()

    def _invalid(self) -> Iterator[ConfigError]:
        if self.episodes < 1:
            yield ConfigError(f"episodes={self.episodes}: must be at least 1.")
        if self.play.seed < 0:
            yield ConfigError(f"seed={self.play.seed}: must be at least 0.")
        if self.num_actors < 0:
            yield ConfigError(
                f"num_actors={self.num_actors}: must not be negative. Use 0 to play in this process."
            )
        if self.num_actors and self.render_mode is not None:
            yield ConfigError(
                "num_actors: actors have no window and write no video. Leave it out, or `render` and `video`."
            )

    @property
    def render_mode(self) -> str | None:
        if self.render:
            return "human"
        if self.video is None:
            return None
        return "rgb_array"

    def log_beginning(self, player: Player) -> None:
        """Log what is played."""
        episodes = counted(self.episodes, "episode")
        described = player.describe(self.play)
        logger.info("%s, %s, %s, seed %d", player.env_name, described, episodes, self.play.seed)


def check_display() -> None:
    """Raise ConfigError where there is no display: some libraries abort the process instead of raising."""
    if sys.platform.startswith("linux") and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        raise ConfigError(
            "render=True: this machine has no display (neither DISPLAY nor WAYLAND_DISPLAY is set). Run it on a "
            "desktop, through `ssh -X`, or under `xvfb-run`. Or use `video=out.mp4`, which needs no display."
        )


class PlayedEpisodes:
    """The episodes of an evaluation that were played, and the faults of the environment that ended others."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.episodes: list[Episode] = []
        self.faults: dict[int, EnvironmentFault] = {}
        """By the index of the episode."""

    @property
    def is_complete(self) -> bool:
        return len(self.episodes) + len(self.faults) == self.total

    @contextmanager
    def logged_on_error(self) -> Iterator[None]:
        """Log what was played before any error: it may have taken hours."""
        try:
            yield
        except Exception:
            if self.episodes:
                logger.warning("ended early: %s", self.summary())
            raise

    def leave_out(self, episode: int, fault: EnvironmentFault) -> None:
        """Leave out an episode, as the evaluations of a run do.

        Raises `fault` if the constructor raised, because the remaining episodes would fail, too. Raises the first fault
        if faults have ended all episodes.
        """
        if fault.in_constructor:
            raise fault
        self.faults[episode] = fault
        if len(self.faults) == self.total:
            raise self.faults[0]
        if len(self.faults) <= MAX_LOGGED_FAULTS:
            first_line = str(fault).partition("\n")[0]
            logger.warning("episode %d is left out: %s", episode, first_line)

    def summary(self, seconds: float | None = None) -> str:
        """Describe what was played, in `seconds`, as the function `summary` does."""
        return summary(self.episodes, self.total, seconds, len(self.faults))


def summary(
    episodes_played: Sequence[Episode],
    episodes: int,
    seconds: float | None = None,
    left_out: int = 0,
) -> str:
    """Return `5 of 100 episodes, mean return -1,101`; with the time that they took, also the time that is left."""
    ended = len(episodes_played) + left_out
    parts = [f"{ended} of {episodes} episodes"]
    if episodes_played:
        mean_return = fmean(episode.episode_return for episode in episodes_played)
        parts.append(f"mean return {number(mean_return)}")
    if left_out:
        parts.append(f"{left_out} left out")
    if ended and seconds is not None:
        left_s = round(seconds / ended * (episodes - ended))
        parts.append(f"about {duration(left_s)} left")
    return ", ".join(parts)
