"""SolverEnv: a Gymnasium environment whose steps a solver makes, which owns its time loop."""

import os
import secrets
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.attempts import WAITS_S, attempted
from dppo.log import logger
from dppo.remote.client import TERMINATED, TRUNCATED
from dppo.remote.connection import MAX_UNIX_PATH, Listener
from dppo.remote.protocol import Part
from dppo.remote.session import Session, SolverEnded, SolverStep
from dppo.slots.program import LOG, SolverError, SolverKilled, SolverNotStarted
from dppo.slots.slots import Slots

ADDRESS = "DPPO_ADDRESS"  # variables of the solver
SECRET = "DPPO_SECRET"
SOLVER = "DPPO_SOLVER"  # name of the instance: SAMPLER.ENVIRONMENT
PORTS_PER_SAMPLER = 10
STARTS = 3  # attempts to start a solver that is killed before it connects, or while its episode is replayed
MAX_LINE = 200  # characters of the solver's last line in a report
RESTARTS = "solver_restarts"  # key of the number of restarts in `info`
LAUNCHERS = ("mpirun", "mpiexec", "srun", "aprun", "prterun")


def make(
    command: Sequence[str] | str | None = None,
    address: str = "",
    open_timeout_s: float = 300.0,
    *,
    scratch_dir: str,
    slots: Slots | None = None,
) -> "SolverEnv":
    """Return an environment whose solver is started by `command`, or connects by itself to `address`.

    Args:
        command: the program with its arguments; it runs in `scratch_dir`, with the ranks that `slots` asks for. A
            command that begins with mpirun or srun is started as it is. Without a command, `address` is needed.
        address: `tcp:HOST:PORT` to listen at; the port of an instance is PORT + 10 * sampler + environment. Default:
            a Unix socket in `scratch_dir`. `tcp:HOST:0` with a command is any free port of the address HOST of this
            machine, for a solver whose rank 0 may run on another machine.
        open_timeout_s: longest wait for the solver to connect.
        scratch_dir: folder of this instance, which dppo passes; `solver.log` in it holds what the solver prints.
        slots: number, ranks and cores of this instance, which dppo passes; by default one rank.

    Raises:
        SolverError: the program cannot be started, ended, did not connect in time, or was refused.
    """
    if command is None and not address:
        raise SolverError(
            "neither command nor address is given. Add one to env_kwargs: {'command': ['/path/to/solver']} starts a "
            "program, {'address': 'tcp:0.0.0.0:5000'} waits for one"
        )
    if command is None and SECRET not in os.environ:
        raise SolverError(
            f"{SECRET} is not set, without which anybody could connect to {address}. Set it to a long random text "
            f"where dppo runs, on every node, and where the solver runs"
        )
    secret = secrets.token_hex(16) if command is not None else os.environ[SECRET]
    slots = slots or Slots()
    if not address and slots.layout.nodes:  # rank 0 may be on another node
        address = f"tcp:{slots.layout.nodes[0].address}:0"
    place = _place(address, PORTS_PER_SAMPLER * slots.sampler_id + slots.env_index, scratch_dir)
    listener = Listener(place, secret)
    try:
        solver = _Solver(command, scratch_dir, slots)
        start = _Start(listener, solver, open_timeout_s)
        session = start()
        if session.opening.restarts:
            return RestartingSolverEnv(listener, start, session, Path(scratch_dir))
        return SolverEnv(listener, start, session)
    except BaseException:
        listener.close()
        raise


def _place(address: str, number: int, folder: str) -> str:
    if not address:
        path = str(Path(folder).absolute() / "dppo.socket")
        # a free port of this machine where the path is too long for a socket
        if len(path.encode()) < MAX_UNIX_PATH:
            return f"unix:{path}"
        return "tcp:127.0.0.1:0"
    start, _, port = address.rpartition(":")
    if not address.startswith("tcp:") or not port.isdecimal():
        raise SolverError(f"address={address}: write tcp:HOST:PORT")
    host = start.removeprefix("tcp:") or socket.gethostname()
    return f"tcp:{host}:{int(port) + number if int(port) else 0}"


@dataclass(frozen=True, slots=True)
class _Solver:
    """The program of an instance."""

    command: Sequence[str] | str | None
    """None for a program that is started elsewhere."""
    folder: str
    slots: Slots

    @property
    def name(self) -> str:
        """Name of the instance: SAMPLER.ENVIRONMENT."""
        return f"{self.slots.sampler_id}.{self.slots.env_index}"

    @property
    def launcher(self) -> str:
        """The launcher with which the command begins; "" without one."""
        words = self.command.split() if isinstance(self.command, str) else self.command
        name = Path(words[0]).name if words else ""
        return name if name in LAUNCHERS else ""


class _Start:
    """Starts the solver of an instance, or waits for it."""

    def __init__(self, listener: Listener, solver: _Solver, timeout_s: float) -> None:
        self._listener = listener
        self._solver = solver
        self._timeout_s = timeout_s
        if solver.launcher and solver.slots.layout.cores:
            logger.warning(
                "solver %s: its command begins with %s, and is started as it is: it has to bind its ranks to cores %s "
                "by itself. Leave the launcher out, and ranks_per_env adds one that does",
                solver.name,
                solver.launcher,
                solver.slots.cores,
            )

    def __call__(self) -> Session:
        listener = self._listener
        solver = self._solver
        if solver.command is None:
            logger.warning("solver %s: is awaited at %s", solver.name, listener.address)
            return Session(listener.accept(self._timeout_s, lambda: None), None)
        for _ in range(STARTS - 1):
            try:
                return self._started()
            except SolverKilled as error:
                logger.warning("solver %s: %s\nIt is started again.", solver.name, error)
        return self._started()

    def restarting(
        self, error: SolverEnded, place: str, restarts: int
    ) -> AbstractContextManager[Callable[[], None]]:
        """Report that the solver ended, and is started again in the context that is returned: see `Slots`."""
        text = f"the solver ended {place} {error.outcome}"
        if error.reason:
            text += f" after the line {error.reason[:MAX_LINE]!r}"
        text += ", and is started again"
        if restarts > 1:
            text += f" ({restarts} times in this episode)"
        if self._solver.command is not None:
            log = Path(self._solver.folder, LOG).absolute()
            text += f"; its log: {log} on {socket.gethostname()}"
        return self._solver.slots.restarting(text)

    def again(self, show: Callable[[], None]) -> Session:
        """Start a solver that has ended in an episode; if it ends before it connects, try for a minute.

        Call `show` during the waits.
        """

        def note(error: SolverNotStarted, wait_s: float) -> None:
            logger.warning(
                "solver %s: %s\nIt is started again in %d s.", self._solver.name, error, wait_s
            )

        return attempted(self, SolverNotStarted, note, show, WAITS_S)

    def _started(self) -> Session:
        listener = self._listener
        solver = self._solver
        assert solver.command is not None
        variables = {ADDRESS: listener.address, SECRET: listener.secret, SOLVER: solver.name}
        program = solver.slots.launch(
            solver.command, solver.folder, variables, as_it_is=bool(solver.launcher)
        )
        try:
            return Session(listener.accept(self._timeout_s, program.check), program)
        except BaseException:
            program.terminate()
            raise


class SolverEnv(gym.Env[Any, np.ndarray]):
    """The environment of a connected solver.

    Observations are a Box if the solver declares a single part, otherwise a Dict by the names of its parts. An action
    is a Box: of the shape of its part if there is only one, otherwise the numbers of all parts in a row.

    A solver that ends in an episode is started again: the episode is replayed up to this step, and goes on if the last
    observation is the same to the last bit. `info["solver_restarts"]` counts these starts. A solver that then ends in
    the same step has failed; a solver that is killed before it comes to this step is started again, three times in all.
    """

    def __init__(self, listener: Listener, start: _Start, session: Session) -> None:
        self._listener = listener
        self._start = start
        self._session: Session | None = session
        opening = session.opening
        self._opening = opening
        native = opening.dtype.newbyteorder("=")
        self.observation_space: gym.Space[Any] = _boxes(opening.observation, native)
        self.action_space = _action_box(opening.action, native)
        self._seed = 0
        self._options: dict[str, Any] = {}
        self._actions: list[np.ndarray] = []  # actions of the episode so far
        self._last_obs: np.ndarray | None = None  # observation after these actions
        self._restarts = 0  # restarts of the solver in the episode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode of the solver; without a seed, draw one from the environment's generator."""
        super().reset(seed=seed)
        self._seed = int(self.np_random.integers(2**63)) if seed is None else seed
        self._options = options or {}
        self._actions.clear()
        self._restarts = 0
        self._listener.refuse_others()
        try:
            step = self._live().reset(self._seed, self._options)
        except SolverEnded as error:
            place = "in its reset"
            self._restarts += 1
            with self._start.restarting(error, place, self._restarts) as show:
                step = self._begin_again(place, show)
        self._last_obs = step.obs
        return self._observation(step), self._info(step)

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Send the action; return what the solver hands over.

        Raises:
            SolverError: the solver ended, and ended again after a restart; or the replayed episode differs.
        """
        action_array = np.array(action, self._opening.dtype)
        if action_array.shape != self.action_space.shape:
            raise ValueError(
                f"the action has the shape {action_array.shape}, not {self.action_space.shape}"
            )
        try:
            step = self._live().act(action_array)
        except SolverEnded as error:
            step = self._replay(error, action_array)
        self._actions.append(action_array)
        ended = bool(step.end & TERMINATED)
        truncated = bool(step.end & TRUNCATED)
        self._last_obs = step.obs
        return self._observation(step), step.reward, ended, truncated, self._info(step)

    def _live(self) -> Session:
        if self._session is None:
            raise SolverError("the environment is closed")
        return self._session

    def _replay(self, error: SolverEnded, action: np.ndarray) -> SolverStep:
        """Start the solver again, and bring it to where it ended, for the step of `action`."""
        place = f"in step {len(self._actions) + 1} of an episode"
        self._restart_and_replay(error, place, STARTS)
        try:
            return self._live().act(action)
        except SolverEnded as second:
            raise SolverError(f"the solver ended twice {place} {second}") from None

    def _restart_and_replay(self, error: SolverEnded, place: str, attempts: int) -> None:
        """Start the solver, at most `attempts` times, until it has repeated the actions of the episode."""
        self._restarts += 1
        try:
            with self._start.restarting(error, place, self._restarts) as show:
                step = self._begin_again(place, show)
                session = self._live()
                for action in self._actions:
                    step = session.act(action)
                    show()
        except SolverEnded as next_error:
            if attempts == 1:
                raise SolverError(f"the solver ended in each replay {place} {next_error}") from None
            self._restart_and_replay(next_error, place, attempts - 1)
            return
        if self._last_obs is None or step.obs.tobytes() != self._last_obs.tobytes():
            raise SolverError(
                f"the solver ended {place} {error}\nIt was started again, but the same actions led to another "
                f"observation than before: its episodes do not follow from the seed and the actions"
            )

    def _begin_again(self, place: str, show: Callable[[], None]) -> SolverStep:
        """Start the solver again, and its episode."""
        self._live().close(wait_s=0.0)
        session = self._start.again(show)
        show()
        self._session = session
        declared = session.opening
        if declared != self._opening:
            raise SolverError(f"the solver that was started again declares other parts: {declared}")
        try:
            return session.reset(self._seed, self._options)
        except SolverEnded as second:
            raise SolverError(f"the solver ended twice {place} {second}") from None

    def _observation(self, step: SolverStep) -> Any:
        if not isinstance(self.observation_space, gym.spaces.Dict):
            return step.obs.reshape(self._opening.observation[0].shape)
        observation = {}
        start = 0
        for part in self._opening.observation:
            values = step.obs[start : start + part.size]
            observation[part.name] = values.reshape(part.shape)
            start += part.size
        return observation

    def _info(self, step: SolverStep) -> dict[str, Any]:
        if self._restarts:
            return {**step.info, RESTARTS: self._restarts}
        return step.info

    def close(self) -> None:
        """Send the reply to stop, wait 10 s for the end of the program, then kill it; a second call does nothing."""
        if self._session is None:
            return
        self._session.close()
        self._session = None
        self._listener.close()


class RestartingSolverEnv(SolverEnv):
    """The environment of a solver that writes restart files, which are its state by reference."""

    def __init__(self, listener: Listener, start: _Start, session: Session, folder: Path) -> None:
        super().__init__(listener, start, session)
        self._folder = folder
        self._path: Path | None = None  # last restart file, of which dppo has a copy by now
        self._saves = 0

    def get_state(self) -> dict[str, Any]:
        """Let the solver write a restart file or folder; return its path, and the episode so far.

        Raises:
            SolverError: the solver ended, wrote nothing, or hands over another observation than before.
        """
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path.unlink(missing_ok=True)
        self._saves += 1
        self._path = self._folder / f"restart-{self._saves}"
        self._check(self._asked("save", self._path), self._last_obs)
        if not self._path.exists():
            raise SolverError(f"the solver wrote nothing at {self._path}, which dppo_path is")
        shape = self.action_space.shape or ()
        actions = np.array(self._actions, self._opening.dtype.newbyteorder("="))
        return {
            "restart": self._path,
            "seed": self._seed,
            "options": self._options,
            "actions": actions.reshape(-1, *shape),
            "last": self._last_obs,
            "restarts": self._restarts,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Let the solver go on from a restart file or folder; raise SolverError as `get_state`."""
        self._listener.refuse_others()
        step = self._asked("load", state["restart"])
        self._check(step, state["last"])
        self._seed = state["seed"]
        self._options = state["options"]
        self._actions = list(state["actions"].astype(self._opening.dtype))
        self._last_obs = step.obs
        self._restarts = state["restarts"]

    def _asked(self, verb: str, path: Path) -> SolverStep:
        try:
            session = self._live()
            if verb == "save":
                return session.save(str(path))
            return session.load(str(path))
        except SolverEnded as error:
            raise SolverError(f"the solver ended when it was to {verb} {path} {error}") from None

    def _check(self, step: SolverStep, last: np.ndarray | None) -> None:
        if last is None or step.obs.tobytes() != last.tobytes():
            raise SolverError(
                "the solver hands over another observation with its restart file than before: the file lacks "
                "something, or the solver advanced when it was to save"
            )


def _boxes(parts: Sequence[Part], dtype: np.dtype) -> gym.Space[Any]:
    boxes: dict[str, gym.Space[Any]] = {
        part.name: gym.spaces.Box(part.low, part.high, part.shape, dtype.type) for part in parts
    }
    if len(parts) > 1:
        return gym.spaces.Dict(boxes)
    return boxes[parts[0].name]


def _action_box(parts: Sequence[Part], dtype: np.dtype) -> gym.spaces.Box:
    low = np.concatenate([np.full(part.size, part.low, dtype) for part in parts])
    high = np.concatenate([np.full(part.size, part.high, dtype) for part in parts])
    shape = low.shape
    if len(parts) == 1 and parts[0].shape:
        shape = parts[0].shape
    return gym.spaces.Box(low.reshape(shape), high.reshape(shape), shape, dtype.type)
