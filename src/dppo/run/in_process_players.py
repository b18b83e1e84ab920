"""InProcessPlayers: plays the episodes of evaluations in the process of the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from dppo.engine.playing import Outcome
from dppo.envs.activity import ActivityRecord
from dppo.envs.silence import SilenceWatch
from dppo.errors import ClusterError, DppoError
from dppo.policies.playing import EpisodePlayer
from dppo.ppo.exchange.records import ControllerTurn, PolicySnapshot


class InProcessPlayers:
    """Plays the episodes of evaluations here, as `ActorPlayers` does on actors: one each time that it is asked."""

    def __init__(
        self,
        player: EpisodePlayer,
        episodes: int,
        timeout_s: float,
        turn: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Keep the arguments; `turn` returns a context in which a signal ends an episode."""
        self._player = player
        self._episodes = episodes
        self._timeout_s = timeout_s
        self._turn = turn
        self.stepped: Callable[[int], object] = int
        """Is called with the length of an episode after its reset and after each step."""
        self._progress = ActivityRecord()
        player.progress = self._progress
        self._tasks = deque[tuple[int, int, PolicySnapshot | ControllerTurn]]()

    def begin(self, number: int, policy: PolicySnapshot | ControllerTurn) -> None:
        """Store the task."""
        self._tasks.extend((number, episode, policy) for episode in range(self._episodes))

    def outcomes(self, wait_s: float) -> list[Outcome]:
        """Play the next episode, or none if `wait_s` is 0."""
        if not self._tasks or not wait_s:
            return []
        number, episode, policy = self._tasks.popleft()
        try:
            with SilenceWatch(self._progress, lambda _: "evaluation"), self._turn():
                played = self._player.play(policy, episode, self._timeout_s, self.stepped)
                return [(number, episode, played)]
        except DppoError as error:
            if isinstance(error, ClusterError):
                self._tasks = deque(task for task in self._tasks if task[0] != number)
            return [(number, episode, error)]
