"""The memory of a batch: printed where it is large, refused where it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import DISCRETE

import dppo
from dppo.config import Config
from dppo.config.memory import batch_memory_in_words, check_layers, memory_of_this_machine
from dppo.errors import ConfigError
from dppo.spaces.spaces import Spaces

IMAGES = Spaces(np.dtype((np.uint8, (4, 84, 84))), DISCRETE)
NUMBERS = Spaces(np.dtype((np.float32, (4,))), DISCRETE)


def config(**settings: int) -> Config:
    return Config(env_id="CartPole-v1", total_timesteps=10**7, **settings)  # type: ignore[arg-type]


def sentence(spaces: Spaces = IMAGES, memory: int = 10**10, **settings: int) -> str | None:
    """Return the sentence about a large batch."""
    large = config(num_samplers=64, num_steps=256, **settings)
    return batch_memory_in_words(large, spaces, machine_bytes=memory)


def test_the_memory_of_a_large_batch_is_given_in_one_sentence() -> None:
    assert sentence() == (
        "Memory: 16,384 observations of 28.2 kB take 925 MB, once in segments and once in the batch."
    )

    # on Ray they have memory elsewhere
    shared = sentence(memory=9 * 10**8, num_actors=1, num_learners=2)
    assert "shared by 2 learners" in str(shared)
    assert sentence(reuse=3) == (
        "Memory: 49,152 observations of 28.2 kB take 2.77 GB, once in segments and once in the batch. Each checkpoint "
        "stores 925 MB of them for reuse."
    )
    assert sentence(num_actors=8, policy_lag=2) == (
        "Memory: 16,384 observations of 28.2 kB take 1.85 GB, once in segments and once in the batch, and a policy lag "
        "of 2 keeps the segments of 2 more batches."
    )

    in_this_process = sentence(policy_lag=2)
    assert in_this_process == sentence()
    # little memory is not worth a line
    assert sentence(NUMBERS) is None
    assert batch_memory_in_words(config(), IMAGES) is None


def test_a_batch_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(
        ConfigError,
        match=r"num_steps=256 .* 925 MB, .* this machine has 900 MB\. Lower `num_steps`",
    ):
        sentence(memory=9 * 10**8)


def test_the_memory_of_a_machine_is_limited_by_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (memory_of_this_machine() or 0) > 10**8
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("dppo.config.memory.CGROUP_LIMIT", limit)
    limit.write_text("1000000\n")
    assert memory_of_this_machine() == 1_000_000
    limit.write_text("max\n")
    assert memory_of_this_machine() is not None


@pytest.mark.parametrize(
    "large", [{"hidden_sizes": (10**6, 10**6)}, {"memory": "lstm", "memory_size": 10**6}]
)
def test_layers_that_do_not_fit_into_memory_are_refused_before_anything_starts(
    large: dict[str, Any], tmp_path: Path
) -> None:
    wide = Config(env_id="CartPole-v1", run_dir=tmp_path / "run", progress="off", **large)
    with pytest.raises(
        ConfigError, match=r"more than 1,000,00\d,\d{3},\d{3} param.* take 16 TB .* has 8 GB"
    ):
        check_layers(wide, machine_bytes=8 * 10**9)
    check_layers(Config(env_id="CartPole-v1", hidden_sizes=(1024, 1024)), machine_bytes=8 * 10**9)
    with pytest.raises(ConfigError, match="Use smaller layers"):
        dppo.train(wide)
    assert not (tmp_path / "run").exists()
