"""The baseline of a run: the user's controller, played once on the episodes of the evaluations."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, pstdev

from dppo.config import Config, plain_settings
from dppo.config.parts import about, names_of
from dppo.errors import counted
from dppo.log import logger
from dppo.ppo.exchange.records import Episode
from dppo.records.comparison import BaselineComparison
from dppo.records.differences import (
    FEW_EPISODES,
    Difference,
    paired_difference,
    unpaired_difference,
)
from dppo.records.files import disk
from dppo.records.files.run_files import BASELINE, json_in
from dppo.records.terminal.figures import deviation, number
from dppo.run.open_evaluation import OpenEvaluation
from dppo.run.parts import RunContext
from dppo.run.sources import source_sha256

BASELINE_NUMBER = -1
"""The number of the baseline among evaluations, which are numbered by their iterations."""
CHECK_NUMBER = -2
"""The number of the first step of the baseline, by which it shows that it can act."""
UNPAIRED = (
    "the environment is declared nondeterministic, so an episode of the policy and one of the baseline with the same "
    "seed have nothing in common: the interval of their difference is that of independent episodes (Welch)"
)


class Baseline:
    """Returns of the user's controller, and how a policy's returns differ from them.

    They are stored in the run folder, with a hash of all that they depend on, so that a resumed run plays again only
    what has changed.
    """

    def __init__(
        self, config: Config, run_dir: Path, *, paired: bool, resumed: bool = False
    ) -> None:
        """Read the stored returns if this controller made them, or log why not.

        `paired`: seeds determine episodes. `resumed`: an earlier call may have played some.
        """
        assert config.baseline_name is not None
        self.name = config.baseline_name
        self.is_over = False
        """True once all of its episodes have been played or left out."""
        self.play = OpenEvaluation(f"baseline {self.name}")
        """Its episodes, unless they were stored."""
        self.has_failed = False
        """True if its failure ends the run, whose error describes it."""
        self._path = run_dir / BASELINE
        self._num_episodes = config.eval_episodes
        self._paired = paired
        self.version = _version(config)
        """Hash of the controller's file and of all that its returns depend on; None if it cannot be known."""
        self._returns: dict[int, float] = {}
        if self.version is None and resumed:
            self._log_again("it is no function or class in a file, so it may have changed")
        elif self.version is not None and self._path.exists():
            self._read(self.version)
        self.is_ready = self.is_over
        """True if training may go on beside the baseline."""
        if self.is_over:
            stored = f"{number(self.mean_return)}, as stored in {BASELINE}"
            logger.info("baseline %s: mean return %s", self.name, stored)

    @classmethod
    def from_run(cls, run: RunContext) -> Baseline:
        """Return the baseline of a run that is about to train, with the returns that its folder has stored."""
        return cls(
            run.config,
            run.folder.path,
            paired=run.parts.model["deterministic"],
            resumed=run.folder.start is not None,
        )

    @property
    def mean_return(self) -> float:
        """Mean of the episode returns; NaN without any."""
        if self._returns:
            return fmean(self._returns.values())
        return math.nan

    def finish(self) -> None:
        """Take over the returns of all episodes that could be played; log the result."""
        episodes = self.play.episodes()
        self._returns = {episode.index: episode.episode_return for episode in episodes}
        self.is_over = True
        self.is_ready = True
        self._log()

    def store(self) -> None:
        """Write the returns into the run folder, in the thread of the disk; None for an episode that failed.

        They are not written if no episode could be played, or the rest were left out with an actor that was lost.
        """
        is_complete = len(self.play.played) == self._num_episodes
        if self.version is None or not self._returns or not is_complete:
            return
        returns = [self._returns.get(episode) for episode in range(self._num_episodes)]
        content = {"baseline": self.name, "version": self.version, "returns": returns}
        disk.write_file(self._path, json.dumps(content).encode() + b"\n")

    def difference(self, episodes: Sequence[Episode]) -> Difference | None:
        """Return the difference between a policy's episodes and the baseline's; None if there is none to compare."""
        returns = {episode.index: episode.episode_return for episode in episodes}
        if self._paired:
            return paired_difference(returns, self._returns)
        return unpaired_difference(list(returns.values()), list(self._returns.values()))

    def difference_in(self, comparison: BaselineComparison) -> Difference | None:
        """Return the difference of a stored comparison; None if another baseline or version made it."""
        if (comparison.name, comparison.version) != (self.name, self.version):
            return None
        return comparison.difference

    def metrics(self, difference: Difference | None) -> dict[str, float]:
        """Return the metrics of an evaluation that has this difference from the baseline."""
        if not self._returns:
            return {}
        row = {"eval/baseline_return": self.mean_return}
        if difference is None:
            return row
        return row | difference.as_metrics()

    def _read(self, version: str) -> None:
        """Take over stored returns, or log why not; the file may be a stranger's, with any content."""
        content = json_in(self._path)
        why = f"{BASELINE} is damaged"
        with suppress(KeyError, OverflowError, TypeError, ValueError):
            stored = enumerate(content["returns"])
            returns = {episode: float(value) for episode, value in stored if value is not None}
            is_complete = len(content["returns"]) == self._num_episodes and bool(returns)
            if content["version"] != version:
                why = f"its file, its environment or a setting has changed since {BASELINE} was written"
            elif is_complete and all(map(math.isfinite, returns.values())):
                self._returns = returns
                self.is_over = True
                return
        self._log_again(why)

    def _log_again(self, why: str) -> None:
        logger.info("baseline %s is played again: %s", self.name, why)

    def _log(self) -> None:
        if not self._returns:
            logger.warning(
                "baseline %s: no episode could be played; nothing is compared", self.name
            )
            return
        returns = list(self._returns.values())
        count = counted(len(returns), "episode")
        spread = deviation(pstdev(returns), self.mean_return)
        mean_return = f"{number(self.mean_return)} +- {spread} in {count}"
        logger.info("baseline %s: mean return %s", self.name, mean_return)
        if not self._paired:
            logger.warning("%s", UNPAIRED)
        if len(returns) < FEW_EPISODES:
            logger.warning(
                f"eval_episodes={len(returns)}: intervals of the difference to the baseline are wide with fewer than "
                f"{FEW_EPISODES} episodes"
            )


def _version(config: Config) -> str | None:
    """Return a hash of the controller's file and of all that its returns depend on; None if it has no such file.

    An object, a function within another one and a lambda may have any state, so they have no version.
    """
    sources = [source_sha256(config.baseline)]
    if ":" in config.env_name:
        sources.append(source_sha256(config.env_id))
    if None in sources:
        return None
    settings = plain_settings(config)
    names = [name for name in names_of("env") if about(name).resume != "free"]
    names += ["baseline", "eval_env_kwargs", "eval_episodes", "seed", "num_samplers"]
    described = [sources, {name: settings[name] for name in names}]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
