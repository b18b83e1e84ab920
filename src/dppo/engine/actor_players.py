"""ActorPlayers: plays the episodes of evaluations on actors, which may be lost at any time."""

import time
from collections.abc import Callable
from threading import Event, Thread

from dppo.engine.actor_collector import Transport, execute
from dppo.engine.mailbox import Mailbox
from dppo.engine.playing import Outcome, PlayEngine
from dppo.errors import ClusterError
from dppo.ppo.exchange.records import ControllerTurn, PolicySnapshot
from dppo.signals import StopSignals
from dppo.user_code import in_a_line

CLOSING_S = 2.0  # longest wait for the end of the thread


class ActorPlayers:
    """Runs the loop between engine and transport in a thread: episodes go on while the run does something else."""

    def __init__(
        self, engine: PlayEngine, transport: Transport, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start the thread, which starts the actors."""
        self._engine = engine
        self._transport = transport
        self._clock = clock
        self._evaluations = Mailbox[tuple[int, PolicySnapshot | ControllerTurn]]()
        self._outcomes = Mailbox[Outcome]()
        self._closing = Event()
        self._thread = Thread(target=self._work, name="dppo-evaluations", daemon=True)
        self._thread.start()

    def begin(self, number: int, policy: PolicySnapshot | ControllerTurn) -> None:
        """Queue an evaluation of a policy, or of the user's controller, after earlier evaluations; does not wait."""
        self._evaluations.put((number, policy))

    def outcomes(self, wait_s: float) -> list[Outcome]:
        """Return the results of episodes since the last call; wait `wait_s` at most for the first."""
        return self._outcomes.take(wait_s)

    def close(self) -> None:
        """Stop all actors; close all environments."""
        self._closing.set()
        self._thread.join(CLOSING_S)
        self._transport.close()

    def _work(self) -> None:
        try:
            self._play()
        except Exception as error:
            # if this thread ended, the end of the run would wait for the episodes forever
            self._leave_out(error)

    def _play(self) -> None:
        signals = StopSignals()  # never requested: `close` ends this
        execute(self._engine.start(self._clock()), self._transport)
        while not self._closing.is_set():
            for evaluation in self._evaluations.take():
                self._engine.begin(*evaluation)
            for event in self._transport.events(signals):
                execute(self._engine.on(event, self._clock()), self._transport)
            execute(self._engine.tick(self._clock()), self._transport)
            self._deliver()

    def _deliver(self) -> None:
        for outcome in self._engine.take_outcomes():
            self._outcomes.put(outcome)

    def _leave_out(self, error: Exception) -> None:
        """Leave out all evaluations from now on."""
        failure = ClusterError(f"evaluations failed: {in_a_line(error)}")
        if isinstance(error, ClusterError):
            failure = error
        while not self._closing.is_set():
            self._engine.give_up(failure)
            self._deliver()
            for evaluation in self._evaluations.take(1.0):
                self._engine.begin(*evaluation)
