"""Invalid steps: found before they reach the weights, named by their place, or dropped with their episode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import assert_same_bytes, group_of, make_config, random_weights, sampler_of
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from scripted import Scripted
from worlds.faulty import Faulty
from worlds.models import Plain

import dppo
from dppo import streams
from dppo.engine.ledger import ReplayLedger
from dppo.envs.checks.faults import REMEDY
from dppo.envs.checks.first_segment import large_numbers
from dppo.envs.checks.observations import SpaceChecks
from dppo.envs.checks.returned import BadResult
from dppo.envs.repairs import FIRST_STEPS
from dppo.envs.spaces import describe_spaces, dtype_of
from dppo.errors import EnvironmentFault
from dppo.ppo.acting.sampler import PPOSampler, collect_together
from dppo.ppo.exchange.records import (
    PolicySnapshot,
    Rebuild,
    Segment,
    SegmentReport,
    SegmentRequest,
)
from dppo.ppo.networks.network import NetworkSpec
from dppo.spaces.spaces import leaves
from dppo.streams import Stream

Collected = list[tuple[SegmentReport, Segment]]


def collect_one(
    sampler: PPOSampler, spec: NetworkSpec, segment: int, rebuild: Rebuild | None = None
) -> tuple[SegmentReport, Segment]:
    snapshot = PolicySnapshot(segment, random_weights(spec, segment))
    return sampler.collect(SegmentRequest(0, segment, rebuild), snapshot)


def collect(
    env: gym.Env[Any, Any], *, segments: int = 1, num_steps: int = 8, drop: bool = False
) -> Collected:
    sampler, spec = sampler_of([env], num_steps=num_steps, rebuild=drop)
    return [collect_one(sampler, spec, segment) for segment in range(segments)]


def fault_of(env: gym.Env[Any, Any], *, segments: int = 1, num_steps: int = 8) -> str:
    with pytest.raises(EnvironmentFault) as caught:
        collect(env, segments=segments, num_steps=num_steps)
    return caught.value.message


def place(phase: str, step: int, episode: int = 0) -> str:
    seed = streams.integer(1, Stream.EPISODES, 0, 0, episode)
    return f"sampler 0 (Test-v0), env 0: {phase} of episode {episode} (seed {seed}, step {step}) "


OUTSIDE = "101.0 at index 1, outside its space from -100.0 to 100.0"
INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "nan": ({"obs": np.array([0, np.nan])}, "an observation that is nan at index 1."),
    "reward": ({"reward": 1e300}, "1e+300 as the reward, and values cannot be learned from"),
    "flag": ({"terminated": None}, "terminated=None, which is not a boolean."),
    "outside": ({"obs": np.array([0, 101], np.float32)}, f"an observation that is {OUTSIDE}."),
}


@pytest.mark.proves("returns another shape or dtype")
@pytest.mark.parametrize("what", INVALID)
def test_an_invalid_step_is_dropped_with_the_rest_of_its_episode(what: str) -> None:
    settings, words = INVALID[what]
    [(report, segment)] = collect(Faulty(**settings, episodes=(1,)), num_steps=16, drop=True)
    # Episode 0 has 6 steps; episode 1 two and an invalid third; the next has 6 again.
    assert segment.valid[:, 0].nonzero()[0].tolist() == [*range(8), *range(9, 16)]
    assert segment.truncated[:, 0].nonzero()[0].tolist() == [5, 8, 14]
    assert not segment.terminated.any()
    assert segment.obs[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2, 3, 4, 5, 0]
    assert segment.rewards[8, 0] == 0
    assert report.steps == 15
    assert [(episode.index, episode.length) for episode in report.episodes] == [(0, 6), (2, 6)]
    [incident] = report.incidents
    assert (incident.kind, incident.env, incident.lost_steps) == ("bad_step", 0, 2)
    assert incident.message.startswith(f"{place('step', 3, 1)}returned {words}")
    assert report.carry.episodes.tolist() == [3]
    assert len(report.open_actions[0]) == 1


def test_dropping_invalid_steps_does_not_change_the_valid_ones() -> None:
    plain, watched = (collect(Faulty(episodes=()), segments=2, drop=drop) for drop in (False, True))
    assert_same_bytes(tuple(plain), tuple(watched), but=["successors", "env_s"])


def test_an_invalid_first_observation_is_dropped_too() -> None:
    faulty = Faulty(obs=np.array([np.nan, 0.0]), at_step=0, episodes=(0, 1, 3))
    [(report, segment)] = collect(faulty, drop=True)
    assert segment.valid.all()  # no step led there
    assert [incident.kind for incident in report.incidents] == ["bad_step"] * 3
    assert report.incidents[0].message.startswith(place("reset", 0, 0))
    assert report.carry.episodes.tolist() == [4]


@pytest.mark.proves("raises in every reset")
def test_an_environment_of_which_no_reset_succeeds_ends_the_run() -> None:
    with pytest.raises(EnvironmentFault, match=f"The {FIRST_STEPS} resets before it failed"):
        collect(Faulty(obs=np.zeros(3), at_step=0, episodes=range(1000)), drop=True)


@pytest.mark.proves("raises in a replay")
def test_a_replay_that_is_invalid_is_given_up_for_a_fresh_episode() -> None:
    sampler, spec = sampler_of([Faulty(episodes=())], num_steps=4, rebuild=True)
    ledger = ReplayLedger(1, replay=True)
    ledger.record(collect_one(sampler, spec, 0)[0])
    other, _ = sampler_of([Faulty(reward=None, episodes=(0,))], num_steps=4, rebuild=True)
    report, _ = collect_one(other, spec, 1, ledger.rebuild(0, 1))
    assert [incident.kind for incident in report.incidents] == ["replay_mismatch", "bad_step"]
    assert "the replay failed: " in report.incidents[0].message


def bounded(space: gym.Space[Any], value: Any) -> Faulty:
    first = space.sample()
    return Faulty(obs=value, space=space, observe=lambda steps: first)


def box(low: float, high: float, dtype: Any, shape: tuple[int, ...] = (2,)) -> gym.spaces.Box:
    return gym.spaces.Box(low, high, shape, dtype)


OUTSIDE_SPACE: list[tuple[gym.Space[Any], Any, str]] = [
    (box(0, 9, np.int64), np.array([0, 10]), "that is 10 at index 1, outside its"),
    (box(0, 9, np.uint8), np.array([77, 0], np.uint8), "that is 77 at index 0"),
    (box(0, 1, np.float64, (1, 2)), np.array([[0, 1.5]]), "that is 1.5 at index (0, 1)"),
    (box(0, np.inf, np.float64), np.array([5, -0.1]), "that is -0.1"),
    (box(-99, 99, np.int8), [0, 1000], "that is 1000 at index 1, outside int8"),
    (box(0, 255, np.uint8), np.array([300, 0], np.uint16), "that is 300 at"),
    (box(-128, 127, np.int8), np.array([0, 200], np.uint8), "that is 200 at"),
    (box(0, 9, np.int32), [2**32 + 3, 0], "that is 4294967299 at index 0"),
    (box(-9, 9, np.int16), [-(2**16), 0], "that is -65536 at index 0"),
    (gym.spaces.MultiBinary(2), [0, 256], "that is 256 at index 1, outside int8 from -128"),
    (gym.spaces.Dict(a=box(-9, 9, np.int8, (1,))), {"a": [260]}, "leaf 'a' that is 260"),
]


@pytest.mark.proves(
    "returns a choice that does not exist",
    "returns floats beyond a limit in the first segment, by more than a tenth of its range",
    "returns an integer that its dtype cannot hold",
)
@pytest.mark.parametrize(("space", "value", "words"), OUTSIDE_SPACE)
def test_an_observation_outside_its_space_is_found_in_a_first_segment(
    space: gym.Space[Any], value: Any, words: str
) -> None:
    message = fault_of(bounded(space, value))
    assert message.startswith(f"{place('step', 3)}returned ")
    assert f"observation {words}" in message


NAN = (np.array([0.0, np.nan], np.float32), box(-100, 100, np.float32), "nan at index 1.")
INFINITE = (np.array([-np.inf, 0], np.float32), NAN[1], "-inf at index 0.")
TOO_LARGE = (np.full(2, 101), box(-100, 100, np.int32), "101 at index 0, outside")


@pytest.mark.proves("returns NaN at a time limit")
@pytest.mark.parametrize(("obs", "space", "words"), [NAN, INFINITE, TOO_LARGE])
@pytest.mark.parametrize("at_step", [0, 1, 5, 6])
@pytest.mark.parametrize("episode", [0, 1, 3])
def test_an_invalid_observation_is_named_by_its_step_in_any_segment_and_at_a_time_limit(
    obs: np.ndarray, space: gym.Space[Any], words: str, at_step: int, episode: int
) -> None:
    env = Faulty(obs=obs, space=space, at_step=at_step, episodes=(episode,), length=6)
    message = fault_of(env, segments=7, num_steps=4)  # episodes begin and end anywhere in a segment
    start = place("step" if at_step else "reset", at_step, episode)
    assert message.startswith(f"{start}returned an observation that is {words}")
    assert message.endswith(REMEDY)


@pytest.mark.parametrize(
    ("leaf", "index", "value", "words"),
    [
        ("kind", (), 0, "0, outside its space from 1 to 3"),
        ("inner.0", (1,), -1.5, "-1.5 at index 1, outside its space from -1.0 to 1.0"),
        ("inner.1", (0,), 2, "2 at index 0, outside its space from 0 to 1"),
    ],
)
def test_each_leaf_has_limits_of_its_own(
    leaf: str, index: tuple[int, ...], value: float, words: str
) -> None:
    inner = (box(-1, 1, np.float64), gym.spaces.MultiDiscrete([2, 5]))
    space = gym.spaces.Dict(
        image=box(0, 255, np.uint8, (2, 2)),
        kind=gym.spaces.Discrete(3, start=1),
        inner=gym.spaces.Tuple(inner),
    )
    checks = SpaceChecks([env := Scripted(space=space)], describe_spaces(env), "sampler 0")
    obs = np.zeros((3, 2), dtype_of(space))
    obs["kind"] = 1
    checks.check_limits(obs)
    leaves(obs)[leaf][(2, 1, *index)] = value
    with pytest.raises(BadResult) as outside:
        checks.check_limits(obs)
    assert outside.value.row == (2, 1)
    assert str(outside.value) == f"observation leaf {leaf!r} that is {words}"


def test_numbers_that_only_rounding_takes_to_a_limit_are_inside() -> None:
    space = gym.spaces.Box(np.array([-0.1, -0.7]), np.array([0.3, 0.7]), dtype=np.float64)
    for drop in (False, True):
        collect(bounded(space, np.array([0.3, -0.7])), drop=drop)


def test_an_environment_that_raises_after_an_invalid_observation_is_said_to_have_returned_it() -> (
    None
):
    class Choking(Faulty):
        def step(self, action: Any) -> Any:
            if self.steps == 3:
                raise RuntimeError("the solver failed")
            return super().step(action)

    message = fault_of(Choking(obs=np.array([0, 101], np.float32)))
    cause = f"(the environment had returned an observation that is {OUTSIDE})"
    assert message.startswith(f"{place('step', 4)}raised RuntimeError: the solver failed {cause}")


@pytest.mark.proves("returns NaN or infinity")
@pytest.mark.parametrize("at_step", [0, 3, 8])
def test_no_action_follows_from_a_number_that_is_not_finite(at_step: int) -> None:
    """Neither the environment that returned it nor another one of the process makes a step more."""
    bad = np.array([0.0, np.nan], np.float32)
    envs = [Scripted(obs=bad if sampler == 1 else None, at_step=at_step) for sampler in range(3)]
    built = [sampler_of([env], num_steps=8, sampler_id=k) for k, env in enumerate(envs)]
    samplers = [sampler for sampler, _ in built]
    requests = [SegmentRequest(k, 0) for k in range(3)]
    with pytest.raises(EnvironmentFault) as caught:
        collect_together(samplers, requests, PolicySnapshot(0, random_weights(built[0][1])))
    phase = "step" if at_step else "reset"
    assert caught.value.message.startswith(f"sampler 1 (Test-v0), env 0: {phase}")
    assert f"step {at_step}) returned an observation that is nan" in caught.value.message
    assert [len(env.actions) for env in envs] == [at_step, at_step, max(0, at_step - 1)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_finite_numbers_whose_squares_overflow_are_accepted(dtype: Any) -> None:
    largest = np.full(2, np.finfo(np.float32).max, dtype)
    [(report, segment)] = collect(Scripted(obs=largest, space=box(-np.inf, np.inf, dtype)))
    assert segment.obs[2, 0].tolist() == largest.tolist()
    assert report.incidents == ()


@pytest.mark.parametrize("large", [np.float32(1e5), np.float64(7e4), 10**5], ids=repr)
def test_a_number_that_becomes_infinite_as_float16_is_an_invalid_step(large: Any) -> None:
    env = Scripted(obs=np.array([0, large]), space=box(-np.inf, np.inf, np.float16))
    assert f"step 2) returned an observation that is {large:.0f}" in fault_of(env)


@pytest.mark.proves("overshoots a limit by less, or later")
def test_a_float_that_passes_a_limit_later_on_is_counted_once_and_used() -> None:
    late = Faulty(obs=np.array([101.0, 0.0], np.float32), at_step=2, episodes=(3, 4))
    made = collect(late, segments=4)
    [incident] = [incident for report, _ in made for incident in report.incidents]
    assert incident.kind == "outside_space"
    assert incident.message.startswith(f"{place('step', 2, 3)}returned an observation that is 101")
    assert max(segment.obs.max() for _, segment in made) == 101
    whole = box(-100, 100, np.int64)
    integers = Faulty(obs=np.full(2, 101), at_step=2, episodes=(3,), space=whole)
    assert "that is 101 at index 0" in fault_of(integers, segments=4)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"space": box(-1, 1, np.float32)}, r"has observation_space=Box\(-1.0, 1.0"),
        (
            {"actions": gym.spaces.Discrete(4)},
            r"has action_space=Discrete\(4\), but env 0 has Discrete\(3\)",
        ),
    ],
)
def test_environments_of_a_group_need_equal_spaces(other: dict[str, Any], words: str) -> None:
    with pytest.raises(EnvironmentFault, match=rf"sampler 0 \(Test-v0\), env 1: {words}"):
        group_of([Scripted(), Scripted(**other)])


@pytest.mark.proves("changes its spaces between episodes")
def test_spaces_must_not_change_between_episodes() -> None:
    class Changing(Scripted):
        def reset(self, **keywords: Any) -> Any:
            answer = super().reset(**keywords)
            self.action_space = gym.spaces.Discrete(3 if len(self.seeds) < 3 else 2)
            return answer

    message = fault_of(Changing(length=2))
    words = "changed action_space from Discrete(3) to Discrete(2). Spaces must not change"
    assert message.startswith(place("reset", 0, 2) + words)


class Differing(CartPoleEnv):
    """Has another action space in the second environment that a process makes."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        if type(self).made == 2:
            self.action_space = gym.spaces.Discrete(3)  # type: ignore[assignment]


@pytest.mark.proves("has other spaces in another instance")
def test_samplers_need_equal_spaces(tmp_path: Path) -> None:
    Differing.made = 0
    words = r"sampler 1 .* its action_space gives .*n=3.*described first .*n=2"
    with pytest.raises(EnvironmentFault, match=words):
        dppo.train(run_settings(tmp_path, env_id=Differing))


def run_settings(folder: Path, **changes: Any) -> dppo.Config:
    sizes = {"num_samplers": 2, "num_steps": 16, "total_timesteps": 32}
    return make_config({**sizes, "run_dir": folder / "run", "progress": "off", **changes})


def offset_env(offset: float, scale: float = 1.0) -> gym.Env[Any, Any]:
    return Faulty(
        episodes=(),
        space=box(-np.inf, np.inf, np.float64),
        observe=lambda steps: np.array([0.5 * steps, offset + scale * steps]),
    )


def picture_env(brightness: Callable[[int], int]) -> gym.Env[Any, Any]:
    shape = (8, 8, 3)
    return Faulty(
        episodes=(),
        space=box(0, 255, np.uint8, shape),
        observe=lambda steps: np.full(shape, brightness(steps), np.uint8),
    )


@pytest.mark.proves("draws an image that never changes")
def test_an_image_that_never_changes_is_reported_in_the_first_segment() -> None:
    (first, _), (second, _) = collect(picture_env(lambda step: 7), segments=2, num_steps=20)
    [incident] = first.incidents
    assert incident.kind == "image_constant"
    assert "in all 21 observations of the first segment: all of its bytes are 7" in incident.message
    assert second.incidents == ()
    [(changes, _)] = collect(picture_env(lambda step: step % 2), num_steps=20)
    [(short, _)] = collect(picture_env(lambda step: 7), num_steps=8)
    assert (changes.incidents, short.incidents) == ((), ())


@pytest.mark.proves("loses its numbers in float32")
def test_numbers_that_float32_cannot_tell_apart_are_reported_in_the_first_segment() -> None:
    (first, _), (second, _) = collect(offset_env(1e9), segments=2)
    [incident] = first.incidents
    assert incident.kind == "precision_lost"
    figures = (
        "from 1000000000 to 1000000006 at index 1, and is stored as float32, whose steps are 64"
    )
    assert incident.message.startswith(f"sampler 0 (Test-v0): the observation is {figures}")
    assert second.incidents == ()


@pytest.mark.parametrize(
    ("offset", "scale"), [(0.0, 1.0), (1e9, 1e5), (1e9, 0.0), (1.0, 1e-9), (1000.0, 0.01)]
)
def test_numbers_that_float32_can_tell_apart_are_not_reported(offset: float, scale: float) -> None:
    assert collect(offset_env(offset, scale))[0][0].incidents == ()


def numbers(**columns: Any) -> np.ndarray:
    """Observations [40, 1] with these leaves: a number, or an array [40, ...] of them."""
    arrays = {
        name: np.broadcast_to(value, (40,)) if np.ndim(value) == 0 else value
        for name, value in columns.items()
    }
    dtype = np.dtype([(name, array.dtype, array.shape[1:]) for name, array in arrays.items()])
    obs = np.zeros((40, 1), dtype)
    for name, array in arrays.items():
        obs[name][:, 0] = array
    return obs


@pytest.mark.parametrize(
    ("obs", "words"),
    [
        (numbers(near=9.0, far=-512.0), "observation leaf 'far' reaches 512; "),
        (np.arange(80.0).reshape(40, 1, 2), "the observation reaches 79; "),
        # a single element of many
        (numbers(pose=np.eye(20)[[3] * 40] * 100), "observation leaf 'pose' reaches 100; "),
        (numbers(spike=np.eye(40)[0] * 1e6), ""),
        (numbers(near=9.0, many=512), ""),  # integers
    ],
)
def test_observations_are_large_where_an_element_mostly_is(obs: np.ndarray, words: str) -> None:
    message = large_numbers(obs) or ""
    assert message.startswith(words)
    assert bool(message) == bool(words)


@pytest.mark.parametrize(
    "changes",
    [{"norm_obs": False}, {"norm_obs": True}, {"model": Plain, "norm_obs": False}],
    ids=str,
)
def test_large_observations_are_reported_unless_they_are_normalized(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    result = dppo.train(run_settings(tmp_path, env_id=lambda: offset_env(512.0), **changes))
    expected = {"large_observations": 1} if changes == {"norm_obs": False} else {}
    assert result.incidents == expected


def test_a_run_drops_invalid_episodes_and_counts_them(tmp_path: Path) -> None:
    world = {"reward": None, "episodes": [1, 2, 5]}
    faulty = {"env_id": "worlds.faulty:Faulty", "env_kwargs": world, "total_timesteps": 4 * 32}
    rebuild = {"on_env_fault": "rebuild", "env_faults": "14/h"}
    options = {"recompute_advantages": True, "norm_obs": True, "norm_reward": True}
    result = dppo.train(run_settings(tmp_path, **faulty, **rebuild, **options))
    # each environment fails in its second episode, after 6 + 3 steps
    assert result.incidents == {"bad_step": 14}
    faults = {f"sampler {k}, env 0: invalid in step": 7 for k in (0, 1)} | {"steps lost": 14 * 2}
    assert result.env_faults == faults
    assert result.global_step == 4 * 32 - 14
    assert faults.items() <= {name[7:]: value for name, value in result.metrics[-1].items()}.items()
