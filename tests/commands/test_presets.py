"""Presets: each is valid, has a source and a score, and applies when it says; `dppo presets` lists and prints them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import yaml
from builders import BOX, DISCRETE, make_config
from commandline import Typed, parse

import dppo
from dppo.config import Config, presets
from dppo.config.presets import Preset, described_presets, merge_preset
from dppo.config.resolve import resolve
from dppo.envs.simulated import register
from dppo.spaces.actions import continuous_width

PRESETS = list(described_presets())
OF_OTHER_PACKAGES = {"MiniGrid": "minigrid", "ALE/": "ale_py", "highway": "highway_env"}
WITH_REAL_ACTIONS = re.compile(
    "Pendulum|MountainCarContinuous|LunarLanderContinuous|BipedalWalker|BipedalWalkerHardcore|"
    "HalfCheetah|Hopper|Walker2d|Ant|Humanoid|Reacher|InvertedDoublePendulum|Swimmer"
)
GAME = "ALE/Pong-v5"
GRID = "MiniGrid-DoorKey-5x5-v0"
every_preset = pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)


def environment_of(preset: Preset) -> str:
    """Return an environment that a preset is for, with the module that registers it."""
    examples = {
        "atari-cleanrl": GAME,
        "atari-machado": GAME,
        "fast": "CartPole-v1",
        "MiniGrid-*": GRID,
    }
    env_id = examples.get(preset.name, preset.name)
    module = next(
        (module for start, module in OF_OTHER_PACKAGES.items() if env_id.startswith(start)), None
    )
    return f"{module}:{env_id}" if module else env_id


@every_preset
def test_a_preset_fits_its_environment_and_names_its_source_and_its_score(preset: Preset) -> None:
    register()
    env_id = environment_of(preset)
    package, _, _ = env_id.partition(":")
    assert env_id in gym.registry or package in OF_OTHER_PACKAGES.values()

    config = make_config({"env_id": env_id} | preset.settings)
    family, _, _ = preset.name.partition("-")
    actions = BOX if WITH_REAL_ACTIONS.fullmatch(family) else DISCRETE
    # `adv_floor` without `norm_adv` was refused when actions turned out to be real-valued
    resolve(config, continuous_width(actions))
    merged = preset.settings | {"env_id": env_id}
    assert merge_preset({"env_id": env_id}, preset.settings) == (merged, ())
    assert config.total_timesteps >= 4 * config.batch_size

    required = {"source", "published", "here"}
    assert required <= preset.about.keys() <= required | {"note", "applies"}
    applies = preset.about.get("applies")
    possible = {"by itself", "on request", "by name"} if preset.settings else {None}
    assert applies in possible

    here = preset.about["here"]
    was_run = not here.startswith("not run")
    assert re.search(r"\d", here) or here.startswith("not run here yet")
    # settings that were not measured apply on request only
    assert applies != "by itself" or was_run


APPLIES: list[tuple[str, str | None, dict[str, Any], str]] = [
    (
        "CartPole-v1",
        "CartPole-v1",
        {"gamma": 0.98},
        "using the preset CartPole-v1; --preset none disables it",
    ),
    ("CartPole-v1 --preset auto", "CartPole-v1", {}, "using the preset CartPole-v1"),
    ("LunarLander-v3", None, {}, "`dppo presets LunarLander-v3` shows settings and scores"),
    ("LunarLander-v3 --preset none", None, {}, ""),
    (
        "LunarLander-v3 --preset LunarLander-v3",
        "LunarLander-v3",
        {"gae_lambda": 0.98},
        "using the preset LunarLander-v3",
    ),
    (f"minigrid:{GRID}", "MiniGrid-*", {"drop_obs": ["mission"]}, "using the preset MiniGrid-*"),
    ("minigrid:MiniGrid-GoToDoor-5x5-v0", None, {"drop_obs": None}, ""),
    ("MountainCar-v0", None, {}, ""),
    ("mysim:fast", None, {}, ""),
    (GAME, None, {}, ""),
    (
        f"{GAME} --preset atari-machado",
        "atari-machado",
        {"atari": "game"},
        "using the preset atari-machado",
    ),
]


@pytest.mark.parametrize(
    ("line", "name", "settings", "note"), APPLIES, ids=[line for line, *_ in APPLIES]
)
def test_a_preset_applies_by_itself_only_where_it_says_so(
    line: str, name: str | None, settings: dict[str, Any], note: str
) -> None:
    parsed = parse(line.split())
    assert parsed.preset == name
    assert {key: parsed.settings.get(key) for key in settings} == settings
    assert "; ".join(parsed.notes).startswith(note)
    assert bool(parsed.notes) is bool(note)


def test_a_preset_of_ppo_is_not_announced_where_soft_actor_critic_takes_nothing_from_it() -> None:
    parsed = parse(["Pendulum-v1", "--algo", "sac"])
    assert parsed.preset is None
    assert parsed.tuned == frozenset()
    [note] = parsed.notes
    assert note.startswith("the preset is for algo=ppo; not taken over for algo=sac: ")
    assert "num_samplers, num_steps" in note


def test_a_value_of_a_preset_that_does_not_fit_is_changed_and_printed(
    desk: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "PRESETS", desk)
    Path("one.yaml").write_text("CartPole-v1: {num_steps: 16, minibatch_size: 64}")
    printed = typed("train CartPole-v1 --num-samplers 2 --total-timesteps 32 --progress plain")
    assert "note: using the preset CartPole-v1; --preset none disables it" in printed
    assert "note: preset: minibatch_size=64 is larger than the batch of 32 steps" in printed
    assert "minibatch_size=32" in printed


def test_arguments_of_the_environment_are_added_to_those_of_a_preset() -> None:
    """A flag for the game's mode must not bring back sticky actions."""
    line = [GAME, "--preset", "atari-cleanrl", "--env-kwargs", '{"mode": 1}']
    assert parse(line).settings["env_kwargs"] == {"repeat_action_probability": 0.0, "mode": 1}
    settings: dict[str, Any] = {"env_id": GAME, "env_kwargs": {"repeat_action_probability": 0.5}}
    assert Config.preset("atari-cleanrl", **settings).env_kwargs == {
        "repeat_action_probability": 0.5
    }


def test_all_presets_are_listed_with_settings_source_and_score(typed: Typed) -> None:
    printed = typed("presets")
    assert max(map(len, printed.splitlines())) <= 80
    rows = " ".join(printed.split())
    for preset in PRESETS:
        star = " *" if preset.about.get("applies") == "by itself" else ""
        assert f" {preset.name}{star} settings " in rows
        assert f"score {preset.about['here']}" in rows
    assert "Swimmer-v5 settings total_timesteps 1000000, num_samplers 4," in rows


@pytest.mark.parametrize(
    "name", ["LunarLander-v3", f"minigrid:{GRID}", "atari-machado", "MountainCar-v0"]
)
def test_a_printed_preset_is_a_file_of_settings(name: str, desk: Path, typed: Typed) -> None:
    printed = typed(f"presets {name}")
    assert "# source: " in printed
    assert "# here: " in printed
    Path("mine.yaml").write_text(printed, encoding="utf8")
    env_id = GAME if name.startswith("atari") else name
    from_file = parse([env_id, "--preset", "none", "--config", "mine.yaml"]).settings
    assert from_file == parse([env_id, "--preset", name]).settings
    assert yaml.safe_load(printed) | {"env_id": env_id} == from_file


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("LunarLander-v2", "LunarLander-v2 is not a known preset. Did you mean LunarLander-v3?"),
        ("zzz", "zzz is not a known preset. `dppo presets` lists them."),
        ("a b", "takes one NAME"),
        ("--all", "--all is not a known flag."),
    ],
)
def test_an_unknown_preset_is_refused_with_the_nearest(
    words: str, message: str, refused: Typed
) -> None:
    assert message in refused(f"presets {words}")


@pytest.mark.slow
@every_preset
def test_a_preset_starts(preset: Preset, tmp_path: Path) -> None:
    """One short iteration, with the sizes that a preset gives way to."""
    module = environment_of(preset).rpartition(":")[0] or {
        "box2d": "Box2D",
        "mujoco": "mujoco",
    }.get(preset.family)
    for needed in filter(None, (module, "cv2" if preset.family == "atari" else None)):
        pytest.importorskip(needed)
    if "*" in environment_of(preset):
        pytest.skip("no settings, for several environments")
    sizes = {"num_samplers": 2, "num_steps": 16, "total_timesteps": 32}
    sized = sizes | {
        "env_id": environment_of(preset),
        "run_dir": tmp_path / "run",
        "progress": "off",
    }
    settings, _ = merge_preset(sized, preset.settings)
    assert dppo.train(make_config(settings)).global_step == 32
