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
    ("changes", "text"),
    [
        (
            {"device": "cuda"},
            r"device=cuda: .* learner_gpus=0 requests none\. Use `learner_gpus=1`, or `device=cpu`\.",
        ),
        ({"learner_gpus": 1}, r"learner_gpus=1.0 has no effect: .*Use `device=cuda`\."),
        (
            {"learner_cpus": 2, "num_learners": 0},
            r"learner_cpus=2.0 has no effect: num_learners=0 .*`num_learners=1`",
        ),
        (
            {"num_actors": 0},
            r"num_learners=2 has no effect: num_actors=0 .*Use `num_actors=1` or more\.",
        ),
        (
            {"micro_batch_size": 32},
            r"micro_batch_size=32 has no effect: a minibatch has 64 rows\. Use a smaller one",
        ),
        (
            {"num_actors": 6, "num_samplers": 6, "num_learners": 4},
            r"num_learners=4 .* 6 samplers .*`num_samplers=8`,",
        ),
        ({"num_actors": 6, "num_samplers": 8, "num_learners": 4}, None),
        ({"device": "cuda", "learner_gpus": 1}, None),
        ({"device": "auto", "learner_gpus": 1}, None),
        ({"device": "cpu"}, None),
    ],
)
def test_contradictory_devices_and_sizes_are_rejected(
    changes: dict[str, Any], text: str | None
) -> None:
    found = refusal(**changes)
    assert found is None if text is None else re.match(text, found or "")
