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

Pair = tuple[SegmentReport, Segment]


def collect_one(
    sampler: PPOSampler, spec: NetworkSpec, segment: int, rebuild: Rebuild | None = None
) -> Pair:
    weights = random_weights(spec, segment)
    request = SegmentRequest(0, segment, rebuild)
    return sampler.collect(request, PolicySnapshot(segment, weights))


def collect(
    env: gym.Env[Any, Any], *, segments: int = 1, num_steps: int = 8, drop: bool = False
) -> list[Pair]:
    sampler, spec = sampler_of([env], num_steps=num_steps, rebuild=drop)
    return [collect_one(sampler, spec, segment) for segment in range(segments)]


def kinds_of(report: SegmentReport) -> list[str]:
    """Return the kinds of incidents."""
    return [incident.kind for incident in report.incidents]


def fault_of(env: gym.Env[Any, Any], *, segments: int = 1, num_steps: int = 8) -> str:
    with pytest.raises(EnvironmentFault) as caught:
        collect(env, segments=segments, num_steps=num_steps)
    return caught.value.message


def place(phase: str, step: int, episode: int = 0) -> str:
    seed = streams.integer(1, Stream.EPISODES, 0, 0, episode)
    return f"sampler 0 (Test-v0), env 0: {phase} of episode {episode} (seed {seed}, step {step}) "


OUTSIDE = "101.0 at index 1, outside its space from -100.0 to 100.0"
BEYOND = np.array([0, 101], np.float32)
INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "nan": ({"obs": np.array([0, np.nan])}, "an observation that is nan at index 1."),
    "reward": ({"reward": 1e300}, "1e+300 as the reward, and values cannot be learned from"),
    "flag": ({"terminated": None}, "terminated=None, which is not a boolean."),
    "outside": ({"obs": BEYOND}, f"an observation that is {OUTSIDE}."),
}


@pytest.mark.proves("returns another shape or dtype")
@pytest.mark.parametrize("what", INVALID)
def test_an_invalid_step_is_dropped_with_the_rest_of_its_episode(what: str) -> None:
    settings, words = INVALID[what]
    env = Faulty(**settings, episodes=(1,))
    [(report, segment)] = collect(env, num_steps=16, drop=True)
    # Episode 0 has 6 steps; episode 1 two and an invalid third; the next has 6 again.
    steps_of_episodes = [*range(6), *range(3), *range(6), 0]
    dropped = 8
    obs = segment.obs[:, 0, 0]
    assert obs.tolist() == steps_of_episodes
    assert np.flatnonzero(~segment.valid).tolist() == [dropped]
    assert segment.rewards[dropped, 0] == 0
    assert np.flatnonzero(segment.truncated).tolist() == [5, dropped, 14]
    assert not segment.terminated.any()

    assert report.steps == 15

    finished = [(episode.index, episode.length) for episode in report.episodes]
    assert finished == [(0, 6), (2, 6)]

    [incident] = report.incidents
    assert incident.kind == "bad_step"
    assert incident.env == 0
    assert incident.lost_steps == 2

    step = place("step", 3, episode=1)
    assert incident.message.startswith(f"{step}returned {words}")
    assert report.carry.episodes.tolist() == [3]

    [actions] = report.open_actions
    assert len(actions) == 1


def test_dropping_invalid_steps_does_not_change_the_valid_ones() -> None:
    plain = collect(Faulty(episodes=()), segments=2, drop=False)
    watched = collect(Faulty(episodes=()), segments=2, drop=True)
    assert_same_bytes(tuple(plain), tuple(watched), but=["successors", "env_s"])


def test_an_invalid_first_observation_is_dropped_too() -> None:
    first_obs = np.array([np.nan, 0.0])
    faulty = Faulty(obs=first_obs, at_step=0, episodes=(0, 1, 3))
    [(report, segment)] = collect(faulty, drop=True)
    assert segment.valid.all()  # no step led there
    assert kinds_of(report) == ["bad_step"] * 3

    message = report.incidents[0].message
    assert message.startswith(place("reset", 0, episode=0))
    assert report.carry.episodes.tolist() == [4]


@pytest.mark.proves("raises in every reset")
def test_an_environment_of_which_no_reset_succeeds_ends_the_run() -> None:
    failing = Faulty(obs=np.zeros(3), at_step=0, episodes=range(1000))
    with pytest.raises(EnvironmentFault, match=f"The {FIRST_STEPS} resets before it failed"):
        collect(failing, drop=True)

    def observe(_: int) -> Any:
        try:
            return 1 // 0
        except ZeroDivisionError as division:
            cause = division
        raise OSError("no port") from cause  # its context is the fault before

    raising = Faulty(observe=observe)
    with pytest.raises(EnvironmentFault, match=r"[^.]\. The .* resets before it failed") as caught:
        collect(raising, drop=True)
    trace = caught.value.remote_traceback
    assert "During handling" not in trace, "only the user's code"
    assert "ZeroDivisionError" in trace
    assert "The above exception was the direct cause" in trace


@pytest.mark.proves("raises in a replay")
def test_a_replay_that_is_invalid_is_given_up_for_a_fresh_episode() -> None:
    sound = Faulty(episodes=())
    sampler, spec = sampler_of([sound], num_steps=4, rebuild=True)
    before, _ = collect_one(sampler, spec, 0)
    ledger = ReplayLedger(1, replay=True)
    ledger.record(before)

    failing = Faulty(reward=None, episodes=(0,))
    other, _ = sampler_of([failing], num_steps=4, rebuild=True)
    report, _ = collect_one(other, spec, 1, ledger.rebuild(0, 1))
    assert kinds_of(report) == ["replay_mismatch", "bad_step"]
    assert "the replay failed: " in report.incidents[0].message


def bounded(space: gym.Space[Any], value: Any) -> Faulty:
    first = space.sample()
    return Faulty(obs=value, space=space, observe=lambda steps: first)


def box(low: float, high: float, dtype: Any, shape: tuple[int, ...] = (2,)) -> gym.spaces.Box:
    return gym.spaces.Box(low, high, shape, dtype)


def integers(*values: int, dtype: Any = np.int64) -> np.ndarray:
    return np.array(values, dtype)


OUTSIDE_INT8 = "that is 256 at index 1, outside int8 from -128"
SHARES = box(0, 1, np.float64, (1, 2))
POSITIVE = box(0, np.inf, np.float64)
NARROW = gym.spaces.Dict(a=box(-9, 9, np.int8, (1,)))
SWITCHES = gym.spaces.MultiBinary(2)
OUTSIDE_SPACE: list[tuple[gym.Space[Any], Any, str]] = [
    (box(0, 9, np.int64), integers(0, 10), "that is 10 at index 1, outside its"),
    (box(0, 9, np.uint8), integers(77, 0, dtype=np.uint8), "that is 77 at index 0"),
    (box(0, 255, np.uint8), integers(300, 0, dtype=np.uint16), "that is 300 at"),
    (box(-128, 127, np.int8), integers(0, 200, dtype=np.uint8), "that is 200 at"),
    (SHARES, np.array([[0, 1.5]]), "that is 1.5 at index (0, 1)"),
    (POSITIVE, np.array([5, -0.1]), "that is -0.1"),
    (box(-99, 99, np.int8), [0, 1000], "that is 1000 at index 1, outside int8"),
    (box(0, 9, np.int32), [2**32 + 3, 0], "that is 4294967299 at index 0"),
    (box(-9, 9, np.int16), [-(2**16), 0], "that is -65536 at index 0"),
    (SWITCHES, [0, 256], OUTSIDE_INT8),
    (NARROW, {"a": [260]}, "part 'a' that is 260"),
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


FLOATS = box(-100, 100, np.float32)
INTEGERS = box(-100, 100, np.int32)
NAN = (np.array([0.0, np.nan], np.float32), FLOATS, "nan at index 1.")
INFINITE = (np.array([-np.inf, 0], np.float32), FLOATS, "-inf at index 0.")
TOO_LARGE = (np.full(2, 101), INTEGERS, "101 at index 0, outside")


@pytest.mark.proves("returns NaN at a time limit")
@pytest.mark.parametrize(("obs", "space", "words"), [NAN, INFINITE, TOO_LARGE])
@pytest.mark.parametrize("at_step", [0, 1, 5, 6])
@pytest.mark.parametrize("episode", [0, 1, 3])
def test_an_invalid_observation_is_named_by_its_step_in_any_segment_and_at_a_time_limit(
    obs: np.ndarray, space: gym.Space[Any], words: str, at_step: int, episode: int
) -> None:
    env = Faulty(obs=obs, space=space, at_step=at_step, episodes=(episode,), length=6)
    message = fault_of(env, segments=7, num_steps=4)  # episodes begin and end anywhere in a segment
    phase = "step" if at_step else "reset"
    start = place(phase, at_step, episode)
    assert message.startswith(f"{start}returned an observation that is {words}")
    is_first = (episode, at_step) in ((0, 0), (0, 1))  # each new environment fails, too
    assert message.endswith(". Correct the environment." if is_first else REMEDY)


NESTED = gym.spaces.Dict(
    image=box(0, 255, np.uint8, (2, 2)),
    kind=gym.spaces.Discrete(3, start=1),
    inner=gym.spaces.Tuple((box(-1, 1, np.float64), gym.spaces.MultiDiscrete([2, 5]))),
)


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
    env = Scripted(space=NESTED)
    checks = SpaceChecks([env], describe_spaces(env), "sampler 0")
    obs = np.zeros((3, 2), dtype_of(NESTED))
    obs["kind"] = 1
    checks.check_limits(obs)

    row = (2, 1)
    place = (*row, *index)
    leaves(obs)[leaf][place] = value
    with pytest.raises(BadResult) as outside:
        checks.check_limits(obs)
    assert outside.value.row == row
    assert str(outside.value) == f"an observation part {leaf!r} that is {words}"


def test_numbers_that_only_rounding_takes_to_a_limit_are_inside() -> None:
    low = np.array([-0.1, -0.7])
    high = np.array([0.3, 0.7])
    space = gym.spaces.Box(low, high, dtype=np.float64)
    at_limits = np.array([0.3, -0.7])
    for drop in (False, True):
        collect(bounded(space, at_limits), drop=drop)


def test_an_environment_that_raises_after_an_invalid_observation_is_said_to_have_returned_it() -> (
    None
):
    class Choking(Faulty):
        def step(self, action: Any) -> Any:
            if self.steps == 3:
                raise RuntimeError("the solver failed")
            return super().step(action)

    message = fault_of(Choking(obs=BEYOND))
    cause = f"(the environment had returned an observation that is {OUTSIDE})"
    step = place("step", 4)
    assert message.startswith(f"{step}raised RuntimeError: the solver failed {cause}")


@pytest.mark.proves("returns NaN or infinity")
@pytest.mark.parametrize("at_step", [0, 3, 8])
def test_no_action_follows_from_a_number_that_is_not_finite(at_step: int) -> None:
    """Neither the environment that returned it nor another one of the process makes a step more."""
    not_finite = np.array([0.0, np.nan], np.float32)
    envs = [Scripted(), Scripted(obs=not_finite, at_step=at_step), Scripted()]
    samplers = []
    for sampler_id, env in enumerate(envs):
        sampler, spec = sampler_of([env], num_steps=8, sampler_id=sampler_id)
        samplers.append(sampler)
    requests = [SegmentRequest(sampler_id, 0) for sampler_id in range(3)]
    policy = PolicySnapshot(0, random_weights(spec))
    with pytest.raises(EnvironmentFault) as caught:
        collect_together(samplers, requests, policy)

    message = caught.value.message
    phase = "step" if at_step else "reset"
    assert message.startswith(f"sampler 1 (Test-v0), env 0: {phase}")
    assert f"step {at_step}) returned an observation that is nan" in message

    first, failed, later = (len(env.actions) for env in envs)
    assert first == at_step
    assert failed == at_step
    assert later == max(0, at_step - 1)


def unlimited(dtype: Any) -> gym.spaces.Box:
    return box(-np.inf, np.inf, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_finite_numbers_whose_squares_overflow_are_accepted(dtype: Any) -> None:
    largest = np.full(2, np.finfo(np.float32).max, dtype)
    env = Scripted(obs=largest, space=unlimited(dtype))
    [(report, segment)] = collect(env)
    obs = segment.obs[2, 0]
    assert obs.tolist() == largest.tolist()
    assert report.incidents == ()


@pytest.mark.parametrize("large", [np.float32(1e5), np.float64(7e4), 10**5], ids=repr)
def test_a_number_that_becomes_infinite_as_float16_is_an_invalid_step(large: Any) -> None:
    env = Scripted(obs=np.array([0, large]), space=unlimited(np.float16))
    message = fault_of(env)
    assert f"step 2) returned an observation that is {large:.0f}" in message


@pytest.mark.proves("overshoots a limit by less, or later")
def test_a_float_that_passes_a_limit_later_on_is_counted_once_and_used() -> None:
    obs = np.array([101.0, 0.0], np.float32)
    collected = collect(Faulty(obs=obs, at_step=2, episodes=(3, 4)), segments=4)
    [incident] = [incident for report, _ in collected for incident in report.incidents]
    assert incident.kind == "outside_space"

    step = place("step", 2, episode=3)
    assert incident.message.startswith(f"{step}returned an observation that is 101")

    used = [segment.obs.max() for _, segment in collected]
    assert max(used) == 101

    whole = box(-100, 100, np.int64)
    faulty = Faulty(obs=np.full(2, 101), at_step=2, episodes=(3,), space=whole)
    message = fault_of(faulty, segments=4)
    assert "that is 101 at index 0" in message


OTHER_OBS = {"space": box(-1, 1, np.float32)}
OTHER_ACTIONS = {"actions": gym.spaces.Discrete(4)}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (OTHER_OBS, r"has observation_space=Box\(-1.0, 1.0"),
        (OTHER_ACTIONS, r"has action_space=Discrete\(4\), but env 0 has Discrete\(3\)"),
    ],
)
def test_environments_of_a_group_need_equal_spaces(other: dict[str, Any], words: str) -> None:
    envs = [Scripted(), Scripted(**other)]
    with pytest.raises(EnvironmentFault, match=rf"sampler 0 \(Test-v0\), env 1: {words}"):
        group_of(envs)


@pytest.mark.proves("changes its spaces between episodes")
def test_spaces_must_not_change_between_episodes() -> None:
    class Changing(Scripted):
        def reset(self, **keywords: Any) -> Any:
            answer = super().reset(**keywords)
            if len(self.seeds) == 3:
                self.action_space = gym.spaces.Discrete(2)
            return answer

    message = fault_of(Changing(length=2))
    start = place("reset", 0, episode=2)
    words = "changed action_space from Discrete(3) to Discrete(2). Spaces must not change"
    assert message.startswith(start + words)


class Differing(CartPoleEnv):
    """Has another action space in the second environment that a process makes."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        if type(self).made == 2:
            self.action_space = gym.spaces.Discrete(3)  # type: ignore[assignment]


def lake(sampler_id: int) -> Any:
    """Return an environment whose dtypes are the same, with 16 or with 64 categories."""
    return gym.make("FrozenLake-v1", map_name=["4x4", "8x8"][sampler_id])


def drawn(sampler_id: int) -> Any:
    """Return an environment that is declared nondeterministic in the second sampler."""
    env = CartPoleEnv()
    env.spec = gym.envs.registration.EnvSpec("Drawn-v0", nondeterministic=sampler_id == 1)
    return env


@pytest.mark.proves("has other spaces in another instance")
@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        (Differing, r"action_space gives .*n=3.*described first .*n=2"),
        (lake, r"observation_space gives .*counts=\(64,\).*described first .*counts=\(16,\)"),
        (drawn, "spec gives deterministic=False.*described first has deterministic=True"),
    ],
)
def test_samplers_need_equal_spaces(env_id: Any, words: str, tmp_path: Path) -> None:
    Differing.made = 0
    with pytest.raises(EnvironmentFault, match=f"sampler 1 .* its {words}"):
        dppo.train(run_settings(tmp_path, env_id=env_id))


def run_settings(folder: Path, **changes: Any) -> dppo.Config:
    sizes = {"num_samplers": 2, "num_steps": 16, "total_timesteps": 32}
    return make_config({**sizes, "run_dir": folder / "run", "progress": "off", **changes})


def offset_env(offset: float, scale: float = 1.0) -> gym.Env[Any, Any]:
    def observe(steps: int) -> np.ndarray:
        return np.array([0.5 * steps, offset + scale * steps])

    return Faulty(episodes=(), space=unlimited(np.float64), observe=observe)


def picture_env(brightness: Callable[[int], int]) -> gym.Env[Any, Any]:
    shape = (8, 8, 3)

    def observe(steps: int) -> np.ndarray:
        return np.full(shape, brightness(steps), np.uint8)

    return Faulty(episodes=(), space=box(0, 255, np.uint8, shape), observe=observe)


def reports_of(
    env: gym.Env[Any, Any], *, segments: int = 1, num_steps: int = 8
) -> list[SegmentReport]:
    collected = collect(env, segments=segments, num_steps=num_steps)
    return [report for report, _ in collected]


@pytest.mark.proves("draws an image that never changes")
def test_an_image_that_never_changes_is_reported_in_the_first_segment() -> None:
    still = picture_env(lambda step: 7)
    first, second = reports_of(still, segments=2, num_steps=20)
    [incident] = first.incidents
    assert incident.kind == "image_constant"

    words = "in all 21 observations of the first segment: all of its bytes are 7"
    assert words in incident.message
    assert second.incidents == ()

    changing = picture_env(lambda step: step % 2)
    [report] = reports_of(changing, num_steps=20)
    assert report.incidents == ()

    short = picture_env(lambda step: 7)
    [report] = reports_of(short, num_steps=8)
    assert report.incidents == ()


@pytest.mark.proves("loses its numbers in float32")
def test_numbers_that_float32_cannot_tell_apart_are_reported_in_the_first_segment() -> None:
    first, second = reports_of(offset_env(1e9), segments=2)
    [incident] = first.incidents
    assert incident.kind == "precision_lost"

    figures = (
        "from 1000000000 to 1000000006 at index 1, and is stored as float32, whose steps are 64"
    )
    assert incident.message.startswith(f"sampler 0 (Test-v0): the observation is {figures}")
    assert second.incidents == ()


@pytest.mark.parametrize(
    ("offset", "scale"),
    [
        pytest.param(0.0, 1.0, id="ordinary"),
        pytest.param(1e9, 1e5, id="large steps"),
        pytest.param(1e9, 0.0, id="constant"),
        pytest.param(1.0, 1e-9, id="nearly constant"),
        pytest.param(1000.0, 0.01, id="small steps"),
    ],
)
def test_numbers_that_float32_can_tell_apart_are_not_reported(offset: float, scale: float) -> None:
    [report] = reports_of(offset_env(offset, scale))
    assert report.incidents == ()


STEPS = 40


def numbers(**columns: Any) -> np.ndarray:
    """Observations [STEPS, 1] with these leaves: a number, or an array [STEPS, ...] of them."""
    arrays = {}
    for name, value in columns.items():
        is_array = np.ndim(value) > 0
        arrays[name] = value if is_array else np.full(STEPS, value)
    dtype = np.dtype([(name, array.dtype, array.shape[1:]) for name, array in arrays.items()])
    obs = np.zeros((STEPS, 1), dtype)
    for name, array in arrays.items():
        obs[name][:, 0] = array
    return obs


POSE = np.zeros((STEPS, 20))
POSE[:, 3] = 100  # a single element of many
SPIKE = np.zeros(STEPS)
SPIKE[0] = 1e6
SUCCESSIVE = np.arange(2.0 * STEPS).reshape(STEPS, 1, 2)


@pytest.mark.parametrize(
    ("obs", "words"),
    [
        (numbers(near=9.0, far=-512.0), "the observation part 'far' reaches 512; "),
        (SUCCESSIVE, "the observation reaches 79; "),
        (numbers(pose=POSE), "the observation part 'pose' reaches 100; "),
        (numbers(spike=SPIKE), ""),
        (numbers(near=9.0, many=512), ""),  # integers
    ],
)
def test_observations_are_large_where_an_element_mostly_is(obs: np.ndarray, words: str) -> None:
    message = large_numbers(obs) or ""
    assert message.startswith(words)
    assert bool(message) == bool(words)


@pytest.mark.parametrize(
    ("changes", "incidents"),
    [
        ({"norm_obs": False}, {"large_observations": 1}),
        ({"norm_obs": True}, {}),
        ({"model": Plain, "norm_obs": False}, {}),
    ],
    ids=str,
)
def test_large_observations_are_reported_unless_they_are_normalized(
    changes: dict[str, Any], incidents: dict[str, int], tmp_path: Path
) -> None:
    config = run_settings(tmp_path, env_id=lambda: offset_env(512.0), **changes)
    result = dppo.train(config)
    assert result.incidents == incidents


def test_a_run_drops_invalid_episodes_and_counts_them(tmp_path: Path) -> None:
    steps = 4 * 32
    config = run_settings(
        tmp_path,
        env_id="worlds.faulty:Faulty",
        env_kwargs={"reward": None, "episodes": [1, 2, 5]},
        total_timesteps=steps,
        on_env_fault="rebuild",
        env_faults="14/h",
        recompute_advantages=True,
        norm_obs=True,
        norm_reward=True,
    )
    result = dppo.train(config)
    # each environment fails in its second episode, after 6 + 3 steps
    faults = {
        "sampler 0, env 0: invalid in step": 7,
        "sampler 1, env 0: invalid in step": 7,
        "steps lost": 14 * 2,
    }
    assert result.incidents == {"bad_step": 14}
    assert result.env_faults == faults
    assert result.global_step == steps - 14

    last_row = result.metrics[-1]
    counted = {name[7:]: value for name, value in last_row.items()}
    assert faults.items() <= counted.items()
