"""Segments of earlier iterations are kept, trained on again, stored, and never lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import assert_same_bytes, make_config, spec_of
from matrix import RUNS
from recorder import Recorder

import dppo
from dppo.errors import TrainingDiverged
from dppo.learners.staged import StagedTrainers
from dppo.learners.stored_segments import StoredSegments
from dppo.ppo.exchange.records import Experience, PolicySnapshot, Segment, Update
from dppo.ppo.learning.reuse import joined
from dppo.ppo.networks.network import NetworkSpec
from dppo.records.files import checkpoint as checkpoints

T = 3
E = 2
SAMPLERS = 2
OBS = np.dtype(
    [("at", np.float32, (2,)), ("inner", [("turn", np.int64), ("image", np.uint8, (2, 2, 3))])]
)
POLICY = PolicySnapshot(0, np.zeros(1))


class Trained:
    """Stands at the seam of trainers: notes what an update trains on, and may fail."""

    def __init__(self) -> None:
        self.spec: NetworkSpec = spec_of()
        self.seen: list[list[Segment]] = []
        self.fails = False
        self.loaded: dict[str, np.ndarray] = {}

    def update(self, experience: Experience) -> Update:
        if self.fails:
            raise TrainingDiverged("a loss is nan")
        self.seen.append(list(experience.segments))
        return Update({}, 0.0, None)

    def state(self) -> dict[str, np.ndarray]:
        return {"step": np.array(len(self.seen))}

    def learned_state(self) -> dict[str, np.ndarray]:
        return self.state()

    def weights(self) -> np.ndarray:
        return np.zeros(1)

    def close(self) -> None: ...

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        self.loaded = state


def reusing(trainers: Trained, reuse: int) -> StagedTrainers:
    return StagedTrainers(trainers, [StoredSegments(reuse, OBS)])


def segment(number: int) -> Segment:
    """A segment of random contents, with a time limit and without the last optional columns."""
    rng = np.random.default_rng(number)
    numbers = {
        name: rng.normal(size=(T, E)) for name in ("logprobs", "values", "next_values", "rewards")
    }
    ends = {name: rng.random((T, E)) < 0.3 for name in ("terminated", "truncated", "valid")}
    drawn = Segment(
        obs=observations(rng, T * E).reshape(T, E),
        actions=rng.integers(0, 3, (T, E)),
        masks=rng.random((T, E, 3)) < 0.5,
        states=rng.normal(size=(1, E, 5)),
        **numbers,
        **ends,
    )
    rows = int(np.count_nonzero(drawn.followed))
    return replace(
        drawn, successors=observations(rng, rows), successor_states=rng.normal(size=(rows, 5))
    )


def observations(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Random bits, in which some numbers are nan."""
    bits = rng.integers(0, 256, rows * OBS.itemsize, np.uint8)
    return np.frombuffer(bits.tobytes(), OBS)


def continued_segment(before: Segment, after: Segment) -> Segment:
    """The segment `after`, as if its sampler had gone on from `before`."""
    assert before.successors is not None
    over = before.terminated[-1] | before.truncated[-1]
    last_successors = before.successors[-E:]
    obs = after.obs.copy()
    obs[0] = np.where(over, obs[0], last_successors)
    return replace(after, obs=obs)


def batch(iteration: int) -> list[Segment]:
    return [segment(10 * iteration + sampler) for sampler in range(SAMPLERS)]


def assert_same(actual: list[Segment], expected: list[Segment]) -> None:
    assert len(actual) == len(expected)
    for segment, other in zip(actual, expected, strict=True):
        assert_same_bytes(segment, other)


def joined_samplers(*iterations: int) -> list[Segment]:
    return [
        joined([segment(10 * iteration + sampler) for iteration in iterations])
        for sampler in range(SAMPLERS)
    ]


def update_on(trainers: StagedTrainers, segments: list[Segment], iteration: int) -> None:
    trainers.update(Experience(segments, POLICY, None, iteration))


def test_each_update_trains_on_the_last_segments_of_every_sampler() -> None:
    inner = Trained()
    trainers = reusing(inner, 3)
    for iteration in range(5):
        update_on(trainers, batch(iteration), iteration)
    expected = [(0,), (0, 1), (0, 1, 2), (1, 2, 3), (2, 3, 4)]
    for batch_seen, iterations in zip(inner.seen, expected, strict=True):
        assert_same(batch_seen, joined_samplers(*iterations))


def test_a_failed_update_keeps_nothing_and_a_restored_one_goes_on() -> None:
    inner = Trained()
    trainers = reusing(inner, 3)
    for iteration in range(2):
        update_on(trainers, batch(iteration), iteration)
    inner.fails = True
    with pytest.raises(TrainingDiverged):
        update_on(trainers, batch(7), 2)

    state = trainers.state()
    assert all(array.dtype.name in checkpoints.DTYPES for array in state.values())

    other = Trained()
    restored = reusing(other, 3)
    restored.load(np.zeros(1), state)
    assert set(other.loaded) == {"step"}

    update_on(restored, batch(2), 2)
    assert_same(other.seen[0], joined_samplers(0, 1, 2))

    other_run_state = {"step": np.array(0)}  # or of the start
    restored.load(np.zeros(1), other_run_state)
    update_on(restored, batch(5), 0)
    assert_same(other.seen[1], joined_samplers(5))


def test_observations_beside_a_mask_go_on_as_any_others() -> None:
    """They are views of some fields, whose items have a gap."""
    fields = list(OBS.names or ())
    mask = ("action_mask", np.bool_, (2,))
    padded = np.dtype([*((name, OBS[name]) for name in fields), mask])

    def viewed(column: Any) -> np.ndarray:
        whole = np.zeros(column.shape, padded)
        for field in fields:
            whole[field] = column[field]
        return whole[fields]

    first = segment(0)
    second = continued_segment(first, segment(1))
    inner = Trained()
    trainers = reusing(inner, 2)
    for part in (first, second):
        beside = replace(part, obs=viewed(part.obs), successors=viewed(part.successors))
        update_on(trainers, [beside], 0)
    assert_same_bytes(inner.seen[1][0], joined([first, second]))


def test_kept_segments_are_copies() -> None:
    """Views of Ray's store would fill it."""
    mine = batch(0)
    trainers = reusing(Trained(), 2)
    update_on(trainers, mine, 0)
    stored = {name: array for name, array in trainers.state().items() if name != "step"}
    assert stored
    for item in mine:
        columns = [getattr(item, name) for name in Segment.__slots__]
        for name, array in stored.items():
            assert not any(np.shares_memory(array, column) for column in columns), name


COLUMNS_OF_ROWS = [
    "obs",
    "actions",
    "logprobs",
    "values",
    "next_values",
    "rewards",
    "terminated",
    "valid",
    "masks",
]


def test_joined_segments_are_one_where_the_sampler_went_on() -> None:
    ends = 0
    for number in range(20):
        parts = [segment(100 * number)]
        for index in range(1, 3):
            after = segment(100 * number + index)
            parts.append(continued_segment(parts[-1], after))

        def column(name: str, parts: list[Segment] = parts) -> np.ndarray:
            return np.concatenate([getattr(part, name) for part in parts])

        whole = joined(parts)
        for name in COLUMNS_OF_ROWS:
            assert getattr(whole, name).tobytes() == column(name).tobytes(), name
        over = column("terminated") | column("truncated")
        # nothing else ends there
        np.testing.assert_array_equal(whole.terminated | whole.truncated, over)

        assert whole.successors is not None
        are_kept = whole.followed[column("followed")]
        expected = column("successors")[are_kept]
        assert whole.successors.tobytes() == expected.tobytes()
        assert len(whole.successors) == np.count_nonzero(whole.followed)
        ends += int(over[[T - 1, 2 * T - 1]].sum())
    assert 0 < ends < 80


def test_joined_segments_are_cut_where_the_sampler_started_anew() -> None:
    """As after the loss of an environment: the older episode goes on nowhere, and is not one with the newer."""
    before = segment(1)
    after = continued_segment(before, segment(2))
    obs = after.obs.copy()
    obs[0, 1] = segment(3).obs[0, 1]
    whole = joined([before, replace(after, obs=obs)])
    np.testing.assert_array_equal(whole.truncated[:T, 0], before.truncated[:, 0])
    assert whole.truncated[T - 1, 1]
    assert whole.followed[T - 1, 1] == ~whole.terminated[T - 1, 1]


def settings(run_dir: Path) -> dppo.Config:
    return make_config(RUNS["reuse of 3"] | {"run_dir": run_dir})


def test_the_segments_of_a_run_go_on_from_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined_segments: list[Segment] = []

    def noted(segments: Sequence[Segment]) -> Segment:
        whole = joined(segments)
        joined_segments.append(whole)
        return whole

    monkeypatch.setattr("dppo.learners.stored_segments.joined", noted)
    dppo.train(settings(tmp_path / "run"))
    assert [len(whole.rewards) for whole in joined_segments[::2]] == [40, 80, 120, 120, 120]
    # CartPole cuts episodes off after 500 steps
    assert not any(whole.truncated.any() for whole in joined_segments)
    assert any(not whole.terminated[39].all() for whole in joined_segments)


def test_a_checkpoint_holds_the_segments_that_are_used_again_and_a_branch_starts_without_them(
    tmp_path: Path,
) -> None:
    origin = dppo.train(settings(tmp_path / "origin"), observers=[Recorder(interrupt_at=3)])
    names = checkpoints.load(origin.checkpoint).arrays["optimizer"]
    assert len({name.split(".")[1] for name in names if "kept" in name}) == 2
    branch = dppo.train(settings(tmp_path / "branch"), resume=origin.run_dir, branch=True)
    assert [row["losses/minibatches"] for row in branch.metrics] == [4, 8, 12, 12, 12]
