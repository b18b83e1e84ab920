"""Every command of every page is run here in a short form, or is listed with the reason why it is not.

The settings and flags of all `dppo` commands are checked in tests/test_readme.py, of all pages.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from commandline import run
from test_readme import PAGES, ROOT, SIMULATOR, SMALL, blocks, commands, words_for_dppo

import dppo

TRAIN = "dppo train CartPole-v1 --total-timesteps 512"


class Guide(NamedTuple):
    """The commands of one page that are run, in its order, in one folder."""

    short: dict[str, str]
    """How a command begins, and the words that make it short."""
    before: tuple[str, ...] = ()
    """Commands that make what the page takes for granted."""


GUIDES = {
    "DEPLOY.md": Guide({"dppo train": "--total-timesteps 512", "dppo export": ""}),
    "DOCTOR.md": Guide(
        {
            "dppo doctor dppo/Slow": "--seconds 3",
            "dppo doctor mysim:make": "--seconds 3",
            "dppo doctor runs/first": "",
        },
        (f"{TRAIN} --run-dir runs/first",),
    ),
    "EVALUATION.md": Guide(
        {
            "dppo train CartPole-v1 --num-actors 8": "--num-actors 0 --total-timesteps 512 --eval-every 256"
        }
    ),
    "REPRODUCIBILITY.md": Guide(
        {"dppo diff": ""}, tuple(f"{TRAIN} --trace-hashes --run-dir runs/{name}" for name in "ab")
    ),
    "RUNS.md": Guide(
        {
            "dppo report": "",
            "dppo plot": "",
            "dppo train CartPole-v1 --preset none --run-dir runs/checked": "",
            "dppo verify runs/checked": "",
            "dppo train CartPole-v1 --seeds": "--total-timesteps 512 --seeds 1,2",
            "dppo train Acrobot-v1": "--total-timesteps 512",
        },
        (f"{TRAIN} --run-dir runs/first",),
    ),
    "SETTINGS.md": Guide({"dppo train CartPole-v1": "--num-actors 0 --total-timesteps 512"}),
}
NOT_RUN = {  # a pattern of commands, and why
    r"pip install|^python -m (pip|venv)": "installs packages; tests/test_package.py installs the wheel; "
    "below it is checked that extras and packages are known",
    r"^(\.venv/bin/)?python benchmarks/": "measures for minutes to hours; its arguments are parsed below",
    r"^python examples/": "run by tests/test_examples.py",
    r"dppo.remote|python -m dppo.remote": "run by tests/test_remote.py, with a compiler and solvers",
    r"--address|^ray |^srun |^head=|^export |^kubectl |^sbatch |^s?ray_|^python -m dppo|^--": "needs a cluster",
    r"--video|--debug|--render|runs/first/incidents/": "run by tests/test_video.py, tests/test_episodes.py and "
    "tests/test_incidents.py: needs images, a debugger, a display or a fault",
    r"replay runs/first --episode|mysim:make --run-dir": "run by tests/test_episodes.py",
    r"--track ": "run by tests/records/test_tracking.py, where the package is installed",
    r"^dppo tune ": "run by tests/commands/test_tune.py",
    r"mysim:make --num-samplers 64|mysim:ScaledReward|agents:make|energyplus:|^cd |^~/": "needs files of yours or a "
    "simulator; tests/test_joint_envs.py and tests/test_simulators.py run these",
    r"openfoam:make": "run by tests/test_openfoam.py, with OpenFOAM",
    r"^dppo train CartPole-v1 #|^dppo train mysim:make --num-actors 8": "shown on the first pages, and run there",
    r"--baseline pi:PI": "run by tests/test_baseline.py, with a smaller plant",
    r"^dppo doctor mysim:make$": "run on the page of the doctor",
    r"^tensorboard ": "starts a server of another package",
    r"^dppo eval tanks:make --policy pi:PI": "run by tests/test_examples.py",
    r"^OPENBLAS_CORETYPE=": "the whole suite of tests; .ci/run does so",
    r"^dppo verify .*--num-actors": "run by tests/test_verify.py: needs actors",
    r"--actors-per-node|--num-learners|--learner-gpus": "run by tests/cluster: needs nodes or a GPU",
}
OTHER_PACKAGES = {"mysim", "huggingface_hub", "envpool"}
RESULTS = ROOT / "benchmarks" / "results"
"""Pages whose trainings take minutes to hours: settings are checked in tests/test_readme.py."""


def commands_to_run(page: Path) -> dict[str, str]:
    """Return the commands of a page that are run, and the words that make them short."""
    short = GUIDES[page.name].short
    chosen = {}
    for command in commands(page):
        beginning = [words for words in short if command.startswith(words)]
        if beginning and not any(re.search(pattern, command) for pattern in NOT_RUN):
            chosen[command] = short[max(beginning, key=len)]
    return chosen


def test_every_command_is_run_or_is_listed_with_a_reason() -> None:
    used = set()
    unknown = []
    for page in PAGES:
        tested_commands = commands_to_run(page) if page.name in GUIDES else {}
        for command in commands(page):
            reasons = {pattern for pattern in NOT_RUN if re.search(pattern, command)}
            used |= reasons
            first = command in SMALL  # tests/test_readme.py runs these
            if not (first or reasons or command in tested_commands or page.parent == RESULTS):
                unknown.append(f"{page.name}: {command}")
    assert not unknown, "\n".join(["Neither run in a short form nor listed in NOT_RUN:", *unknown])
    assert used == set(NOT_RUN)
    for file in re.findall(r"tests/[\w/]+\.py", "".join(NOT_RUN.values())):
        assert (ROOT / file).is_file(), file
    for name, guide in GUIDES.items():
        tested_commands = commands_to_run(ROOT / "docs" / name)
        for beginning in guide.short:
            assert any(command.startswith(beginning) for command in tested_commands), (
                f"{name}: {beginning}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_that_are_called_know_their_flags(page: Path) -> None:
    for command in commands(page):
        for script, words in re.findall(
            r"python ((?:benchmarks|examples)/[\w/]+\.py)(.*)", command.split(" #")[0]
        ):
            text = (ROOT / script).read_text(encoding="utf8")
            for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", words):
                assert flag in text, f"{page.name}: {script} has no {flag}"


def test_extras_and_packages_that_pages_install_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf8")
    extras = re.findall(r"^(\w+) = \[", project, re.MULTILINE)
    packages = project + (ROOT / "constraints.txt").read_text(encoding="utf8")
    for page in PAGES:
        text = page.read_text(encoding="utf8")
        for words in re.findall(r"pip install ([^`\n]+)", text):
            for word in shlex.split(words.replace("./dppo", ""), comments=True):
                assert not re.match(r"dppo\b", word), (
                    f"{page.name}: dppo is in no index; install from the clone"
                )
                names = re.findall(r"^\.\[([\w,]+)\]$", word)
                for name in names[0].split(",") if names else ():
                    assert name in extras, f"{page.name}: {word}"
                if re.fullmatch(r"[a-z][\w-]*", word) and word not in OTHER_PACKAGES:
                    assert re.search(rf'^{word}==|"{word}[>"]', packages, re.MULTILINE), (
                        f"{page.name}: {word}"
                    )


@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_the_commands_of_a_guide_work(name: str, tmp_path: Path) -> None:
    for snippet in blocks(SIMULATOR, "python"):
        if file := re.match(r"# (\w+\.py)\b", snippet):
            (tmp_path / file[1]).write_text(snippet, encoding="utf8")
    guide = GUIDES[name]
    for command, words in [
        *((command, "") for command in guide.before),
        *commands_to_run(ROOT / "docs" / name).items(),
    ]:
        called = [*words_for_dppo(command), *shlex.split(words)]
        code, out, err = run(called, tmp_path, 250.0)
        # 1: a finding
        assert code in ((0, 1) if called[0] == "doctor" else (0,)), f"{command} {words}\n{out}{err}"


@pytest.mark.slow
def test_python_of_the_guide_to_deployment_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run([*shlex.split(TRAIN)[1:], "--run-dir", "runs/deployed"], tmp_path, 250.0)
    assert code == 0, out + err
    monkeypatch.chdir(tmp_path)
    [snippet] = blocks(ROOT / "docs" / "DEPLOY.md", "python")
    exec(compile(snippet, "DEPLOY.md", "exec"), {})
    assert re.search(r"return \d+\n", capsys.readouterr().out)
    shutil.copytree("runs/deployed", "robot")
    [*_, checkpoint] = sorted(Path("robot/checkpoints").glob("*.safetensors"))
    for copy in (Path("robot"), checkpoint):
        assert dppo.load_policy(copy).act(np.zeros(4, np.float32)) in (0, 1)
