"""Environments with get_state and set_state are rebuilt from their state; others by a replay that has a limit."""

from __future__ import annotations

import dataclasses
import random
import signal
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_run
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
    "update_epochs": 2,
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
    world: dict[str, Any] = {"env_id": f"worlds.stateful:{env}", "env_kwargs": kwargs or {}}
    return tiny_run(run_dir, **world | SIZES | changes)


def resumed(config: dppo.Config, at: int = 3, **changes: Any) -> tuple[dppo.Result, Recorder]:
    """Stop a run, and resume it with changed settings."""
    dppo.train(config, observers=[Recorder(interrupt_at=at)])
    recorder = Recorder()
    changed = dataclasses.replace(config, **changes)
    result = dppo.train(changed, resume=config.run_dir, observers=[recorder])
    return result, recorder


@pytest.mark.parametrize(
    ("env", "settings_of_run"),
    [
        ("limited", {}),
        ("limited", {"env_state": "own"}),
        pytest.param("endless", {}, marks=pytest.mark.slow),
        # Copies take turns only where episodes end, and then hidden state depends on whose turn it is.
        pytest.param("endless", {"standby_envs": 1, "env_threads": True}, marks=pytest.mark.slow),
        ("endless", {"replay": False}),
    ],
    ids=str,
)
def test_hidden_state_survives_a_stop(
    env: str, settings_of_run: dict[str, Any], tmp_path: Path
) -> None:
    whole = dppo.train(settings(tmp_path / "whole", env, **settings_of_run))
    with Notes() as notes:
        result, _ = resumed(settings(tmp_path / "run", env, **settings_of_run))
    assert result.weights_sha256 == whole.weights_sha256
    assert result.incidents == {}
    set_at_once = any(
        "of a lost environment is set, without a replay" in text for text in notes.texts
    )
    assert set_at_once == ("env_state" in settings_of_run)
    assert result.metrics[-1].get("replay/steps", 0) == 0
    # otherwise a replay proves the state first
    assert not set_at_once or sum(row["replay/steps"] for row in result.metrics) == 0


@pytest.mark.proves("has state that survives resets, and no `get_state`")
@pytest.mark.parametrize("before", [pytest.param("off", marks=pytest.mark.slow), "auto"])
def test_without_its_state_what_a_replay_cannot_repeat_is_said(before: str, tmp_path: Path) -> None:
    """A state in the checkpoint may be left out."""
    result, recorder = resumed(settings(tmp_path / "run", env_state=before), env_state="off")
    assert result.incidents == {"replay_mismatch": 4}
    remedy = "or keeps state across resets, which `get_state` and `set_state`"
    assert remedy in recorder.incidents[0].message


@pytest.mark.proves("has state that survives resets, and `get_state`")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "changes"),
    [
        ("limited", {}),
        ("limited", {"policy_lag": 2}),
        ("limited", {"env_threads": True, "num_samplers": 4}),
        ("Arm", {}),  # its state leaves something out, so that it is replayed
    ],
    ids=str,
)
def test_hidden_state_moves_with_its_sampler(
    env: str, changes: dict[str, Any], ray_session: None, tmp_path: Path
) -> None:
    in_process = changes | {"env_threads": False}
    if env == "Arm":
        in_process["env_state"] = "off"
    here = dppo.train(settings(tmp_path / "here", env, **in_process))
    on_actors = settings(tmp_path / "there", env, {"sleep_s": 0.01}, num_actors=2, **changes)
    with Disturbance("PPOActor.make_segment", send(signal.SIGKILL), times=2):
        there = dppo.train(on_actors)
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
    def run(name: str, after: int = 0, **changes: Any) -> tuple[dict[str, int], list[str]]:
        recorder = Recorder()
        kwargs = {"fault": fault, "after": after}
        config = settings(tmp_path / name, kwargs=kwargs, **changes)
        result = dppo.train(config, observers=[recorder])
        return result.incidents, [incident.message for incident in recorder.incidents]

    with pytest.raises(EnvironmentFault, match=words):
        run("own", env_state="own")
    incidents, messages = run("first")
    assert incidents == {"own_state": 1}
    assert messages[0].startswith("sampler 0 (worlds.stateful:limited), env 0: its state ")
    assert "It is not used: episodes are replayed." in messages[0]
    assert run("off", env_state="off") == ({}, [])

    incidents, messages = run("later", after=2)
    assert incidents == {"own_state": 2}
    assert "If its actor is lost, the episode is replayed" in messages[0]


@pytest.mark.proves("takes another state than `set_state` was given, with `--env-state own`")
def test_a_state_that_is_not_what_was_set_ends_the_episode(tmp_path: Path) -> None:
    forgets = settings(tmp_path / "run", kwargs={"fault": "forgets"}, env_state="own")
    result, _ = resumed(forgets, at=2)
    assert result.incidents == {"replay_mismatch": 4}


@pytest.mark.proves(
    "has `get_state` and `set_state` that mean something else, or leave something out"
)
@executes("envs/own_state.py: Return all that later steps depend on, or use env_state=off.")
@pytest.mark.parametrize(
    "world", [pytest.param("Arm", marks=pytest.mark.slow), "Clockless", "Misleading"]
)
def test_a_state_that_leaves_something_out_changes_nothing(world: str, tmp_path: Path) -> None:
    """Methods of these names that packages have for something else; without a proof, they are not used."""
    whole = dppo.train(settings(tmp_path / "whole", world))
    result, recorder = resumed(settings(tmp_path / "run", world))
    assert result.weights_sha256 == whole.weights_sha256
    assert result.incidents == ({"own_state": 2} if world == "Misleading" else {})

    if world == "Misleading":
        words = "get_state and set_state do not restore the environment"
        assert words in recorder.incidents[0].message
        [checkpoint] = (tmp_path / "run" / "checkpoints").glob("*000003*")
        off = settings(tmp_path / "run", world, env_state="off")
        replayed = dppo.train(off, resume=checkpoint)
        assert replayed.weights_sha256 == whole.weights_sha256
        assert replayed.incidents == {}


@pytest.mark.proves("has them, and cannot be replayed")
def test_a_state_is_never_set_in_a_standby_copy_that_has_begun_its_next_episode(
    tmp_path: Path,
) -> None:
    """The replay lets another copy play, and leads to another state: the right one is set in that copy."""
    changes: dict[str, Any] = {"standby_envs": 1, "num_steps": 8, "total_timesteps": 13 * 32}
    whole = dppo.train(settings(tmp_path / "whole", "Worn", **changes))
    result, _ = resumed(settings(tmp_path / "run", "Worn", **changes), at=9)
    assert result.weights_sha256 == whole.weights_sha256
    assert result.episodes == whole.episodes == 12


def test_without_a_replay_a_state_that_leaves_something_out_is_not_used(tmp_path: Path) -> None:
    result, recorder = resumed(settings(tmp_path / "run", "Arm", replay=False))
    assert result.incidents == {"replay_mismatch": 4}
    message = recorder.incidents[0].message
    assert "the last segment ends with another observation" in message
    assert "env_state=own uses that state without a proof" in message


@executes("envs/sub_envs/serial.py: Add both, or use `env_state=auto`.")
def test_a_state_that_is_demanded_needs_its_methods(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"env_state=own: the environment has no get_state\(\) and set_state\(state\)",
    ):
        dppo.train(settings(tmp_path / "none", "Foreign", env_state="own"))
    assert dppo.train(settings(tmp_path / "auto", "Foreign", total_timesteps=64)).iterations == 1


@pytest.mark.slow
def test_a_slow_state_is_reported_once_and_other_methods_of_these_names_are_left_alone(
    tmp_path: Path,
) -> None:
    recorder = Recorder()
    slow = settings(tmp_path / "slow", kwargs={"fault": "slow"}, total_timesteps=10 * 64)
    dppo.train(slow, observers=[recorder])
    messages = [incident.message for incident in recorder.incidents]
    assert [message[:9] for message in messages] == ["sampler 0", "sampler 1"]
    assert "MiB" not in messages[0]
    assert "of its time. Raise `num_steps`" in messages[0]
    assert dppo.train(settings(tmp_path / "Foreign", "Foreign")).incidents == {}


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


def invalid_states() -> list[tuple[str, bytes]]:
    """Return states and proofs of a sampler that do not fit: of one environment, of another form, damaged."""
    proof = [b"", 0, 0.0, 0, np.zeros(16, np.int64), None]
    short = proof[:5]
    two_columns = [*proof[:4], np.zeros((16, 2)), None]
    return [
        ("states", packed([b""])),
        ("states", b"\xff" * 40),
        ("states", packed("text")),
        ("proofs", packed([proof])),
        ("proofs", packed([proof, short])),
        ("proofs", packed([proof, two_columns])),
        ("proofs", packed({"a": proof})),
    ]


def test_states_that_do_not_fit_are_refused_before_training(tmp_path: Path) -> None:
    config = settings(tmp_path / "run")
    dppo.train(config, observers=[Recorder(interrupt_at=2)])
    folder = tmp_path / "run" / "checkpoints"
    [path] = folder.glob("*000002*")
    checkpoint = checkpoints.load(path)
    right = checkpoint.arrays["samplers"].copy()
    [first, *_] = unpacked(right["1.proofs"].tobytes())
    assert first[4].shape == (16,)

    for name, content in invalid_states():
        invalid = {f"1.{name}": np.frombuffer(content, np.uint8)}
        checkpoint.arrays["samplers"] = right | invalid
        checkpoints.save(folder, 3, checkpoint, keep=checkpoints.Keep(9), score=None)
        with pytest.raises(CheckpointError, match="cannot be resumed"):
            dppo.train(config, resume=tmp_path / "run")


@pytest.mark.proves("never ends an episode")
def test_a_limit_of_replays_truncates_each_episode(tmp_path: Path) -> None:
    limit: dict[str, Any] = {"env": "Foreign", "replay_limit": 20}
    recorder = Recorder()
    whole = dppo.train(settings(tmp_path / "whole", **limit), observers=[recorder])
    assert {episode.length for episode in recorder.episodes} == {20}
    assert whole.episodes == 4 * (6 * 16 // 20)
