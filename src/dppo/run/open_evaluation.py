"""An evaluation of a run that is not over: the episodes that have been played."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dppo.errors import ConfigError, DppoError, EnvironmentFault, counted
from dppo.log import logger
from dppo.policies.arguments import summary
from dppo.ppo.exchange.records import Episode, Incident, IncidentKind

MOST_NAMED = 3  # evaluations that the line about a wait describes


@dataclass(slots=True)
class OpenEvaluation:
    """An evaluation that is not over."""

    name: str
    """Name in messages, such as "evaluation after 2,048 steps"."""
    global_step: int = 0
    is_played: bool = False
    """True once all of its episodes have been played or left out."""
    began: float = field(default_factory=time.monotonic)
    played: dict[int, Episode | None] = field(default_factory=dict)
    """Episodes by index; None for an episode that failed."""
    faults: list[Incident] = field(default_factory=list)
    """Faults of these, counted at the end: a resumed run repeats an evaluation that is not over."""

    def add_fault(self, text: str) -> None:
        self.faults.append(Incident(IncidentKind.EVALUATION_FAULT, text))

    def episodes(self) -> list[Episode]:
        """The episodes that have not failed, in their order."""
        return [episode for _, episode in sorted(self.played.items()) if episode is not None]

    def log_progress(self, episodes: int, length: int = 0) -> None:
        """Log how many of the episodes have been played; the current one has `length` steps."""
        text = summary(self.episodes(), episodes, time.monotonic() - self.began)
        if length:
            text += f"; the current one: {counted(length, 'step')}"
        logger.info("%s: %s", self.name, text)

    def check_kwargs(self, eval_env_kwargs: Mapping[str, Any], error: DppoError) -> None:
        """Raise ConfigError if every constructor raised with `eval_env_kwargs`; `error` is that of the last one."""
        if not (eval_env_kwargs and self.is_played) or self.episodes():
            return
        if isinstance(error, EnvironmentFault) and error.in_constructor:
            raise ConfigError(
                f"eval_env_kwargs={eval_env_kwargs}: {error.message}. Resume the run with another value."
            )


def described(playing: Sequence[OpenEvaluation], episodes: int) -> str:
    """Describe evaluations that are not over, and how many of their `episodes` are; "" for none."""
    texts = [
        f"{evaluation.name} ({len(evaluation.played)} of {episodes} episodes)"
        for evaluation in playing[:MOST_NAMED]
    ]
    if len(playing) > MOST_NAMED:
        texts.append(f"and {len(playing) - MOST_NAMED} more")
    return ", ".join(texts)
