"""Actions of all kinds and action masks, from end to end: train, play."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from kinds import small
from recorder import Notes
from remedies import executes
from worlds.acting import HYBRID, SPACES, Masked

import dppo
from dppo.envs.make import make_env
from dppo.envs.spaces import actions_of, describe_spaces
from dppo.errors import ConfigError, EnvironmentFault
from dppo.hosts.sac import check_actions
from dppo.spaces.actions import actions_from_json, boxes, with_allowed_choices
from dppo.spaces.bounds import describe_rescaling, stuck_beside_unbounded

SHORT = {"total_timesteps": 80, "update_epochs": 1}
HIDDEN = 2 * 64 + 64 + 64 * 64 + 64  # parameters of the hidden layers of one trunk
SOURCES = {"leaf": "auto", "method": "auto", "info": "info"}
each_source = pytest.mark.parametrize("source", list(SOURCES))
several = pytest.mark.parametrize("several", [False, True], ids=["discrete", "multidiscrete"])


def masked(source: str, **world: Any) -> dict[str, Any]:
    return {
        "env_id": "worlds.acting:Masked",
        "env_kwargs": {"source": source, **world},
        "action_mask": SOURCES[source],
    }


def actuated(kind: str) -> dict[str, Any]:
    return {"env_id": "worlds.acting:Actuated", "env_kwargs": {"kind": kind}}


@pytest.mark.parametrize("kind", SPACES)
def test_every_kind_of_action_trains_and_plays(kind: str, tmp_path: Path) -> None:
    """The environment raises if an action is not in its space."""
    result = dppo.train(small(tmp_path / "run", **actuated(kind), **SHORT))
    assert result.episodes > 0
    assert dppo.evaluate(result, episodes=2, deterministic=False).lengths

    policy = dppo.load_policy(result.run_dir)
    space = SPACES[kind]
    env: Any = make_env("worlds.acting:Actuated", {"kind": kind})
    observations = np.stack([env.reset(seed=seed)[0] for seed in range(4)])
    together = policy.act(observations)
    rows = gym.vector.utils.iterate(gym.vector.utils.batch_space(space, 4), together)
    for row, obs in zip(rows, observations, strict=True):
        alone = policy.act(obs)
        assert space.contains(alone)
        assert type(row) is type(alone) or np.isscalar(row)
        flat: Any = gym.spaces.flatten(space, row)
        expected: Any = gym.spaces.flatten(space, alone)
        # several rows are summed in another order than one
        np.testing.assert_allclose(flat, expected, rtol=1e-5)


@pytest.mark.parametrize("bounds", ["squash", "rescale", "auto"])
def test_bounds_far_from_one_are_reached(bounds: str, tmp_path: Path) -> None:
    """A fresh policy, with deviation 1, covers a wide Box; clipped, it would stay near zero."""
    config = small(tmp_path / "run", **actuated("wide"), **SHORT, action_bounds=bounds)
    with Notes() as notes:
        run = dppo.train(config).run_dir
    line = (
        "Actions lie between [-500, 10] and [100, 11]: the range [-1, 1] of the policy is mapped to these bounds; "
        "action_bounds=clip (--action-bounds clip) passes its numbers on as they are."
    )
    assert (line in notes.texts) == (bounds == "auto")

    policy = dppo.load_policy(run)
    rng = np.random.default_rng(0)
    drawn = np.array([policy.act(OBS, generator=rng) for _ in range(300)])
    wide: Any = SPACES["wide"]
    assert all(wide.contains(action) for action in drawn)

    spread = np.ptp(drawn, axis=0) / (wide.high - wide.low)
    assert (spread > 0.8).all()


OBS = np.zeros(2, np.float32)
FAR = gym.spaces.Box(np.array([-1, 0], np.float32), np.array([1, 512], np.float32))


def pair(low: float, high: float) -> gym.Space[Any]:
    """Return a Box of two numbers with these bounds."""
    return gym.spaces.Box(low, high, (2,))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        ([0, 0], [1, 1], "0 and 1"),
        ([10, 0, 0], [45, 100, 180], "[10, 0, 0] and [45, 100, 180]"),
        ([-2, *range(9)], [5, *range(5, 14)], "-2 at the lowest and 13 at the highest"),
    ],
)
def test_bounds_are_named_by_element_if_they_differ(
    low: list[float], high: list[float], expected: str
) -> None:
    space = gym.spaces.Box(np.array(low, np.float32), np.array(high, np.float32))
    line = describe_rescaling(actions_of(space, "auto"))
    assert line is not None
    assert line.startswith(f"Actions lie between {expected}: ")


@executes("spaces/bounds.py: Give it finite bounds")
@pytest.mark.parametrize(
    ("low", "high", "stuck"),
    [
        ([10, 0, 0], [45, np.inf, 180], "Element 1 of an action lies between 0 and inf."),
        ([10, 0], [45, 3e38], "Element 1 of an action lies between 0 and inf."),
        ([10, -1], [45, np.inf], ""),
        ([-1, 0], [1, np.inf], "Element 1 of an action lies between 0 and inf."),
        ([-np.inf, -1], [np.inf, 1], ""),
        ([-np.inf, -np.inf], [np.inf, np.inf], ""),
        ([10, 0, 0], [45, 100, 180], ""),
    ],
)
def test_elements_that_an_infinite_bound_leaves_at_their_own_bounds_are_named(
    low: list[float], high: list[float], stuck: str
) -> None:
    """An element of [0, inf] is clipped, so that it may stay at 0."""
    space = gym.spaces.Box(np.array(low, np.float32), np.array(high, np.float32))
    described = stuck_beside_unbounded(actions_of(space, "auto"))
    assert (described or "").startswith(stuck)
    assert (described is None) == (not stuck)


@pytest.mark.parametrize("bounds", ["auto", "clip"])
def test_a_run_warns_of_elements_beside_an_infinite_bound_unless_clipping_was_asked_for(
    bounds: str, tmp_path: Path
) -> None:
    with Notes() as notes:
        dppo.train(small(tmp_path / "run", **actuated("free"), **SHORT, action_bounds=bounds))
    warned = any(text.startswith("Element 1 of an action lies") for text in notes.texts)
    assert warned == (bounds == "auto")


SEVERAL_PARTS = gym.spaces.Tuple([gym.spaces.Box(-1, 1), FAR, gym.spaces.Discrete(2)])


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (pair(-2, 2), ["clip"]),
        (pair(-1, 1.1), ["clip"]),
        (pair(-0.4, 0.4), ["clip"]),
        (pair(-3e38, 3e38), ["clip"]),
        (pair(-2.5, 0), ["rescale"]),
        (pair(0, 1), ["rescale"]),
        (pair(-0.01, 0.01), ["rescale"]),
        (pair(-1, 0.5), ["rescale"]),
        (FAR, ["rescale"]),
        (SPACES["free"], ["clip"]),
        (SPACES["mixed"], ["rescale"]),
        (SEVERAL_PARTS, ["clip", "rescale"]),
        (gym.spaces.Discrete(2), []),
    ],
    ids=str,
)
def test_auto_rescales_finite_bounds_that_a_fresh_policy_does_not_cover(
    space: gym.Space[Any], expected: list[str]
) -> None:
    actions = actions_of(space, "auto")
    restored = actions_from_json(actions.as_json())
    assert [box.bounds for box in boxes(restored)] == expected
    is_described = describe_rescaling(actions) is not None
    assert is_described == ("rescale" in expected)


@pytest.mark.parametrize("bounds", ["auto", "rescale"])
def test_elements_with_finite_bounds_are_mapped_beside_others_that_are_not(bounds: Any) -> None:
    actions = actions_of(SPACES["mixed"], bounds)
    restored = actions_from_json(json.loads(json.dumps(actions.as_json())))
    policy_actions = np.array([[-1, -1, -1, -1], [0, 0, 0, 0], [1, 1, 1, 1], [3, -3, -3, 7e8]])
    env_actions = np.array([[10, -1, 0, -1], [27.5, 0, 90, 0], [45, 1, 180, 1], [45, -1, 0, 7e8]])
    for converted in (actions, restored):
        np.testing.assert_array_equal(
            converted.to_env(policy_actions), env_actions.astype(np.float32)
        )
        for row in env_actions:
            again = converted.to_env(converted.from_env(row)[None])[0]
            np.testing.assert_array_equal(again, row.astype(np.float32))
        assert converted.half_widths().tolist() == [1, 1, 1, 1]

    [box] = boxes(actions)
    lower, upper = box.saturated_at()
    assert lower.tolist() == [-1, -1, -1, -np.inf]
    assert upper.tolist() == [1, np.inf, 1, np.inf]
    line = describe_rescaling(actions)
    assert line is not None
    assert line.startswith("Actions lie between [10, 0] and [45, 180]: ")
    assert line.endswith(
        " Elements 1, 3 of an action are not mapped, for lack of two finite bounds."
    )


def test_a_box_without_an_element_to_map_is_refused_by_its_first_infinite_element() -> None:
    for bounds, space in (("rescale", pair(0, np.inf)), ("squash", SPACES["mixed"])):
        with pytest.raises(ConfigError, match=rf"^action_bounds={bounds}: .* element [01] of an"):
            actions_of(space, bounds)  # type: ignore[arg-type]


def test_soft_actor_critic_names_an_element_without_finite_bounds() -> None:
    with pytest.raises(ConfigError, match=r"^algo=sac: .* element 1 of an action lies between -1"):
        check_actions(SPACES["mixed"])


@pytest.mark.parametrize(
    ("kind", "outputs", "trunk", "trunks"),
    [("wide", 4, "auto", 2), ("dict", 2 * 2 + 4 + 8, "shared", 1)],
)
def test_the_deviation_may_depend_on_the_state(
    kind: str, outputs: int, trunk: str, trunks: int, tmp_path: Any
) -> None:
    """Deviations are outputs, not parameters."""
    settings = actuated(kind) | SHORT | {"trunk": trunk, "state_dependent_std": True}
    result = dppo.train(small(tmp_path / "run", **settings))
    assert dppo.load_policy(result.run_dir).weights.size == trunks * HIDDEN + 65 * outputs + 65


@pytest.mark.parametrize(
    ("settings", "components", "log_std"),
    [
        ({"env_id": "Pendulum-v1", "log_std_init": -1.5, "trunk": "shared"}, 1, -1.5),
        ({"env_id": "Pendulum-v1"}, 1, 0.0),
        (actuated("free"), 2, -0.5),
        (actuated("free") | {"log_std_init": 0.0}, 2, 0.0),
    ],
    ids=str,
)
def test_the_first_deviation(
    settings: dict[str, Any], components: int, log_std: float, tmp_path: Path
) -> None:
    """It shows in the entropy of the first update: log std + (1 + log(2 pi)) / 2 for each component."""
    short = {"learning_rate": 1e-12, "total_timesteps": 80}
    result = dppo.train(small(tmp_path / "run", **short, **settings))
    each = log_std + 0.5 + 0.5 * math.log(2 * math.pi)
    assert result.metrics[0]["losses/entropy"] == pytest.approx(components * each, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            actuated("free") | {"action_bounds": "squash"},
            "squash: needs finite .*element 1.*between 0.0 and inf",
        ),
        ({"log_std_init": -1.0}, r"log_std_init=-1.0 has no effect.*Discrete\(2\)"),
        ({"state_dependent_std": True}, r"state_dependent_std=True has no effect.*Discrete\(2\)"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_actions_are_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """tests/remedies/refused.py has others."""
    with pytest.raises(ConfigError, match=words):
        dppo.train(small(tmp_path / "run", **{"env_id": "CartPole-v1"} | changes))


@each_source
@several
def test_masks_are_obeyed_in_training_and_evaluation(
    source: str, several: bool, tmp_path: Path
) -> None:
    """The environment raises if an action is not allowed."""
    result = dppo.train(small(tmp_path / "run", **masked(source, several=several), **SHORT))
    assert result.incidents == {}
    for deterministic in (True, False):
        assert len(dppo.evaluate(result, episodes=5, deterministic=deterministic).returns) == 5


def test_the_source_of_masks_does_not_change_the_result(tmp_path: Path) -> None:
    """A leaf is not compared: of a Dict observation another network is made."""
    method = dppo.train(small(tmp_path / "method", **masked("method")))
    info = dppo.train(small(tmp_path / "info", **masked("info")))
    assert method.weights_sha256 == info.weights_sha256


def test_choices_that_a_mask_forbids_are_replaced_by_the_first_allowed_ones() -> None:
    mask = np.array([False, False, True, True])
    choice = actions_of(gym.spaces.Discrete(4))
    numbers: Any = np.arange(4)
    replaced = [with_allowed_choices(choice, number, mask) for number in numbers]
    assert replaced == [2, 2, 2, 3]
    hybrid = actions_of(HYBRID)
    # arm, gear, a number and two dials, lamps
    action = np.array([0.5, -0.5, 0, 0.25, 1, 0, 1, 0])
    masks = np.concatenate([mask, [True, False], [False, True, True], [False, True], [True, False]])
    expected = [0.5, -0.5, 2, 0.25, 0, 1, 1, 0]
    assert with_allowed_choices(hybrid, action, masks).tolist() == expected
    assert action[2] == 0


class Remade(gym.Wrapper[Any, Any, Any, Any]):
    """Makes its environment, which raises if an action is not allowed, again in each reset."""

    def __init__(self) -> None:
        super().__init__(Masked("method"))

    def reset(self, **keywords: Any) -> Any:
        self.env = Masked("method")
        return self.env.reset(**keywords)


def test_the_masks_of_a_new_inner_environment_are_obeyed(tmp_path: Path) -> None:
    expected = dppo.train(small(tmp_path / "run", **masked("method")))
    result = dppo.train(small(tmp_path / "remade", env_id=Remade))
    assert result.weights_sha256 == expected.weights_sha256
    assert dppo.evaluate(result, episodes=3).lengths


@pytest.fixture(scope="module")
def policy_with_method(module_path: Path) -> dppo.Policy:
    run_dir = module_path / "method"
    return dppo.load_policy(dppo.train(small(run_dir, **masked("method"), **SHORT)))


def test_policies_with_masks_act_on_one_observation_and_on_many(
    policy_with_method: dppo.Policy,
) -> None:
    policy = policy_with_method
    three = np.stack([OBS] * 3)
    for only in range(4):
        mask = np.arange(4) == only
        assert policy.act(OBS, action_mask=mask) == only
        masks = np.stack([mask, mask, ~mask])
        together = policy.act(three, action_mask=masks)
        assert together[:2].tolist() == [only, only]
        generator = np.random.default_rng(only)
        assert policy.act(OBS, action_mask=~mask, generator=generator) != only


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ({}, r"action_mask is missing.*env\.action_masks\(\)"),
        ({"action_mask": np.ones(3)}, r"shape \(3,\) instead of \(4,\)"),
        ({"action_mask": np.zeros(4)}, "allows no action"),
        ({"action_mask": "all"}, "dtype"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_policy_refuses_wrong_masks(
    masks: Any, words: str, policy_with_method: dppo.Policy
) -> None:
    with pytest.raises(ValueError, match=words):
        policy_with_method.act(OBS, **masks)


def test_a_policy_takes_masks_from_where_it_was_trained_with_them(tmp_path: Path) -> None:
    def policy_of(name: str, **settings: Any) -> dppo.Policy:
        config = small(tmp_path / name, **SHORT, **settings)
        return dppo.load_policy(dppo.train(config))

    with_leaf = policy_of("leaf", **masked("leaf"))
    only_third = {"action_mask": np.array([0, 0, 1, 0]), "at": OBS}
    assert with_leaf.act(only_third) == 2

    every = {"action_mask": np.ones(4, np.int8), "at": OBS}
    with pytest.raises(ValueError, match="reads masks from the observation"):
        with_leaf.act(every, action_mask=np.ones(4))

    without = policy_of("none", env_id="CartPole-v1")
    with pytest.raises(ValueError, match="trained without masks"):
        without.act(np.zeros(4), action_mask=np.ones(2))


@pytest.mark.proves("allows no action in its mask")
@each_source
def test_a_mask_that_allows_nothing_is_named_with_its_place(source: str, tmp_path: Path) -> None:
    place = r"sampler 0 \(worlds\.acting:Masked\), env \d: step of episode 1 \(seed \d+, step 4\) "
    with pytest.raises(
        EnvironmentFault, match=f"^{place}returned an action mask that allows no action: all of it"
    ):
        dppo.train(small(tmp_path / "run", **masked(source, nothing_at=4)))


def test_an_episode_without_allowed_actions_can_be_dropped(tmp_path: Path) -> None:
    faults = {"on_env_fault": "rebuild", "env_faults": "unlimited"}
    result = dppo.train(small(tmp_path / "run", **masked("info", nothing_at=4), **faults))
    assert result.incidents["bad_step"] >= 4  # the second episode of each environment fails


class InfoWithout(Masked):
    """Forgets the mask in some steps."""

    def info(self) -> dict[str, Any]:
        return super().info() if self.steps < 3 else {}


BAD_MASKS = {
    "missing": "step 3) returned an info without 'action_mask', which action_mask=info reads",
    "short": "returned an action mask of shape (3,) instead of (4,)",
    "nan": "returned an action mask with NaN, which neither allows nor forbids",
    "raises": "raised RuntimeError: no rules for this state",
}


@pytest.mark.parametrize("case", BAD_MASKS)
def test_bad_masks_are_errors_that_say_where(case: str, tmp_path: Path) -> None:
    def bad() -> Any:
        if case == "raises":
            raise RuntimeError("no rules for this state")
        return np.ones(3) if case == "short" else np.array([1, 0, np.nan, 0])

    def make(**kwargs: Any) -> gym.Env[Any, Any]:
        if case == "missing":
            return InfoWithout("info")
        env = Masked("method")
        env.action_masks = bad
        return env

    mask = {"action_mask": "info"} if case == "missing" else {}
    with pytest.raises(EnvironmentFault, match=re.escape(BAD_MASKS[case])):
        dppo.train(small(tmp_path / "run", env_id=make, **mask))


def test_a_mask_in_info_that_is_not_used_is_reported(tmp_path: Path) -> None:
    short = {"env_id": "Taxi-v4", "total_timesteps": 80}
    assert dppo.train(small(tmp_path / "auto", **short)).incidents == {"mask_not_used": 1}
    for setting in ("off", "info"):
        assert dppo.train(small(tmp_path / setting, action_mask=setting, **short)).incidents == {}


def test_the_network_does_not_read_the_mask(tmp_path: Path) -> None:
    read = describe_spaces(Masked("leaf")).of_network()
    assert (list(read.leaves()), read.mask) == (["at"], None)
    result = dppo.train(small(tmp_path / "run", norm_obs=True, **masked("method"), **SHORT))
    assert dppo.load_policy(result.run_dir).weights.size == 2 * HIDDEN + 65 * 4 + 65
