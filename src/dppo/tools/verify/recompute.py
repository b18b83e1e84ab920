"""Compute the iterations behind a checkpoint again, and compare them with what the run has stored."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dppo.config import Config
from dppo.config.groups import flattened
from dppo.config.resume import leave_out_ineffective
from dppo.config.trust import require_trust
from dppo.errors import CheckpointError, DppoError
from dppo.numerics.fingerprint import Fingerprint
from dppo.process_state.borders import dppo_computes
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files.checkpoint import Checkpoint, LoadedCheckpoint
from dppo.records.files.lock import locked
from dppo.records.files.run_folder import RunFolder
from dppo.records.metrics.reading import read_metrics
from dppo.records.metrics.writer import plain
from dppo.run import outputs
from dppo.run.building import build
from dppo.run.iteration_row import TrainingTimes, row_maker
from dppo.run.learner import PPOLearner
from dppo.run.loading import STATES_OF_ENVS
from dppo.run.parts import Parts
from dppo.run.state import RunState
from dppo.signals import StopSignals
from dppo.tools.diff import (
    Checksums,
    Results,
    bits_of,
    differing_results,
    first_difference,
    read_trace,
    results_of,
)
from dppo.tools.verify.stored import Stretch

Computed = tuple[Results, Checksums]
"""The results and the trace of an iteration."""


class NotEqual(DppoError):
    """A recomputed iteration differs from the stored one."""


class NotReplayed(DppoError):
    """A run whose samplers cannot be restored: no iteration of it can be computed again."""


def config_of(end: Checkpoint, num_actors: int | None, run: Path, *, trust: bool) -> Config:
    """Return the settings with which a run got to a checkpoint, without evaluations and trackers.

    Raises ConfigError if they name code that is not trusted, or do not go together with `num_actors`.
    """
    settings = {"atari": "raw"} | flattened(end.state["config"])
    require_trust({"env_kwargs": {}} | settings, (), run, trust=trust, nameable=())
    changes: dict[str, Any] = {"eval_every": None, "track": ()}
    if num_actors is not None:
        changes["num_actors"] = num_actors
    return Config(**leave_out_ineffective(settings, changes))


class Comparison:
    """Compares the iterations of a stretch with the rows, the trace and the checkpoint of the run."""

    def __init__(self, run: Path, stretch: Stretch, show: Callable[[str], None]) -> None:
        """Read the stored rows and trace; `show` is called with each iteration."""
        self.run = run
        self.show = show
        self._stretch = stretch
        self._trace = read_trace(run)
        self._rows: dict[int, list[Results]] = {}
        self._stored_names = set[str]()
        self._computed_names = set[str]()
        for row in read_metrics(run):
            iteration_results = self._rows.setdefault(int(row["iteration"]), [])
            iteration_results.append(results_of(plain(row)))
            self._stored_names |= row.keys()
        self.computed: list[Computed] = []
        """The iterations so far."""
        self.other_numerics = ""
        """Differences between the last bits of this process and of the run, and their cause; "" without any."""
        self.weights_sha256 = ""
        """SHA-256 of the weights at the end of the stretch; "" until it is computed."""

    def check(self, row: Results, trace: Checksums, learner: PPOLearner) -> bool:
        """Compare an iteration; return whether it is the last. Raise NotEqual if something differs."""
        number = int(row["iteration"] or 0)
        self.show(f"iteration {number:,} of {self._stretch}")
        results = results_of(row)
        self._computed_names |= results.keys()
        self.computed.append((results, trace))
        difference = self._difference(number, results, trace)
        is_last = number == self._stretch.last
        if is_last and not difference:
            end = checkpoints.load(self._stretch.end)
            difference = _state_difference(RunState.capture(learner), end)
        if difference:
            raise NotEqual(f"iteration {number:,}{difference}")
        self.weights_sha256 = learner.weights_sha256()
        return is_last

    def _difference(self, number: int, results: Results, trace: Checksums) -> str:
        stored_trace = self._trace.get(number)
        if stored_trace and trace and stored_trace != trace:
            return f"{first_difference(stored_trace, trace)}: trace.jsonl has another checksum"
        if number not in self._rows:
            return ": has no row in metrics.jsonl"
        shared = self._stored_names & self._computed_names
        for stored in self._rows[number]:
            name = min(differing_results(stored, results, shared), default=None)
            if name is not None:
                return f": {name} is {stored.get(name)} in metrics.jsonl, and {results.get(name)} computed again"
        return ""


def _state_difference(state: RunState, stored: Checkpoint) -> str:
    """Return the first part of a state that differs from a checkpoint; "" if there is none."""
    for part in sorted(state.arrays.keys() | stored.arrays.keys()):
        arrays = state.arrays.get(part, {})
        stored_arrays = stored.arrays.get(part, {})
        for name in sorted(arrays.keys() | stored_arrays.keys()):
            if name.endswith(STATES_OF_ENVS):  # an environment may store its state in several ways
                continue
            if name not in arrays or name not in stored_arrays:
                return f": {part}/{name} is not in both states"
            if bits_of(arrays[name]) != bits_of(stored_arrays[name]):
                return f": {part}/{name} differs from the checkpoint"
    # incidents of actors are not part of the result, and an earlier version stored fewer values
    for name in sorted((state.values.keys() & stored.state.keys()) - {"incidents", "env_options"}):
        if _as_json(state.values[name]) != _as_json(stored.state[name]):
            return f": {name} differs from the checkpoint"
    return ""


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _leave_out_given_up(stretch: Stretch, parts: Parts) -> None:
    """Let the segments of a stretch leave out the steps that the run gave up, which may hang or end this process."""
    given_up = checkpoints.load(stretch.end).state.get("given_up", [])
    try:
        parts.learner.ledger.load_given_up(given_up)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{stretch.end}: the steps that were given up are damaged ({error})."
        ) from None


@dppo_computes()
def recompute(config: Config, comparison: Comparison, stretch: Stretch, stop: StopSignals) -> None:
    """Train from the start of a stretch in a temporary folder, and compare each iteration.

    Raises NotEqual, or NotReplayed if open episodes cannot be replayed.
    """
    start = LoadedCheckpoint(stretch.start, checkpoints.load(stretch.start))
    state = start.checkpoint.state
    outputs.check_code(config)
    with TemporaryDirectory(prefix="dppo-verify-") as folder, ExitStack() as stack:
        owner = stack.enter_context(locked(Path(folder)))
        run_folder = RunFolder(Path(folder), owner, start=start)
        parts = build(config, run_folder, stop, stack, lambda progress: None)
        if not parts.learner.ledger.replays:
            raise NotReplayed(
                f"{config.env_name}: open episodes cannot be replayed, because it is nondeterministic, resets its "
                f"sub-environments by itself, or was trained with replay=False. No iteration of such a run can be "
                f"computed again."
            )
        _leave_out_given_up(stretch, parts)
        if "numerics" in state:
            run_fingerprint = Fingerprint(**state["numerics"]["own"])
            comparison.other_numerics = run_fingerprint.explanation(parts.numerics.own)
        options = state.get("env_options")
        parts.learner.env_options = lambda: options
        row_of = row_maker(config.info_keys)
        times = TrainingTimes()
        for iteration in parts.learner.run(config.iterations, stop):
            row = plain(row_of(iteration, parts.learner, times))
            trace = parts.trace(row) if parts.trace is not None else {}
            checksums = {name: str(value) for name, value in trace.items()}
            if comparison.check(row, checksums, parts.learner):
                return
