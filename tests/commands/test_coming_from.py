"""Names and habits of other libraries: answered in Python and in files, and printed as a page."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import tiny_run
from commandline import parse as parse_training

import dppo
from dppo.config.aliases import ABSENT_NAMES, METRICS
from dppo.config.parts import settings_by_name
from dppo.config.settings import Settings
from dppo.errors import ConfigError, DppoError

anything: Any = dppo
anything_settings: Any = Settings


@pytest.mark.parametrize("name", ABSENT_NAMES)
def test_a_name_of_another_library_is_answered_when_it_is_used(name: str) -> None:
    absent = getattr(anything, name)
    with pytest.raises(
        ConfigError, match=re.escape(f"dppo.{name} does not exist. {ABSENT_NAMES[name]}")
    ):
        absent("MlpPolicy", "CartPole-v1")
    with pytest.raises(AttributeError, match=f"dppo.{name} does not exist"):
        _ = absent.learn
    with pytest.raises(ConfigError, match=f"dppo.{name} does not exist"):
        exec("class Child(absent): ...", {"absent": absent})
    namespace: dict[str, Any] = {}
    exec(f"from dppo import {name}", namespace)
    assert name not in dppo.__all__


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda: anything.Config("CartPole-v1"), "Use dppo.Config(env_id='CartPole-v1')."),
        (
            lambda: anything.Config("CartPole-v1", seed=2),
            "Use dppo.Config(env_id='CartPole-v1', seed=...).",
        ),
        (
            lambda: anything.Config("MlpPolicy", "CartPole-v1", n_steps=64),
            "dppo.Config('MlpPolicy', 'CartPole-v1', n_steps=...): settings are passed by their names. Use "
            "dppo.Config(env_id='CartPole-v1', n_steps=...).",
        ),
        (lambda: anything.train("CartPole-v1"), "Use dppo.Config(env_id='CartPole-v1')."),
        (
            lambda: anything.train(env_id="CartPole-v1"),
            "has no argument env_id. It is a setting: dppo.Config(env_id=...)",
        ),
        (
            lambda: anything.train(None, num_envs=3),
            "has no argument num_envs. It is a setting: dppo.Config(num_samplers",
        ),
        (lambda: anything.train(None, callbacks=[]), "dppo.train(config, observers=[...])"),
        (lambda: anything.train(None, observer=[]), "Did you mean observers?"),
        (lambda: anything.train(None, nonsense=1), "It has config, resume, branch, observers."),
        (lambda: anything.train(None, reset_num_timesteps=False), "dppo.train(config, resume=run)"),
        (lambda: anything.evaluate(None, n_eval_episodes=3), "Did you mean episodes?"),
        (
            lambda: anything.Config(env_id="CartPole-v1", callback=[]),
            "callback is not a known setting. Pass observers",
        ),
        (
            lambda: anything.Config(env_id="CartPole-v1", tensorboard_log="x"),
            "TensorBoard events are always written",
        ),
        (
            lambda: anything.Config(env_id="CartPole-v1", learning_rate=lambda left: left),
            "`anneal_lr=True`",
        ),
        *(
            (partial(anything.Config, **{"env_id": "CartPole-v1"} | settings), answer)
            for settings, answer in (
                ({"learning_rate": "linear"}, "Use a number, with `anneal_lr=True` for a linear"),
                ({"learning_rate": "lin_3e-4"}, "Use `learning_rate=3e-4`, with `anneal_lr=True`"),
                ({"learning_rate": [[0, 1e-3], [1000, 1e-4]]}, "with `anneal_lr=True`"),
                ({"clip_coef": lambda left: left}, "with `anneal_clip=True`"),
                ({"ent_coef": "auto"}, "adapts by itself to `target_entropy`"),
                ({"ent_coef": "auto_0.1", "algo": "sac"}, "leave `ent_coef` out"),
                ({"target_entropy": "auto"}, "leave `target_entropy` out"),
                ({"memory": True}, "Use `memory=lstm`, or `memory=gru`."),
                ({"activation": "ELU"}, "must be 'tanh' or 'relu'."),
                ({"track": "wandb"}, "is not a list. Use a list: track=['wandb']."),
                ({"wrappers": dict}, "is not a list. Use a list: wrappers=[dict]."),
                ({"clip_vloss": 0.2}, "with the range of `clip_coef`. Use `clip_vloss=True`."),
                ({"gradient_steps": -1}, "it is a number per env step. Use `gradient_steps=1`"),
                ({"seed": None}, "so that the run can be repeated. Use one such as `seed=2`."),
                ({"hidden_sizes": "64,64"}, "Use a list: hidden_sizes=[64,64]."),
                ({"hidden_sizes": 64}, "is not a list. Use a list: hidden_sizes=[64]."),
                ({"env_id": [lambda: None]}, "is a list. Pass one id, or one function"),
                ({"env_id": ["CartPole-v1"]}, "is a list. Pass one id, or one function"),
                ({"hidden_sizes": {"pi": [64], "vf": [64]}}, "Use a list such as [64, 64]"),
                ({"device": "cuda:0"}, "Use `device=cuda`"),
            )
        ),
    ],
)
def test_a_habit_in_python_is_answered_with_the_right_line(call: Any, answer: str) -> None:
    with pytest.raises(ConfigError) as refused:
        call()
    assert answer in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("algo", "PPO", "ppo"),
        ("algo", "SAC", "sac"),
        ("memory", "LSTM", "lstm"),
        ("memory", False, "none"),
        ("memory", None, "none"),
        ("activation", torch.nn.ReLU, "relu"),
        ("activation", torch.nn.ReLU(), "relu"),
        ("activation", torch.relu, "relu"),
        ("activation", "ReLU", "relu"),
        ("activation", "nn.Tanh", "tanh"),
        ("dtype", torch.float64, "float64"),
        ("obs_dtype", np.float64, "float64"),
        ("device", torch.device("cpu"), "cpu"),
        ("progress", False, "off"),
        ("target_kl", "none", None),
    ],
)
def test_a_choice_in_the_spelling_of_another_library_is_taken(
    name: str, value: Any, ours: Any
) -> None:
    config = anything.Config(env_id="Pendulum-v1", **{name: value})
    assert getattr(config, name) == ours
    # defaults that depend on the choice follow it
    assert config == anything.Config(env_id="Pendulum-v1", **{name: ours})
    assert getattr(dataclasses.replace(config, **{name: value}), name) == ours


class Thing:
    """Object that no setting takes."""


WRONG_VALUES = (Thing(), "?", 3.7, [Thing()], {1: 2}, None, True, 5, b"bytes")


@pytest.mark.parametrize("name", settings_by_name())
def test_no_refusal_of_a_value_speaks_in_the_words_of_the_library_that_checks(name: str) -> None:
    """Each value by itself, without checks across settings."""
    refusals = []
    for value in WRONG_VALUES:
        try:
            anything_settings(**{"env_id": "CartPole-v1", name: value})
        except ConfigError as error:
            refusals.append(str(error).replace(repr(value), ""))
    assert refusals
    for refusal in refusals:
        words = re.sub("<class '[^']*Thing'>|<[^ ]*Thing object at [^>]*>", "", refusal)
        assert not re.search(r"valid|tuple|dictionary|instance|callable|pydantic|<class", words)
        assert re.search(r"\. (Use|Pass|Leave|Set|With)\b|must be ('|less|greater)", words)


def test_an_assignment_is_answered_with_the_way_to_make_a_changed_copy() -> None:
    config: Any = dppo.Config(env_id="CartPole-v1")
    with pytest.raises(
        dataclasses.FrozenInstanceError, match=r"dataclasses\.replace\(config, num_actors=3\)"
    ) as refused:
        config.num_actors = 3
    remedy = str(refused.value).partition("Make a copy: ")[2].rstrip(".")
    assert eval(remedy, {"dataclasses": dataclasses, "config": config}).num_actors == 3


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (
            "gamma: 0.9\n\nlearningrate: 1e-3\n",
            "line 3: learningrate is not a known setting. Did you mean learning_rate?",
        ),
        (
            "sampling:\n  n_steps: 3\n",
            "line 2: n_steps is not a known setting. Did you mean num_steps?",
        ),
        (
            "# zoo\nCartPole-v1:\n  n_envs: 8\n",
            "line 2: CartPole-v1 is not a setting, but contains settings, as in files of rl",
        ),
        (
            "normalize: true\n",
            "line 1: normalize is not a known setting. Observations and rewards are normalized by default, and the "
            "statistics are saved with the policy; norm_obs: false and norm_reward: false turn it off.",
        ),
        (
            "policy_kwargs: {net_arch: [64]}\n",
            "line 1: policy_kwargs is not a known setting. The layers are hidden_sizes and activation;",
        ),
        ("net_arch: {pi: [64]}\n", "line 1: net_arch is not a known setting. Did you mean hidden"),
        ("vec_env_kwargs: {}\n", "line 1: vec_env_kwargs is not a known setting. Environments run"),
        (
            "# gamma: 1\nseed: 2\ngamma: 1.5\n",
            "line 3: gamma=1.5: must be less than or equal to 1.",
        ),
        (
            "env_kwargs: {gamma: 2}\ngamma: 1.5\nlearning_rate: -1\n",  # a flag replaces the last
            "line 2: gamma=1.5: must be less than or equal to 1.",
        ),
        (
            "env_kwargs:\n  gamma: 2\nppo:\n  gamma: 1.5\n",
            "line 4: gamma=1.5: must be less than or equal to 1.",
        ),
        ("seed: 2\nsampling: {num-steps: 3.5}\n", "line 2: num_steps=3.5: must be a whole number."),
        ("hidden_sizes: [8, a]\n", "line 1: hidden_sizes.1='a': must be a whole number."),
        ("seed: 2\ngamma: 0.9\nppo: {gamma: 1}\n", "line 2: gamma=0.9: is given twice"),
        (
            "seed: 2\nlearners: {num_steps: 64}\n",
            "line 2: learners.num_steps=64: num_steps belongs",
        ),
    ],
)
@pytest.mark.parametrize("env_id", ["", "CartPole-v1 "])
def test_what_is_wrong_in_a_file_is_refused_with_its_line(
    text: str, answer: str, env_id: str, tmp_path: Path
) -> None:
    """Also where the environment is missing: the file is what is wrong."""
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(DppoError) as refused:
        parse_training(f"{env_id}--config {file} --learning-rate 0.1".split())
    assert f"config={file}, {answer}" in str(refused.value)
    assert "learning_rate=" not in str(refused.value)


def test_a_method_of_a_name_of_another_library_has_its_own_answer() -> None:
    with pytest.raises(AttributeError, match=r"dppo.PPO does not exist. Use dppo.load_policy"):
        anything.PPO.load("model")


@pytest.mark.parametrize(
    ("method", "arguments", "answer"),
    [
        (
            "act",
            {"deterministic": True},
            "Policy.act and `dppo eval` take the most likely actions; to sample",
        ),
        ("act", {"action_masks": None}, "dppo.Policy.act() has no argument action_masks. Did you"),
        ("act", {"seed": 1}, "seed. It has obs, state, action_mask, generator."),
        ("outputs", {"deterministic": True}, "dppo.Policy.outputs() has no argument deterministic"),
    ],
)
def test_an_argument_of_a_model_is_answered_by_a_policy(
    method: str, arguments: dict[str, Any], answer: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        getattr(dppo.Policy, method)(None, np.zeros(4), **arguments)
    assert answer in str(refused.value)


class HabitualObserver(dppo.Observer):
    """Reads metrics by the names of another library."""

    def on_iteration(self, row: dict[str, float]) -> bool:
        return row["rollout/ep_rew_mean"] > 0


def test_a_metric_of_another_library_is_answered_in_an_observer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_run(tmp_path / "run", steps=8, iterations=2)
    with pytest.raises(KeyError, match="rollout/ep_rew_mean"):
        dppo.train(config, observers=[HabitualObserver()])
    assert "rollout/ep_rew_mean is the metric charts/episodic_return here." in caplog.messages


def test_metrics_of_another_library_are_translated_into_documented_ones() -> None:
    page = (Path(__file__).parents[2] / "docs" / "METRICS.md").read_text()
    assert [name for name in METRICS.values() if f"`{name}`" not in page] == []


def refusal_of(call: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        call()
    return str(refused.value)


def test_what_the_answers_tell_to_do_works(tmp_path: Path) -> None:
    def made_by(code: str) -> dppo.Config:
        config: dppo.Config = eval(code, {"dppo": dppo})
        return config

    algorithms = {"PPO": "ppo", "make_vec_env": "ppo", "SAC": "sac", "EvalCallback": "ppo"}
    for name, algo in (algorithms | {"DummyVecEnv": "ppo", "SubprocVecEnv": "ppo"}).items():
        [code] = re.findall(r"dppo\.Config\([^()]*\)", ABSENT_NAMES[name])
        assert made_by(code).algo == algo
    answer = refusal_of(lambda: anything.Config("CartPole-v1"))
    code = answer.partition("Use ")[2].rstrip(".")
    assert made_by(code).env_id == "CartPole-v1"

    answer = refusal_of(lambda: anything.Config(env_id="E-v0", learning_rate=max))
    changes = re.findall(r"`(\w+)(?:=(\w+))?`", answer)
    assert changes == [("anneal_lr", "True"), ("desired_kl", "")]
    assert dppo.Config(env_id="E-v0", learning_rate=0.1, anneal_lr=True).anneal_lr
    assert dppo.Config(env_id="E-v0", desired_kl=0.01).desired_kl == 0.01

    answer = refusal_of(lambda: anything.train(None, observer=[]))
    keyword = answer.rpartition(" ")[2].rstrip("?")
    config = tiny_run(tmp_path / "run", steps=8, iterations=1)
    result = anything.train(config, **{keyword: [dppo.Observer()]})
    assert result.global_step == 8


def test_a_file_of_the_zoo_that_is_changed_as_told_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "zoo.yaml"
    file.write_text("CartPole-v1:\n  gamma: 0.98\n")
    with pytest.raises(
        DppoError,
        match="Move them to the top of the file, without CartPole-v1, and name the environment",
    ):
        parse_training(["--config", str(file)])
    file.write_text("gamma: 0.98\n")
    assert parse_training(["CartPole-v1", "--config", str(file)]).settings["gamma"] == 0.98
