"""Mistakes of users, refused early with a remedy, and exceptions of their own code."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from commandline import Command, fresh_environment
from worlds.faulty import line_that_raises
from worlds.simple import changeable

import dppo
from dppo.__main__ import main
from dppo.errors import CheckpointError, EnvironmentFault, printable

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
SIZES = {
    "num_samplers": 1,
    "num_steps": 16,
    "total_timesteps": 64,
    "anneal_lr": True,
    "progress": "off",
}
TINY = ["--preset", "none", "--num-samplers", "1", "--num-steps", "16", "--total-timesteps", "64"]
ODD = ["train", "worlds.simple:Odd", *TINY, "--env-kwargs"]

# The words after `dppo`, and what the message must contain: the setting, the fact, the remedy.
REFUSED = {
    "trian": "trian is not a known command ... Did you mean train?",
    "resume runs/x": "resume is `dppo train --resume RUN`",
    "train mysim.py": "env_id=mysim.py: is a file ... Use mysim:make.",
    "train ./sims/mysim.py:Sim": "is a file ... Use mysim:Sim, with PYTHONPATH=sims.",
    "train numpy-v0": "env_id=numpy-v0 ... write numpy:numpy-v0",
    "train CartPole-v1 --hidden-sizes 64,0": "hidden_sizes ... greater than 0",
    "train": "the environment is missing ... dppo train CartPole-v1",
    "train CartPole-v1 --num-actor 8": "--num-actor is not a known flag ... Did you mean --num-actors? ... --help",
    "train CartPole-v1 --gama=0.9": "--gama ... Did you mean --gamma?",
    "eval run --episode 3": "--episode ... Did you mean --episodes?",
    "train CartPole-v1 --seed": "--seed ... expected one argument",
    "train CartPole-v1 --n_envs 4": "--n-envs ... Did you mean --num-samplers?",
    "train --seed 3 CartPole-v1 Acrobot-v1": "'Acrobot-v1' ... one ENV_ID",
    "train CartPole-v1 --anneal-lr no": "'no' ... take no value",
    "train CartPol-v1": "env_id=CartPol-v1 ... not a known environment id ... Did you mean CartPole-v1?",
    "train :": "env_id=: ... names no environment ... module:make",
    "train :make": "env_id=:make ... names no environment ... module:make",
    f"train CartPole-v1 --env-kwargs '{'[' * 5000}'": "env_kwargs=[[[ ... [ ... is not JSON",
    f"train CartPole-v1 --seed {'x' * 100_000}": "seed='xxx ... xxx ... whole number",
    "train --config deep.yaml": "config=deep.yaml ... line 1 has more than 100 levels",
    "train Zorgon-v0": "env_id=Zorgon-v0 ... package:Zorgon-v0",
    "train no_such:Env-v0": "env_id=no_such:Env-v0 ... No module named 'no_such' ... Python looks in",
    "train broken:Env-v0": "env_id=broken:Env-v0 ... ZeroDivisionError: division by zero",
    "train unparsable:Env-v0": "env_id=unparsable:Env-v0 ... SyntaxError",
    "train exiting:Env-v0": "env_id=exiting:Env-v0 ... SystemExit",
    "train worlds.simple:Od": "env_id=worlds.simple:Od ... has no Od",
    "train CartPole-v1 --preset none --num-steps 4 --minibatch-size 300": (
        "minibatch_size=300 is larger ... 32 steps (8 samplers x 1 env x 4 steps) ... at most 32, or raise --num-steps"
    ),
    "train CartPole-v1 --preset none --num-actors 4 --num-samplers 3": (
        "num_actors=4 is more than num_samplers=3 ... Use --num-actors 3 or fewer, or --num-samplers 4"
    ),
    "train CartPole-v1 --num-actors 1 --licences 8 --eval-every 1000": "licences=8 ... use --num-samplers 7",
    "train CartPole-v1 --num-samplers 1 --envs-per-sampler 8 --licences 4": "lower --envs-per-sampler, for a smaller",
    "train CartPole-v1 --config twice.yaml": "num-steps and num_steps, the same setting. Leave one out.",
    "train CartPole-v1 --config grouped.yaml": "line 3 has ppo for the second time",
    "train CartPole-v1 --config repeated.yaml": "line 2 has num_steps for the second time",
    "train CartPole-v1 --config both.yaml": "sampling: has num-steps and num_steps, the same setting. Leave one out.",
    "train CartPole-v1 --seed -1": "seed=-1: must be greater than or equal to 0.",
    "train CartPole-v1 --hidden-sizes 64 0": "hidden_sizes ... greater than 0",
    "train CartPole-v1 --activation gelu": "gelu ... tanh ... relu",
    "train CartPole-v1 --env-kwargs '{g: 1'": "env_kwargs={g: 1 ... JSON",
    "train CartPole-v1 --num-actors 2 --actor-resources '{\"CPU\": 2}'": "actor_resources ... CPU ... --cpus-per-actor",
    "train CartPole-v1 --cpus-per-actor 2": "cpus_per_actor=2.0 has no effect ... num_actors=0 ... --num-actors 1 or",
    "train CartPole-v1 --preset CartPol-v1": "preset ... CartPol-v1 ... CartPole-v1",
    "train --config none.yaml": "config=none.yaml ... No such file",
    "train --config .": "config=. ... directory",
    "train --config noise.yaml": "config=noise.yaml ... cannot be read",
    "train --config number.yaml": "config=number.yaml ... not settings",
    "train --config object.yaml": "config=object.yaml ... cannot be read as settings",
    "train --config broken.py": "config=broken.py ... not settings",
    "train CartPole-v1 --config other.yaml": "learning_rat is not a known setting ... Did you mean learning_rate?",
    "train CartPole-v1 --run-dir broken.py/run": "run_dir=broken.py/run ... cannot be written ... Use another folder",
    f"train CartPole-v1 --run-dir {'a' * 300}": "run_dir=aaa ... cannot be written ... Use another folder",
    "train CartPole-v1 --run-dir run": "run_dir=run: contains a run already ... --resume run",
    "train --resume .": "is not a run folder ... config.yaml",
    "train --resume nowhere": "nowhere: does not exist ... Pass the folder",
    "train --resume bare": "bare ... contains no checkpoint",
    "train --resume from_python": "<lambda> ... is an object of a Python program ... dppo.train(config, resume=",
    "train --resume run --gamma 0.5": "gamma=0.5 ... 0.99 ... Leave it out, or start a new run ... --branch NEW_DIR",
    "train --resume run --total-timesteps 32": "total_timesteps=32 ... was made after 64",
    "train --resume run --num-samplers 2": "num_samplers=2",
    "train --resume run --seed 2": "seed=2 ... was made with 1",
    "train --resume run --config other.yaml": "--config other.yaml has no effect with --resume",
    "train --resume run --run-dir elsewhere": "--run-dir elsewhere ... has no effect with --resume ... Leave it out",
    "train --resume run --init-from run": "--init-from run has no effect with --resume",
    "train --resume run --init-from run --branch new": "--init-from run has no effect with --resume",
    "train Acrobot-v1 --resume run": "env_id=Acrobot-v1 ... was made with CartPole-v1",
    "train --resume run --hidden-sizes 32": "hidden_sizes=[32] ... was made with [64, 64]",
    "train --resume damaged/checkpoints/iter_000004": "damaged/checkpoints/iter_000004.safetensors ... SHA-256",
    "eval damaged/checkpoints/iter_000004": "damaged/checkpoints/iter_000004.safetensors ... SHA-256",
    "train --resume ruined": "ruined ... contains only damaged checkpoints (1)",
    "eval nowhere": "nowhere: there is no such run ... --policy",
    "eval": "RUN",
    "eval run --episodes 0": "episodes=0 ... at least 1",
}
# Runs all of them in one process, and returns for each what was printed on stderr and whether Ray was imported.
REFUSED_IN_A_ROW = """
import contextlib, io, json, sys, traceback
from dppo.__main__ import main
answers = {}
for line, argv in json.load(sys.stdin).items():
    said, code = io.StringIO(), None
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(argv)
        except BaseException:
            traceback.print_exc()
    answers[line] = {"code": code, "said": said.getvalue(), "ray": "ray" in sys.modules}
json.dump(answers, sys.stdout)
"""


def damage(path: Path) -> None:
    """Change one byte of a checkpoint."""
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, damaged copies of it, and files that are not runs."""
    desk = tmp_path_factory.mktemp("desk")
    files = {
        "broken.py": "1 / 0\n",
        "unparsable.py": "def (\n",
        "exiting.py": "raise SystemExit('wrong arguments')\n",
        "other.yaml": "learning_rat: 0.1\n",
        "deep.yaml": "[" * 5000,
        "number.yaml": "1: 2\n",
        "object.yaml": "!!python/object/apply:os.getcwd []",
        "grouped.yaml": "ppo: {gamma: 0.9}\nsampling: {num_steps: 8}\nppo: {vf_coef: 1.0}\n",
        "repeated.yaml": "num_steps: 8\nnum_steps: 16\n",
        "both.yaml": "sampling: {num-steps: 16, num_steps: 32}\n",
        "twice.yaml": "num-steps: 8\nnum_steps: 16\n",
    }
    for name, text in files.items():
        (desk / name).write_text(text)
    (desk / "noise.yaml").write_bytes(bytes(range(256)))
    settings = {**SIZES, "checkpoint_interval_s": 0}
    dppo.train(make_config({"env_id": "CartPole-v1", "run_dir": desk / "run", **settings}))
    without_path = lambda: changeable()  # noqa: E731, PLW0108  a function that no import path names
    dppo.train(make_config({"env_id": without_path, "run_dir": desk / "from_python", **settings}))
    for name in ("damaged", "ruined", "bare"):
        shutil.copytree(desk / "run", desk / name)
    damage(desk / "damaged" / "checkpoints" / "iter_000004.safetensors")
    for path in (desk / "ruined" / "checkpoints").glob("iter_00000[0123].*"):
        path.unlink()
    damage(desk / "ruined" / "checkpoints" / "iter_000004.safetensors")
    shutil.rmtree(desk / "bare" / "checkpoints")
    return desk


@pytest.fixture(scope="module")
def refusals(desk: Path) -> dict[str, dict[str, Any]]:
    lines = json.dumps({line: shlex.split(line) for line in REFUSED})
    child = subprocess.run(
        [sys.executable, "-c", REFUSED_IN_A_ROW], input=lines, cwd=desk, env=fresh_environment(),
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    answers: dict[str, dict[str, Any]] = json.loads(child.stdout)
    return answers


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: line[:60])
def test_a_mistake_is_refused_in_one_or_two_lines_with_a_remedy(
    line: str, refusals: dict[str, dict[str, Any]]
) -> None:
    answer = refusals[line]
    text = answer["said"]
    for words in REFUSED[line].split(" ... "):
        assert words in text
    assert answer["code"] == 2
    assert text.startswith("dppo")
    assert text.count("dppo train:") <= 1

    is_module = "importing" in text  # file, line and text, as Python shows them
    assert 1 <= len(text.splitlines()) <= (6 if is_module else 2)
    assert len(text) < 4000
    assert "Traceback" not in text
    assert not answer["ray"], "Ray was imported for this"


def test_a_refused_command_leaves_no_folder_behind(
    desk: Path, refusals: dict[str, dict[str, Any]]
) -> None:
    assert not (desk / "runs").exists()
    assert not (desk / "elsewhere").exists()


@pytest.mark.parametrize(
    ("part", "kind", "words"),
    [
        ("obs", "dict", "leaf 'mission' ... Use --drop-obs mission"),
        ("obs", "list", "is Sequence(Discrete(3) ... TransformObservation"),
        ("obs", "graph", "is Graph(Discrete(3) ... TransformObservation"),
        ("act", "text", "action_space=Text( ... TransformAction"),
    ],
)
def test_an_unsupported_space_is_named_before_anything_is_printed_and_leaves_the_folder_free(
    part: str, kind: str, words: str, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """tests/envs/test_spaces.py has others."""
    monkeypatch.chdir(tmp_path)
    assert main([*ODD, json.dumps({part: kind}), "--run-dir", "run"]) == 2
    printed, refusal = capsys.readouterr()
    assert printed == ""
    assert all(word in refusal for word in words.split(" ... "))
    assert len(refusal.splitlines()) <= 2
    assert list(tmp_path.iterdir()) == [], "a refused run leaves nothing behind"
    assert main([*ODD, '{"obs": "box"}', "--run-dir", "run"]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_an_unsupported_space_is_reported_once_by_several_actors(
    tmp_path: Path, capfd: Capture, monkeypatch: Patch, ray_session: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dppo.records.observers.PATIENCE_S", 1e9)  # a slow start is not announced
    text = ["worlds.simple:Odd", "--env-kwargs", '{"obs": "text"}']
    assert main(["train", *text, *TINY, "--num-actors", "3", "--num-samplers", "3"]) == 2
    printed, refusal = capfd.readouterr()
    assert printed in ("", "Starting 3 Ray actors ...\n"), "no headline comes before a refusal"
    assert refusal.startswith("dppo train: observation_space: is Text(")
    assert len(refusal.splitlines()) <= 2


@pytest.mark.parametrize(
    ("variable", "before", "after", "words"),
    [
        ("ODD_OBS", "box", "wider", r"its obs.*\[3\].*\[5\]"),
        ("ODD_ACT", "two", "three", r"actions.*2.*3"),
    ],
)
def test_a_run_is_not_resumed_with_other_spaces(
    variable: str, before: str, after: str, words: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    config = make_config({"env_id": changeable, **SIZES, "run_dir": tmp_path / "run"})
    monkeypatch.setenv(variable, before)
    dppo.train(config)
    monkeypatch.setenv(variable, after)
    with pytest.raises(CheckpointError, match=words) as refused:
        dppo.train(config, resume=tmp_path / "run")
    assert "worlds.simple:changeable" in str(refused.value)


def test_a_damaged_checkpoint_is_skipped_with_a_note(
    desk: Path, tmp_path: Path, capsys: Capture
) -> None:
    run_dir = tmp_path / "damaged"
    shutil.copytree(desk / "damaged", run_dir)
    assert main(["train", "--resume", str(run_dir), "--progress", "plain"]) == 0
    text = capsys.readouterr().out
    assert "skipped a damaged checkpoint" in text
    assert "iter_000004.safetensors" in text
    assert "Resuming from iter_000003" in text
    assert "; later iterations, up to 4, were not saved, and are repeated." in text
    mended, original = (dppo.load_policy(at).weights.tobytes() for at in (run_dir, desk / "run"))
    assert mended == original


def test_playing_with_an_older_policy_is_noted(desk: Path, capsys: Capture) -> None:
    assert main(["eval", str(desk / "damaged"), "--episodes", "1"]) == 0
    printed = capsys.readouterr()
    assert "iter_000004.safetensors" in printed.out + printed.err
    assert "policy after 48 steps" in printed.out


@pytest.mark.slow
def test_training_works_without_standard_output(tmp_path: Path) -> None:
    """As under some supervisors: `>&-`."""
    closed = "import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'dppo', *sys.argv[1:]])"
    with Command(
        ["train", "CartPole-v1", *TINY, "--run-dir", "run"], tmp_path, program=("-c", closed)
    ) as command:
        assert command.wait(60) == 0
        assert command.err == ""
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.proves("raises an exception that fails to unpickle")
@pytest.mark.parametrize(
    ("num_actors", "where"),
    [
        *(("0", where) for where in ("constructor", "reset", "step")),
        *(pytest.param("3", where, marks=pytest.mark.slow) for where in ("constructor", "reset")),
        ("1", "step"),
    ],
)
def test_an_exception_of_the_environment_is_shown_with_the_users_traceback(
    where: str,
    num_actors: str,
    tmp_path: Path,
    capfd: Capture,
    monkeypatch: Patch,
    ray_session: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    hosting = f"--num-actors {num_actors} --num-samplers 6 --envs-per-sampler 2"
    sizes = f"{hosting} --total-timesteps 1000 --on-env-fault raise"
    world = ["worlds.faulty:Brittle", "--env-kwargs", json.dumps({"where": where})]
    assert main(["train", *world, *TINY, *sizes.split()]) == 1

    text = capfd.readouterr().err
    # The traceback begins with the user's line, not with ours.
    [first, traceback] = text.split("Traceback (most recent call last):\n")
    assert "faulty.py" in traceback.splitlines()[0]
    assert f'faulty.py", line {line_that_raises(where)}, in ' in traceback

    place = r"dppo train: sampler \d+ \(worlds.faulty:Brittle\), env \d+: "
    if where != "constructor":
        place += rf"{where} of episode \d+ \(seed \d+, step \d+\) raised "
    assert re.match(place, first)
    # in the first line, and at the end of the traceback
    assert text.count("LicenceError: licence server said 503") == 2


def test_texts_are_printed_without_control_characters_and_shortened() -> None:
    assert (
        printable("Tür\t\x1b[2J\x9b31m\u202e\ud800\r\n→ ok")
        == "Tür\t\\x1b[2J\\x9b31m\\u202e\\ud800\\r\n→ ok"
    )

    line = printable(f"name={'x' * 10**7}: too long. Use less.")
    assert len(line) < 2000
    assert re.fullmatch(r"name=x+ \.\.\. x+: too long\. Use less\.", line)

    text = printable("".join(f"line {number}\n" for number in range(10**6)))
    assert len(text) < 60_000
    assert text.startswith("line 0\nline 1\n")
    assert text.endswith("line 999999\n")
    assert str(CheckpointError("\x1b")) == str(EnvironmentFault("\x1b")) == "\\x1b"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["--help", "train --help", "presets"])
def test_a_reader_that_has_exited_gets_no_error(words: str, unbuffered: str) -> None:
    """As in `dppo presets | head`: nothing is printed, and a command that has done its work ends as ever."""
    reading, writing = os.pipe()
    os.close(reading)
    settings: dict[str, Any] = {
        "stdout": writing,
        "stderr": subprocess.PIPE,
        "env": fresh_environment(PYTHONUNBUFFERED=unbuffered),
    }
    ended = subprocess.run([sys.executable, "-m", "dppo", *words.split()], check=False, **settings)
    os.close(writing)
    assert (ended.returncode in (0, 141), ended.stderr) == (True, b"")
