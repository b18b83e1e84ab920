"""InProcessPlayers: plays the episodes of evaluations in the process of the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from functools import partial

from dppo.engine.playing import Outcome
from dppo.envs.activity import ActivityRecord
from dppo.envs.closing import closing_together
from dppo.envs.silence import SilenceWatch
from dppo.envs.threads import Worker, wait_for_ends
from dppo.errors import ClusterError, DppoError
from dppo.policies.playing import EpisodePlayer
from dppo.ppo.exchange.records import ControllerTurn, Episode, PolicySnapshot

POLL_S = 0.1  # between two looks at the episodes that threads play

Task = tuple[int, int, PolicySnapshot | ControllerTurn]
"""The number of an evaluation, the index of an episode, and what plays it."""


class InProcessPlayers:
    """Plays the episodes of evaluations here, as `ActorPlayers` does on actors, whenever it is asked for outcomes.

    A single player plays one episode at a time, in the thread that asks. Several play side by side, each in a thread of
    its own, so that simulators that wait do so together.
    """

    def __init__(
        self,
        players: Sequence[EpisodePlayer],
        episodes: int,
        timeout_s: float,
        turn: Callable[[], AbstractContextManager[None]],
        hint: str,
    ) -> None:
        """Keep the arguments; `turn` returns a context in which a signal ends an episode.

        `hint` ends the first line about an environment that does not return from a call.
        """
        self._players = players
        self._episodes = episodes
        self._timeout_s = timeout_s
        self._turn = turn
        self._hint = hint
        self.on_step: Callable[[int], object] = int
        """Called with the length of an episode after its reset and each step; of several players, now and then with
        the length of the longest."""
        for player in players:
            player.progress = ActivityRecord()
        self._tasks = deque[Task]()
        self._workers: list[Worker] = []
        self._idle = deque(range(len(players)))
        self._playing: dict[Future[Episode], tuple[int, Task]] = {}
        """Calls of threads, with the index of the player and the task."""
        self._ignored = set[Future[Episode]]()
        """Calls whose evaluation was over before they had ended."""
        self._lengths = [0] * len(players)
        """Steps of the episode that each player plays."""
        self._is_closed = False

    def begin(self, number: int, policy: PolicySnapshot | ControllerTurn) -> None:
        """Store the task."""
        self._tasks.extend((number, episode, policy) for episode in range(self._episodes))

    def outcomes(self, wait_s: float) -> list[Outcome]:
        """Play the next episode, or with several players until one of their episodes ends; nothing if `wait_s` is 0."""
        if not wait_s:
            return []
        if len(self._players) == 1:
            return self._next_alone()
        while self._idle and self._tasks:
            self._begin(self._idle.popleft(), self._tasks.popleft())
        if not self._playing:
            return []
        try:
            with self._turn():
                ended, _ = wait(self._playing, min(wait_s, POLL_S), FIRST_COMPLETED)
        except BaseException:  # a signal
            self._is_closed = True
            raise
        self.on_step(max(self._lengths))
        # those that began first are reported first
        in_order = [call for call in self._playing if call in ended]
        return [outcome for call in in_order for outcome in self._take_ended(call)]

    def _next_alone(self) -> list[Outcome]:
        if not self._tasks:
            return []
        task = self._tasks.popleft()
        try:
            with self._turn():
                return [(*task[:2], self._play(0, task, self.on_step))]
        except DppoError as error:
            return self._take_failure(task, error)

    def _play(self, index: int, task: Task, stepped: Callable[[int], object]) -> Episode:
        player = self._players[index]
        assert player.progress is not None
        _, episode, policy = task
        with SilenceWatch(player.progress, lambda _: "evaluation", self._hint):
            return player.play(policy, episode, self._timeout_s, stepped)

    def _begin(self, index: int, task: Task) -> None:
        """Let the thread of a player play an episode."""
        if not self._workers:
            count = len(self._players)
            self._workers = [Worker(f"evaluation, env {number}") for number in range(count)]
        stepped = partial(self._note_length, index)
        call = self._workers[index].begin(partial(self._play, index, task, stepped))
        self._playing[call] = index, task

    def _note_length(self, index: int, length: int) -> None:
        """Note how far a player is; its thread calls this."""
        self._lengths[index] = length
        if self._is_closed:
            raise ClusterError("the run is over")

    def _take_ended(self, call: Future[Episode]) -> list[Outcome]:
        """Return the outcome of a call that has ended; none if its evaluation was over before."""
        index, task = self._playing.pop(call)
        self._idle.append(index)
        self._lengths[index] = 0
        if call in self._ignored:
            self._ignored.remove(call)
            return []
        try:
            return [(*task[:2], call.result())]
        except DppoError as error:
            return self._take_failure(task, error)

    def _take_failure(self, task: Task, error: DppoError) -> list[Outcome]:
        """Return a failure as an outcome; an episode that was not over in time ends its evaluation."""
        number, episode, _ = task
        if isinstance(error, ClusterError):
            self._tasks = deque(task for task in self._tasks if task[0] != number)
            playing = self._playing.items()
            self._ignored |= {call for call, (_, other) in playing if other[0] == number}
        return [(number, episode, error)]

    def close(self) -> None:
        """Close all environments; those of threads after the current step of each, within a few seconds."""
        self._is_closed = True
        with closing_together():
            if not self._workers:
                for player in self._players:
                    player.close()
            for worker, player in zip(self._workers, self._players, strict=False):
                worker.end(player.close)
            wait_for_ends()
