"""Watching: reads the progress of actors that are too busy to answer, on any node."""

from __future__ import annotations

from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dppo.cluster.collecting.messages import Process, Progressed
from dppo.cluster.collecting.progress_file import (
    ProgressFile,
    Witness,
    read_progress_file,
    read_stacks,
    remove_progress_file,
)
from dppo.envs.activity import Activity, Phase

STACKS_TIMEOUT_S = 15.0  # for a witness on another node


class Watching:
    """Reads the progress files of actors: directly on this node, through a witness process on other nodes.

    A witness starts with the first look at an actor of its node, and reserves no CPU of the cluster.
    """

    def __init__(self, here: str) -> None:
        self._here = here  # id of the node whose files can be read directly
        self._files: dict[Process, ProgressFile] = {}
        self._witnesses: dict[str, Any] = {}
        self._looks: dict[ObjectRef[Any], tuple[Process, str]] = {}
        self._looked_at: set[Process] = set()  # those of the pending looks
        self._seen: list[Progressed] = []
        self._latest: dict[Process, Activity] = {}

    def started(self, process: Process, file: ProgressFile) -> None:
        """Record the progress file of a new process."""
        self._files[process] = file

    def ended(self, process: Process) -> None:
        """Forget a process."""
        self._latest.pop(process, None)
        file = self._files.pop(process, None)
        if file is not None and file.node_id == self._here:
            remove_progress_file(file.path)

    def homes(self) -> dict[int, str]:
        """Return the id of the node of each actor with a process, by the id of the actor."""
        return {process.actor_id: file.node_id for process, file in self._files.items()}

    def look(self, process: Process) -> None:
        """Look at a process; does not wait."""
        file = self._files.get(process)
        if file is None or not file.path:
            return
        if file.node_id == self._here:
            self._take(process, read_progress_file(file.path))
            return
        self._looks[self._witness(file).look.remote(file.path)] = process, file.node_id
        self._looked_at.add(process)

    def stacks(self, process: Process) -> str:
        """Return the stacks of the threads of a process, "" if they cannot be read; waits a moment."""
        file = self._files.get(process)
        if file is None or not file.path:
            return ""
        if file.node_id == self._here:
            return read_stacks(file.path, file.pid)
        try:
            found: str = ray.get(self._witness(file).stacks.remote(file.path, file.pid), timeout=STACKS_TIMEOUT_S)
            return found
        except RayError:
            return ""

    def _witness(self, file: ProgressFile) -> Any:
        if file.node_id not in self._witnesses:
            strategy = NodeAffinitySchedulingStrategy(file.node_id, soft=False)
            witness: Any = ray.remote(Witness)
            self._witnesses[file.node_id] = witness.options(num_cpus=0, scheduling_strategy=strategy).remote()
        return self._witnesses[file.node_id]

    def steps_of(self, process: Process) -> int:
        """Return the env steps made for the current question of a process; on another node, as last seen."""
        if process not in self._looked_at:
            self.look(process)
        progress = self._latest.get(process)
        return 0 if progress is None or progress.phase is Phase.IDLE else progress.steps

    def seen(self) -> list[Progressed]:
        """Return the results of looks since the last call; does not wait."""
        if self._looks:
            ready, _ = ray.wait(list(self._looks), num_returns=len(self._looks), timeout=0)
            for ref in ready:
                process, node_id = self._looks.pop(ref)
                self._looked_at.discard(process)
                try:
                    self._take(process, ray.get(ref, timeout=1))
                except RayError:  # the witness is lost, perhaps with its node; the next look starts another
                    self._witnesses.pop(node_id, None)
        seen, self._seen = self._seen, []
        return seen

    @property
    def idle(self) -> bool:
        """True if no look is pending."""
        return not self._looks

    def take_witnesses(self) -> list[Any]:
        """Return all witnesses to be killed, and forget them."""
        witnesses = list(self._witnesses.values())
        self._witnesses.clear()
        self._looks.clear()
        self._looked_at.clear()
        return witnesses

    def _take(self, process: Process, progress: Activity | None) -> None:
        if progress is not None:
            self._latest[process] = progress
            self._seen.append(Progressed(process, progress))
