"""`dppo.evaluate`, and the policies that it plays with."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import tiny_run
from commandline import run_as_program
from recorder import Notes
from worlds.faulty import Brittle, Unreliable, line_that_raises

import dppo
from dppo.__main__ import main
from dppo.config.trust import require_trust
from dppo.envs.spaces import describe_spaces
from dppo.errors import CheckpointError, ConfigError, EnvironmentFault
from dppo.policies.acting import check_spaces
from dppo.records.terminal.figures import number

Patch = pytest.MonkeyPatch


def train(run_dir: Path, env_id: Any = "CartPole-v1", **settings: Any) -> dppo.Result:
    return dppo.train(tiny_run(run_dir, steps=32, iterations=1, env_id=env_id, **settings))


Env = gym.Env[Any, Any]
FACTORY = """
import gymnasium as gym

def make(length=0.5):
    env = gym.make("CartPole-v1")
    env.unwrapped.length = length
    return env
"""


@pytest.fixture(scope="module")
def trained(module_path: Path) -> dppo.Result:
    return train(module_path / "trained")


@pytest.fixture(scope="module")
def function_run(module_path: Path) -> dppo.Result:
    """A run of a function with an argument, which evaluations set to 7."""
    run_dir = module_path / "function_run"
    evaluated: dict[str, Any] = {"eval_every": 64, "eval_env_kwargs": {"max_episode_steps": 7}}
    return train(run_dir, cartpole, env_kwargs={"max_episode_steps": 9}, **evaluated)


@pytest.fixture
def mysim(tmp_path: Path, monkeypatch: Patch) -> str:
    """Return the name of a user's module, which can be imported."""
    name = f"mysim_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(FACTORY, encoding="utf8")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def cartpole(**kwargs: Any) -> Env:
    return gym.make("CartPole-v1", **kwargs)


def played_by_hand(policy: dppo.Policy, env: Env, seed: int) -> float:
    obs, _ = env.reset(seed=seed)
    total = 0.0
    done = False
    while not done:
        obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
        total += float(reward)
        done = terminated or truncated
    return total


class Recording(gym.Wrapper[Any, Any, Any, Any]):
    """Remembers the seeds of its resets, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__(cartpole())
        self.seeds: list[int] = []
        self.closed = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        assert seed is not None
        self.seeds.append(seed)
        return super().reset(seed=seed, options=options)

    def close(self) -> None:
        self.closed = True
        super().close()


def test_returns_and_lengths_are_those_of_a_loop_by_hand(trained: dppo.Result) -> None:
    """A controller plays the seeds of a policy."""
    env = Recording()
    evaluation = dppo.evaluate(trained, env, episodes=4)
    assert not env.closed

    seeds = tuple(env.seeds)
    assert len(set(seeds)) == 4
    dppo.evaluate(lambda obs: int(obs[2] > 0), env, episodes=4)
    assert tuple(env.seeds) == seeds * 2

    policy = dppo.load_policy(trained.run_dir)
    by_hand = [played_by_hand(policy, env, seed) for seed in seeds]
    assert list(evaluation.returns) == by_hand
    assert evaluation.lengths == tuple(evaluation.returns)  # CartPole's reward is one for each step

    shown = dataclasses.replace(evaluation, returns=(1.0, 3.0), lengths=(10, 11), env_name="E-v0")
    assert repr(shown) == "Evaluation(E-v0: return 2.00 +- 1.00, mean length 10.5, 2 episodes)"
    shown = dataclasses.replace(shown, returns=(0.91, 0.96))  # which one digit would not tell apart
    assert "return 0.935 +- 0.025, " in repr(shown)
    shown = dataclasses.replace(shown, returns=(0.3, 0.1 + 0.2))  # equal up to rounding
    assert "return 0.300 +- 0, " in repr(shown)


def test_a_seed_determines_the_episodes_and_the_sampled_actions(trained: dppo.Result) -> None:
    evaluations = []
    for changes in ({}, {"seed": 1}, {"deterministic": False}):
        evaluations.append(dppo.evaluate(trained, episodes=3, **changes))
        assert dppo.evaluate(trained, episodes=3, **changes) == evaluations[-1]
    assert evaluations[1] != evaluations[0] != evaluations[2]


def test_a_constructor_that_needs_a_seed_gets_that_of_the_evaluation(trained: dppo.Result) -> None:
    seeds: list[int] = []

    def make(seed: int) -> Env:
        seeds.append(seed)
        return cartpole()

    for seed in (7, 8):
        dppo.evaluate(trained, make, episodes=1, seed=seed)
    assert seeds == [7, 8]


def test_the_environment_of_the_run_gets_its_arguments_or_those_that_are_given(
    function_run: dppo.Result,
) -> None:
    policy = dppo.load_policy(function_run)

    def length(env: Any, **arguments: Any) -> float:
        return dppo.evaluate(policy, env, 1, **arguments).mean_length

    assert length(cartpole) == length(f"{__name__}:cartpole") == 7
    assert dppo.evaluate(function_run, episodes=1).mean_length == 7
    assert length(cartpole, env_kwargs={"max_episode_steps": 3}) == 3
    assert length(lambda: cartpole(max_episode_steps=5)) == 5
    assert length(cartpole(max_episode_steps=5)) == 5
    assert length(cartpole, env_kwargs={}) == 7  # as without any


def with_tool(tool: Any) -> Env:
    return cartpole(max_episode_steps=tool.steps)


def test_an_argument_that_is_an_object_is_asked_for_again(tmp_path: Path) -> None:
    evaluated = {"tool": SimpleNamespace(steps=7)}
    trained = {"tool": SimpleNamespace(steps=9)}
    kwargs = {"env_kwargs": trained, "eval_env_kwargs": evaluated, "eval_every": 64}
    run = train(tmp_path / "run", with_tool, **kwargs, eval_episodes=1)
    asked = (
        r"^env_kwargs: tool was .*steps=7.* in the run, whose folder cannot hold it\. Pass `env_k"
    )
    for policy in (run, run.run_dir, dppo.load_policy(run)):
        with pytest.raises(ConfigError, match=asked):
            dppo.evaluate(policy, with_tool, 1)
        again = dppo.evaluate(policy, with_tool, 1, env_kwargs=evaluated)
        assert again.mean_length == 7


def test_policy_and_environment_may_each_be_given_in_four_ways(
    trained: dppo.Result, mysim: str
) -> None:
    expected = dppo.evaluate(trained, episodes=2)
    for run in (trained.run_dir, str(trained.run_dir), trained.checkpoint):
        assert dppo.evaluate(run, episodes=2) == expected
    assert dppo.evaluate(dppo.load_policy(trained.run_dir), "CartPole-v1", 2) == expected
    for env in ("CartPole-v1", f"{mysim}:make", cartpole, lambda: cartpole(), Recording()):  # noqa: PLW0108
        assert dppo.evaluate(trained.run_dir, env, 2).returns == expected.returns


def test_code_of_a_folder_runs_only_with_trust_and_that_of_a_result_always(
    mysim: str, tmp_path: Path
) -> None:
    result = train(tmp_path / "run", f"{mysim}:make")
    with pytest.raises(
        ConfigError,
        match=rf"and imports {mysim} and calls make\(\)\. Add `trust=True` if you trust",
    ):
        dppo.evaluate(result.run_dir)
    with pytest.raises(ConfigError) as refused:
        require_trust(
            {"env_id": "mysim:make", "model": "m:f.<locals>.Net", "prior": "pi:PI"}, (), "it"
        )
    starts = [line.partition("=")[0] for line in str(refused.value).splitlines()]
    assert starts == ["env_id", "model", "prior"]
    expected = dppo.evaluate(result, episodes=1)
    assert dppo.evaluate(result.run_dir, episodes=1, trust=True) == expected
    assert dppo.evaluate(result.run_dir, f"{mysim}:make", 1) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"env": cartpole(), "env_kwargs": {"g": 1}}, "^env_kwargs: have no effect"),
        ({"env": cartpole(), "render": True}, "already made"),
        ({"model": "nets:Net"}, "^model=nets:Net: has no effect"),
        ({"num_actors": -1}, "num_actors=-1: must not be negative"),
        ({"num_actors": 2, "video": "out.mp4"}, "actors have no window and write no video"),
        ({"num_actors": 2, "env": cartpole()}, "already made stays in this process"),
    ],
)
def test_invalid_arguments_are_config_errors(
    arguments: dict[str, Any], words: str, trained: dppo.Result, monkeypatch: Patch
) -> None:
    """tests/commands/test_eval.py and test_controllers_played.py have others."""
    monkeypatch.setenv("DISPLAY", ":0")
    with pytest.raises(ConfigError, match=words) as refused:
        dppo.evaluate(trained, **arguments)
    assert "--" not in str(refused.value)


def test_a_loaded_policy_has_a_repr_and_needs_an_environment(trained: dppo.Result) -> None:
    policy = dppo.load_policy(trained.run_dir)
    spaces = "obs float32[4], actions Discrete(2)"
    network = "MLP 64x64 tanh, 9,155 parameters"
    assert repr(policy) == f"Policy(CartPole-v1: {spaces}; {network}; iteration 1)"
    with pytest.raises(ConfigError, match=r"^env: is missing"):
        dppo.evaluate(policy)


def test_other_spaces_are_refused(trained: dppo.Result) -> None:
    words = r"^Acrobot-v1 has obs float32\[6\], actions Discrete\(3\); .* obs float32\[4\], actions Discrete\(2\)\."
    with pytest.raises(CheckpointError, match=words):
        dppo.evaluate(trained, "Acrobot-v1")


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("constructor", "the environment's constructor raised"),
        ("step", r"step of episode 0 \(seed \d+, step \d\) "),
    ],
)
def test_an_exception_of_the_environment_carries_its_traceback(
    where: str, words: str, trained: dppo.Result
) -> None:
    with pytest.raises(
        EnvironmentFault, match=rf"^worlds.faulty:Brittle(, env 0)?: {words}"
    ) as raised:
        dppo.evaluate(trained, Brittle, env_kwargs={"where": where})
    assert str(raised.value).count("LicenceError: licence server said 503") == 2
    assert f'faulty.py", line {line_that_raises(where)}, in ' in raised.value.remote_traceback


def unreliable() -> Env:
    return Unreliable(resets=0.4)


def test_an_episode_in_which_the_environment_fails_is_left_out(trained: dppo.Result) -> None:
    with Notes() as notes:
        evaluation = dppo.evaluate(trained, unreliable, 8)
    undisturbed = dppo.evaluate(trained, cartpole, 8)
    assert 0 < len(evaluation.left_out) < 8
    played = [index for index in range(8) if index not in evaluation.left_out]
    assert evaluation.returns == tuple(undisturbed.returns[index] for index in played)
    for index in evaluation.left_out:
        assert any(f"episode {index} is left out: " in text for text in notes.texts)
    assert f"{len(played)} episodes, {len(evaluation.left_out)} left out" in str(evaluation)
    with pytest.raises(EnvironmentFault, match="licence server said 503"):
        dppo.evaluate(trained, unreliable(), 8)

    first = evaluation.left_out[0]
    envs = list[Env]()

    def licensed() -> Env:
        envs.append(unreliable())
        assert len(envs) == 1, "there is one licence"
        return envs[0]

    until_then = dppo.evaluate(trained, licensed, first + 1)  # makes no other behind the last
    assert until_then.left_out == (first,)
    mean = number(until_then.mean_return)
    envs.clear()
    with Notes() as notes, pytest.raises(EnvironmentFault, match="there is one licence"):
        dppo.evaluate(trained, licensed, 8)
    so_far = f"{first + 1} of 8 episodes, mean return {mean}, 1 left out"
    assert notes.texts[-1] == f"ended early: {so_far}"


def ignores_render_mode(**kwargs: Any) -> Env:
    return cartpole()


def takes_render_mode(render_mode: str | None = None) -> Env:
    assert render_mode == "human"
    env = cartpole()
    env.unwrapped.render_mode = "seen"  # a window cannot be opened here
    return env


def test_a_window_needs_a_display_and_nothing_is_made_without_one(
    trained: dppo.Result, monkeypatch: Patch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    with pytest.raises(
        ConfigError, match=r"^render=True: this machine has no display .* `xvfb-run`"
    ):
        dppo.evaluate(trained, lambda: pytest.fail("made all the same"), render=True)


def test_an_environment_must_take_render_mode_to_be_shown(
    trained: dppo.Result, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("DISPLAY", ":0")
    for factory, words in (
        (lambda: cartpole(), r"does not take it \(TypeError: "),  # noqa: PLW0108
        (ignores_render_mode, "returned an environment without it"),
    ):
        with pytest.raises(
            ConfigError, match=f"{words}.*Accept render_mode as an argument and pass it on"
        ):
            dppo.evaluate(trained, factory, render=True)
    assert dppo.evaluate(trained, takes_render_mode, 1, render=True).returns
    assert dppo.evaluate(
        trained, takes_render_mode, 1, env_kwargs={"render_mode": "rgb_array"}, render=True
    ).returns
    # opens one by itself
    assert dppo.evaluate(trained, ignores_render_mode, 1, env_kwargs={"window": True}).returns


def test_a_result_knows_the_objects_that_it_was_trained_with(tmp_path: Path) -> None:
    limits: list[Any] = []

    def wrapped(env: Env) -> Env:
        assert env.spec is not None
        limits.append(env.spec.max_episode_steps)
        return env

    result = train(
        tmp_path,
        lambda limit: cartpole(max_episode_steps=2 * limit),
        env_kwargs={"limit": 4},
        wrappers=(wrapped,),
    )
    limits.clear()
    assert dppo.evaluate(result, episodes=2).lengths == (8, 8)
    assert limits == [8]
    assert dppo.load_policy(result).act(np.zeros(4, np.float32)) in (0, 1)
    with pytest.raises(
        ConfigError, match=r"an object of a Python program.* dppo\.evaluate\(run, env=\.\.\.\)\."
    ):
        dppo.evaluate(result.run_dir)


def test_an_environment_of_a_program_is_found_in_one_step(
    desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    program = desk / "mine.py"
    sizes = "num_samplers=1, num_steps=32, total_timesteps=32, progress='off', run_dir='run'"
    train = f"dppo.train(dppo.Config(env_id=make, {sizes}))"
    train = f"\nif __name__ == '__main__':\n    import dppo\n    {train}\n"
    run_as_program(FACTORY + train, program)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["eval", "run", "--episodes", "1"]) != 0

    refused = capsys.readouterr().err
    assert f"make was defined in {program}" in refused
    advice = refused.partition("dppo eval run ")[2].partition(". ")[0]
    assert advice == "--env-id mine:make"
    assert main(["eval", "run", "--episodes", "1", *advice.split()]) == 0

    sys.modules.pop("mine", None)
    assert "return " in capsys.readouterr().out


@pytest.mark.parametrize(
    "other",
    [gym.spaces.MultiDiscrete([3, 2] * 5), gym.spaces.MultiDiscrete([2, 3] * 5, start=[7] * 10)],
)
def test_another_environment_is_refused_by_all_its_choices_also_where_too_many_to_show(
    other: Any,
) -> None:
    def with_choices(choices: Any) -> Any:
        obs = gym.spaces.Box(-1, 1, (3,))
        return SimpleNamespace(
            observation_space=obs, action_space=gym.spaces.Dict(move=choices), spec=None
        )

    trained = with_choices(gym.spaces.MultiDiscrete([2, 3] * 5))
    check_spaces(describe_spaces(trained), trained, "E")
    words = r"elements with 2 to 3 choices\) that differ, as in numbers of choices\. Use"
    with pytest.raises(CheckpointError, match=words):
        check_spaces(describe_spaces(trained), with_choices(other), "E")


@pytest.fixture(scope="module")
def informed(module_path: Path) -> dppo.Result:
    keys = {"info_keys": ("energy",), "eval_every": 32, "eval_episodes": 4}
    run_dir = module_path / "informed"
    return train(run_dir, "worlds.informed:Informed", **keys)


def test_numbers_in_the_info_are_summed_up_per_episode(informed: dppo.Result) -> None:
    """The energy of step t is t times that of the first one, in 17 steps."""
    evaluation = dppo.evaluate(informed, episodes=4, seed=1)
    assert evaluation.info.keys() == {"energy"}
    energies = evaluation.info["energy"]
    for energy in energies:
        first = energy.last / 17
        assert energy == pytest.approx((17 * 9 * first, 9 * first, 17 * first))
    row = informed.metrics[-1]
    figures = [row[f"eval/info/energy{name}"] for name in ("_sum", "", "_last")]
    assert figures == pytest.approx(np.mean(energies, axis=0))


def test_other_numbers_in_the_info_may_be_asked_for(
    informed: dppo.Result, capsys: pytest.CaptureFixture[str]
) -> None:
    """`total` is a number of the last step only."""
    evaluation = dppo.evaluate(informed, episodes=4, info_keys=["total", "name"])
    assert evaluation.info == {"total": ((17.0, 17.0, 17.0),) * 4}
    words = f"eval {informed.run_dir} --trust --episodes 4 --info-keys total name"
    assert main(words.split()) == 0
    head, table = capsys.readouterr().out.splitlines()[-2:]
    assert head.split() == ["in", "an", "episode", "sum", "mean", "last"]
    assert table.split() == ["total", *["17", "+-", "0"] * 3]


def test_another_environment_does_not_get_the_arguments_of_the_run(
    function_run: dppo.Result,
) -> None:
    with Notes() as notes:
        evaluation = dppo.evaluate(function_run.run_dir, lambda: gym.make("CartPole-v1"), 1)
    note = "env_kwargs of the run (max_episode_steps) are not passed to another environment; pass those it needs"
    assert note in notes.texts
    assert evaluation.mean_length > 7


def test_actors_play_the_same_episodes(trained: dppo.Result, ray_session: None) -> None:
    """A single actor starts sooner; in the slow set there are more."""
    expected = dppo.evaluate(trained, unreliable, 5)
    assert expected.left_out
    assert dppo.evaluate(trained.run_dir, unreliable, 5, num_actors=1) == expected


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_any_number_of_actors_gives_the_same_evaluation(
    deterministic: bool, informed: dppo.Result, ray_session: None
) -> None:
    expected = dppo.evaluate(informed, deterministic=deterministic)
    for num_actors in (1, 3, 5):
        there = dppo.evaluate(informed, num_actors=num_actors, deterministic=deterministic)
        assert there == expected


@pytest.mark.slow
def test_a_fault_on_an_actor_is_that_of_the_environment(
    trained: dppo.Result, ray_session: None
) -> None:
    with pytest.raises(EnvironmentFault, match="raised"):
        dppo.evaluate(trained, Brittle, env_kwargs={"where": "step"}, num_actors=1)
