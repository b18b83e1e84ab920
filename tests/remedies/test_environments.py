"""Remedies for environments: each is read from the message of a tiny run, and carried out in the next one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import tiny_run
from commandline import Typed

import dppo
from dppo.config.trust import code_named_by
from dppo.envs.wrappers import old_api
from dppo.errors import ConfigError
from remedies import executes
from remedies.refused import Shaped
from remedies.running import TINY, captured, problem, settings_in
from remedies.worlds import BOX, TWO, Fine, Herd, OldStep, Overshoots

Capture = pytest.CaptureFixture[str]


def in_package(name: str, /, **kwargs: Any) -> dict[str, Any]:
    return {"env_id": f"remedies.worlds:{name}", "env_kwargs": kwargs}


@pytest.mark.proves("has the API of Gym before 0.26")
@executes("envs/checks/returned.py: Use `wrappers=dppo.envs.wrappers:old_api`")
@pytest.mark.parametrize("name", ["OldReset", "OldStep"])
def test_an_environment_of_the_old_api_trains_in_the_wrapper_that_the_message_names(
    name: str, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize(
    "settings",
    [
        {"num_samplers": 2},
        {"num_samplers": 2, "env_threads": True},
        {"envs_per_sampler": 2},
        {"standby_envs": 1},
        {"eval_every": 16},
    ],
    ids=str,
)
@executes("envs/sharing.py: Create a new environment in each call.")
def test_a_function_that_returns_the_same_environment_again_is_refused(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """The episodes of two samplers would be parts of one, without any error."""
    shared = gym.make("CartPole-v1")
    settings = settings | {"total_timesteps": 64}
    message = problem(tmp_path, env_id=lambda: gym.Wrapper(shared), **settings)
    assert "returned an environment that this process already uses" in message
    assert problem(tmp_path, env_id=lambda: gym.make("CartPole-v1"), **settings) == ""


@executes("policies/player.py: Pass another environment.")
def test_an_evaluation_in_the_environment_of_the_run_is_refused(tmp_path: Path) -> None:
    """It would play on in the open episode of the run, without any error."""
    messages = list[str]()

    class Evaluating(dppo.Observer):
        def on_iteration(self, row: dict[str, float]) -> None:
            policy = dppo.load_policy(tmp_path / "trained")
            with pytest.raises(ConfigError) as raised:
                dppo.evaluate(policy, env=shared, episodes=1)
            messages.append(str(raised.value))
            dppo.evaluate(policy, env=Fine(), episodes=1)

    dppo.train(tiny_run(tmp_path / "trained", env_id=Fine))
    shared = Fine()
    dppo.train(tiny_run(tmp_path / "run", env_id=lambda: shared), observers=[Evaluating()])
    assert "env: is an environment that this process already uses" in messages[0]
    for _ in range(2):
        dppo.evaluate(tmp_path / "trained", env=shared, episodes=1)


def test_a_closed_environment_may_be_returned_again(tmp_path: Path) -> None:
    shared = Fine()
    for run in "ab":
        result = dppo.train(tiny_run(tmp_path / run, env_id=lambda: shared))
        assert len(dppo.evaluate(result, env=lambda: shared, episodes=2).returns) == 2


@executes("envs/checks/returned.py: Use `wrappers=dppo.envs.wrappers:SummedReward`")
def test_rewards_of_several_parts_are_summed_by_the_wrapper_that_the_message_names(
    tmp_path: Path,
) -> None:
    message = problem(tmp_path, **in_package("SeveralRewards"))
    assert "The reward must be one number" in message
    assert "on_env_fault" not in message
    assert problem(tmp_path, **in_package("SeveralRewards"), **settings_in(message)) == ""
    assert code_named_by(settings_in(message)) == {}  # our own needs no trust
    assert code_named_by({"wrappers": ["dppo.envs.wrappers:gym.make"]})


@executes("envs/group.py: Use `wrappers=dppo.envs.wrappers:no_limits`")
def test_a_space_that_is_wrong_by_factors_is_left_out_by_the_wrapper_that_the_message_names(
    tmp_path: Path,
) -> None:
    message = problem(tmp_path, **in_package("Overshoots", share=0.5))
    assert "outside its space from -1.0 to 1.0" in message
    assert problem(tmp_path, **in_package("Overshoots", share=0.5), **settings_in(message)) == ""


def test_an_overshoot_of_some_percent_is_noted_in_the_first_segment_and_used(
    tmp_path: Path,
) -> None:
    config = tiny_run(tmp_path / "run", steps=64, iterations=1, env_id=lambda: Overshoots(0.01))
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
    assert (
        problem(tmp_path, starts=True, **in_package("EmptyPart", name=name), **settings_in(message))
        == ""
    )


def test_the_usual_argument_for_the_checker_of_gymnasium_is_accepted(tmp_path: Path) -> None:
    usual = {"disable_env_checker": True}
    assert problem(tmp_path, env_id="CartPole-v1", env_kwargs=usual, starts=True) == ""


@pytest.mark.proves("leaves an agent out in its last step")
@pytest.mark.parametrize(
    ("part", "name"), list(enumerate(("observation", "reward", "terminated", "truncated")))
)
def test_an_agent_that_is_left_out_in_its_last_step_is_named_with_the_part(
    part: int, name: str, tmp_path: Path
) -> None:
    message = problem(tmp_path, env_id=lambda: Herd((part,)), envs_per_sampler=3)
    assert f"returned no `{name}` for agent 'ann', which was among `agents`" in message
    assert "on_env_fault" not in message


@pytest.mark.proves("lets an agent vanish without an end, or lists an unknown one")
@executes("envs/sub_envs/agents.py: Return True as its `terminated` or `truncated` in the step")
@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ({"vanish": True}, "returned no end of agent 'ann', which was among `agents` and left it. Return True"),
        ({"strays": ["dan"]}, "returned `agents` with 'dan' instead of possible_agents alone. List it"),
        ({"parts": True}, "The reward must be one number. Return reward.item(), or a weighted sum of several parts"),
    ],
)  # fmt: skip
def test_agents_against_the_rules_are_named_without_a_remedy_for_single_environments(
    mistake: Any, words: str, tmp_path: Path
) -> None:
    message = problem(tmp_path, **in_package("Herd", **mistake), envs_per_sampler=3)
    assert words in message
    assert not settings_in(message)
    assert "on_env_fault" not in message


@executes("envs/sub_envs/agents.py: Return its last observation, reward and flags")
def test_agents_that_are_there_in_their_last_step_train(tmp_path: Path) -> None:
    assert problem(tmp_path, env_id=Herd, envs_per_sampler=3) == ""


def test_no_command_is_printed_for_sub_environments_that_cannot_be_played_again(
    tmp_path: Path, capsys: Capture, typed: Typed, refused: Typed
) -> None:
    run = tmp_path / "run0"
    assert problem(tmp_path, **in_package("Herd"), envs_per_sampler=3) == ""
    assert "none can be played again" in typed(f"replay {run} --episodes")
    message = refused(f"replay {run} --episode 1")
    assert "whose episodes depend on the actions of all" in message
    herd = in_package("Herd", leaves_out=[1])
    assert problem(tmp_path, **herd, envs_per_sampler=3, progress="plain")
    incident = tmp_path / "run1" / "incidents" / "001"
    assert f": see {incident}\n" in "".join(capsys.readouterr())


@executes("envs/repairs.py: . Correct the environment.")
def test_a_result_of_a_wrong_form_is_corrected_and_a_new_environment_not_offered(
    tmp_path: Path,
) -> None:
    message = problem(tmp_path, **in_package("WrongShape"))
    assert message.endswith("of shape (3,) instead of (2,). Correct the environment.")
    assert problem(tmp_path, **in_package("Fine")) == ""


@executes(
    "envs/checks/faults.py: or use `on_env_fault=rebuild` to go on",
    "records/closing_lines.py: Nothing to resume: no iteration has finished. Start again, in another folder",
    "records/files/run_folder.py: of which no iteration has finished. Use another folder, or delete this one",
)
def test_a_fault_now_and_then_is_survived_with_the_setting_that_the_message_names(
    tmp_path: Path, capsys: Capture
) -> None:
    message = problem(tmp_path, **in_package("Flaky"), progress="plain")
    assert "Start again, in another folder" in capsys.readouterr().out
    corrected = settings_in(message)
    place = tmp_path / "run0"
    again = problem(tmp_path, **in_package("Flaky"), **corrected, run_dir=place)
    assert again.endswith("Use another folder, or delete this one.")
    shutil.rmtree(place)
    assert problem(tmp_path, **in_package("Flaky"), **corrected, run_dir=place) == ""
    assert problem(tmp_path, **in_package("Flaky"), **corrected) == ""


@executes(
    "records/closing_lines.py: Nothing to resume: no iteration has finished. Start again, in another folder"
)
def test_a_run_whose_controller_fails_at_first_is_started_again(
    tmp_path: Path, capsys: Capture
) -> None:
    plant: dict[str, Any] = {"env_id": "worlds.plants:Plant", "total_timesteps": 32}
    plant["progress"] = "plain"
    evaluated = {"eval_every": 16, "eval_episodes": 2}
    for setting, needs in {"prior": {"prior_steps": 16}, "baseline": evaluated}.items():
        message = problem(tmp_path, **plant | needs | {setting: "worlds.plants:wide"})
        assert message.startswith(f"{setting}=worlds.plants:wide: in step 1 of episode 0")
        printed = capsys.readouterr().out
        assert "Start again, in another folder" in printed
        assert "Resume with" not in printed
        corrected = {setting: "worlds.plants:proportional"}
        assert problem(tmp_path, **plant | needs | corrected) == ""


@executes("records/files/episodes.py: Train longer: {} --total-timesteps {}.")
def test_a_run_without_a_finished_episode_says_how_to_go_on(
    tmp_path: Path, typed: Typed, refused: Typed
) -> None:
    assert problem(tmp_path, env_id="Acrobot-v1") == ""
    message = refused(f"replay {tmp_path / 'run0'} --episode 1")
    command = captured(message, r"Train longer: dppo (.*?)\.(?: Faults|\n)")
    typed(f"{command} --progress off")


@executes("records/files/episodes.py: with record_episodes={}. Train with `record_episodes=all`")
def test_a_run_that_recorded_nothing_records_what_the_message_says(
    tmp_path: Path, typed: Typed
) -> None:
    assert problem(tmp_path, **in_package("Fine"), record_episodes="none") == ""
    printed = typed(f"replay {tmp_path / 'run0'} --episodes")
    recorded = captured(printed, r"Train with --record-episodes (\w+)")
    assert problem(tmp_path, **in_package("Fine"), record_episodes=recorded) == ""
    typed(f"replay {tmp_path / 'run1'} --episode 1 --trust")


@pytest.mark.parametrize("words", ["eval {} --episodes 1", "replay {} --episode 1"])
def test_videos_are_made_whatever_render_mode_the_run_was_given(
    words: str, tmp_path: Path, typed: Typed
) -> None:
    pytest.importorskip("av")
    assert problem(tmp_path, **in_package("fixed_mode", render_mode="rgb_array_list")) == ""
    video = tmp_path / "out.mp4"
    typed(f"{words.format(tmp_path / 'run0')} --trust --video {video}")
    assert video.exists()


def test_a_render_that_returns_a_tuple_is_described() -> None:
    from dppo.tools.video import image_of

    env = Fine("rgb_array")
    env.render = lambda: (Fine().render(), {})  # type: ignore[method-assign]
    with pytest.raises(
        ConfigError, match="whose render_mode is 'rgb_array', returned a tuple of 2, not an image"
    ):
        image_of(env)


def incidents(tmp_path: Path, **settings: Any) -> dict[str, str]:
    """Return the incidents of a run that succeeds, by kind."""
    messages: dict[str, str] = {}

    class Watching(dppo.Observer):
        def on_incident(self, incident: Any) -> None:
            messages[incident.kind.value] = incident.message

    run_dir = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
    sizes = {**TINY, "num_steps": 32, "total_timesteps": 32, "minibatch_size": 32}
    dppo.train(dppo.Config(**{**sizes, "run_dir": run_dir, **settings}), observers=[Watching()])
    return messages


class Offers(Shaped):
    """Has a mask in its info."""

    def reset(self, **_: Any) -> Any:
        return super().reset()[0], {"action_mask": np.ones(2, bool)}

    def step(self, action: Any) -> Any:
        *results, _ = super().step(action)
        return *results, {"action_mask": np.ones(2, bool)}


class Times(Fine):
    """Observes its own clock, from `start` in steps of `by`."""

    start = 0.0
    by = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)

    def reset(self, **_: Any) -> Any:
        self.taken = 0
        return np.array([self.start]), {}

    def step(self, action: Any) -> Any:
        _, *results = super().step(action)
        return np.array([self.start + self.by * self.taken]), *results


class Precise(Times):
    start = 1e9
    by = 0.1


class Large(Times):
    start = 500.0
    by = 100.0


@pytest.mark.slow
@executes(
    "envs/checks/first_segment.py: Set action_mask=info to take allowed actions only, or action_mask=off",
    "envs/checks/first_segment.py: {} actions have no choices to allow. Set action_mask=off",
    "envs/checks/first_segment.py: Use obs_dtype=float64 with norm_obs=True, or subtract an offset",
    "envs/checks/first_segment.py: Use norm_obs=True (--norm-obs), or scale it in the environment",
)
@pytest.mark.parametrize(
    ("env_id", "kind", "settings"),
    [
        (Offers, "mask_not_used", {"action_mask": "info"}),
        (Offers, "mask_not_used", {"action_mask": "off"}),
        (lambda: Offers(act=gym.spaces.Box(-1, 1, (1,))), "mask_not_used", {"action_mask": "off"}),
        (Precise, "precision_lost", {"obs_dtype": "float64", "norm_obs": True}),
        (Large, "large_observations", {"norm_obs": True}),
    ],
)
def test_a_note_about_observations_is_gone_with_the_settings_that_it_names(
    env_id: Any, kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    note = incidents(tmp_path, env_id=env_id, norm_obs=False)[kind]
    for name, value in settings.items():
        assert f"{name}={value}" in note
    assert kind not in incidents(tmp_path, **{"env_id": env_id, "norm_obs": False, **settings})


@executes("envs/checks/masks.py: Add it to the info of reset and step, or use `action_mask=off`")
def test_a_mask_that_is_missing_is_added_or_not_asked_for(tmp_path: Path) -> None:
    message = problem(tmp_path, env_id=Fine, action_mask="info")
    assert problem(tmp_path, env_id=Fine, **settings_in(message.partition("on_env_fault")[0])) == ""
    assert problem(tmp_path, env_id=Offers, action_mask="info") == ""


class Nested(Shaped):
    """Masks of an action of two parts, by its method."""

    masks: Any = None

    def __init__(self) -> None:
        super().__init__(act=gym.spaces.Tuple([TWO, BOX]))

    def action_masks(self) -> Any:
        return self.masks


class WithFloats(Nested):
    masks = np.ones(2, bool), np.ones(2, bool)


class AsDict(Nested):
    masks = {"0": np.ones(2, bool), "1": None}  # noqa: RUF012


class AsTold(Nested):
    masks = np.ones(2, bool), None


@executes(
    "envs/checks/masks.py: {}, which is {} and has no choices to allow. Pass None for it",
    "envs/checks/masks.py: {} that is a dict, and the actions are a {}. Pass a tuple",
)
def test_masks_of_several_parts_have_the_form_that_the_messages_name(tmp_path: Path) -> None:
    assert "Pass None for it" in problem(tmp_path, env_id=WithFloats)
    assert "Pass a tuple" in problem(tmp_path, env_id=AsDict)
    assert problem(tmp_path, env_id=AsTold) == ""


class OddState(Fine):
    """Its state is an object."""

    def get_state(self) -> Any:
        return object()

    def set_state(self, state: Any) -> None:
        pass


class PlainState(OddState):
    """Its state is plain data."""

    def get_state(self) -> Any:
        return self.taken

    def set_state(self, state: Any) -> None:
        self.taken = state


@pytest.mark.slow
@executes("envs/own_state.py: Return at most {} MiB of plain data")
def test_a_state_that_is_not_plain_is_made_so_or_left_out(tmp_path: Path) -> None:
    assert "or use env_state=off" in incidents(tmp_path, env_id=OddState)["own_state"]
    assert "own_state" not in incidents(tmp_path, env_id=OddState, env_state="off")
    assert "own_state" not in incidents(tmp_path, env_id=PlainState)


@pytest.mark.slow
@executes(
    "envs/spaces.py: wrap it with shimmy.GymV26CompatibilityV0 (gym 0.26) or shimmy.GymV21CompatibilityV0"
)
@pytest.mark.parametrize("version", ["GymV26CompatibilityV0", "GymV21CompatibilityV0"])
def test_environments_of_the_package_gym_are_wrapped_as_the_message_says(
    version: str, tmp_path: Path
) -> None:
    old_gym = pytest.importorskip("gym")
    shimmy = pytest.importorskip("shimmy")

    class Old(old_gym.Env):  # type: ignore[misc, name-defined]
        observation_space = old_gym.spaces.Box(-1, 1, (2,), np.float32)
        action_space = old_gym.spaces.Discrete(2)
        flags = 1 if "21" in version else 2

        def seed(self, seed: Any = None) -> Any:
            return [seed]

        def reset(self, **_: Any) -> Any:
            return Fine.obs if self.flags == 1 else (Fine.obs, {})

        def step(self, action: Any) -> Any:
            return Fine.obs, 1.0, *(False,) * self.flags, {}

    assert version in problem(tmp_path, env_id=Old, starts=True)
    assert problem(tmp_path, env_id=lambda: getattr(shimmy, version)(env=Old())) == ""
