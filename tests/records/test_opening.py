"""The first lines of a run show its sizes and where its samplers run."""

from __future__ import annotations

import pytest

from dppo.config import Config
from dppo.records.words import hosting_line, sizes_line


def test_sizes_are_those_of_the_run() -> None:
    config = Config(
        env_id="E-v0", num_samplers=3, envs_per_sampler=2, num_steps=50, minibatch_size=64, total_timesteps=1000
    )
    assert sizes_line(config) == (
        "4 iterations of 300 steps (3 samplers x 2 envs x 50 steps), each trained for 4 epochs of 5 minibatches of "
        "up to 60 rows: 80 SGD steps in all."
    )
    assert "4 epochs of 1 minibatch of up to 1,024 rows" in sizes_line(Config(env_id="E-v0", minibatch_size=1024))


@pytest.mark.parametrize(
    ("actors", "samplers", "words"),
    [
        (8, 8, "8 Ray actors host 1 sampler each."),
        (4, 8, "4 Ray actors host 2 samplers each."),
        (1, 8, "1 Ray actor hosts 8 samplers."),
        (3, 8, "3 Ray actors host 8 samplers unevenly: 2 host 3, the others 2 and have to wait."),
        (
            *(0, 8),
            "Collecting in this process; num_actors=8 (--num-actors 8) would spread it over Ray actors, with the same "
            "result.",
        ),
        (0, 1, "Collecting in this process."),
    ],
)
def test_the_line_names_the_hosts_of_the_samplers(actors: int, samplers: int, words: str) -> None:
    assert hosting_line(Config(env_id="E-v0", num_actors=actors, num_samplers=samplers)) == words
