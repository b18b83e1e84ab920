"""Recorded episodes, which can be played again: a line of episodes.jsonl each."""

import base64
import math
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dppo.config.trust import resume_command
from dppo.errors import GIVEN_UP, CheckpointError
from dppo.records.files.disk import cause, remedy
from dppo.records.files.run_files import EPISODES, read_run_file
from dppo.records.files.run_folder import settings_to_resume
from dppo.records.metrics.reading import last_row, parsed

MAX_ACTIONS_BYTES = 2**28  # largest size of the actions of an episode that is read
INTEGERS = ("sampler_id", "env", "episode", "seed", "length", "number", "checksum", "global_step")
DTYPES: dict[str, type[np.generic]] = {
    "int64": np.int64,
    "float32": np.float32,
    "float64": np.float64,
}
NAMES_OF_GIVEN_UP = (GIVEN_UP, "fatal")  # the second one is of earlier versions
SUB_ENVS = "an environment that steps several sub-environments at once, whose episodes depend on the actions of all"


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """An episode that can be played again, also one up to its fault."""

    sampler_id: int
    env: int
    episode: int
    seed: int
    length: int
    packed: Mapping[str, Any]
    """Its actions, see the function `packed`."""
    number: int | None = None
    """1, 2, ... among the finished episodes of the run; None if it ended with a fault."""
    episode_return: float = math.nan
    checksum: int = 0
    global_step: int = 0
    """Env steps of the run at the end of its last iteration."""
    error: str = ""
    options: dict[str, Any] | None = None
    """Options of its reset."""
    is_single: bool = True
    """False for a sub-environment of an environment that steps several: it cannot be played again."""

    @property
    def name(self) -> str:
        """Its sampler, environment and index."""
        return f"{self.sampler_id}/{self.env}/{self.episode}"

    @property
    def is_given_up(self) -> bool:
        """True if no process has survived its last step, or its reset."""
        return self.error.partition(" in ")[0] in NAMES_OF_GIVEN_UP

    @property
    def last_place(self) -> str:
        """The last step in words, or the reset."""
        return f"step {self.length:,}" if self.length else "its reset"

    def actions(self) -> np.ndarray:
        """Return its actions [length, *A], as sampled; raise one of several errors if they are damaged."""
        compressed = base64.b64decode(self.packed["actions"])
        data = zlib.decompressobj().decompress(compressed, MAX_ACTIONS_BYTES)
        actions = np.frombuffer(data, DTYPES[self.packed["dtype"]])
        return actions.reshape(self.length, *self.packed["shape"])


def packed(actions: np.ndarray) -> dict[str, Any]:
    data = zlib.compress(np.ascontiguousarray(actions).tobytes(), 1)
    return {
        "dtype": str(actions.dtype),
        "shape": actions.shape[1:],
        "actions": base64.b64encode(data).decode(),
    }


def read_episodes(run_dir: Path) -> list[RecordedEpisode]:
    """Return the recorded episodes of a run, perhaps a stranger's, the oldest first; skip damaged lines.

    Raise CheckpointError if their file is not a regular one, or too large.
    """
    path = run_dir / EPISODES
    try:
        data = read_run_file(path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path}: {cause(error)} {remedy(error)}") from None
    episodes = []
    for _, line in parsed(data):
        if line is not None:
            with suppress(KeyError, OverflowError, TypeError, ValueError):
                episodes.append(_episode(line))
    return episodes


def _episode(line: Mapping[str, Any]) -> RecordedEpisode:
    """Return the episode in a line; raise one of several errors if it is damaged."""
    integers: dict[str, Any]
    integers = {name: int(np.uint64(line[name])) for name in INTEGERS if name in line}
    options = line.get("options")
    if not isinstance(options, dict):
        options = None
    return RecordedEpisode(
        **integers,
        packed=line["packed"],
        episode_return=float(line.get("episode_return", math.nan)),
        error=str(line.get("error", "")),
        options=options,
        is_single=line.get("alone") is not False,
    )


def nothing_recorded(run: Path) -> str:
    """Explain why a run has no recorded episodes, and what to do about it."""
    settings = settings_to_resume(run, read_only=True)
    recorded = settings.get("record_episodes", "none")  # earlier versions record none
    if recorded != "all":
        return f"{run}: has no recorded episodes, with record_episodes={recorded}. Train with `record_episodes=all`."
    row = last_row(run)
    finished = row.get("charts/episodes", 0)
    if finished:
        return (
            f"{run}: has no recorded episodes, although {finished:,.0f} have finished: {EPISODES} is missing or "
            f"damaged. Copy it from where the run was trained."
        )
    longer = 2 * int(settings.get("total_timesteps", 0))
    remedy = f"Train longer: {resume_command(run, settings)} --total-timesteps {longer}."
    if not row:
        remedy = "No iteration has finished either: correct what ended the run, and start it again."
    text = f"{run}: has no recorded episodes: none has finished yet. {remedy}"
    if (run / "incidents").exists():
        text += f" Faults are played by their folder, such as {run}/incidents/001."
    return text
