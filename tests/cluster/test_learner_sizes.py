"""Numbers of learners, samplers and rows that do not divide, and contradictory devices, are rejected at once."""

from __future__ import annotations

import re
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import settings

from dppo.errors import ConfigError


def refusal(**changes: Any) -> str | None:
    try:
        settings(**changes)
    except ConfigError as error:
        return str(error)
    return None


@hypothesis.settings(deadline=None)
@given(
    learners=st.integers(2, 5),
    samplers=st.integers(1, 12),
    envs=st.integers(1, 3),
    steps=st.integers(2, 70),
    share=st.none() | st.floats(0.01, 1.0),
)
def test_the_nearest_sizes_are_named(
    learners: int, samplers: int, envs: int, steps: int, share: float | None
) -> None:
    """Following the advice of the messages gives valid settings in at most two steps."""
    chosen: dict[str, Any] = {
        "num_learners": learners,
        "num_samplers": samplers,
        "envs_per_sampler": envs,
    }
    chosen |= {"num_steps": steps, "norm_adv": False}
    if share is not None:
        chosen["minibatch_size"] = max(1, int(share * samplers * envs * steps))
    for pick in (0, -1):
        settings_now = dict(chosen)
        refusals = []
        while (text := refusal(**settings_now)) is not None:
            refusals.append(text)
            match = re.search(r"Use `(num_samplers|minibatch_size)=(\d+)`(?: or (\d+))?", text)
            if match is None:  # the batch is now too small for its minibatch
                assert "is larger than the batch" in text
                settings_now["minibatch_size"] = int(re.findall(r"Use at most (\d+)", text)[0])
            else:
                settings_now[match[1]] = int(
                    [number for number in match.groups()[1:] if number][pick]
                )
            assert len(refusals) <= 3, refusals
        config = settings(**settings_now)
        assert config.num_samplers % learners == 0
        assert config.batch_size // learners % config.sizes.minibatches_per_epoch == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"num_actors": 6, "num_samplers": 8, "num_learners": 4},
        {"device": "cuda", "learner_gpus": 1},
        {"device": "auto", "learner_gpus": 1},
        {"device": "cpu"},
    ],
    ids=str,
)
def test_devices_and_sizes_that_fit_are_accepted(changes: dict[str, Any]) -> None:
    """Those that do not fit are refused in tests/remedies/settings.py."""
    assert refusal(**changes) is None
