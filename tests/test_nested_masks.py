"""Masks for the choices in Dict and Tuple actions, and masks that no action can have."""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from kinds import small
from recorder import Notes
from remedies import executes
from worlds.acting import HYBRID, Actuated, Hybrid

import dppo
from dppo.envs.checks.masks import checked_masks
from dppo.envs.checks.returned import BadResult
from dppo.envs.spaces import actions_of, describe_spaces
from dppo.errors import ConfigError
from dppo.ppo.distributions.simple import distribution_of
from dppo.spaces.spaces import leaves
from dppo.tools.export.modules import ExportedPolicy

FORMS = [("leaf", "flat"), ("leaf", "nested"), ("method", "flat"), ("info", "nested")]


def hybrid(source: str, form: str) -> dict[str, Any]:
    setting = "info" if source == "info" else "auto"
    return {
        "env_id": "worlds.acting:Hybrid",
        "env_kwargs": {"source": source, "form": form},
        "action_mask": setting,
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dppo.Result]:
    folder = tmp_path_factory.mktemp("masks")
    results = {}
    for form in FORMS:
        settings = hybrid(*form) | {"total_timesteps": 160, "update_epochs": 1}
        config = small(folder / "-".join(form), **settings)
        with Notes() as notes:
            results[form] = dppo.train(config)
        [line] = [text for text in notes.texts if text.startswith("Spaces: obs ")]
        assert " with masks from " in line
    return results


def test_masks_of_nested_actions_are_obeyed_and_their_form_does_not_change_the_weights(
    trained: dict[tuple[str, str], dppo.Result],
) -> None:
    """The environment raises if a choice is not allowed.

    A part of the observation is not compared: of a Dict observation another network is made.
    """
    for result in trained.values():
        assert result.incidents == {}
        for deterministic in (True, False):
            played = dppo.evaluate(result, episodes=3, deterministic=deterministic)
            assert len(played.returns) == 3
    in_observation = FORMS[:2]
    beside = FORMS[2:]
    for forms in (in_observation, beside):
        weights = {trained[form].weights_sha256 for form in forms}
        assert len(weights) == 1


def test_a_policy_takes_nested_masks_of_one_state_and_of_many(trained: Any) -> None:
    policy = dppo.load_policy(trained["info", "nested"].run_dir)
    gears = np.eye(4, dtype=np.int8)
    only_second_on = np.array([0, 1], np.int8)
    obs = np.zeros(2, np.float32)
    for only in range(4):
        mask = {"arm": None, "gear": gears[only], "inner": None, "lamps": only_second_on}
        action = policy.act(obs, action_mask=mask)
        assert action["gear"] == 2 + only
        assert action["lamps"].tolist() == [0, 1]
        assert HYBRID.contains(action)

    masks = {"gear": gears[:2], "inner": (None, None), "lamps": np.array([[0, 1], [2, 1]], np.int8)}
    together = policy.act(np.stack([obs, obs]), action_mask=masks)
    assert together["gear"].tolist() == [2, 3]
    assert together["lamps"][:, 1].tolist() == [1, 1]
    first_mask = {"gear": gears[0], "inner": None, "lamps": np.array([0, 1], np.int8)}
    first = policy.outputs(obs, action_mask=first_mask)
    outputs = policy.outputs(np.stack([obs, obs]), action_mask=masks)
    np.testing.assert_allclose(outputs.head[0], first.head, rtol=1e-5)
    assert outputs.values[0] == pytest.approx(first.values)
    assert (first.head < -1e8).sum() == 3 + 2


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_an_exported_policy_reads_masks_in_the_observation(form: str, trained: Any) -> None:
    policy = dppo.load_policy(trained["leaf", form].run_dir)
    module = ExportedPolicy(policy.spaces, policy.spec, policy.weights, policy.obs_scale)
    env = Hybrid("leaf", form)
    for seed in range(5):
        obs, _ = env.reset(seed=seed)
        inputs = {}
        for name, leaf in leaves(obs).items():
            row = np.array(leaf)[None]
            inputs[f"obs.{name}"] = torch.from_numpy(row)
        outputs = module.outputs(inputs)
        for name, part in leaves(policy.act(obs)).items():
            exported = outputs[f"action.{name}"][0]
            np.testing.assert_allclose(exported, part, rtol=1e-4, atol=1e-5)


def test_impossible_choices_have_no_gradient_and_the_others_are_unchanged() -> None:
    distribution = distribution_of(actions_of(HYBRID))
    drawn = np.random.default_rng(0)
    head = drawn.normal(size=(9, distribution.head_size))
    masks = drawn.random((9, 13)) < 0.5
    masks[:, [0, 4, 6, 9, 11]] = True  # each element keeps a choice

    limited = distribution.limited(head, masks)
    in_torch = distribution.limited_in_torch(torch.from_numpy(head), torch.from_numpy(masks))
    np.testing.assert_array_equal(in_torch, limited)

    impossible = limited != head
    columns = list(distribution.choice_columns)
    np.testing.assert_array_equal(impossible[:, columns], ~masks)
    assert impossible.sum() == (~masks).sum()

    noise = distribution.noise(drawn, 1, 9, "float64")[0]
    actions = distribution.sample(limited, noise)
    scored = distribution.scores_with_gradient(in_torch, torch.from_numpy(actions))
    ones = torch.ones(9, dtype=torch.float64)
    gradient = scored.gradient(ones, ones)
    assert torch.isfinite(gradient).all()
    assert (gradient[torch.from_numpy(impossible)] == 0).all()


GEAR = np.ones(4, np.int8)
WRONG: list[tuple[Any, str]] = [
    ({"gear": GEAR, "inner": None}, "an action mask without part 'lamps'"),
    (
        {"gear": GEAR, "inner": None, "lamps": None, "wheel": GEAR},
        "an action mask with the unexpected part 'wheel'",
    ),
    (
        {"gear": GEAR[:3], "inner": None, "lamps": None},
        "an action mask for 'gear' of shape (3,) instead of (4,)",
    ),
    (
        {"gear": 0 * GEAR, "inner": None, "lamps": None},
        "an action mask that allows no action for 'gear'",
    ),
    (
        {"gear": GEAR, "inner": (None, np.array([1, 1, 0, 0, 0])), "lamps": None},
        "for element 1 of 'inner.1'",
    ),
    (np.ones(4), "an action mask of shape (4,) instead of (13,)"),
    (
        {"gear": GEAR, "inner": None, "lamps": np.array([1, 0])},
        "for 'lamps' of shape (2,) instead of (4,)",
    ),
]


@pytest.mark.parametrize(("mask", "words"), WRONG)
def test_nested_masks_of_a_wrong_form_are_named_with_their_part(mask: Any, words: str) -> None:
    actions = actions_of(HYBRID)
    with pytest.raises(BadResult, match=re.escape(words)):
        checked_masks(mask, (), actions)
    # as the texts say
    everything = {"arm": None, "gear": GEAR, "inner": (None, None), "lamps": None}
    assert checked_masks(everything, (), actions).all()


PAIR = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])
BESIDE = spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 1)])


@pytest.mark.parametrize(
    ("space", "mask", "rows", "allowed"),
    [
        (PAIR, [1, 0, 1, 1, 0], (), [1, 0, 1, 1, 0]),
        (PAIR, ([1, 0], [1, 1, 0]), (), [1, 0, 1, 1, 0]),
        (BESIDE, [1, 0], (), [1, 0]),
        (BESIDE, (np.array([1, 0]), None), (), [1, 0]),
        (BESIDE, ([[1, 0], [0, 1]], None), (2,), [[1, 0], [0, 1]]),
        (spaces.MultiDiscrete([2, 3]), (None, [1, 0, 1]), (), [1, 1, 1, 0, 1]),
        (spaces.MultiDiscrete([2, 1]), ([[1, 0], [0, 1]], None), (2,), [[1, 0, 1], [0, 1, 1]]),
    ],
    ids=[
        "flat",
        "nested",
        "flat beside a number",
        "nested beside a number",
        "of two rows",
        "of elements",
        "of elements of two rows",
    ],
)
def test_flat_masks_are_told_from_those_of_each_part_or_element(
    space: Any, mask: Any, rows: tuple[int, ...], allowed: Any
) -> None:
    actions = actions_of(space)
    checked = checked_masks(mask, rows, actions)
    assert checked.tolist() == allowed


def box_with_mask() -> gym.Env[Any, Any]:
    """Return an environment of real-valued actions whose observation has a mask."""
    env: Any = Actuated("wide")
    env.observation_space = spaces.Dict(action_mask=spaces.MultiBinary(2), at=spaces.Box(-9, 9))
    return env


def odd_leaf() -> gym.Env[Any, Any]:
    env = Hybrid("leaf", "nested")
    env.observation_space = spaces.Dict(
        action_mask=spaces.Dict(gear=spaces.MultiBinary(4)), at=spaces.Box(-9, 9, (2,), np.float32)
    )
    return env


REFUSED: list[tuple[Any, str]] = [
    (box_with_mask, "the part 'action_mask' of the observation has no effect on Box[2] actions"),
    (odd_leaf, "does not fit Dict(arm: Box[2], "),
]


@pytest.mark.proves("has a mask for actions that have no choices, or one that does not fit them")
@executes(
    "envs/checks/masks.py: use `action_mask=off` in a new run",
    "envs/checks/masks.py: Make it one array of shape ({},){}, or use `action_mask=off` in a new run",
)
@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_a_mask_that_does_not_fit_is_refused_and_there_is_a_way_on(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        describe_spaces(make())
    assert "use `action_mask=off`" in str(refused.value)
    assert describe_spaces(make(), action_mask="off").mask is None
