"""Watch the Ray behind a run: whether its processes answer, and how long calls into it have been waiting."""

import errno
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dppo.errors import ClusterError
from dppo.invocation import as_setting_and_flag
from dppo.machine import cores_in_words, load_average
from dppo.transports.ray.calls import RayCalls
from dppo.transports.ray.clock import RunClock
from dppo.transports.ray.connections import end_those_to, probe_all
from dppo.transports.ray.freezing import Silence

PERIOD_S = 0.5  # between two pings of each endpoint
CONNECT_S = 2.0  # longest wait for one connection, and for one answer
SILENT_S = 4.0  # without an answer, after which actors are not late any more
PROBE_S = 5.0  # between two looks for new connections
NOTIFY_S = 10.0  # without an answer, before a line is logged
LOST_S = 75.0  # without an answer, after which Ray counts as lost: a cluster itself gives up a node after a minute
CALL_LOST_S = 90.0  # time after which a call counts as lost while the processes of Ray answer
RESUME = "Resume from the last checkpoint (--resume); before the first one, start again."
NOTHING_DONE = "Nothing was trained, and no checkpoint was written."
START_AGAIN = f"{NOTHING_DONE} Start again, or use `num_actors=0`, which needs no Ray."
NETWORK = "Look at the network between this host and that of Ray's head"
NOBODY_LISTENS = (errno.ECONNREFUSED, errno.ECONNRESET)
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
# First bytes of a gRPC client, which any gRPC server answers: the preface of HTTP/2, and no settings.
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)


def silences_in(action: str) -> tuple[Silence, Silence]:
    """Return the silences of a process that Ray has frozen in a call which are reported, and which end it."""
    note = (
        f"  note: Ray ({action}) has not answered for {NOTIFY_S:.0f} s. The run waits for it, {CALL_LOST_S:.0f} s at "
        f"most. {NETWORK}"
    )
    end = (
        f"dppo: Ray has not answered for {CALL_LOST_S:.0f} s ({action}), and this process, which Ray had frozen "
        f"meanwhile, is killed. {NETWORK}. {NOTHING_DONE} Start again, or use "
        f"{as_setting_and_flag('num_actors', 0)}, which needs no Ray."
    )
    return Silence(NOTIFY_S, note), Silence(CALL_LOST_S, end)


def ping(address: str, timeout_s: float) -> None:
    """Connect to the server of gRPC at `host:port`, and wait for its first word; raise `OSError` if there is none.

    The kernel accepts connections for a process that is stopped; only an answer shows that it runs. One that speaks TLS
    ends the connection, which is an answer, too.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection:
        try:
            connection.sendall(HELLO)
            connection.recv(1)
        except ConnectionError:  # ended by the other side
            return


@dataclass(slots=True)
class Endpoint:
    """A process of Ray that a run depends on."""

    name: str
    address: str  # host:port
    patience_s: float
    """Seconds for which its port may refuse connections before the process counts as dead."""
    failing_since: float | None = None

    def look(self, now: Callable[[], float] = time.monotonic) -> str | None:
        """Ask once; return the reason if the process counts as lost, else None."""
        began = now()
        try:
            ping(self.address, CONNECT_S)
            self.failing_since = None
            return None
        except OSError as error:
            silent = isinstance(error, TimeoutError)
            if not silent and error.errno not in NOBODY_LISTENS + UNREACHABLE:
                return None  # a problem of this process, such as no free file descriptor
            if self.failing_since is None:
                self.failing_since = began
            failing_s = now() - self.failing_since
            patience_s = LOST_S
            if error.errno in NOBODY_LISTENS:
                patience_s = self.patience_s
            if failing_s < patience_s:
                return None
            if silent:
                return f"it has not answered for {failing_s:.0f} s"
            return error.strerror or str(error)

    def __str__(self) -> str:
        return f"{self.name} at {self.address}"


class ClusterWatch:
    """Pings Ray's processes twice a second in its own thread, and measures how long calls have waited.

    Ray itself raises nothing: it ends this process a few minutes after the GCS has died or become unreachable. After
    the local raylet has died it waits without limit, or ends this process at the next access to the object store.
    """

    def __init__(
        self, notify: Callable[[str], None], clock: RunClock, *, started_here: bool = False
    ) -> None:
        """Watch nothing yet: see `add_endpoints` and `add_calls`.

        `started_here`: whether this process starts Ray, on this machine alone.
        """
        self._notify = notify
        self._started_here = started_here
        self.is_starting = False
        """True while Ray is started or connected, before anything is trained."""
        self._clock = clock
        self._endpoints: list[Endpoint] = []
        self._calls: list[RayCalls] = []
        self._lost: str | None = None
        # start of a silence about which a line was logged
        self._reported_silence: float | None = None
        self._silent_since: float | None = None  # while Ray's processes do not answer
        self.silences = 0  # number of silences that are over, and were long enough for a line
        self._stop = threading.Event()

    def add_endpoints(self, endpoints: list[Endpoint]) -> None:
        """Ask these processes from now on."""
        self._endpoints = endpoints
        threading.Thread(target=self._look, name="dppo-cluster-watch", daemon=True).start()

    def add_calls(self, calls: RayCalls) -> None:
        """Read how long these calls have waited, from now on."""
        self._calls.append(calls)

    @property
    def lost(self) -> bool:
        """True if Ray is lost."""
        return self._lost is not None

    def check(self) -> None:
        """Raise `ClusterError` if Ray is lost. Log that it has not answered for a while, and that it answers again.

        Cheap enough for each tick of a wait; for the thread of the loop only.
        """
        for calls in self._calls:
            calls.check()
        if self._lost is None:
            self._report()
        self.raise_if_lost()

    def raise_if_lost(self) -> None:
        """Raise `ClusterError` if Ray is lost: then large arguments of calls, and results, would end this process."""
        if self._lost is not None:
            raise ClusterError(self._lost)

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()

    def _report(self) -> None:
        now = self._clock.awake()
        since, name, limit_s = self._longest_silence(now)
        silent_s = now - since
        if silent_s > NOTIFY_S and self._reported_silence is None:
            self._reported_silence = since
            self._notify(
                f"{name} has not answered for {silent_s:.0f} s. The run waits for it, {limit_s:.0f} s at most, "
                f"with the same result. {self._place_to_look_at()}"
            )
        elif silent_s <= NOTIFY_S and self._reported_silence is not None:
            self._notify(
                f"Ray answers again, after {now - self._reported_silence:.0f} s; the run goes on"
            )
            self._reported_silence = None

    def _place_to_look_at(self) -> str:
        if self._started_here:
            load = load_average()
            load_text = f": its load average is {load:.1f} on {cores_in_words()}" if load else ""
            return f"Ray runs on this machine alone, which may be too busy{load_text}"
        return f"{NETWORK}{self._head()}"

    def _longest_silence(self, now: float) -> tuple[float, str, float]:
        """Return the start of the longest silence, the silent process, and the longest silence that it may have.

        `now` and "" if all have answered.
        """
        since = now
        name = ""
        limit_s = LOST_S
        for endpoint in self._endpoints:
            failing_since = endpoint.failing_since
            if failing_since is not None and failing_since < since:
                since = failing_since
                name = str(endpoint)
        for calls in self._calls:
            waited_s, action = calls.waiting()
            if waited_s > CALL_LOST_S:
                self._lose(f"Ray{self._head()} has not answered for {waited_s:.0f} s ({action})")
            if now - waited_s < since - CONNECT_S:  # otherwise the silent process is the reason
                since = now - waited_s
                name = f"Ray ({action})"
                limit_s = CALL_LOST_S
        return since, name, limit_s

    def _head(self) -> str:
        if not self._endpoints:
            return ""
        return f" ({self._endpoints[0].address})"

    def _look(self) -> None:
        probed_at = 0.0
        connections = set[str]()
        while not self._stop.wait(PERIOD_S):
            for endpoint in self._endpoints:
                reason = endpoint.look(self._clock.awake)
                if reason is not None and not self._stop.is_set():
                    self._lose(f"{endpoint} is lost ({reason})")
                    return
            self._note_silence()
            if self._clock.awake() - probed_at > PROBE_S:
                probed_at = self._clock.awake()
                connections = probe_all(connections)

    def _note_silence(self) -> None:
        """Stop the clock of the deadlines while Ray does not answer; afterwards, renew the connections to the GCS.

        Answers that were lost meanwhile do not come any more. Ray repeats its requests to the GCS on a new connection.
        """
        now = self._clock.awake()
        since = [endpoint.failing_since for endpoint in self._endpoints]
        failing = [start for start in since if start is not None]
        if self._silent_since is None:
            if failing and now - min(failing) > SILENT_S:
                self._silent_since = min(failing)
        elif not failing:
            end_those_to(self._endpoints[0].address)
            # a shorter silence may come from a busy machine
            if now - self._silent_since > NOTIFY_S:
                self.silences += 1
            self._silent_since = None
        self._clock.set_silent(self._silent_since is not None)

    def _lose(self, fact: str) -> None:
        if self.is_starting:
            self._lost = f"{fact}, and the run cannot start without it. {START_AGAIN}"
        else:
            self._lost = f"{fact}, and the run cannot continue without it. {RESUME}"
