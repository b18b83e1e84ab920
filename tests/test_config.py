"""The configuration: derived sizes, and refusals before any process starts."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from builders import make_config
from hypothesis import assume, given
from hypothesis import strategies as st
from worlds.simple import Counting

import dppo
from dppo.config import (
    PPO,
    Actors,
    Config,
    Env,
    Sampling,
    grouped,
    plain_settings,
    presets,
    read_settings,
)
from dppo.config.parts import PARTS, about, annealed, help_by_name, settings_by_name
from dppo.config.presets import merge_preset
from dppo.config.resume import changes_on_resume, check_branch, leave_out_ineffective
from dppo.engine.hosting import shares
from dppo.errors import ConfigError


def config(**settings: Any) -> Config:
    return make_config({"env_id": "CartPole-v1"} | settings)


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "batch_size", "minibatches"),
    [
        ({}, 512, 8),
        ({"num_actors": 5}, 512, 8),
        ({"num_samplers": 3, "envs_per_sampler": 2, "num_steps": 50, "minibatch_size": 64}, 300, 5),
        ({"num_samplers": 64, "envs_per_sampler": 8}, 32_768, 32),  # the most of any batch
        # of 8, the most that divide 150 rows
        ({"num_samplers": 9, "num_steps": 50, "num_actors": 1, "num_learners": 3}, 450, 6),
    ],
    ids=str,
)
def test_sizes_follow_from_the_settings_and_never_from_the_number_of_actors(
    settings: dict[str, Any], batch_size: int, minibatches: int
) -> None:
    sizes = config(**settings).sizes
    assert config(**settings).batch_size == batch_size
    assert sizes.minibatches_per_epoch == minibatches


@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 70), st.none() | st.integers(1, 500))
def test_every_size_that_is_accepted_can_be_trained(
    n: int, e: int, t: int, minibatch_size: int | None
) -> None:
    rows = n * e * t
    assume(minibatch_size is None or minibatch_size <= rows)
    settings: dict[str, Any] = {
        "num_samplers": n,
        "envs_per_sampler": e,
        "num_steps": t,
        "minibatch_size": minibatch_size,
    }
    largest = minibatch_size or max(64, rows // 32)
    num_minibatches = math.ceil(rows / largest)
    smallest = rows // num_minibatches
    if smallest < 2:
        assert "of one row" in refusal(**settings)
        assert (minibatch_size or 2) < 3, "the remedy must help: at least 3"
        settings["norm_adv"] = False
    c = config(**settings)
    assert math.ceil(rows / c.sizes.minibatches_per_epoch) <= largest
    assert c.iterations * rows >= c.total_timesteps
    assert (c.iterations - 1) * rows < c.total_timesteps


def test_remedies_are_found_at_once_for_large_primes() -> None:
    text = refusal(memory="gru", sequence_length=7, num_steps=1_000_000_007, total_timesteps=1e12)
    assert text.endswith(
        "does not divide num_steps=1000000007. Use `sequence_length=1` or 1000000007."
    )
    shared = {"num_actors": 1, "num_learners": 2, "num_steps": 999_999_937, "minibatch_size": 1000}
    assert (
        refusal(**shared, total_timesteps=1e12)
        .removesuffix(", or a different number of learners.")
        .endswith("evenly. Use `minibatch_size=1999999874` or 3999999748")
    )


def test_learning_rate_falls_to_just_above_zero_or_stays() -> None:
    falling = config(total_timesteps=10240, learning_rate=1.0, anneal_lr=True).ppo
    rates = [annealed(falling, done / 10).learning_rate for done in range(10)]
    assert rates == pytest.approx([1 - done / 10 for done in range(10)])
    assert annealed(config(learning_rate=0.5).ppo, 0.3).learning_rate == 0.5


@given(st.integers(1, 12), st.integers(0, 30))
def test_every_sampler_has_one_host_and_hosts_differ_by_one_at_most(
    actors: int, further: int
) -> None:
    hosts = shares(actors + further, actors)
    assert sorted(chain(*hosts)) == list(range(actors + further))
    sizes = [len(samplers) for samplers in hosts]
    assert len(sizes) == actors
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("1e6", 1_000_000), ("1_000_000", 1_000_000), (1e6, 1_000_000), ("2.5e5", 250_000), (4096.0, 4096),
        ("9007199254740993", 2**53 + 1), (10**30, 10**30), (" 4096 ", 4096), ("1E6", 1_000_000),
    ],
)  # fmt: skip
def test_integers_are_accepted_in_several_notations(value: Any, number: int) -> None:
    steps = config(total_timesteps=value).total_timesteps
    assert steps == number
    assert type(steps) is int


@pytest.mark.parametrize("sizes", [["1e3", 64.0], ["1e3,64"]])
def test_layers_are_integers_in_the_same_notations(sizes: Any) -> None:
    assert config(hidden_sizes=sizes).hidden_sizes == (1000, 64)


@pytest.mark.parametrize("value", [1.5, "1.5", "many", "nan", "1e400", None, [1], "1e-3"])
def test_other_values_are_refused_for_integers(value: Any) -> None:
    assert re.fullmatch("num_steps=.*", refusal(num_steps=value)), "one line"


@pytest.mark.parametrize(
    ("settings", "text"),
    [  # tests/remedies/settings.py has contradictions
        (
            {"update_epochs": 1e308},
            r"update_epochs=1\d{308}: must be less than or equal to 1000000.",
        ),
        ({"learning_rate": "nan"}, "learning_rate='nan': must be a finite number."),
        (
            {"num_actors": 6, "num_samplers": 6, "num_learners": 4},
            "num_learners=4 cannot share 6 samplers evenly. Use `num_samplers=8`, or a different number of learners.",
        ),
        (
            {
                "num_actors": 4,
                "num_samplers": 4,
                "num_steps": 10,
                "num_learners": 2,
                "minibatch_size": 14,
            },
            "minibatch_size=14: 3 minibatches do not divide the 20 rows .* Use `minibatch_size=10` or 20, or a "
            "different number of learners.",
        ),
        *(
            (
                {"num_actors": bad},
                f"num_actors={bad}: must be a number of at least 0, auto, or bounds. Use one such as 8, ",
            )
            for bad in (-1, "4...", "..4")
        ),
        ({"num_actors": "0..4"}, "num_actors=0..4: the lower bound must .* `num_actors=4..64`; "),
        (
            {"num_actors": "9..64"},
            "num_actors=9..64 is more than num_samplers=8, .* `num_samplers=9`, which makes the ",
        ),
        *(
            (
                {name: 1e-5, "num_actors": 1, "num_learners": 2},
                f"{name}=1e-05: Ray counts in units of 0.0001",
            )
            for name in ("actor_gpus", "learner_cpus")
        ),
        ({"env_id": 5}, "env_id=5: must be a name, or a function that makes an environment."),
        ({"eval_every": 0}, "eval_every=0: must be greater than 0."),
        ({"resize": [84]}, "resize=84: must be two numbers"),
        *(
            ({"actor_resources": amount, "num_actors": 1}, "actor_resources=")
            for amount in (
                {"GPU": 1},
                {"licence": 0},
                {"licence": 1e-5},
                {"licence": -1},
                {"licence": "nan"},
                [{"a": 1}, {"CPU": 2}],
            )
        ),
        *(
            (
                {"address": at, "num_actors": 2},
                f"address={at}: .*`address=auto`, or .* host:port .6379 by default.",
            )
            for at in ("http://127.0.0.1:8265", "https://ray.example.org", "tcp://head:6379")
        ),
        ({"num_steps": 32, "sampling": {"num_steps": 64}}, "num_steps=32: is given twice"),
        ({"sampling": {"gamma": 0.9}}, "sampling.gamma=0.9: gamma belongs to ppo. Move it there."),
        (
            {"sampling": {"num_step": 64}},
            "num_step is not a known setting. Did you mean num_steps?",
        ),
        ({"actors": 8}, "actors=8: actors is a group of settings. Use one of actor_gpus, "),
        ({"ppo": Sampling()}, r"ppo=Sampling\("),
        *(
            ({name: value}, rf"{name}(\.\d)?=(np\.)?True_?: must be a (whole )?number")
            for name, value in (
                ("seed", True),
                ("num_samplers", np.True_),
                ("gamma", True),
                ("target_kl", True),
                ("num_actors", True),
                ("hidden_sizes", [64, True]),
            )
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refusals_name_the_setting_the_fact_and_the_remedy(
    settings: dict[str, Any], text: str
) -> None:
    assert re.fullmatch(f"{text}.*", refusal(**settings))


def test_all_problems_of_groups_are_named_at_once() -> None:
    lines = refusal(
        num_steps=32, sampling={"num_steps": 64, "gamma": 0.9, "vf-coef": 1, "vf_coef": 1}, actors=8
    ).splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("sampling: has vf-coef and vf_coef")
    assert lines[1].startswith("sampling.gamma=0.9: gamma belongs to ppo")
    assert lines[2].startswith("sampling.vf_coef=1: vf_coef belongs to ppo")
    assert lines[3].startswith("num_steps=32: is given twice")
    assert lines[4].startswith("actors=8: actors is a group")


OF_ACTORS = {
    "address": "auto",
    "cpus_per_actor": 0.5,
    "actor_resources": {"licence": 1},
    "segment_timeout_s": 5,
    "actors_per_node": 1,
    "max_actor_restarts": 0,
    "dashboard": True,
    "actor_gpus": 1,
    "num_learners": 1,
}


@pytest.mark.parametrize("name", OF_ACTORS)
def test_a_setting_of_actors_is_refused_without_them(name: str) -> None:
    """tests/remedies/settings.py has other settings without effect."""
    settings = {name: OF_ACTORS[name]}
    refused = refusal(**settings)
    assert refused.startswith(f"{name}=")
    assert " has no effect: num_actors=0" in refused
    assert getattr(config(num_actors=2, **settings), name) == OF_ACTORS[name]


def test_a_limit_of_kl_is_refused_for_an_update_of_a_single_step() -> None:
    single = {"target_kl": 0.1, "update_epochs": 1, "minibatch_size": 512}
    assert "target_kl=0.1 has no effect: an update is a single SGD step" in refusal(**single)


def test_every_invalid_setting_is_reported_on_its_own_line_and_a_missing_environment() -> None:
    lines = refusal(gamma=2, gae_lambda=-1, nonsense=1, hidden_sizes=(0,)).splitlines()
    names = sorted(re.split("[= .]", line)[0] for line in lines)
    assert names == ["gae_lambda", "gamma", "hidden_sizes", "nonsense"]
    with pytest.raises(ConfigError, match="env_id is missing"):
        make_config({})


@pytest.mark.parametrize("settings", [{"gama": 0.9}, {"num_actors": 9}], ids=str)
def test_invalid_settings_are_config_errors_in_python_that_do_not_mention_flags(
    settings: dict[str, Any],
) -> None:
    assert "--" not in refusal(**settings)
    with pytest.raises(ConfigError):
        Config.preset("CartPole-v1", **settings | {"num_actors": 99})
    with pytest.raises(ConfigError):
        dataclasses.replace(config(), **settings)


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"gamma": 2, "seed": -1}, "gamma"),
        ({"num_actors": 9}, "num_actors"),
        ({"start_rate": "2"}, "start_rate"),
    ],
    ids=str,
)
def test_an_error_names_its_setting(settings: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**settings)
    assert caught.value.setting == setting
    assert pickle.loads(pickle.dumps(caught.value)).setting == setting


def test_train_refuses_anything_but_a_config() -> None:
    with pytest.raises(
        ConfigError, match=r"must be a dppo\.Config\. Use dppo\.Config\(env_id=\.\.\.\)\.$"
    ):
        dppo.train({"env_id": "CartPole-v1"})  # type: ignore[arg-type]


def test_help_is_a_sentence_and_no_text_of_the_configuration_mentions_flags() -> None:
    for name in ("checks", "values", "reading", "resume"):
        source = Path(dppo.config.__file__).with_name(f"{name}.py").read_text(encoding="utf8")
        assert not re.findall(r"--[a-z]", source), name
    for name in settings_by_name():
        assert re.fullmatch(r"(?!.*--)([A-Z].*\.|.*[^.]\.)", help_by_name()[name]), name


def test_settings_cannot_be_changed_except_in_a_copy() -> None:
    for record in (config(), config().run):
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.seed = 3  # type: ignore[misc]
    changed = dataclasses.replace(config(), num_steps=32, seed=4)
    assert (changed.batch_size, changed.sampling.num_steps, changed.run.seed) == (256, 32, 4)


def test_settings_may_be_given_and_read_flat_or_in_parts() -> None:
    flat = config(num_steps=32, gamma=0.9, num_actors=2)
    in_dicts = config(sampling={"num-steps": "32"}, ppo={"gamma": 0.9}, actors={"num_actors": 2})
    in_records = Config(  # type: ignore[call-arg]  # env_id may come in its part
        env=Env(env_id="CartPole-v1"),
        sampling=Sampling(num_steps=32),
        ppo=PPO(gamma=0.9),
        actors=Actors(num_actors=2),
    )
    assert flat == in_dicts == in_records
    assert repr(flat) == "Config(env_id='CartPole-v1', num_steps=32, gamma=0.9, num_actors=2)"

    beside_part = config(sampling=Sampling(num_steps=16, num_samplers=4), num_steps=32)
    assert beside_part.batch_size == 128
    assert flat.sampling.batch_size == flat.batch_size == 256

    counting = config(env_id=Counting)
    assert (flat.env.env_name, counting.env_name) == ("CartPole-v1", "worlds.simple:Counting")
    assert plain_settings(counting)["env_id"] == "worlds.simple:Counting"


def test_every_setting_belongs_to_one_part_and_every_part_holds_its_values() -> None:
    names = [field.name for part in PARTS.values() for field in dataclasses.fields(part)]
    assert len(names) == len(set(names))
    c = config(num_steps=64, learner_threads=2, hidden_sizes=(3,), name="x")
    for name, part in PARTS.items():
        for field in dataclasses.fields(part):
            assert getattr(getattr(c, name), field.name) == getattr(c, field.name)


def test_a_configuration_and_its_parts_travel_without_pydantic() -> None:
    """Pickles are loaded in a process that has not imported it."""
    code = (
        "import pickle, sys\n"
        f"config, sampling = pickle.loads({pickle.dumps((config(num_steps=64), config(num_steps=64).sampling))!r})\n"
        "assert config.sampling == sampling and config.batch_size == 512\n"
        "assert not {'pydantic', 'yaml', 'torch', 'ray'} & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_presets_are_available_in_python() -> None:
    tuned = Config.preset("CartPole-v1", num_actors=2, sampling={"num_steps": 64})
    assert (tuned.gamma, tuned.num_actors, tuned.num_steps) == (0.98, 2, 64)
    with pytest.raises(
        ConfigError, match=r"CartPol-v1 is not a known preset\. Did you mean CartPole-v1"
    ):
        Config.preset("CartPol-v1")


TUNED = {
    "num_steps": 32,
    "minibatch_size": 256,
    "clip_vloss": True,
    "total_timesteps": 4000,
    "sequence_length": None,
}


@pytest.mark.parametrize(
    ("chosen", "given_way", "notes"),
    [
        ({"num_samplers": 8}, {}, []),
        ({"num_samplers": 4}, {"minibatch_size": 128}, [
            "preset: minibatch_size=256 is larger than the batch of 128 steps (4 samplers x 1 env x 32 steps); using "
            "minibatch_size=128"
        ]),
        ({"vf_coef": 0.0}, {"clip_vloss": False}, [
            "preset: clip_vloss=True has no effect: vf_coef=0 disables the value loss; using clip_vloss=False"
        ]),
        ({"num_samplers": 126}, {"total_timesteps": 500_000}, [
            "preset: total_timesteps=4000 is less than one batch of 4032 steps (126 samplers x 1 env x 32 steps); "
            "using total_timesteps=500000"
        ]),
        ({"num_samplers": 4, "memory": "gru", "sequence_length": 32, "num_steps": 64}, {}, []),
        ({"num_samplers": 4, "minibatch_size": 300}, {}, []),  # the user's own value is refused later
        ({"gamma": 2.0}, {}, []),
    ],
)  # fmt: skip
def test_tuned_values_give_way_to_those_of_the_user(
    chosen: dict[str, Any], given_way: dict[str, Any], notes: Any
) -> None:
    chosen = {"env_id": "E-v0"} | chosen
    fitted, reasons = merge_preset(chosen, TUNED)
    settings = make_config({"env_id": "E-v0"})
    assert {
        name: fitted.get(name, getattr(settings, name)) for name in TUNED | chosen
    } == TUNED | chosen | given_way
    assert list(reasons) == notes


def test_a_tuned_value_gives_way_to_a_setting_that_is_refused_beside_it() -> None:
    chosen = {"env_id": "E-v0", "desired_kl": 0.01}
    note = "preset: desired_kl=0.01 has no effect: anneal_lr sets the learning"
    fitted, notes = merge_preset(chosen, {"gamma": 0.9, "anneal_lr": True})
    assert (fitted, notes) == (chosen | {"gamma": 0.9}, (f"{note} rate; using anneal_lr=False",))
    refused = {"env_id": "E-v0", "minibatch_size": 0}
    assert merge_preset({"env_id": "E-v0"}, refused)[0] == {"env_id": "E-v0"}


def test_a_preset_that_is_changed_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "PRESETS", tmp_path)
    (tmp_path / "one.yaml").write_text(
        "CartPole-v1: {num_steps: 32, minibatch_size: 256}\n", encoding="utf8"
    )
    with pytest.warns(
        UserWarning, match=r"^preset: minibatch_size=256 is larger .* using minibatch_size=128$"
    ):
        assert Config.preset("CartPole-v1", sampling={"num_samplers": 4}).minibatch_size == 128
    with pytest.raises(ConfigError, match=r"^minibatch_size=300 is larger"):
        Config.preset("CartPole-v1", num_samplers=4, minibatch_size=300)


BEFORE = {
    "env_id": "CartPole-v1",
    "num_actors": 2,
    "cpus_per_actor": 0.5,
    "gamma": 0.75,
    "total_timesteps": 10240,
    "anneal_lr": True,
}


def changes(**settings: Any) -> tuple[str, ...]:
    """Return the notes on resuming a run with other settings after half of its iterations."""
    before = plain_settings(config(**BEFORE))
    effective = leave_out_ineffective(before, settings)
    flat, in_groups = (
        changes_on_resume(stored, config(**effective), Path("c"), 5)
        for stored in (before, grouped(before))
    )
    assert flat == in_groups
    return flat


def test_settings_that_do_not_affect_learning_may_change_on_resume() -> None:
    assert changes(num_actors=0, checkpoint_interval_s=1, keep_checkpoints=9, progress="off") == ()
    [note] = changes(learner_threads=2)
    assert note.startswith("learner_threads=2 instead of 1: from here on, results differ by round")
    free = {name for name in settings_by_name() if about(name).resume == "free"}
    sizes = {"num_samplers", "envs_per_sampler", "num_steps"}
    assert not free & sizes
    assert not free & {"seed", "learner_threads", "dtype", "replay", "gamma"}


def test_overlap_is_another_name_of_a_lag_of_one_on_resume() -> None:
    before = plain_settings(config(overlap=True))
    assert changes_on_resume(before, config(policy_lag=1), Path("c"), 5) == ()
    with pytest.raises(ConfigError, match="cannot be resumed with another value"):
        changes_on_resume(before, config(policy_lag=2), Path("c"), 5)


def test_a_run_may_be_extended_with_a_note_on_the_learning_rate() -> None:
    def note(after: int, *, is_of_seeds: bool = False, **annealing: Any) -> tuple[str, ...]:
        settings = {"learning_rate": 2.5e-4, "anneal_lr": True, "ent_coef": 0.01, "num_steps": 128}
        settings |= annealing
        before, longer = (config(total_timesteps=steps, **settings) for steps in (10240, after))
        stored = plain_settings(before)
        return changes_on_resume(stored, longer, Path("c"), 5, is_of_seeds=is_of_seeds)

    ends = ", and reaches zero at 20,480 steps instead of 10,240"
    begins = "total_timesteps=20480 instead of 10240: the "
    assert note(20480) == (f"{begins}learning rate rises from 0.000125 to 0.000188{ends}",)

    ranges = "clipping range rises from 0.1 to 0.15 and the weight of the entropy rises from 0.005 to 0.0075"
    ranges_note = note(20480, anneal_lr=False, anneal_clip=True, anneal_ent=True)
    assert ranges_note == (begins + ranges + ends,)
    for total in (5120, 20480):  # without annealing the length changes nothing
        assert note(total, anneal_lr=False) == ()
    with pytest.raises(ConfigError, match=r"=4096: c was made after 5120 env steps\. Leave it out"):
        note(4096, anneal_lr=False)
    assert note(4096, anneal_lr=False, is_of_seeds=True) == (), "a seed that has finished is kept"


def test_a_setting_of_actors_that_is_given_is_not_dropped_without_actors() -> None:
    """Those of the run are: see tests/commands/test_arguments.py."""
    effective = leave_out_ineffective(BEFORE, {"num_actors": 0, "cpus_per_actor": 2})
    assert "cpus_per_actor=2.0 has no effect" in refusal(**effective)


@pytest.mark.parametrize(
    ("settings", "change"),
    [
        ({"eval_every": 64, "baseline": "control:PI", "never_worse": True}, {"eval_every": None}),
        ({"num_actors": 2, "num_learners": 2, "learner_cpus": 2}, {"num_actors": 0}),
    ],
    ids=["never_worse", "learner_cpus"],
)
def test_a_setting_whose_own_need_is_left_out_is_left_out_too(
    settings: dict[str, Any], change: dict[str, Any]
) -> None:
    stored = plain_settings(config(**BEFORE | settings))
    effective = leave_out_ineffective(stored, change, resume=("free", "close"))
    assert not settings.keys() & effective.keys() - change.keys()
    assert config(**effective).gamma == BEFORE["gamma"]


YAML = (
    "env_id: CartPole-v1\ntotal-timesteps: 1e6\nhidden_sizes: [32, 32]\nversions: {dppo: 1}\n",
    "env: {env_id: CartPole-v1}\nrun: {total-timesteps: 1e6}\nnetwork:\n  hidden_sizes: [32, 32]\n",
)
TOML = (
    'run.total_timesteps = 1e6\nversions.dppo = 1\n[env]\nenv_id = "CartPole-v1"\n'
    "[network]\nhidden_sizes = [32, 32]\n"
)


def settings_of(text: str, folder: Path, suffix: str = "yaml") -> dict[str, Any]:
    """Return the settings of a file with this text."""
    path = folder / f"settings.{suffix}"
    path.write_text(text, encoding="utf8")
    return read_settings(path)


@pytest.mark.parametrize(("suffix", "text"), [("yaml", YAML[0]), ("yaml", YAML[1]), ("toml", TOML)])
def test_settings_are_read_from_files(tmp_path: Path, suffix: str, text: str) -> None:
    """tests/test_errors.py has files that cannot be read as settings."""
    settings = settings_of(text, tmp_path, suffix)
    c = make_config(settings)
    assert c.env_id == "CartPole-v1"
    assert c.total_timesteps == 1_000_000
    assert c.hidden_sizes == (32, 32)


def test_all_settings_survive_being_written_and_read(tmp_path: Path) -> None:
    c = config(
        num_actors=2,
        actor_resources={"licence": 1},
        env_kwargs={"a": [1, {"b": None}]},
        target_kl=0.5,
    )
    groups = grouped(plain_settings(c))
    read = make_config(settings_of(yaml.safe_dump(groups), tmp_path))
    assert read == dataclasses.replace(c, minibatch_size=64)  # what was derived is written down
    assert groups["sampling"]["num_samplers"] == 8


@pytest.mark.parametrize(
    ("habits", "answer"),
    [
        ({"env_id": gym.make("CartPole-v1")}, "is an environment. Pass its id, or a function that"),
        ({"env": "CartPole-v1"}, "env is a group of settings. Use env_id='CartPole-v1'."),
        ({"lr": 1e-3}, "lr is not a known setting. Did you mean learning_rate?"),
    ],
)
def test_habits_from_other_libraries_are_answered(habits: dict[str, Any], answer: str) -> None:
    assert answer in refusal(**habits)


LONG = "1" * 1000


@pytest.mark.parametrize("number", [LONG, "1" + ":1" * 600, f"!!int '1{':1' * 600}'"])
def test_only_numbers_may_not_be_very_long(number: str, tmp_path: Path) -> None:
    """YAML takes long to read them; quoted digits are a text."""
    with pytest.raises(ConfigError, match=r"line 1 has .* a very long number"):
        settings_of(f"env_kwargs: {{task: {number} }}", tmp_path)
    quoted = settings_of(f"env_kwargs: ['{LONG}', \"{LONG}\"]", tmp_path)
    assert quoted["env_kwargs"] == [LONG, LONG]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("seed: 010", "line 1 has 010, which is 8 in YAML: write that, or quote it"),
        ("total_timesteps: 1:30", "line 1 has 1:30, which is 90 in YAML"),
        ("seed: 1\n\tgamma: 0.9", "line 2: found a tab character"),
    ],
)
def test_a_surprise_of_yaml_is_refused_with_its_line(
    text: str, answer: str, tmp_path: Path
) -> None:
    assert settings_of("seed: 007\nrun_dir: '010'", tmp_path) == {"seed": 7, "run_dir": "010"}
    with pytest.raises(ConfigError, match=re.escape(answer)):
        settings_of(text, tmp_path)


def test_words_of_yaml_are_understood(tmp_path: Path) -> None:
    """`off` is a boolean there, and `none` a text."""
    text = "progress: off\nenv_state: off\nrun_dir: none\nlicences: none\n"
    read = config(**settings_of(text, tmp_path))
    assert (read.progress, read.env_state) == ("off", "off")
    assert (read.run_dir, read.licences) == (None, None)


def test_keys_of_yaml_may_be_merged_from_several_mappings(tmp_path: Path) -> None:
    text = "env_kwargs: {a: &a {x: 1}, b: &b {y: 2}, c: {<<: *a, <<: *b}}\n"
    assert settings_of(text, tmp_path)["env_kwargs"]["c"] == {"x": 1, "y": 2}


def named_in(refused: pytest.ExceptionInfo[ConfigError]) -> set[str]:
    """Return the settings that begin the lines of a refusal."""
    return {line.partition("=")[0] for line in str(refused.value).splitlines()}


def test_all_that_settings_lack_or_contradict_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match="Set `baseline` and `eval_every`") as refused:
        config(never_worse=True, eval_episodes=1, learner_cpus=2.0)
    assert named_in(refused) == {"eval_episodes", "learner_cpus", "never_worse"}


def test_each_change_that_a_resumed_run_or_a_branch_does_not_allow_is_named(tmp_path: Path) -> None:
    before = plain_settings(config())
    with pytest.raises(ConfigError) as refused:
        changes_on_resume(before, config(gamma=0.5, seed=7, hidden_sizes=(3,)), tmp_path, 1)
    assert named_in(refused) == {"gamma", "seed", "hidden_sizes"}

    with pytest.raises(ConfigError) as refused:
        check_branch(before, config(gamma=0.5, activation="relu", hidden_sizes=(3,)), tmp_path)
    assert named_in(refused) == {"activation", "hidden_sizes"}


def test_each_unknown_argument_and_each_invalid_number_of_a_call_is_named() -> None:
    unknown: dict[str, Any] = {"learning_rate": 1, "epochs": 2}
    with pytest.raises(ConfigError, match=r"argument learning_rate\..*\n.*argument epochs\."):
        dppo.train(config(), **unknown)
    with pytest.raises(ConfigError) as refused:
        dppo.evaluate(Path("runs/none"), episodes=0, seed=-1)
    assert named_in(refused) == {"episodes", "seed"}


def test_each_name_of_code_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    wrong = config(env_id="CartPol-v1", model="worlds.models:Plan", run_dir=tmp_path / "run")
    with pytest.raises(ConfigError) as refused:
        dppo.train(wrong)
    assert named_in(refused) >= {"env_id", "model"}
    assert not (tmp_path / "run").exists()
