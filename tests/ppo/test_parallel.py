"""Several trainers, each with its share of the rows, are one trainer with all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from builders import BOX, DISCRETE, random_weights, spec_of
from torch import Tensor

from dppo.ppo.batch import Batch
from dppo.ppo.moments import merged_moments, moments_of
from dppo.ppo.trainer import PPOTrainer, TrainerOptions
from dppo.spaces import BoxActions, DiscreteActions


class Meeting:
    """Ranks that are threads of this process: one face of `Parallel` for each."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30)
        self._brought: list[Tensor] = [torch.empty(0)] * size
        self.ranks = [Rank(self, rank, size) for rank in range(size)]

    def exchange(self, rank: int, tensor: Tensor) -> Tensor:
        """What all ranks brought, stacked in their order."""
        self._brought[rank] = tensor.clone()
        self._barrier.wait()
        everything = torch.stack(self._brought)
        self._barrier.wait()
        return everything

    def all_do(self, work: Callable[[int], Any]) -> list[Any]:
        """Let every rank do its work; the results, in the order of ranks."""
        results: list[Any] = [None] * len(self.ranks)

        def run(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except Exception as error:
                results[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


class Rank:
    """One of those who meet."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    def sum_(self, tensor: Tensor) -> None:
        tensor.copy_(self._meeting.exchange(self.rank, tensor).sum(dim=0))

    def gather(self, tensor: Tensor) -> Tensor:
        return self._meeting.exchange(self.rank, tensor)


OPTIONS = TrainerOptions(
    update_epochs=2,
    minibatches=1,
    micro_batch_size=None,
    norm_adv=True,
    clip_coef=0.2,
    clip_vloss=True,
    ent_coef=0.02,
    vf_coef=0.5,
    max_grad_norm=0.1,
    target_kl=None,
)


def trainer_of(actions: DiscreteActions | BoxActions, options: TrainerOptions, parallel: Rank | None) -> PPOTrainer:
    trainer = PPOTrainer(spec_of(actions), 1, options, parallel=parallel)
    trainer.load(random_weights(trainer.model.spec), trainer.state())
    return trainer


def some_batch(actions: DiscreteActions | BoxActions, rows: int) -> Batch:
    rng = np.random.default_rng(0)
    chosen: Any = rng.integers(0, 3, rows) if isinstance(actions, DiscreteActions) else rng.normal(size=(rows, 2))
    columns = rng.normal(size=(4, rows))
    columns[0] -= 1 if isinstance(actions, DiscreteActions) else 3  # log-probabilities
    return Batch(
        torch.from_numpy(rng.normal(size=(rows, 4))), torch.from_numpy(chosen), *map(torch.from_numpy, columns)
    )


@pytest.mark.parametrize("actions", [DISCRETE, BOX], ids=["discrete", "box"])
@pytest.mark.parametrize("target_kl", [None, 1e-6], ids=["all epochs", "early stop"])
def test_three_ranks_with_a_third_of_the_rows_are_one_with_all(
    actions: DiscreteActions | BoxActions, target_kl: float | None
) -> None:
    options = TrainerOptions(*(getattr(OPTIONS, name) for name in OPTIONS.__slots__[:-1]), target_kl)
    batch = some_batch(actions, 36)
    alone = trainer_of(actions, options, None)
    figures = alone.update(batch, 1e-2, np.random.default_rng(0))
    meeting = Meeting(3)
    trainers = [trainer_of(actions, options, rank) for rank in meeting.ranks]
    shares = batch.split([12, 12, 12])
    told = meeting.all_do(lambda rank: trainers[rank].update(shares[rank], 1e-2, np.random.default_rng(rank)))
    assert figures["minibatches"] == (2 if target_kl is None else 1)
    for trainer, one in zip(trainers, told, strict=True):
        np.testing.assert_array_equal(trainer.weights(), trainers[0].weights())  # to the last bit
        np.testing.assert_allclose(trainer.weights(), alone.weights(), rtol=1e-9, atol=1e-12)
        assert one == told[0]
        assert one == pytest.approx(figures, rel=1e-9, abs=1e-12)


def test_moments_of_parts_are_those_of_all_samples() -> None:
    rng = np.random.default_rng(1)
    parts = [torch.from_numpy(rng.normal(loc, 3, (2, size))) for loc, size in ((5, 4), (-7, 2), (100, 6))]
    found = merged_moments(torch.stack([moments_of(part) for part in parts]))
    everything = torch.cat(parts, dim=1).numpy()
    np.testing.assert_allclose(found[:, 0], 12)
    np.testing.assert_allclose(found[:, 1], everything.mean(axis=1))
    np.testing.assert_allclose(found[:, 2], everything.var(axis=1) * 12)
