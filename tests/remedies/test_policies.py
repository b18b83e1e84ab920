"""Remedies for policies that are loaded and played in Python."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_run

import dppo
from dppo.config.aliases import MODEL_METHODS
from dppo.errors import CheckpointError, ConfigError
from remedies import executes
from remedies.refused import Masked
from remedies.running import captured, problem
from remedies.worlds import BOX, Fine

MODEL = "worlds.models:Plain"
OTHER = "worlds.models:Residual"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return runs of some kinds, by name."""
    parent = tmp_path_factory.mktemp("policies")
    kinds: dict[str, dict[str, Any]] = {
        "plain": {"env_id": "remedies.worlds:Fine"},
        "masked": {"env_id": lambda: Masked(BOX)},
        "memory": {"env_id": Fine, "memory": "gru", "memory_size": 4, "sequence_length": 16},
        "own": {"env_id": "remedies.worlds:Fine", "model": MODEL},
        "object": {"env_id": ObjectNeeded, "env_kwargs": {"needed": object}},
    }
    for settings in kinds.values():
        assert problem(parent, **settings) == ""
    return {name: parent / f"run{number}" for number, name in enumerate(kinds)}


class ObjectNeeded(Fine):
    """Takes a Python object."""

    def __init__(self, needed: Any) -> None:
        assert needed is object
        super().__init__()


def without_arguments() -> Any:
    """Return a factory that accepts nothing, and cannot be found by name."""

    def make() -> Fine:
        return Fine()

    return make


def loaded(run: Path) -> dppo.Policy:
    return dppo.load_policy(run, trust=True)


def played(policy: Any, env: Any = None, **options: Any) -> None:
    """Play an episode."""
    assert dppo.evaluate(policy, env, episodes=1, **options).returns


@executes("policies/policy.py: obs has shape {}. Pass {}, or (n, {})")
def test_an_observation_of_another_shape_is_given_that_of_the_message(
    runs: dict[str, Path],
) -> None:
    policy = loaded(runs["plain"])
    with pytest.raises(ValueError, match="obs has shape") as refused:
        policy.act(np.zeros(3, np.float32))
    shape = captured(str(refused.value), r"Pass \((\d+),\)")
    assert policy.act(np.zeros(int(shape), np.float32)) in (0, 1)
    together = policy.act(np.zeros((4, int(shape)), np.float32))
    assert np.shape(together) == (4,)


@executes(
    "policies/policy.py: this policy has no memory: act() returns the action alone. Leave state out",
    "policies/policy.py: state has shape {}. Pass that of the last act(), {}, or None",
)
def test_a_state_is_left_out_or_that_of_the_last_step(runs: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="Leave state out"):
        loaded(runs["plain"]).act(Fine.obs, state=np.zeros(4))
    assert loaded(runs["plain"]).act(Fine.obs) in (0, 1)
    policy: Any = loaded(runs["memory"])
    with pytest.raises(ValueError, match=r"Pass that of the last act\(\)"):
        policy.act(Fine.obs, state=np.zeros(9))
    _, state = policy.act(Fine.obs, state=None)

    action, _ = policy.act(Fine.obs, state=state)
    assert action in (0, 1)


@executes(
    "policies/policy.py: action_mask has no effect on this policy: {}. Leave it out",
    "policies/policy.py: action_mask is missing: this policy was trained with masks. Pass action_mask={}",
    "policies/policy.py: Pass a mask by its name: action_mask=...",
)
def test_a_mask_is_left_out_or_passed(runs: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="Leave it out"):
        loaded(runs["plain"]).act(Fine.obs, action_mask=np.ones(2, bool))
    policy = loaded(runs["masked"])
    with pytest.raises(ValueError, match="action_mask is missing") as refused:
        policy.act(Fine.obs)
    code = captured(str(refused.value), r"Pass action_mask=(.*)\.$")
    action_mask = eval(code, {"env": Masked(BOX)})
    with pytest.raises(ValueError, match=r"Pass a mask by its name: action_mask="):
        policy.act(Fine.obs, action_mask)
    assert policy.act(Fine.obs, action_mask=action_mask) in (0, 1)


@executes(
    "policies/policy.py: Pass {}, or (n, {}); of several agents, the observation of each",
    "policies/policy.py: Pass np.random.default_rng(1), and the same one to each call",
    "policies/policy.py: Use act(obs), which returns the most likely action, or act(obs, generator=",
    "config/aliases.py: Policy.act and `dppo eval` take the most likely actions; to sample, use act(obs",
)
def test_what_other_libraries_pass_is_answered_with_what_act_takes(runs: dict[str, Path]) -> None:
    policy: Any = loaded(runs["plain"])
    with pytest.raises(ValueError, match=r"a dict of 'a', 'b', .*Pass \(\d,\).* several agents"):
        policy.act({"a": Fine.obs, "b": Fine.obs})
    with pytest.raises(ValueError, match="generator=1 is not a NumPy generator") as refused:
        policy.act(Fine.obs, generator=1)
    generator = eval(captured(str(refused.value), r"Pass (.*), and"), {"np": np})
    for name in ("predict", "compute_single_action"):
        with pytest.raises(AttributeError, match=rf"{name}'\. Use act\(obs\), which returns"):
            getattr(policy, name)
    with pytest.raises(ValueError, match=r"to sample, use act\(obs, generator=np\.random\.default"):
        policy.act(Fine.obs, deterministic=False)
    assert not hasattr(policy, "learn")
    assert policy.act(Fine.obs) in (0, 1)
    assert policy.act(Fine.obs, generator=generator) in (0, 1)


@executes(
    "config/aliases.py: Use dppo.load_policy(run), whose act(obs) returns the action",
    "config/aliases.py: Use dppo.train(config, resume=run), which continues a run",
    "config/aliases.py: Use dppo.evaluate(run, env=...), which plays in another environment",
    "policies/policy.py: Use spaces, which describes observations and actions",
    "policies/policy.py: obs is a pair of observation and info",
    "records/observer.py: an Evaluation is not a pair. Use its mean_return and std_return.",
)
def test_the_habits_of_a_model_of_stable_baselines_are_answered(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", env_id=Fine, iterations=1)
    result: Any = dppo.train(config)
    policy: Any = dppo.load_policy(result)
    for model in (result, policy):
        for name, answer in MODEL_METHODS.items():
            if name != "predict":
                with pytest.raises(AttributeError, match=re.escape(f"{name!r}. {answer}")):
                    getattr(model, name)
            assert not hasattr(model, name)
    with pytest.raises(AttributeError, match=r"'predict'\. Use dppo.load_policy\(run\)"):
        result.predict(Fine.obs)
    with pytest.raises(AttributeError, match=r"'action_space'\. Use spaces, which"):
        _ = policy.action_space
    assert policy.spaces.actions
    with pytest.raises(ValueError, match="Pass the observation alone"):
        policy.act(Fine().reset())
    obs, _ = Fine().reset()
    assert policy.act(obs) in (0, 1)

    assert dppo.train(config, resume=result).global_step == result.global_step
    evaluation: Any = dppo.evaluate(result, env=Fine, episodes=2)
    with pytest.raises(TypeError, match="Use its mean_return and std_return"):
        _, _ = evaluation
    assert (evaluation.mean_return, evaluation.std_return) == (5.0, 0.0)
    assert pickle.loads(pickle.dumps(result)) == copy.deepcopy(result) == result


@executes(
    "policies/loading.py: model={}: has no effect: {} has the default network. Leave it out",
    "policies/loading.py: or pass the class: load_policy(path, model=Class)",
    "policies/loading.py: Use the class as it was at the time of training",
)
def test_a_network_is_found_as_the_messages_say(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from worlds.models import Plain

    with pytest.raises(ConfigError, match="Leave it out"):
        dppo.load_policy(runs["plain"], model=Plain)
    with pytest.raises(CheckpointError, match="is not the network that was trained"):
        dppo.load_policy(runs["own"], model=OTHER)
    with pytest.raises(CheckpointError, match=r"load_policy\(path, model=Class\)"):
        dppo.load_policy(runs["own"], model="nowhere.models:Plain", trust=True)

    policy = dppo.load_policy(runs["own"], model=Plain)
    assert policy.act(Fine.obs) in (0, 1)


@executes(
    "policies/arguments.py: num_actors={}: must not be negative. Use 0 to play in this process",
    "policies/arguments.py: num_actors: actors have no window and write no video. "
    "Leave it out, or `render` and `video`",
    "policies/on_actors.py: num_actors: an environment that is already made stays in this process. Pass its id",
    "policies/player.py: env_kwargs={}: must be arguments by name. Use one such as",
)
def test_what_actors_cannot_play_is_played_here(runs: dict[str, Path], tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"num_actors": -1},
        {"num_actors": 1, "video": tmp_path / "out.mp4"},
        {"num_actors": 1, "env": Fine()},
        {"env_kwargs": [1]},
    ]
    for arguments in wrong:
        with pytest.raises(ConfigError, match=r"num_actors|env_kwargs"):
            played(runs["plain"], trust=True, **arguments)

    played(runs["plain"], trust=True, num_actors=0, env_kwargs={})


@executes(
    "policies/player.py: env_kwargs: have no effect on an environment that is already made. Leave them out",
    "policies/player.py: Pass env, or the run in place of the policy",
    "policies/player.py: model: has no effect on a policy that is already loaded. Leave it out",
    "policies/player.py: Make it with render_mode='human'",
    "policies/player.py: in the run, whose folder cannot hold it. Pass `env_kwargs`",
    "envs/names.py: is neither a string nor callable. Pass an id or a function",
)
def test_an_evaluation_is_given_what_the_messages_ask_for(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    policy = loaded(runs["plain"])
    loaded_policy = loaded(runs["object"])
    with pytest.raises(ConfigError, match="Leave them out"):
        played(policy, Fine(), env_kwargs={"a": 1})
    played(policy, Fine())
    with pytest.raises(ConfigError, match="Leave it out"):
        played(policy, Fine, model=MODEL)
    played(policy, Fine)
    with pytest.raises(ConfigError, match="Pass env, or the run in place of the policy"):
        played(policy)
    played(runs["plain"], trust=True)
    with pytest.raises(ConfigError, match="Pass an id or a function"):
        played(policy, 5)
    played(policy, "remedies.worlds:Fine")
    with pytest.raises(ConfigError, match="Make it with render_mode='human'"):
        played(policy, Fine(), render=True)
    played(policy, Fine(render_mode="human"))
    with pytest.raises(ConfigError, match="Pass `env_kwargs`"):
        played(loaded_policy, ObjectNeeded)

    played(loaded_policy, ObjectNeeded, env_kwargs={"needed": object})


@executes(
    "records/files/run_folder.py: Pass `{}` again to resume the run: in Python with Config({}=...) and train(",
    "config/trust.py: Pass the object itself in Python: dppo.train",
)
def test_objects_of_a_program_are_passed_again(runs: dict[str, Path], tmp_path: Path) -> None:
    from dppo.__main__ import main
    from dppo.records.files.run_folder import settings_to_resume

    run = runs["object"]
    with pytest.raises(
        ConfigError, match=r"with Config\(env_kwargs=\.\.\.\) and train\(config, resume"
    ):
        settings_to_resume(run)
    stored = settings_to_resume(run, read_only=True)
    config = dppo.Config(
        **{**stored, "env_id": ObjectNeeded, "env_kwargs": {"needed": object}, "progress": "off"}
    )
    assert dppo.train(config, resume=run).iterations == 1
    message = problem(tmp_path, env_id=without_arguments())
    assert message == ""
    with pytest.raises(
        ConfigError, match=r"Pass the object itself in Python: .*dppo\.evaluate\(run, env=\.\.\.\)"
    ):
        played(tmp_path / "run0", trust=True)

    played(tmp_path / "run0", env=Fine)
    assert main(["eval", str(tmp_path / "run0"), "--episodes", "1", "--trust"]) == 2


@executes("tools/video.py: Return one if its render_mode is rgb_array")
def test_a_video_is_made_of_images(runs: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("av")
    policy = loaded(runs["plain"])
    blind = Fine("rgb_array")
    blind.render = lambda: None  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="Return one if its render_mode is rgb_array"):
        played(policy, blind, video=tmp_path / "a.mp4")
    played(policy, Fine("rgb_array"), video=tmp_path / "a.mp4")


@executes(
    "envs/preparation.py: Accept render_mode as an argument and pass it on to the environment"
)
def test_a_factory_that_accepts_render_mode_is_filmed(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("av")
    policy = loaded(runs["plain"])
    with pytest.raises(ConfigError, match="Accept render_mode as an argument and pass it on"):
        played(policy, without_arguments(), video=tmp_path / "a.mp4")
    played(policy, lambda render_mode=None: Fine(render_mode), video=tmp_path / "a.mp4")


@executes(
    "envs/preparation.py: , or leave `render` out, and let `env_kwargs` open the window",
    "policies/arguments.py: Or use `video=out.mp4`, which needs no display",
)
def test_without_a_window_another_way_is_named(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("av")
    policy = loaded(runs["plain"])
    monkeypatch.setenv("DISPLAY", ":0")

    def opens_it_itself(window: bool = False) -> Fine:
        return Fine()

    with pytest.raises(
        ConfigError, match="leave `render` out, and let `env_kwargs` open the window"
    ):
        played(policy, opens_it_itself, render=True)
    played(policy, opens_it_itself, env_kwargs={"window": True})
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="Or use `video=") as refused:
        played(policy, Fine, render=True)
    name = captured(str(refused.value), "Or use `video=(.*?)`")

    played(policy, Fine, video=tmp_path / name)
    assert re.fullmatch(r".*\.mp4", name)
