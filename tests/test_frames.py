"""Frames: prepared by settings, and stored once each, with the results of a wrapper that returns whole stacks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import collect, make_config, parts_of
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, GrayscaleObservation
from hypothesis import given
from hypothesis import strategies as st
from kinds import LEARNT, RunOf, small
from recorder import Recorder
from worlds.observed import Film, Guarded, Picture
from worlds.simple import Counting

import dppo
from dppo.config.atari import describe_atari
from dppo.config.memory import batch_memory_in_words
from dppo.config.parts import Env
from dppo.envs.frames import LifeStack, Lives
from dppo.envs.preparation import make_prepared
from dppo.errors import ConfigError
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.exchange.stacks import frames_of, stack_numbers
from dppo.spaces.actions import DiscreteActions
from dppo.spaces.spaces import Spaces


def test_frames_stored_once_train_the_same_weights_as_whole_stacks(
    run_of: RunOf, tmp_path: Path
) -> None:
    """With masks, memory, recomputed advantages and policy lag; episodes end within segments."""
    whole = LEARNT | {"env_id": "worlds.observed:stacked", "env_kwargs": {"stack": 3}}
    stacked = dppo.train(small(tmp_path / "run", **whole))
    unstacked = run_of("frames")
    assert unstacked.weights_sha256 == stacked.weights_sha256
    assert unstacked.episodes > 10


def test_a_policy_is_evaluated_on_frames_as_in_training(run_of: RunOf) -> None:
    result = run_of("frames")
    stacked_env = FrameStackObservation(GrayscaleObservation(Guarded()), 3)
    expected = dppo.evaluate(result, episodes=2).returns
    for env in (Guarded, stacked_env):
        assert dppo.evaluate(result, env, episodes=2).returns == expected


@given(
    st.integers(2, 4),
    st.lists(st.lists(st.booleans(), min_size=2, max_size=2), min_size=1, max_size=12),
)
def test_stacks_are_found_in_frames_that_are_stored_once(
    stack: int, ends: list[list[bool]]
) -> None:
    """The slow way: a list of the latest frames, filled with the first one of each episode."""
    done = np.array(ends)
    steps = len(done)
    frame = 100
    stacks = np.empty((*done.shape, stack, 1), np.int64)
    for env in range(2):
        latest = [10 * env + k for k in range(stack)]  # of an episode that began before the segment
        for t in range(steps):
            stacks[t, env, :, 0] = latest
            frame += 1
            if done[t, env]:
                latest = [frame] * stack
            else:
                latest = [*latest[1:], frame]
    frames = frames_of(stacks)
    assert len(frames) == steps + stack - 1

    numbers = stack_numbers(done, stack)
    gathered = frames.reshape(-1, 1)[numbers]
    np.testing.assert_array_equal(gathered, stacks)


class Reusing(Guarded):
    """Draws into the same array at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.canvas = np.empty(self.shape, np.uint8)

    def observation(self) -> Any:
        self.canvas[:] = super().observation()
        return self.canvas


def test_frames_are_stacked_that_were_drawn_into_the_same_array(tmp_path: Path) -> None:
    weights = set()
    for env_class in (Guarded, Reusing):
        config = small(
            tmp_path / env_class.__name__, env_id=env_class, frame_stack=3, image_features=8
        )
        weights.add(dppo.train(config).weights_sha256)
    assert len(weights) == 1


class Rewarding(Counting):
    """Returns the number of its step as the reward."""

    def step(self, action: Any) -> Any:
        obs, _, *outcome = super().step(action)
        return obs, float(obs[0]), *outcome


def test_an_action_is_repeated_until_the_episode_ends() -> None:
    env = make_prepared(Env(env_id=lambda: Rewarding(terminate_after=5), action_repeat=3))
    env.reset(seed=1)
    obs, reward, ended, *_ = env.step(0)
    assert (obs[0], reward, ended) == (3, 6.0, False)
    obs, reward, ended, *_ = env.step(0)
    assert (obs[0], reward, ended) == (5, 9.0, True)


WITHOUT_EFFECT = {
    "frame_stack": 1,
    "resize": (),
    "grayscale": False,
    "action_repeat": 1,
    "atari": "raw",
}
SHAPES: list[tuple[Any, dict[str, Any], tuple[int, ...]]] = [
    (Picture, {"grayscale": True}, (8, 8, 1)),
    (Picture, {"grayscale": True, "frame_stack": 4}, (4, 8, 8)),
    (Picture, {"frame_stack": 2}, (2, 8, 8, 3)),
    (Counting, {"frame_stack": 3}, (3, 1)),
    (Picture, WITHOUT_EFFECT, (8, 8, 3)),
]


@pytest.mark.parametrize(("make", "settings", "shape"), SHAPES)
def test_settings_change_the_shape_of_observations(
    make: Any, settings: dict[str, Any], shape: tuple[int, ...]
) -> None:
    env = make_prepared(Env(env_id=make, **settings))
    assert env.observation_space.shape == shape


class First(Picture):
    """Has its channels first."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, 255, (3, 8, 8), np.uint8)


# tests/remedies/refused.py has others
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (First, {"resize": (4, 4)}, r"resize=4 4: does not fit .*channels last"),
    (Film, {"frame_stack": 2}, r"frame_stack=2: does not fit .*at most three axes"),
    ("worlds.observed:Numbers", {"frame_stack": 2}, r"frame_stack=2: .*this is Dict"),
    (Picture, {"atari": "life", "action_repeat": 4}, r"atari=life: does not fit .*frame-skipping"),
]


@pytest.mark.parametrize(("make", "settings", "words"), REFUSED)
def test_settings_that_do_not_fit_are_refused(
    make: Any, settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[gym.Env[Any, Any]] = []
    monkeypatch.setitem(sys.modules, "cv2", type("Stub", (), {"setNumThreads": print}))
    monkeypatch.setattr("dppo.envs.preparation.close_all", closed.extend)
    with pytest.raises(ConfigError, match=words):
        make_prepared(Env(env_id=make, **settings))
    assert len(closed) == 1


@pytest.mark.parametrize("settings", [{}, {"atari": "life"}], ids=str)
def test_a_factory_by_name_gets_a_frameskip_for_games_if_it_takes_one(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrapper for games skips frames instead."""
    got: list[int] = []

    def skipping(frameskip: int = 4) -> Any:
        got.append(frameskip)
        return Picture()

    monkeypatch.setattr("worlds.observed.skipping", skipping, raising=False)
    monkeypatch.setattr("dppo.envs.preparation._apply", lambda env, *_: env)
    for name in ("skipping", "Picture"):
        prepared = make_prepared(Env(env_id=f"worlds.observed:{name}", **settings))
        assert isinstance(prepared, Picture)
    expected = 1 if settings else 4
    assert got == [expected]


def test_a_missing_opencv_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(
        ConfigError, match=r"resize=4 4: needs OpenCV.* -m pip install .*opencv-python-headless"
    ):
        make_prepared(Env(env_id=Picture, resize=(4, 4)))


SIZES = {"resize": (84, 84), "frame_stack": 4, "sign_reward": True}
GAME = {"atari": "life", "action_repeat": 4, "grayscale": True} | SIZES
RAW = {
    "atari": "raw",
    "action_repeat": 1,
    "grayscale": False,
    "resize": (),
    "frame_stack": 1,
    "sign_reward": False,
}
GAMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a game": ({}, GAME),
    "with its module": ({"env_id": "ale_py:ALE/Pong-v5"}, GAME),
    "explicit": (
        {"frame_stack": 1, "resize": ["40", "40"], "clip_reward": 2.0},
        GAME | {"frame_stack": 1, "resize": (40, 40), "sign_reward": False},
    ),
    "raw": ({"atari": "raw", "grayscale": True}, RAW | {"grayscale": True}),
    "own frameskip": ({"env_kwargs": {"frameskip": 2}}, GAME | {"action_repeat": 1}),
    "ram": ({"env_kwargs": {"obs_type": "ram"}}, RAW),
    "no game": ({"env_id": "CartPole-v1"}, RAW),
    "own factory": ({"env_id": "my:game", "atari": "life"}, GAME),
}


@pytest.mark.parametrize("case", GAMES)
def test_games_have_defaults_of_their_own_and_what_is_given_wins(case: str) -> None:
    settings, expected = GAMES[case]
    config = make_config({"env_id": "ALE/Pong-v5"} | settings)
    assert {name: getattr(config, name) for name in GAME} == expected
    description = describe_atari(config)
    if config.atari == "raw":
        assert config.update_epochs is None
        assert description is None
    else:
        assert config.update_epochs == 4
        assert description is not None
        assert "atari=raw" in description


def test_the_memory_of_stacks_counts_each_frame_once() -> None:
    pixels = Spaces(np.dtype((np.uint8, (4, 84, 84))), DiscreteActions(3))

    def words(**changes: Any) -> str | None:
        large = {"env_id": "ALE/Pong-v5", "num_samplers": 64, "num_steps": 256}
        return batch_memory_in_words(make_config(large | changes), pixels, 10**10)

    expected = "16,384 observations of 7.06 kB take 578 MB, in stacks of 4 while"
    assert expected in (words() or "")
    assert words(num_actors=8) is None


@pytest.mark.proves("Lives")
@pytest.mark.slow
def test_a_lost_life_ends_an_episode_for_learning_only(tmp_path: Path) -> None:
    """A resumed run replays the games that were open, over all of their lives."""
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    game = {
        "env_id": "ALE/Breakout-v5",
        "num_samplers": 2,
        "num_steps": 60,
        "total_timesteps": 720,
        "update_epochs": 1,
        "progress": "off",
    }
    whole = dppo.train(make_config(game | {"run_dir": tmp_path / "whole"}))
    config = make_config(game | {"run_dir": tmp_path / "run"})
    dppo.train(config, observers=[Recorder(interrupt_at=3)])
    resumed = dppo.train(config, resume=tmp_path / "run")
    assert resumed.weights_sha256 == whole.weights_sha256
    assert resumed.incidents == {}
    assert sum(row["replay/steps"] for row in resumed.metrics) > 0
    assert dppo.evaluate(whole, episodes=1).lengths[0] > 60


class Lively(Guarded):
    """A game with three lives, two of which end at steps 3 and 6."""

    def __init__(self) -> None:
        super().__init__()
        self.fired = 0

    @property
    def ale(self) -> Any:
        return self

    def lives(self) -> int:
        return 3 - (self.steps >= 3) - (self.steps >= 6)

    def get_action_meanings(self) -> list[str]:
        return ["NOOP", "FIRE", "LEFT"]

    def step(self, action: Any) -> Any:
        self.fired += action == 1
        return super().step(action)


def alive() -> gym.Env[Any, Any]:
    return Lives(GrayscaleObservation(Lively()))


def lively() -> gym.Env[Any, Any]:
    return LifeStack(alive(), 2)


@pytest.mark.proves("Lives")
def test_a_life_starts_with_fire_and_copies_of_its_first_frame() -> None:
    env: Any = lively()
    env.reset(seed=3)
    fired = []
    lost = []
    same = []
    for _ in range(6):
        stack, *_ = env.step(2)
        is_same = stack[0] == stack[1]
        fired.append(env.unwrapped.fired)
        lost.append(env.lost_life)
        same.append(bool(is_same.all()))
    assert fired == [1, 2, 2, 3, 3, 3]  # steps of the game: 2 | 3 4 | 5 | 6 7 | 8 | 9
    assert lost == same == [False, True, False, True, False, False]


def test_a_lost_life_is_terminal_in_a_segment_and_the_game_goes_on(tmp_path: Path) -> None:
    settings = {
        "env_id": alive,
        "frame_stack": 2,
        "num_steps": 10,
        "minibatch_size": 20,
        "image_features": 8,
    }
    config = small(tmp_path / "run", **settings)
    samplers, trainer = parts_of(config)
    reports, segments = collect(samplers, PolicySnapshot(0, trainer.weights()))
    for report, segment in zip(reports, segments, strict=True):
        assert segment.terminated.sum() >= 2 * len(report.episodes) + 2
        assert segment.obs.shape == (11, 2, 8, 8)
        lengths = [len(actions) for actions in report.open_actions]
        in_segment = np.minimum(report.carry.episode_lengths, 10)
        assert lengths == in_segment.tolist()

    stacked = settings | {"env_id": lively, "frame_stack": 1}
    whole = dppo.train(small(tmp_path / "whole", **stacked))
    dppo.train(config, observers=[Recorder(interrupt_at=1)])
    resumed = dppo.train(config, resume=config.run_dir)
    assert resumed.resumed_at == 1
    assert resumed.incidents == {}
    assert resumed.weights_sha256 == whole.weights_sha256
