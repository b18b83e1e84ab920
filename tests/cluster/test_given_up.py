"""Steps that were given up are known to the ledger and to checkpoints: a segment that is made again leaves them out."""

from __future__ import annotations

from typing import Any

import pytest
from test_fatal_steps import Fated

from dppo.engine.ledger import ReplayLedger
from dppo.ppo.exchange.records import FatalStep

GIVEN_UP: dict[str, list[int]] = {
    "the first segment of sampler 1": [1, 0, 0, 2, 8],
    "the reset of a later episode": [1, 0, 0, 4, 0],
    "the second segment of sampler 0": [0, 1, 0, 5, 6],
}
"""Sampler, segment, environment, episode and step."""


@pytest.fixture
def ledger() -> ReplayLedger:
    """Return a ledger that has read these steps from a checkpoint."""
    ledger = ReplayLedger(2, replay=True)
    ledger.load_given_up([*GIVEN_UP.values()])
    return ledger


def test_a_segment_that_is_made_again_leaves_out_what_was_given_up_at_once() -> None:
    driver = Fated(given_up=[*GIVEN_UP.values()])
    steps = driver.fatal()
    assert steps.keys() == {1}
    assert steps[1] == (FatalStep(0, 2, 8), FatalStep(0, 4, 0))

    driver.asks = driver.asks[-1:]
    driver.answer()
    driver.request(1)
    assert driver.fatal() == {0: (FatalStep(0, 5, 6),)}


def test_the_steps_that_were_given_up_are_stored_up_to_a_checkpoint(ledger: ReplayLedger) -> None:
    assert ledger.given_up_before(2) == sorted(GIVEN_UP.values())
    first_segments = ledger.given_up_before(1)
    assert len(first_segments) == 2
    assert all(sampler == 1 for sampler, *_ in first_segments)
    assert ledger.given_up_before(0) == []


@pytest.mark.parametrize("damaged", [[1, 0], [1, 0, 0, 2, "x"], 5])
def test_a_damaged_list_of_steps_is_an_error(ledger: ReplayLedger, damaged: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        ledger.load_given_up([damaged])
