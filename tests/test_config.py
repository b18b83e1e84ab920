"""The configuration: what follows from the settings, and what is refused before any process starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from dppo.config import FREE_ON_RESUME, Config, make_config, read_settings
from dppo.envs.testbeds import Counting
from dppo.errors import ConfigError


def config(**settings: Any) -> Config:
    return make_config({"env_id": "CartPole-v1"} | settings)


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**settings)
    return str(caught.value)


# ----------------------------------------------------------------------------------- derived sizes


def test_defaults_are_one_sampler_in_this_process() -> None:
    c = config()
    assert (c.num_actors, c.samplers, c.batch_size, c.minibatches_per_epoch) == (0, 1, 128, 4)
    assert c.hosting() == [[0]]
    assert c.iterations == 3907  # 500,000 / 128 = 3906.25
    assert c.hosting_in_words().startswith("Collecting in this process")


def test_samplers_are_as_many_as_actors_unless_told() -> None:
    assert config(num_actors=5).samplers == 5
    assert config(num_actors=5, num_samplers=7).samplers == 7
    assert config(num_samplers=7).samplers == 7


def test_sizes_follow_from_the_settings() -> None:
    c = config(num_samplers=3, envs_per_sampler=2, num_steps=50, minibatch_size=64, total_timesteps=1000)
    assert c.batch_size == 300
    assert c.minibatches_per_epoch == 5  # 300 / 64 = 4.7
    assert c.iterations == 4
    assert c.sizes_in_words() == (
        "4 iterations of 300 steps (3 samplers x 2 envs x 50 steps), each trained for 4 epochs of 5 minibatches of "
        "up to 60 rows: 80 SGD steps in all."
    )


@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 70), st.none() | st.integers(1, 500))
def test_every_size_that_is_accepted_can_be_trained(n: int, e: int, t: int, minibatch_size: int | None) -> None:
    rows = n * e * t
    assume(minibatch_size is None or minibatch_size <= rows)
    settings: dict[str, Any] = {
        "num_samplers": n,
        "envs_per_sampler": e,
        "num_steps": t,
        "minibatch_size": minibatch_size,
    }
    if rows // -(-rows // (minibatch_size or -(-rows // 4))) < 2:
        assert "of one row" in refusal(**settings)
        assert (minibatch_size or 2) < 3, "the remedy must help: at least 3"
        settings["norm_adv"] = False
    c = config(**settings)
    largest = -(-rows // c.minibatches_per_epoch)
    assert largest <= (minibatch_size or -(-rows // 4))
    assert c.iterations * rows >= c.total_timesteps > (c.iterations - 1) * rows


@given(st.integers(1, 8), st.integers(2, 40), st.integers(2, 4), st.integers(1, 200))
def test_the_remedy_for_learners_that_cannot_share_works(n: int, t: int, learners: int, minibatch_size: int) -> None:
    settings: dict[str, Any] = {"num_actors": n * learners, "num_steps": t, "num_learners": learners, "norm_adv": False}
    assume(minibatch_size <= n * learners * t)
    try:
        c = config(**settings, minibatch_size=minibatch_size)
    except ConfigError as error:
        offered = [int(word) for word in re.findall(r"\d+", str(error).partition("Use minibatch_size=")[2])]
        for size in offered or pytest.fail(str(error)):
            c = config(**settings, minibatch_size=size)
            assert n * t % c.minibatches_per_epoch == 0
    else:
        assert n * t % c.minibatches_per_epoch == 0


def test_learning_rate_falls_to_just_above_zero_or_stays() -> None:
    c = config(total_timesteps=1280, learning_rate=1.0)
    assert [c.learning_rate_at(i) for i in range(10)] == pytest.approx([1 - i / 10 for i in range(10)])
    assert config(anneal_lr=False, learning_rate=0.5).learning_rate_at(3) == 0.5


# ---------------------------------------------------------------------------------------- hosting


@given(st.integers(1, 12), st.integers(0, 30))
def test_every_sampler_has_one_host_and_hosts_differ_by_one_at_most(actors: int, more: int) -> None:
    hosting = config(num_actors=actors, num_samplers=actors + more).hosting()
    assert len(hosting) == actors
    assert sorted(sampler for samplers in hosting for sampler in samplers) == list(range(actors + more))
    sizes = [len(samplers) for samplers in hosting]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("actors", "samplers", "words"),
    [
        (8, 8, "8 Ray actors host 1 sampler each."),
        (4, 8, "4 Ray actors host 2 samplers each."),
        (1, 8, "1 Ray actor hosts 8 samplers."),
        (
            3,
            8,
            "3 Ray actors host 8 samplers unevenly: 2 of them 3, the others 2; the others wait for these.",
        ),
    ],
)
def test_hosting_in_words(actors: int, samplers: int, words: str) -> None:
    assert config(num_actors=actors, num_samplers=samplers).hosting_in_words() == words


# ---------------------------------------------------------------------------------- whole numbers


@pytest.mark.parametrize(
    ("given_as", "number"),
    [
        ("1e6", 1_000_000), ("1_000_000", 1_000_000), (1e6, 1_000_000), ("2.5e5", 250_000), (4096.0, 4096),
        ("9007199254740993", 2**53 + 1), (10**30, 10**30), (" 4096 ", 4096), ("1E6", 1_000_000),
    ],
)  # fmt: skip
def test_whole_numbers_may_be_written_in_many_ways(given_as: Any, number: int) -> None:
    found = config(total_timesteps=given_as).total_timesteps
    assert found == number
    assert type(found) is int


@pytest.mark.parametrize("given_as", [1.5, "1.5", "many", "nan", "1e400", None, [1], "1e-3"])
def test_what_is_no_whole_number_is_refused(given_as: Any) -> None:
    text = refusal(num_steps=given_as)
    assert text.startswith("num_steps=")
    assert "\n" not in text


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"num_samplers": 8, "num_steps": 32, "minibatch_size": 300},
            "minibatch_size=300 is larger than the batch of 256 steps (8 samplers x 1 env x 32 steps). "
            "Use at most 256, or raise num_steps.",
        ),
        (
            {"num_actors": 9, "num_samplers": 6},
            "num_actors=9 is more than the 6 samplers there are to host: 3 would idle. Use at most 6, or raise "
            "num_samplers (which makes the batch larger).",
        ),
        (
            {"total_timesteps": 100, "num_samplers": 2},
            "total_timesteps=100 is less than one batch of 256 steps (2 samplers x 1 env x 128 steps). Raise it, or "
            "lower num_steps.",
        ),
        (
            {"num_steps": 1},
            "num_steps=1 makes a batch of 1 step (1 sampler x 1 env x 1 step): nothing to learn from. Raise "
            "num_steps; 128 is usual.",
        ),
        ({"gama": 0.9}, "gama is not a known setting. Did you mean gamma?"),
        ({"activation": "gelu"}, "activation='gelu': should be 'tanh' or 'relu'. Use one of these."),
        ({"learning_rate": 0}, "learning_rate=0: should be greater than 0. Use a larger one."),
        ({"learning_rate": "nan"}, "learning_rate='nan': should be a finite number. Use a finite number."),
        ({"gamma": 2}, "gamma=2: should be less than or equal to 1. Use a smaller one."),
        (
            {"num_actors": 6, "num_learners": 4},
            "num_learners=4 cannot share 6 samplers evenly. Use num_samplers=8, or another number of learners.",
        ),
        (
            {"num_actors": 4, "num_steps": 10, "num_learners": 2, "minibatch_size": 14},
            "minibatch_size=14: 3 minibatches do not divide the 20 rows of each of 2 learners. "
            "Use minibatch_size=10 or 20.",
        ),
        ({"num_samplers": 0}, "num_samplers=0: should be greater than 0. Use a larger one."),
        ({"env_id": 5}, "env_id=5: should be a valid string."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refusals_name_the_setting_the_fact_and_the_remedy(settings: dict[str, Any], text: str) -> None:
    assert refusal(**settings) == text


@pytest.mark.parametrize("settings", [{"minibatch_size": 1}, {"num_steps": 5, "minibatch_size": 2}, {"num_steps": 2}])
def test_a_minibatch_of_one_row_cannot_be_standardised(settings: dict[str, int]) -> None:
    text = refusal(**settings)
    assert "of one row, whose advantage cannot be standardised" in text
    assert "--no-norm-adv" in text
    name, value = list(settings.items())[-1]
    assert text.startswith(f"{name}={value} ")
    assert config(**settings, norm_adv=False).norm_adv is False


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"address": "auto"}, "num_actors=0"),
        ({"cpus_per_actor": 0.5}, "num_actors=0"),
        ({"actor_resources": {"licence": 1}}, "num_actors=0"),
        ({"segment_timeout_s": 5}, "num_actors=0"),
        ({"max_actor_restarts": 0}, "num_actors=0"),
        ({"dashboard": True}, "num_actors=0"),
        ({"actor_gpus": 1}, "num_actors=0"),
        ({"num_learners": 1}, "num_actors=0"),
        ({"learner_cpus": 2, "num_actors": 2}, "num_learners=0 trains in this process"),
        ({"micro_batch_size": 32}, "a minibatch has 32 rows"),
        ({"dashboard": True, "num_actors": 2, "address": "auto"}, "a cluster that runs has its own dashboard"),
        ({"clip_vloss": True, "vf_coef": 0}, "vf_coef=0 leaves the value loss out"),
        ({"activation": "relu", "hidden_sizes": ()}, "hidden_sizes is empty"),
        (
            {"target_kl": 0.1, "update_epochs": 1, "minibatch_size": 128},
            "an update of one SGD step has nothing to stop",
        ),
    ],
)
def test_a_setting_without_effect_is_refused(settings: dict[str, Any], words: str) -> None:
    name, value = next(iter(settings.items()))
    text = refusal(**settings)
    assert text.startswith(f"{name}=")
    assert f" has no effect: {words}" in text
    assert text.endswith(".")
    if words == "num_actors=0":
        assert getattr(config(num_actors=2, **settings), name) == value


@pytest.mark.parametrize("amount", [{"CPU": 1}, {"GPU": 1}, {"licence": 0}, {"licence": -1}, {"licence": "nan"}])
def test_resources_that_ray_would_choke_on_are_refused(amount: dict[str, Any]) -> None:
    assert refusal(num_actors=1, actor_resources=amount).startswith("actor_resources=")


def test_every_wrong_setting_is_told_on_a_line_of_its_own() -> None:
    lines = refusal(gamma=2, gae_lambda=-1, nonsense=1, hidden_sizes=(0,)).splitlines()
    assert sorted(line.split("=")[0].split(" ")[0].split(".")[0] for line in lines) == [
        "gae_lambda", "gamma", "hidden_sizes", "nonsense",
    ]  # fmt: skip


def test_a_missing_environment_is_told() -> None:
    with pytest.raises(ConfigError, match="env_id is missing"):
        make_config({})


# ------------------------------------------------------------------------------------------- shape


def test_settings_cannot_be_changed_afterwards() -> None:
    with pytest.raises(ValidationError):
        config().seed = 3  # type: ignore[misc]


def test_environments_are_named_as_a_person_would_write_them() -> None:
    assert config(env_id="CartPole-v1").env_name == "CartPole-v1"
    assert config(env_id=Counting).env_name == "dppo.envs.testbeds:Counting"


def test_every_setting_has_help_that_is_a_sentence() -> None:
    for name, field in Config.model_fields.items():
        assert field.description is not None, name
        assert field.description.endswith("."), name


def test_what_is_free_on_resume_are_settings_that_change_nothing_learnt() -> None:
    assert set(Config.model_fields) >= FREE_ON_RESUME
    learnt = {"seed", "num_samplers", "envs_per_sampler", "num_steps", "learner_threads", "dtype", "replay", "gamma"}
    assert not FREE_ON_RESUME & learnt


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "env_id: CartPole-v1\ntotal-timesteps: 1e6\nhidden_sizes: [32, 32]\nversions: {dppo: 1}\n"),
        ("a.toml", 'env_id = "CartPole-v1"\ntotal-timesteps = 1e6\nhidden_sizes = [32, 32]\n[versions]\ndppo = 1\n'),
    ],
)
def test_settings_are_read_from_files(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf8")
    c = make_config(read_settings(path))
    assert (c.env_id, c.total_timesteps, c.hidden_sizes) == ("CartPole-v1", 1_000_000, (32, 32))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "cannot be read as settings"),
        ("- 1\n- 2\n", "holds list, not settings"),
        ("1: 2\n", "not settings"),
        (None, "cannot be read as settings: [Errno 2]"),
        ("!!python/object/apply:os.getcwd []", "cannot be read as settings"),
    ],
)
def test_files_that_hold_no_settings_are_refused(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "settings.yaml"
    if text is not None:
        path.write_text(text, encoding="utf8")
    with pytest.raises(ConfigError) as caught:
        read_settings(path)
    assert str(caught.value).startswith(f"config={path}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
