"""Environments with get_state and set_state are rebuilt from their state; others by a replay that has a limit."""

from __future__ import annotations

import random
import signal
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import make_config
from processes import Disturbance, send
from recorder import Notes, Recorder
from remedies import executes

import dppo
from dppo.errors import CheckpointError, ConfigError, EnvironmentFault
from dppo.plain_data import NotPlain, packed, unpacked
from dppo.records.files import checkpoint as checkpoints

SIZES: dict[str, Any] = {
    "num_samplers": 2,
    "envs_per_sampler": 2,
    "num_steps": 16,
    "total_timesteps": 6 * 64,
}
PLAIN: dict[Any, Any] = {
    "numbers": [1, 2.5, -0.0, float("nan"), 2**200, True, None],
    7: (("text", b"bytes\0"), deque([1, 2], maxlen=3)),
    "arrays": [
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.zeros((2, 0), ">i2"),
        np.array(3),
        np.float32(0.1),
    ],
    "generator": np.random.default_rng(3).bit_generator.state,
}


def settings(
    run_dir: Path, env: str = "limited", kwargs: dict[str, Any] | None = None, **changes: Any
) -> dppo.Config:
    base = SIZES | {
        "env_id": f"worlds.stateful:{env}",
        "env_kwargs": kwargs or {},
        "run_dir": run_dir,
    }
    return make_config(base | {"progress": "off", "update_epochs": 2} | changes)


@pytest.mark.parametrize(
    ("env", "more"),
    [
        ("limited", {}),
        pytest.param("endless", {}, marks=pytest.mark.slow),
        # Copies take turns only where episodes end, and then hidden state depends on whose turn it is.
        pytest.param("endless", {"standby_envs": 1, "env_threads": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_hidden_state_survives_a_stop(env: str, more: dict[str, Any], tmp_path: Path) -> None:
    whole = dppo.train(settings(tmp_path / "whole", env, **more))
    dppo.train(settings(tmp_path / "run", env, **more), observers=[Recorder(interrupt_at=3)])
    resumed = dppo.train(settings(tmp_path / "run", env, **more), resume=tmp_path / "run")
    assert resumed.weights_sha256 == whole.weights_sha256
    assert resumed.incidents == {}
    assert resumed.metrics[-1]["replay/steps"] == 0


@pytest.mark.proves("has state that survives resets, and no `get_state`")
@pytest.mark.slow
def test_without_its_state_what_a_replay_cannot_repeat_is_said(tmp_path: Path) -> None:
    dppo.train(settings(tmp_path / "run", env_state="off"), observers=[Recorder(interrupt_at=3)])
    recorder = Recorder()
    resumed = dppo.train(
        settings(tmp_path / "run", env_state="off"), resume=tmp_path / "run", observers=[recorder]
    )
    assert resumed.incidents == {"replay_mismatch": 4}
    assert (
        "or keeps state across resets, which `get_state` and `set_state`"
        in recorder.incidents[0].message
    )


def test_a_state_in_a_checkpoint_can_be_left_out(tmp_path: Path) -> None:
    dppo.train(settings(tmp_path / "run"), observers=[Recorder(interrupt_at=3)])
    resumed = dppo.train(settings(tmp_path / "run", env_state="off"), resume=tmp_path / "run")
    assert resumed.incidents == {"replay_mismatch": 4}


@pytest.mark.proves("has state that survives resets, and `get_state`")
@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{}, {"policy_lag": 2}, {"env_threads": True, "num_samplers": 4}], ids=str
)
def test_hidden_state_moves_with_its_sampler(
    more: dict[str, Any], ray_session: None, tmp_path: Path
) -> None:
    here = dppo.train(settings(tmp_path / "here", **{**more, "env_threads": False}))
    with Disturbance("PPOActor.make_segment", send(signal.SIGKILL), times=2):
        there = dppo.train(
            settings(tmp_path / "there", kwargs={"sleep_s": 0.01}, num_actors=2, **more)
        )
    assert there.incidents["actor_lost"] >= 2
    assert there.weights_sha256 == here.weights_sha256
    assert "replay_mismatch" not in there.incidents


@pytest.mark.proves("returns from `get_state` what is no plain data, or too much")
@executes("envs/own_state.py: or use env_state=off, which replays instead")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "set",
            r"env 0: its state holds a builtins\.set at \['get_state\(\)'\]\['odd'\]\. Return at most 16 MiB of plain",
        ),
        pytest.param(
            "generator",
            r"holds a numpy\.random\._generator\.Generator .*: return its bit_generator\.state",
            marks=pytest.mark.slow,
        ),
        ("large", r"its state has 16,777,\d+ bytes\. Return at most 16 MiB .* env_state=off"),
        pytest.param(
            "raises",
            r"its state raised OSError: no answer(.|\n)*in get_state",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wrong_state_is_an_error_in_the_first_segment_if_it_is_demanded_and_a_replay_otherwise(
    fault: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentFault, match=words):
        dppo.train(settings(tmp_path / "own", kwargs={"fault": fault}, env_state="own"))
    recorder = Recorder()
    first = dppo.train(settings(tmp_path / "first", kwargs={"fault": fault}), observers=[recorder])
    assert first.incidents == {"own_state": 1}
    assert recorder.incidents[0].message.startswith(
        "sampler 0 (worlds.stateful:limited), env 0: its state "
    )
    assert "It is not used: episodes are replayed." in recorder.incidents[0].message
    assert (
        dppo.train(settings(tmp_path / "off", kwargs={"fault": fault}, env_state="off")).incidents
        == {}
    )
    recorder = Recorder()
    later = dppo.train(
        settings(tmp_path / "later", kwargs={"fault": fault, "after": 2}), observers=[recorder]
    )
    assert later.iterations == 6
    assert later.incidents == {"own_state": 2}
    assert "If its actor is lost, the episode is replayed" in recorder.incidents[0].message


@pytest.mark.proves("takes another state than `set_state` was given, with `--env-state own`")
def test_a_state_that_is_not_what_was_set_ends_the_episode(tmp_path: Path) -> None:
    forgets: dict[str, Any] = {"kwargs": {"fault": "forgets"}, "env_state": "own"}
    dppo.train(settings(tmp_path / "run", **forgets), observers=[Recorder(interrupt_at=2)])
    resumed = dppo.train(settings(tmp_path / "run", **forgets), resume=tmp_path / "run")
    assert resumed.incidents == {"replay_mismatch": 4}


def resumed_from(run_dir: Path) -> Path:
    """Return the checkpoint of a run after iteration 3."""
    return next((run_dir / "checkpoints").glob("*000003*"))


@pytest.mark.proves(
    "has `get_state` and `set_state` that mean something else, or leave something out"
)
@executes("envs/own_state.py: Return all that later steps depend on, or use env_state=off.")
@pytest.mark.parametrize(
    "world", [pytest.param("arm", marks=pytest.mark.slow), "clockless", "misleading"]
)
def test_a_state_that_leaves_something_out_changes_nothing(world: str, tmp_path: Path) -> None:
    """Methods of these names that packages have for something else; without a proof, they are not used."""
    whole = dppo.train(settings(tmp_path / "whole", world))
    dppo.train(settings(tmp_path / "run", world), observers=[Recorder(interrupt_at=3)])
    recorder = Recorder()
    resumed = dppo.train(
        settings(tmp_path / "run", world), resume=tmp_path / "run", observers=[recorder]
    )
    assert resumed.weights_sha256 == whole.weights_sha256
    assert resumed.incidents == ({"own_state": 2} if world == "misleading" else {})
    if world == "misleading":
        assert (
            "get_state and set_state do not bring the environment back"
            in recorder.incidents[0].message
        )
        off = dppo.train(
            settings(tmp_path / "run", world, env_state="off"),
            resume=resumed_from(tmp_path / "run"),
        )
        assert (off.weights_sha256, off.incidents) == (whole.weights_sha256, {})


@pytest.mark.proves("has them, and cannot be replayed")
def test_without_a_replay_a_state_that_leaves_something_out_is_not_used(tmp_path: Path) -> None:
    dppo.train(
        settings(tmp_path / "run", "arm", replay=False), observers=[Recorder(interrupt_at=3)]
    )
    recorder = Recorder()
    resumed = dppo.train(
        settings(tmp_path / "run", "arm", replay=False),
        resume=tmp_path / "run",
        observers=[recorder],
    )
    assert resumed.incidents == {"replay_mismatch": 4}
    assert "the last segment ends with another observation" in recorder.incidents[0].message
    assert "env_state=own uses that state without a proof" in recorder.incidents[0].message


def test_a_proven_state_needs_no_replay(tmp_path: Path) -> None:
    whole = dppo.train(settings(tmp_path / "whole", "endless"))
    dppo.train(
        settings(tmp_path / "run", "endless", replay=False), observers=[Recorder(interrupt_at=3)]
    )
    resumed = dppo.train(
        settings(tmp_path / "run", "endless", replay=False), resume=tmp_path / "run"
    )
    assert (resumed.weights_sha256, resumed.incidents) == (whole.weights_sha256, {})


@executes("envs/rows/serial.py: Add both, or use `env_state=auto`.")
def test_a_state_that_is_demanded_is_set_at_once(tmp_path: Path) -> None:
    whole = dppo.train(settings(tmp_path / "whole", env_state="own"))
    dppo.train(settings(tmp_path / "run", env_state="own"), observers=[Recorder(interrupt_at=3)])
    with Notes() as notes:
        resumed = dppo.train(settings(tmp_path / "run", env_state="own"), resume=tmp_path / "run")
    assert (resumed.weights_sha256, resumed.incidents) == (whole.weights_sha256, {})
    assert sum(row["replay/steps"] for row in resumed.metrics) == 0
    assert sum("is set to its state, without a replay" in text for text in notes.texts) == 1
    with pytest.raises(
        ConfigError,
        match=r"env_state=own: the environment has no get_state\(\) and set_state\(state\)",
    ):
        dppo.train(settings(tmp_path / "none", "foreign", env_state="own"))
    assert dppo.train(settings(tmp_path / "auto", "foreign", total_timesteps=64)).iterations == 1


@pytest.mark.slow
def test_an_actor_that_dies_replays_an_environment_whose_state_leaves_something_out(
    ray_session: None, tmp_path: Path
) -> None:
    here = dppo.train(settings(tmp_path / "here", "arm", env_state="off"))
    with Disturbance("PPOActor.make_segment", send(signal.SIGKILL), times=2):
        there = dppo.train(settings(tmp_path / "there", "arm", {"sleep_s": 0.01}, num_actors=2))
    assert there.incidents["actor_lost"] >= 2
    assert there.weights_sha256 == here.weights_sha256
    assert "replay_mismatch" not in there.incidents


@pytest.mark.slow
def test_a_slow_state_is_reported_once_and_other_methods_of_these_names_are_left_alone(
    tmp_path: Path,
) -> None:
    recorder = Recorder()
    dppo.train(
        settings(tmp_path / "slow", kwargs={"fault": "slow"}, total_timesteps=10 * 64),
        observers=[recorder],
    )
    assert [one.message[:9] for one in recorder.incidents] == [f"sampler {one}" for one in range(2)]
    assert "MiB" not in recorder.incidents[0].message
    assert "of its time. Raise `num_steps`" in recorder.incidents[0].message
    assert dppo.train(settings(tmp_path / "foreign", "foreign")).incidents == {}


def test_plain_data_is_restored_as_it_was() -> None:
    data = packed(PLAIN)
    restored = unpacked(data)
    assert packed(restored) == data
    assert repr(restored) == repr(PLAIN)
    assert restored["arrays"][0].flags.fnc
    restored["arrays"][0][0, 0] = 1.0  # may be written to
    for wrong in (
        {1},
        object(),
        np.array([None]),
        np.zeros(2, "i4,f4"),
        10**5000,
        np.array(["text"]),
    ):
        with pytest.raises(NotPlain, match=r"holds a.* at \['x'\]\[0\]|cannot be stored"):
            packed({"x": [wrong]})


def test_damaged_plain_data_is_nothing_but_a_value_error() -> None:
    drawn = random.Random(1)
    data = packed(PLAIN)
    refused = 0
    for _ in range(3000):
        damaged = bytearray(data)
        for _ in range(drawn.randint(1, 4)):
            damaged[drawn.randrange(len(data))] = drawn.randrange(256)
        try:
            unpacked(bytes(damaged[: drawn.choice([len(data), drawn.randrange(len(data))])]))
        except ValueError:
            refused += 1
    assert refused > 2000


def test_states_that_do_not_fit_are_refused_before_training(tmp_path: Path) -> None:
    dppo.train(settings(tmp_path / "run"), observers=[Recorder(interrupt_at=2)])
    (path,) = sorted((tmp_path / "run" / "checkpoints").glob("*000002*"))
    good = checkpoints.load(path)
    right = good.arrays["samplers"].copy()
    assert unpacked(right["1.proofs"].tobytes())[0][4].shape == (16,)
    damaged = [("states", states) for states in (packed([b""]), b"\xff" * 40, packed("text"))]
    first = [b"", 0, 0.0, 0, np.zeros(16, np.int64), None]
    for wrong in (
        [first],
        [first, first[:5]],
        [first, [*first[:4], np.zeros((16, 2)), None]],
        {"a": first},
    ):
        damaged.append(("proofs", packed(wrong)))
    for name, states in damaged:
        good.arrays["samplers"] = right | {f"1.{name}": np.frombuffer(states, np.uint8)}
        checkpoints.save(
            tmp_path / "run" / "checkpoints", 3, good, keep=checkpoints.Keep(9), score=None
        )
        with pytest.raises(CheckpointError, match="cannot be resumed"):
            dppo.train(settings(tmp_path / "run"), resume=tmp_path / "run")


@pytest.mark.proves("never ends an episode")
def test_a_limit_of_replays_truncates_each_episode(tmp_path: Path) -> None:
    limit: dict[str, Any] = {"env": "foreign", "replay_limit": 20}
    recorder = Recorder()
    whole = dppo.train(settings(tmp_path / "whole", **limit), observers=[recorder])
    assert {episode.length for episode in recorder.episodes} == {20}
    assert whole.episodes == 4 * (6 * 16 // 20)
    with pytest.raises(
        ConfigError, match="replay_limit=20 has no effect: replay=False replays nothing"
    ):
        settings(tmp_path / "run", **limit, replay=False)
