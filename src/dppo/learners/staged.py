"""Trainers with stages around each update, such as those that keep earlier segments or record checksums."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack

import numpy as np

from dppo.learners.trainers import Trainers
from dppo.ppo.exchange.records import Experience, Update


class RunStage(ABC):
    """A part of a run around its updates, which only some runs have."""

    @abstractmethod
    def around(
        self, experience: Experience, trainers: Trainers
    ) -> AbstractContextManager[Experience]:
        """Return the context of an update of `trainers`, which yields what to train on.

        After an update that fails, nothing of the stage may have changed.
        """

    def state(self) -> dict[str, np.ndarray]:
        """Capture the arrays on which the next update depends, by name."""
        return {}

    def load(self, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Restore what `state` returned from the arrays of a run, perhaps of another one; return all other arrays."""
        return state


class StagedTrainers:
    """Trainers whose updates have stages. A run without any uses its trainers as they are."""

    def __init__(self, trainers: Trainers, stages: Sequence[RunStage]) -> None:
        self.trainers = trainers
        self.stages = stages
        self.spec = trainers.spec

    def update(self, experience: Experience) -> Update:
        """Do one update on what the stages make of the segments."""
        with ExitStack() as stack:
            for stage in self.stages:
                experience = stack.enter_context(stage.around(experience, self.trainers))
            return self.trainers.update(experience)

    def weights(self) -> np.ndarray:
        return self.trainers.weights()

    def state(self) -> dict[str, np.ndarray]:
        state = self.trainers.state()
        for stage in self.stages:
            state = state | stage.state()
        return state

    def learned_state(self) -> dict[str, np.ndarray]:
        return self.trainers.learned_state()

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Restore weights and the result of `state`."""
        for stage in self.stages:
            state = stage.load(state)
        self.trainers.load(weights, state)

    def close(self) -> None:
        """Close the trainers."""
        self.trainers.close()
