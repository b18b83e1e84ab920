"""Evaluations on Ray: actors of their own play episodes, one each at a time, while training goes on."""

import math
import os
import time
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any

import ray
from ray.exceptions import RayError

from dppo.engine.slots import ENDING_S
from dppo.envs.activity import Phase, place_of
from dppo.errors import ClusterError, DppoError
from dppo.log import logger
from dppo.ppo.exchange.records import Episode, PolicySnapshot
from dppo.transports.ray.actor import PPOActor
from dppo.transports.ray.actor_class import actor_class
from dppo.transports.ray.calls import RayThread, calls_ray
from dppo.transports.ray.failures import FETCH_TIMEOUT_S, call_with_timeout, cause_of_death, last_line
from dppo.transports.ray.pickling import PackedModel, pack, packed_model, sendable, unpack, unpacked_model
from dppo.transports.ray.progress_file import ProgressFile
from dppo.transports.ray.session import RayLink
from dppo.user_code import in_a_line

START_S, LOOK_S = 600.0, 1.0  # for an actor to start; between two looks at what it does
TRIES, LATER_S = 3, 5.0  # actors for an episode, until the rest of its evaluation is left out; between two of them
LOST_S = 1.0  # for a Ray that is lost to close actors all the same
CLOSING_S, IDLE_S = 2.0, 0.2  # for actors to close their environments; between two looks for something to do

Outcome = tuple[int, int, Episode | DppoError]
"""The number of an evaluation, the index of an episode, and its result."""


class EvaluationActor:
    """Plays episodes on request, in a process of its own."""

    def __init__(self, player: PackedModel, number: int) -> None:
        self._packed, self._process = player, PPOActor(b"")  # which hosts no samplers
        self._player: Any = None
        self._number = number

    def configure_process(self, *args: Any) -> Any:
        """Do `PPOActor.configure_process`, and import what playing needs, before it is needed."""
        file = self._process.configure_process(*args)
        with suppress(DppoError):  # which `play` reports
            self._loaded()
        return file

    def play(self, policy: PolicySnapshot, episode: int, timeout_s: float) -> bytes:
        """Return the packed episode, or the fault that ended it."""
        try:
            stepped = partial(self._process._progress.enter, place_of(Phase.STEP), episode)
            return pack(self._loaded().play(policy, episode, timeout_s, stepped))
        except DppoError as error:
            return pack(sendable(error))

    def close(self) -> None:
        """Close the environment."""
        self._process.close()

    def _loaded(self) -> Any:
        if self._player is None:
            self._player = unpacked_model(self._packed)
            self._player.number = self._number
            self._process.keep(self._player)  # so that SIGTERM closes it
        return self._player


class RayPlayers:
    """Plays the episodes of evaluations, and delivers them in the order in which they end.

    A thread for each actor asks it for one after the other. An actor that dies, hangs in a step or is late is replaced,
    and its episode is played again. After some such losses in a row, the rest of an evaluation is left out.
    """

    def __init__(
        self, player: Any, resources: dict[str, float], link: RayLink, *, episodes: int, actors: int, timeout_s: float,
        hung_s: float, logs: str, licensed: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        """Start the threads; `player` is an EpisodePlayer, the rest as for `RayTransport`.

        `licensed`: the licence of a lost actor is free only when its keeper has ended its processes.
        """
        self._licence_s = ENDING_S if licensed else 0.0
        self._link, self._now = link, link.clock.patience
        self._packed, self._episodes, self._timeout_s = packed_model(player, "eval_env_kwargs"), episodes, timeout_s
        self._kind, self._logs, self._gpus = actor_class(EvaluationActor, resources, options), logs, "GPU" in resources
        self._tasks, self._ended = SimpleQueue[tuple[int, int, Any]](), SimpleQueue[Outcome]()
        self._closing, self._left_out, self._hung_s = Event(), set[int](), hung_s
        self._actors: list[Any] = [None] * actors
        self._files = [ProgressFile("", "")] * actors
        self._threads = [RayThread(self._work, f"dppo-evaluation-{number}", (number,)) for number in range(actors)]
        for thread in self._threads:
            thread.start()

    def begin(self, number: int, policy: PolicySnapshot) -> None:
        """Begin an evaluation of a policy, after those before; does not wait."""
        self._link.calls.post(partial(self._begin, number, policy), "sending a policy to evaluate")

    @calls_ray
    def _begin(self, number: int, policy: PolicySnapshot) -> None:
        try:
            sent = ray.put(policy)
        except RayError as error:
            self._ended.put((number, 0, ClusterError(f"the policy could not be sent: {last_line(error)}")))
            return
        for episode in range(self._episodes):
            self._tasks.put((number, episode, sent))

    def outcomes(self, wait_s: float) -> list[Outcome]:
        """Return the results of episodes since the last call; wait `wait_s` at most for the first."""
        found = []
        with suppress(Empty):
            found.append(self._ended.get(timeout=max(wait_s, 1e-9)))
            while True:
                found.append(self._ended.get_nowait())
        return found

    def close(self) -> None:
        """Stop all actors; close all environments."""
        self._closing.set()
        with suppress(ClusterError):  # Ray does not answer
            timeout_s = LOST_S if self._link.watch.lost else 3 * CLOSING_S
            self._link.calls.call(self._close, "closing the actors of evaluations", timeout_s=timeout_s)
        deadline = time.monotonic() + CLOSING_S
        for thread in self._threads:  # whose calls fail now
            thread.join(max(0.0, deadline - time.monotonic()))

    @calls_ray
    def _close(self) -> None:
        actors = [actor for actor in self._actors if actor is not None]
        if actors:
            ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=CLOSING_S)
        call_with_timeout(CLOSING_S, lambda: [ray.kill(actor) for actor in actors])

    @calls_ray
    def _work(self, number: int) -> None:
        """Start an actor, and let it play one episode after the other."""
        with suppress(Exception):  # which the first episode finds out
            self._start(number)
        while not self._closing.is_set():
            with suppress(Empty):
                evaluation, episode, policy = self._tasks.get(timeout=IDLE_S)
                if evaluation not in self._left_out:
                    outcome = self._played(number, policy, episode)
                    if isinstance(outcome, ClusterError):
                        self._left_out.add(evaluation)
                    self._ended.put((evaluation, episode, outcome))

    @calls_ray
    def _played(self, number: int, policy: Any, episode: int) -> Episode | DppoError:
        lost = ""
        for later in range(TRIES):
            if lost:
                logger.warning("%s; it is replaced, and the episode is played again", lost)
            if self._closing.wait(max(LATER_S * (later - 1), self._licence_s * bool(later))):
                break
            try:
                if self._actors[number] is None:
                    self._start(number)
                return unpack(self._answer(number, policy, episode))
            except Exception as error:  # if this thread ended, the end of the run would wait for the episode forever
                lost = cause_of_death(error) if isinstance(error, RayError) else f"failed: {in_a_line(error)}"
                lost = f"actor {number} of evaluations {lost}"
                if self._actors[number] is not None:
                    call_with_timeout(CLOSING_S, partial(ray.kill, self._actors[number]))
                self._actors[number] = None
                if later and isinstance(error, TimeoutError):
                    break
        return ClusterError(lost)

    @calls_ray
    def _answer(self, number: int, policy: Any, episode: int) -> Any:
        """Return what an actor answers; raise TimeoutError if it is late, or in one step for too long."""
        question = self._actors[number].play.remote(policy, episode, self._timeout_s)
        late_at, hung_at, seen = self._now() + self._timeout_s + self._hung_s, math.inf, None
        while not ray.wait([question], timeout=LOOK_S)[0]:
            doing, now = self._files[number].read(), self._now()  # None on another node
            if doing != seen:
                seen, hung_at = doing, now + self._hung_s
            if now > hung_at:
                where = f"was in one step, reset or constructor of episode {episode}"
                raise TimeoutError(f"{where} for {self._hung_s:g} s, the longest of the timeouts of a segment's phases")
            if now > late_at:
                raise TimeoutError(f"did not end episode {episode} within eval_timeout_s={self._timeout_s:g}")
        return ray.get(question, timeout=FETCH_TIMEOUT_S)

    @calls_ray
    def _start(self, number: int) -> None:
        actor = self._kind.remote(self._packed, number)
        self._actors[number] = actor
        log = f"{self._logs}/evaluation-{number}.log"
        started = actor.configure_process.remote(self._gpus, log, self._link.node_id, os.getpid())
        self._files[number] = ray.get(started, timeout=START_S)
