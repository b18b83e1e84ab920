"""Remedies for environments: each is read from the message of a tiny run, and carried out in the next one."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

import dppo
from dppo.__main__ import main
from dppo.envs.wrappers import old_api
from remedies import executes
from remedies.running import problem, settings_in, told
from remedies.worlds import Fine, Herd, OldStep, Overshoots

Capture = pytest.CaptureFixture[str]


def in_package(name: str, /, **kwargs: Any) -> dict[str, Any]:
    return {"env_id": f"remedies.worlds:{name}", "env_kwargs": kwargs}


@executes("envs/checks/returned.py: Use `wrappers=dppo.envs.wrappers:old_api`")
@pytest.mark.parametrize("name", ["OldReset", "OldStep"])
def test_an_environment_of_the_old_api_trains_in_the_wrapper_that_the_message_names(name: str, tmp_path: Path) -> None:
    message = problem(tmp_path, **in_package(name))
    assert "This is the API of Gym before 0.26" in message
    assert "on_env_fault" not in message
    assert problem(tmp_path, **in_package(name), **settings_in(message)) == ""


def test_an_environment_of_the_old_api_inside_wrappers_of_gymnasium_is_reached() -> None:
    from gymnasium.wrappers import OrderEnforcing, TimeLimit

    old = OldStep()
    env = old_api(TimeLimit(OrderEnforcing(old, disable_render_order_enforcing=True), 2))
    env.reset(seed=7)
    assert old.seeds == [7]
    assert env.step(0)[2:4] == (False, False)
    assert env.step(0)[2:4] == (False, True)  # the time limit holds
    env = old_api(OldStep())
    env.reset(seed=1)
    assert [env.step(0)[2:4] for _ in range(5)][-1] == (False, True)


@executes("envs/checks/returned.py: Use `wrappers=dppo.envs.wrappers:SummedReward`")
def test_rewards_of_several_parts_are_summed_by_the_wrapper_that_the_message_names(tmp_path: Path) -> None:
    message = problem(tmp_path, **in_package("SeveralRewards"))
    assert "the reward must be one number" in message
    assert "on_env_fault" not in message
    assert problem(tmp_path, **in_package("SeveralRewards"), **settings_in(message)) == ""


@executes("envs/group.py: where you cannot change the environment, use")
def test_a_space_that_is_wrong_by_factors_is_left_out_by_the_wrapper_that_the_message_names(tmp_path: Path) -> None:
    message = problem(tmp_path, **in_package("Overshoots", share=0.5))
    assert "outside its space from -1.0 to 1.0" in message
    assert problem(tmp_path, **in_package("Overshoots", share=0.5), **settings_in(message)) == ""


def test_an_overshoot_of_some_percent_is_noted_in_the_first_segment_and_used(tmp_path: Path) -> None:
    config = dppo.Config(env_id=lambda: Overshoots(0.01), num_samplers=1, total_timesteps=64, progress="off",
                         num_steps=64, run_dir=tmp_path / "run")  # fmt: skip
    assert dppo.train(config).incidents == {"outside_space": 1}


@executes(
    "envs/spaces.py: , or use `drop_obs={}` to leave it out",
    "envs/spaces.py: {}: {}. Give it at least one{}.",
    "envs/spaces.py: {}: has no parts. Give it at least one{}.",
)
@pytest.mark.parametrize("name", ["objects", "others"])
def test_a_part_that_is_empty_is_left_out_as_the_message_says(name: str, tmp_path: Path) -> None:
    message = problem(tmp_path, starts=True, **in_package("EmptyPart", name=name))
    assert f"leaf {name!r}" in message
    assert problem(tmp_path, starts=True, **in_package("EmptyPart", name=name), **settings_in(message)) == ""


def test_the_usual_argument_for_the_checker_of_gymnasium_is_accepted(tmp_path: Path) -> None:
    assert problem(tmp_path, env_id="CartPole-v1", env_kwargs={"disable_env_checker": True}, starts=True) == ""


@pytest.mark.parametrize(("part", "name"), list(enumerate(("observation", "reward", "terminated", "truncated"))))
def test_an_agent_that_is_left_out_in_its_last_step_is_named_with_the_part(
    part: int, name: str, tmp_path: Path
) -> None:
    message = problem(tmp_path, env_id=lambda: Herd((part,)), envs_per_sampler=2)
    assert f"returned no `{name}` for agent 'a', which was among `agents`" in message
    assert "on_env_fault" not in message


@executes("envs/rows.py: Return its last observation, reward and flags")
def test_agents_that_are_there_in_their_last_step_train(tmp_path: Path) -> None:
    assert problem(tmp_path, env_id=Herd, envs_per_sampler=2) == ""


def test_no_command_is_printed_for_rows_that_cannot_be_played_again(tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run0"
    assert problem(tmp_path, **in_package("Herd"), envs_per_sampler=2, total_timesteps=32) == ""
    assert main(["replay", str(run), "--episodes"]) == 0
    assert "none can be played again" in capsys.readouterr().out
    assert main(["replay", str(run), "--episode", "1"]) == 2
    assert "an episode of one depends on the actions of all" in capsys.readouterr().err
    message = problem(tmp_path, **in_package("Herd", leaves_out=[1]), envs_per_sampler=2, progress="plain")
    assert message
    said = capsys.readouterr()
    assert f"see {tmp_path / 'run1' / 'incidents' / '001'}\n" in said.out + said.err


@executes("envs/repairs.py: . Correct the environment.")
def test_a_result_of_a_wrong_form_is_corrected_and_a_new_environment_not_offered(tmp_path: Path) -> None:
    message = problem(tmp_path, **in_package("WrongShape"))
    assert message.endswith("of shape (3,) instead of (2,). Correct the environment.")
    assert problem(tmp_path, **in_package("Fine")) == ""


@executes(
    "envs/checks/faults.py: or use `on_env_fault=rebuild` to go on",
    "records/going_on.py: Nothing to resume: no iteration has finished. Start again, in another folder",
)
def test_a_fault_now_and_then_is_survived_with_the_setting_that_the_message_names(
    tmp_path: Path, capsys: Capture
) -> None:
    message = problem(tmp_path, **in_package("Flaky"), progress="plain")
    assert "Start again, in another folder" in capsys.readouterr().out
    assert problem(tmp_path, **in_package("Flaky"), **settings_in(message)) == ""


@executes("records/files/episodes.py: {}. Train longer: {} --total-timesteps {}.")
def test_a_run_without_a_finished_episode_says_how_to_go_on(tmp_path: Path, capsys: Capture) -> None:
    assert problem(tmp_path, env_id="Acrobot-v1") == ""
    run = tmp_path / "run0"
    assert main(["replay", str(run), "--episode", "1"]) == 2
    command = told(capsys.readouterr().err, r"Train longer: dppo (.*?)\.(?: Faults|\n)")
    assert main([*shlex.split(command), "--progress", "off"]) == 0


@executes("records/files/episodes.py: with record_episodes={}. Train with `record_episodes=all`")
def test_a_run_that_recorded_nothing_records_what_the_message_says(tmp_path: Path, capsys: Capture) -> None:
    settings = {**in_package("Fine"), "record_episodes": "none"}
    assert problem(tmp_path, **settings) == ""
    assert main(["replay", str(tmp_path / "run0"), "--episodes"]) == 0
    said = capsys.readouterr().out
    recorded = told(said, r"Train with --record-episodes (\w+)")
    assert problem(tmp_path, **{**settings, "record_episodes": recorded}) == ""
    assert main(["replay", str(tmp_path / "run1"), "--episode", "1", "--trust"]) == 0


@pytest.mark.parametrize("command", ["eval", "replay"])
def test_videos_are_made_whatever_render_mode_the_run_was_given(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("av")
    settings = in_package("fixed_mode", render_mode="rgb_array_list")
    assert problem(tmp_path, **settings) == ""
    words = ["--episodes", "1"] if command == "eval" else ["--episode", "1"]
    video = tmp_path / "out.mp4"
    assert main([command, str(tmp_path / "run0"), *words, "--trust", "--video", str(video)]) == 0
    assert video.exists()


def test_a_render_that_returns_a_tuple_is_described() -> None:
    from dppo.errors import ConfigError
    from dppo.records.video import image_of

    env = Fine("rgb_array")
    env.render = lambda: (Fine().render(), {})  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="whose render_mode is 'rgb_array', returned a tuple of 2, not an image"):
        image_of(env)
