"""Turning the words of a command line into settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import make_config
from commandline import parse as parse_training

import dppo
from dppo.commands.eval import PARSER
from dppo.commands.flags import EXTRA, FIRST, as_words, in_flags
from dppo.commands.train import Arguments
from dppo.config import grouped, plain_settings, presets
from dppo.config.aliases import REPLACEMENTS, other_names
from dppo.config.parts import settings_by_name
from dppo.errors import ConfigError, DppoError
from dppo.invocation import flag
from dppo.tools.compare import parse as parse_comparison


@pytest.fixture(autouse=True)
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets for two environments, in two files."""
    folder = tmp_path / "presets"
    folder.mkdir()
    (folder / "one.yaml").write_text(
        "CartPole-v1: {gamma: 0.5, num_steps: 64, ent_coef: 0.0}\n", encoding="utf8"
    )
    (folder / "two.yaml").write_text("Pendulum-v1: {gamma: 0.25}\n", encoding="utf8")
    (folder / "none.yaml").write_text("", encoding="utf8")
    monkeypatch.setattr(presets, "PRESETS", folder)


def parse(line: str) -> Arguments:
    return parse_training(line.split())


def settings(line: str) -> dict[str, Any]:
    """Return the settings of a line, without those of a preset."""
    return parse(f"{line} --preset none").settings


def refusal(line: str) -> str:
    with pytest.raises(DppoError) as caught:
        parse(line)
    assert caught.value.exit_code == 2
    assert len(str(caught.value).splitlines()) <= 2
    return str(caught.value)


def test_only_given_arguments_become_settings_and_the_environment_may_stand_anywhere() -> None:
    assert settings("Acrobot-v1") == {"env_id": "Acrobot-v1"}
    # although 1 is the default
    for line in ("Acrobot-v1 --seed 1", "--seed 1 Acrobot-v1", "--seed=1 Acrobot-v1"):
        assert settings(line) == {"env_id": "Acrobot-v1", "seed": "1"}


def test_defaults_then_preset_then_file_then_flags(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("gamma: 0.6\nnum-steps: 48\nvf_coef: 0.75\n", encoding="utf8")
    parsed = parse(f"CartPole-v1 --config {file} --num-steps 32")
    assert parsed.preset == "CartPole-v1"
    c = make_config(parsed.settings)
    assert c.num_steps == 32  # flag over file
    assert c.gamma == 0.6  # file over preset
    assert c.ent_coef == 0  # preset over default
    assert c.vf_coef == 0.75
    assert c.seed == 1


def test_the_environment_may_come_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('env_id = "Pendulum-v1"\n', encoding="utf8")
    assert parse(f"--config {file}").settings == {"env_id": "Pendulum-v1", "gamma": 0.25}
    assert parse(f"CartPole-v1 --config {file} --preset none").settings["env_id"] == "CartPole-v1"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--num-actors 8", {"num_actors": 8}),
        ("--num_actors=8", {"num_actors": 8}),
        ("--num-actors 4..64", {"num_actors": "4..64"}),
        ("--total-timesteps 1e6", {"total_timesteps": 1_000_000}),
        ("--no-anneal-lr --norm-obs", {"anneal_lr": False, "norm_obs": True}),
        ("--hidden-sizes 32 16", {"hidden_sizes": (32, 16)}),
        ("--hidden-sizes", {"hidden_sizes": ()}),
        ("--target-kl none", {"target_kl": None}),
        ("--run-dir some/where", {"run_dir": Path("some/where")}),
        ("--name no_replay", {"name": "no_replay"}),
        ('--env-kwargs {"nested":{"a":[1,0.25]}}', {"env_kwargs": {"nested": {"a": [1, 0.25]}}}),
        (
            '--num-actors 2 --actor-resources {"licence":1}',
            {"num_actors": 2, "actor_resources": {"licence": 1}},
        ),
        (
            '--num-actors 2 --actor-resources [{"a":1}]',
            {"num_actors": 2, "actor_resources": [{"a": 1}]},
        ),
        ("--seed 1 --seed 9007199254740993", {"seed": 2**53 + 1}),
        ("--replay --no-replay", {"replay": False}),
    ],
)
def test_flags_become_settings(flags: str, expected: dict[str, Any]) -> None:
    parsed = settings(f"Acrobot-v1 {flags}")
    assert set(parsed) == {"env_id", *expected}
    c = make_config(parsed)
    assert {name: getattr(c, name) for name in expected} == expected


def shown(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the help that a line prints."""
    with pytest.raises(SystemExit) as stopped:
        parse(line)
    assert not stopped.value.code
    return capsys.readouterr().out


def test_every_setting_is_a_flag_and_every_flag_a_setting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = set(re.findall(r"^  (--[a-z-]+)", shown("--help", capsys), re.MULTILINE))
    assert flags == {
        flag(name) for name in (*settings_by_name(), *EXTRA, "trust", "seeds", "seeds_at_once")
    } - {"--env-id"}


def test_help_is_in_groups_the_most_used_first_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown("--help", capsys)
    assert max(map(len, text.splitlines())) <= 80
    groups = re.findall(r"^(\w[\w, ]*):", text, re.MULTILINE)[1:]
    parts = ["env", "sampling", "ppo", "sac", "network", "actors", "learners", "run"]
    assert groups == [
        "ENV_ID",
        "several seeds",
        "most used",
        "files, presets and earlier runs",
        *parts,
    ]

    flags = re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)
    assert len(FIRST) == 10
    assert flags[: 2 + len(FIRST) + len(EXTRA)] == [
        flag(name) for name in ("seeds", "seeds_at_once", *FIRST, *EXTRA)
    ]
    for words in ("CartPole-v1", "module:Name-v0", "module:factory"):
        assert words in text.partition("most used")[0]


@pytest.mark.parametrize(
    ("line", "gamma", "steps", "words"),
    [
        ("CartPole-v1 --help", "0.5", "64", "tuned for CartPole-v1"),
        ("-h CartPole-v1", "0.5", "64", "tuned for CartPole-v1"),
        ("CartPole-v1 --nonsense --help", "0.99", "64", ""),
        ("--resume RUN --help", "0.75", "64", "Defaults are the settings of"),
    ],
)
def test_help_shows_the_defaults_that_apply(
    line: str, gamma: str, steps: str, words: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(line.replace("RUN", str(run_dir)), capsys)

    def assert_default(name: str, default: str) -> None:
        [entry] = re.findall(rf"^  --{name} .*?(?=^  --|^$)", text, re.MULTILINE | re.DOTALL)
        assert f"(default: {default})" in " ".join(entry.split())

    assert_default("gamma", gamma)
    assert_default("num-steps", steps)
    assert_default("hidden-sizes", "64 64")

    in_one_line = " ".join(text.split())
    assert words in in_one_line
    assert "Discount factor per env step." in in_one_line

    is_tuned = "tuned for CartPole-v1" in in_one_line
    assert is_tuned is words.startswith("tuned")


def test_aliases_name_flags_that_exist_and_are_not_settings_themselves() -> None:
    settings_as_flags = {flag(name) for name in settings_by_name()}
    flags_of_commands = {
        "--resume",
        "--config",
        "--actors",
        "--seeds",
        "--out",
        "--episodes",
        "--stochastic",
    }
    ours = {row.ours for row in other_names()}
    assert ours <= settings_as_flags | flags_of_commands

    aliases = {alias for row in other_names() for alias in row.theirs}
    answered = {name for row in REPLACEMENTS for name in row.names.split()}
    assert aliases.isdisjoint(answered), "one answer to a name"

    as_flags = {f"--{name}" for name in aliases | answered}
    assert as_flags.isdisjoint(settings_as_flags)
    for row in REPLACEMENTS:
        named = re.findall(r"`([a-z_]+)(?:=[^`]*)?`", row.answer)
        assert set(named) <= set(settings_by_name()), row


def test_the_version_is_printed_behind_a_command_too(typed: Callable[[str], str]) -> None:
    assert typed("train --version") == typed("version") == f"dppo {dppo.__version__}\n"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("lr-schedule", "Did you mean --anneal-lr?"),
        ("policy-kwargs", "--hidden-sizes and --activation"),
        ("normalize", "--no-norm-obs and --no-norm-reward turn it off"),
        ("num-minibatches", "--minibatch-size is the number of rows of a minibatch"),
        ("train-batch-size", "set --num-samplers and --num-steps"),
        ("tensorboard-log", "`tensorboard --logdir runs`"),
        ("algorithm", "--algo is ppo or sac"),
        ("use-sde", "is --noise pink"),
        ("stats-window-size", "the last 100 episodes"),
        ("save-model", "every --checkpoint-interval-s seconds (not env steps), and at the end"),
        ("save-freq", "every --checkpoint-interval-s seconds (not env steps), and at the end"),
        ("clip-range-vf", "--clip-vloss clips the value loss, with the range of --clip-coef"),
        ("eval-freq", "--eval-every counts the env steps of all environments together"),
        ("train-freq", "--gradient-steps is a number per env step"),
        ("policy", "--model is for a network of your own"),
        ("hyperparams", "such as --gamma 0.98"),
        ("n-eval-envs", "Did you mean --eval-actors?"),
        ("early-stop", "examples/early_stop.py"),
        ("optimizer", "Adam, with --learning-rate"),
        ("n-stack", "Did you mean --frame-stack?"),
        ("lstm", "Did you mean --memory?"),
        ("continue", "Did you mean --resume?"),
        ("vec-env", "--num-actors 8"),
        ("capture-video", "dppo replay RUN"),
        ("wandb-project-name", "WANDB_PROJECT"),
        ("callback", "observers=[...]"),
    ],
)
def test_a_name_without_a_counterpart_is_answered_on_the_command_line_and_in_python(
    name: str, answer: str
) -> None:
    assert answer in refusal(f"CartPole-v1 --{name} 1")
    setting = name.replace("-", "_")
    with pytest.raises(ConfigError, match=f"{setting} is not a known setting"):
        make_config({"env_id": "CartPole-v1", setting: 1})


@pytest.mark.parametrize(
    ("command", "aliases"),
    [
        (
            "train",
            "lr:learning-rate n-envs:num-samplers num_envs:num-samplers entropy-coef:ent-coef n_steps:num-steps "
            "num-workers:num-actors clip-range:clip-coef batch-size:minibatch-size timesteps:total-timesteps "
            "n-epochs:update-epochs cuda:device net-arch:hidden-sizes normalize-obs:norm-obs logdir:run-dir",
        ),
        ("compare", "lr:learning-rate num-workers:actors n-seeds:seeds output-dir:out"),
        ("eval", "n-eval-episodes:episodes env:env-id env_name:env-id"),
    ],
)
def test_flags_of_other_libraries_lead_to_ours(command: str, aliases: str) -> None:
    parsers: dict[str, Callable[[list[str]], object]] = {
        "train": parse_training,
        "compare": parse_comparison,
        "eval": PARSER.split,
    }
    for pair in aliases.split():
        alias, _, ours = pair.partition(":")
        with pytest.raises(DppoError) as refused:
            parsers[command](["CartPole-v1", f"--{alias}", "3"])
        assert f"--{alias.replace('_', '-')} is not a known flag. Did you mean --{ours}?" in str(
            refused.value
        )


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("a=1: is wrong. Use `norm_adv=False`.", "a=1: is wrong. Use --no-norm-adv."),
        (
            "gamma=2: too large. Use `gamma=0.9`, or `x=3`.",
            "gamma=2: too large. Use --gamma 0.9, or `x=3`.",
        ),
        (
            "num_actors=9 is many. Use `num_actors=8` or fewer.",
            "num_actors=9 is many. Use --num-actors 8 or fewer.",
        ),
        ("one line\nseed=1: no. Use `seed=2`", "one line\nseed=1: no. Use --seed 2"),
        (
            "a=1: is wrong. Use fewer, or raise `num_steps`.",
            "a=1: is wrong. Use fewer, or raise --num-steps.",
        ),
        (
            "a=1: is wrong. Continue it with `resume=runs/a-1`.",
            "a=1: is wrong. Continue it with --resume runs/a-1.",
        ),
        (
            "a=1: is wrong. Start a new run: `branch=True`.",
            "a=1: is wrong. Start a new run: --branch NEW_DIR.",
        ),
        ("a=1: is wrong. Add `trust=True` if you like.", "a=1: is wrong. Add --trust if you like."),
        (
            "a: no. In Python: train(config, resume=...).",
            "a: no. In Python: train(config, resume=...).",
        ),
        ("a: no. Use `drop_obs=mission robot.arm`.", "a: no. Use --drop-obs mission robot.arm."),
        (
            "a: no. Name it as `env_id` (module:function).",
            "a: no. Name it as ENV_ID (module:function).",
        ),
        ("a: no. Use `env_id=CartPole-v1`.", "a: no. Use CartPole-v1."),
        (
            "a: no. See `ray status`, or the layer `value`.",
            "a: no. See `ray status`, or the layer `value`.",
        ),
        (
            "num_step is unknown. Did you mean num_steps?",
            "num_step is unknown. Did you mean num_steps?",
        ),
    ],
)
def test_remedies_can_be_typed(text: str, typed: str) -> None:
    assert in_flags(text) == typed


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("CartPole-v1 --seed 3 --xyzzyq 1", "--xyzzyq is not a known flag."),
        (
            "CartPole-v1 --num-actor 3 --xyzzyq --learning_rat=3",
            "--num-actors? --xyzzyq is not a known flag. --learning-rat is not a known flag. Did you mean",
        ),
        ("CartPole-v1 -n 1000", "-n is not a known flag. The number of env steps is --total-time"),
        ("CartPole-v1 --actor-resources {licence:1}", "actor_resources={licence:1}: is not JSON"),
        ("CartPole-v1 --preset zzz", "zzz is not a known preset. `dppo presets` lists them."),
        *(
            (
                f"{name} A-v0",
                "is not a known flag: the environment is typed without one, as in dppo train CartPole-v1.",
            )
            for name in ("--env", "--env-id", "--gym_id")
        ),
    ],
)
def test_an_invalid_line_is_refused_in_one_or_two_lines(line: str, words: str) -> None:
    assert words in refusal(line)


@pytest.mark.parametrize(
    "line", ["CartPole-v1 --anneal-lr false", "CartPole-v1 --seed 3 4", "CartPole-v1 Pendulum-v1"]
)
def test_a_stray_word_is_named_and_no_flag_is_reported_as_unknown(line: str) -> None:
    text = refusal(line)
    assert line.rsplit(maxsplit=1)[-1] in text
    assert "is not a known flag" not in text


@pytest.fixture(params=["flat", "in groups"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a run with two actors; its settings are in groups, or flat as in older runs."""
    folder = tmp_path / "runs" / "one"
    (folder / "checkpoints" / "step").mkdir(parents=True)
    on_actors = {"num_actors": 2, "num_samplers": 2, "cpus_per_actor": 0.5}
    config = make_config({"env_id": "CartPole-v1", "gamma": 0.75, **on_actors})
    settings = (
        plain_settings(config) if request.param == "flat" else grouped(plain_settings(config))
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf8")
    return folder


@pytest.mark.parametrize("path", ["", "checkpoints/step"])
def test_resume_takes_the_settings_of_the_run_and_no_preset(run_dir: Path, path: str) -> None:
    parsed = parse(f"--resume {run_dir / path}")
    assert parsed.resume == run_dir / path
    assert parsed.preset is None
    c = make_config(parsed.settings)
    assert (c.env_id, c.num_actors, c.num_samplers, c.cpus_per_actor, c.gamma) == (
        "CartPole-v1",
        2,
        2,
        0.5,
        0.75,
    )


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ("--num-actors 1 --segment-timeout-s 7", {"num_actors": 1, "segment_timeout_s": 7}),
        ("--num-actors 0", {"num_actors": 0, "num_samplers": 2, "cpus_per_actor": 1.0}),
        ("--gamma 0.9", {"gamma": 0.9}),
    ],
)
def test_flags_win_over_the_settings_of_the_run(
    run_dir: Path, flags: str, changed: dict[str, Any]
) -> None:
    file = run_dir / "config.yaml"
    if "gamma" in changed:  # an invalid value may be replaced
        file.write_text(file.read_text().replace("gamma: 0.75", "gamma: 75"))
    c = make_config(parse(f"--resume {run_dir} {flags}").settings)
    assert {name: getattr(c, name) for name in changed} == changed


@pytest.mark.parametrize("flags", ["--preset none", "--preset auto", "--config my.yaml"])
def test_presets_and_files_are_refused_for_a_resumed_run(
    run_dir: Path, tmp_path: Path, flags: str
) -> None:
    name, value = flags[2:].split()
    assert refusal(f"--resume {run_dir} {flags}").startswith(
        f"--{name} {value} has no effect with --resume"
    )
    assert "is not a run folder" in refusal(f"--resume {tmp_path}")
    message = refusal(f"--resume {run_dir.parent}")
    assert f"Pass the folder of a run, such as {run_dir}" in message


def test_resume_auto_takes_the_settings_of_the_command_line(run_dir: Path) -> None:
    """The same line starts the run and continues it, as in the script of a batch system."""
    parsed = parse(f"CartPole-v1 --resume auto --run-dir {run_dir} --num-actors 1")
    assert (parsed.resume, parsed.preset) == ("auto", "CartPole-v1")
    assert parsed.settings["gamma"] == 0.5
    assert refusal("CartPole-v1 --resume auto").startswith(
        "resume=auto: needs a folder that is the same each time."
    )


def test_words_that_are_printed_for_settings_can_be_typed() -> None:
    typed = {"actor_resources": [{"licence": 1.0}, {"gpu_node": 0.5}], "num_actors": 2}
    typed |= {"log_std_init": -1e-05, "hidden_sizes": [8, 4]}
    words = as_words(typed)
    assert words[:2] == ["--actor-resources", '[{"licence": 1.0}, {"gpu_node": 0.5}]']
    config = make_config(parse_training(["Pendulum-v1", *words]).settings)
    assert (config.actor_resources, config.log_std_init) == (typed["actor_resources"], -1e-05)


@pytest.mark.parametrize("command", ["report", "train --resume"])
def test_a_run_of_another_version_is_refused_with_the_file_and_line_of_its_unknown_setting(
    command: str, desk: Path, refused: Callable[[str], str]
) -> None:
    (desk / "run").mkdir()
    text = "env: {env_id: CartPole-v1}\nsampling:\n  num_stepz: 3\n"
    (desk / "run" / "config.yaml").write_text(text, encoding="utf8")
    words = (
        "config=run/config.yaml, line 3: num_stepz is not a known setting. Did you mean num_steps?"
    )
    assert words in refused(f"{command} run")
