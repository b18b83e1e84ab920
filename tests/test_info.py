"""Numbers in the info of env steps and episodes.

tests/test_promise.py shows that they do not depend on the number of actors, kills and resumes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import make_config
from matrix import INFORMED, sized
from recorder import Notes, Recorder
from worlds.informed import SEEN, Informed

import dppo
from dppo.envs.episode import GroupSettings, InfoMeter
from dppo.envs.spaces import describe_spaces
from dppo.envs.sub_envs.serial import SerialSubEnvs

ITERATIONS = 3


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    return make_config(sized(INFORMED) | {"run_dir": run_dir} | changes)


def measured(result: dppo.Result) -> list[dict[str, float]]:
    rows = []
    for row in result.metrics:
        rows.append({key: value for key, value in row.items() if key.startswith("info/")})
    return rows


def test_numbers_of_steps_and_of_episodes_are_reported_by_name(tmp_path: Path) -> None:
    SEEN.clear()

    def forget_earlier(number: int) -> None:
        if number < ITERATIONS:
            SEEN.clear()

    recorder = Recorder(after_iteration=forget_earlier)
    with Notes() as notes:
        result = dppo.train(settings(tmp_path / "run"), observers=[recorder])
    row = measured(result)[-1]
    for key, values in SEEN.items():
        assert row[f"info/{key}_min"] == min(values)
        assert row[f"info/{key}_max"] == max(values)
        assert row[f"info/{key}"] == pytest.approx(np.mean(values))

    last = recorder.episodes[0].info
    assert last.keys() == {"energy", "total", "solved"}
    assert last["total"] == 17.0
    assert last["solved"] == 1.0

    info_notes = [text for text in notes.texts if "info_keys" in text]
    assert info_notes == [
        "info_keys=absent: no number of this name in any info so far; the last info had energy, solved, total"
    ]

    without = dppo.train(settings(tmp_path / "without", info_keys=()))
    assert without.weights_sha256 == result.weights_sha256
    assert measured(without) == [{}] * ITERATIONS


class Warming(Informed):
    """Takes three steps in each reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        for _ in range(3):
            obs, *_, info = self.step(1)
        return obs, info


def test_steps_that_an_environment_makes_in_its_reset_do_not_count() -> None:
    meter = InfoMeter(["energy", "flow"])
    env = Warming()
    settings = GroupSettings(
        "Warming", describe_spaces(env), lambda env, episode: episode, meter=meter
    )
    sub_envs = SerialSubEnvs([env], settings)
    [checked] = sub_envs.envs
    totals: dict[str, list[float]] = {"energy": [], "flow": []}
    for episode in (0, 1):
        checked.reset(episode)
        for _ in range(4):
            *_, info = checked.step(1)
            for key in totals.keys() & info.keys():
                totals[key].append(info[key])
    for key, (count, total, least, largest, last) in meter.take().items():
        values = totals.pop(key)
        assert count == len(values)
        assert least == min(values)
        assert largest == max(values)
        assert last == values[-1]
        assert total == pytest.approx(sum(values))
    assert not totals

    checked.reset(2)
    assert meter.take() == {}


def test_a_missing_key_is_named_while_a_controller_acts(tmp_path: Path) -> None:
    """Its episodes are not among the recent ones, whose returns count."""
    with Notes() as notes:
        dppo.train(settings(tmp_path / "run", prior=lambda obs: 0, prior_steps=1))
    [missing] = [text for text in notes.texts if text.startswith("info_keys=absent")]
    assert missing.endswith("the last info had energy, solved, total")


def test_a_resumed_run_waits_for_an_episode_before_it_misses_a_key(tmp_path: Path) -> None:
    """Checkpoints hold the returns of the last episodes, and not their infos."""
    sizes: dict[str, Any] = {
        "num_steps": 5,
        "total_timesteps": 5 * 3 * 2 * 8,
        "info_keys": ("total",),
    }
    dppo.train(settings(tmp_path / "run", **sizes), observers=[Recorder(interrupt_at=4)])
    with Notes() as notes:
        result = dppo.train(settings(tmp_path / "run", **sizes), resume=tmp_path / "run")
    assert not [text for text in notes.texts if "info_keys" in text]
    with_total = [row["iteration"] for row in result.metrics if "info/total" in row]
    assert with_total == [7]
