"""README and docs are true: commands and snippets run, names and links exist, tables match the code."""

from __future__ import annotations

import ast
import importlib
import io
import os
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from builders import make_config
from commandline import parse as parse_training
from commandline import run
from sources import trees

from dppo.__main__ import main
from dppo.commands.discovery import command_modules
from dppo.commands.flags import Parser
from dppo.commands.train import arguments_of
from dppo.envs.checks.faults import gymnasium_warnings
from dppo.tools import compare, tune

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RUNS = ROOT / "docs" / "RUNS.md"
SIMULATOR = ROOT / "docs" / "YOUR_SIMULATOR.md"
OTHERS = [
    ROOT / name
    for name in ("CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "benchmarks/README.md")
]
DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
PAGES = [*DOCUMENTS, *OTHERS, *RESULTS]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of a page in this language."""
    return re.findall(
        rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf8"), re.MULTILINE | re.DOTALL
    )


def commands(page: Path) -> list[str]:
    """Return every command line in the shell blocks of a page."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [
        " ".join(line.split())
        for line in lines
        if line.strip() and not line.strip().startswith("#")
    ]


def first_commands() -> list[str]:
    """Return the commands that a newcomer types: all of the README, and those of SMALL in the first guides."""
    readme_commands = commands(README)
    guide_commands = [
        command for page in (RUNS, SIMULATOR) for command in commands(page) if command in SMALL
    ]
    return readme_commands + guide_commands


class Small(NamedTuple):
    """A command of the first pages as it is run here: as written, then with further words that make it short."""

    words: str
    prints: str
    """A pattern of its output."""
    fast: str | None = None
    """Other words for the fast tests, if these take long; with "" the fast tests only parse the command."""


AS_A_NEWCOMER = {  # with a Ray of its own
    "./dppo train CartPole-v1 --num-actors 8 --run-dir runs/hello": Small(
        "--total-timesteps 512",
        r"Done after 512 steps",
        fast="--num-actors 1 --total-timesteps 512",
    ),
    "./dppo test --quick": Small("--collect-only -q", r"\d+/\d+ tests collected", fast=""),
    "./dppo eval runs/hello --episodes 10": Small("--episodes 2", r"return [\d,.]+ \+- "),
    "./dppo report runs/hello": Small("", r"report\.html: \d+ kB"),
    "./dppo doctor heater:Heater": Small("--seconds 10", r"dppo train heater:Heater", fast=""),
    "./dppo train heater:Heater --total-timesteps 100000 --run-dir runs/heater": Small(
        "--total-timesteps 512", r"Done after 512 steps"
    ),
    "./dppo eval runs/heater --trust": Small("--episodes 2", r"return -[\d,.]+ \+- "),
    "./dppo train heater:Heater --algo sac --total-timesteps 20000": Small(
        "--total-timesteps 512", r"Done after 512 steps"
    ),
}
TRAINED = "dppo train CartPole-v1 --run-dir runs/first"
RESUMED = "dppo train --resume runs/first --num-actors 4"
SMALL = AS_A_NEWCOMER | {
    TRAINED: Small("--total-timesteps 1024 --checkpoint-interval-s 0", r"Done after 1,024 steps"),
    RESUMED: Small(
        "--num-actors 2",
        r"(?s)iter_000003 at step 768.*Done after 1,024 steps",
        fast="--num-actors 1",
    ),
    "dppo train --resume runs/first --branch runs/second --learning-rate 1e-4": Small(
        "--num-actors 0 --total-timesteps 512",
        r"(?s)Branching .* at step 1,024.*Done after 512 steps",
    ),
    "dppo eval runs/first --episodes 20": Small("--episodes 3", r"return [\d,.]+ \+- "),
    "dppo compare dppo/SlowCartPole-v0 --actors 1 8 --seeds 3 --target 350": Small(
        "--actors 1 2 --seeds 1 --total-timesteps 512 --env-kwargs '{\"step_s\": 0.001}' --out compared",
        r"The same weights, bit for bit",
        fast="",
    ),
    "dppo train mysim:make --num-actors 4 --env-kwargs '{\"gravity\": 9.81}'": Small(
        "--num-actors 2 --total-timesteps 1024",
        r"Done after 1,024 steps",
        fast="--num-actors 0 --total-timesteps 1024",
    ),
    "./dppo train heater:Heater --num-actors 64 --num-samplers 64 --address auto": Small(
        "--num-actors 2 --num-samplers 2 --total-timesteps 256", r"Done after 256 steps", fast=""
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files that the first pages ask for."""
    for snippet in (*blocks(README, "python"), *blocks(SIMULATOR, "python")):
        if name := re.match(r"# (\w+\.py)\b", snippet):
            (tmp_path / name[1]).write_text(snippet, encoding="utf8")
    return tmp_path


def check_commands(
    folder: Path, run_command: Callable[[str, list[str]], tuple[int, str]], *, fast: bool
) -> None:
    """Run the first commands in order: each as written, with the words that make it short."""
    weights = {}
    for command in first_commands():
        small = SMALL[command]
        words = small.fast if fast and small.fast is not None else small.words
        if not words and fast and small.fast is not None:
            continue  # test_commands_of_the_documents_are_valid parses it
        if command == RESUMED:  # as if it had been stopped before its last iteration
            max((folder / "runs" / "first" / "checkpoints").glob("iter_*")).unlink()
        code, out = run_command(command, shlex.split(f"{command} {words}")[1:])
        assert code == 0, f"{command}\n{out}"
        assert re.search(small.prints, out), f"{command}\n{out}"
        weights[command] = re.findall(r"Weights: sha256 (\w+)", out)
    assert weights[TRAINED] == weights[RESUMED] != []


def test_every_command_of_the_first_pages_is_run_here() -> None:
    assert sorted(first_commands()) == sorted(SMALL)


def test_the_commands_of_the_first_pages_work(
    folder: Path, ray_session: None, capsys: Capture, monkeypatch: Patch
) -> None:
    """In this process, which has a Ray and has imported torch. tests/test_signals.py runs real commands."""

    def run_here(_: str, words: list[str]) -> tuple[int, str]:
        code = main(words)
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("mysim", None)  # that of another page
    check_commands(folder, run_here, fast=True)


@pytest.mark.slow
def test_each_command_of_the_readme_works_in_a_process_of_its_own(
    folder: Path, ray_session: None
) -> None:
    import ray

    auth = {
        name: os.environ[name]
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
        if name in os.environ
    }
    shared_ray = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, **auth}

    def run_there(command: str, words: list[str]) -> tuple[int, str]:
        code, out, err = run(
            words, folder, 250.0, **({} if command in AS_A_NEWCOMER else shared_ray)
        )
        return code, out + err

    check_commands(folder, run_there, fast=False)
    assert (folder / "compared" / "compare.png").stat().st_size > 0


def test_the_first_environments_are_clean_for_the_checker_of_gymnasium(
    folder: Path, monkeypatch: Patch
) -> None:
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop("mysim", None)
    heater = importlib.import_module("heater")
    mysim = importlib.import_module("mysim")
    assert gymnasium_warnings(heater.Heater()) == []
    assert gymnasium_warnings(mysim.make()) == []


@pytest.mark.parametrize("steps", [1_024, pytest.param(60_000, marks=pytest.mark.slow)])
def test_python_of_the_readme_prints_as_shown(
    steps: int, folder: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """Numbers with a decimal point are learned, so they depend on the last bits of a CPU's results.

    Of the rest, only the direction is learned: to push under a pole that falls. A random policy has a mean return of
    22, the best one of 500; after 40,000 steps, each of six seeds has 500.
    """
    text = README.read_text(encoding="utf8")
    [(snippet, printed)] = re.findall(
        r"^```python\n(import dppo\n.*?)^```$[^`]+```text\n(.*?)^```$", text, re.M | re.S
    )
    monkeypatch.chdir(folder)
    assert "60_000" in snippet

    exec(compile(snippet.replace("60_000", str(steps)), "README.md", "exec"), {})
    shown = capsys.readouterr().out.splitlines(keepends=True)
    assert "Checkpoint: " in "".join(shown), "the display of the run comes first"

    out = "".join(shown[-len(printed.splitlines()) :])
    decimals = r"\b0\b|\d+\.\d+"
    learned = decimals if steps == 60_000 else rf"{decimals}|left|right|[\d,]+ steps"
    assert re.sub(learned, "#", out) == re.sub(learned, "#", printed)
    for numbers in (out, printed) if steps == 60_000 else (printed,):
        assert 400 < float(re.findall(decimals, numbers)[0]) <= 500


def test_the_picture_is_described_by_the_caption_of_its_command() -> None:
    command = next(command for command in commands(RUNS) if "compare" in command)
    options, settings = compare.parse(shlex.split(command)[2:])
    plan = compare.make_plan(options, settings, Path("unused"))
    assert f"![{compare.caption(options, plan)}](compare.png)" in RUNS.read_text(encoding="utf8")


def words_for_dppo(command: str) -> list[str]:
    """Return the arguments of `dppo` in a line of the shell; nothing if it is not called."""
    words = shlex.split(re.sub(r"\$\w+", "1", command), comments=True)
    called = [index for index, word in enumerate(words) if word == "dppo" or word.endswith("/dppo")]
    return words[called[0] + 1 :] if called else []


class Parsed(Exception):
    """Raised in place of the work of a command whose words its parser has accepted."""


@pages
def test_commands_of_the_documents_are_valid(
    page: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """Each goes through the parser of its command; settings of a training are checked as in a run."""
    split = Parser.split

    def split_only(parser: Parser, words: list[str]) -> None:
        split(parser, words)
        raise Parsed

    for command in commands(page):
        words = words_for_dppo(command)
        resumes = "--resume" in words and words[words.index("--resume") + 1] != "auto"
        if words[:1] == ["train"] and not resumes:
            make_config(parse_training(words[1:]).settings)
        elif words[:1] == ["tune"]:
            make_config(
                arguments_of(*tune.COMMAND.split(words[1:])[1:], tune.COMMAND.prog).settings
            )
        elif words[:1] == ["compare"]:
            compare.make_plan(*compare.parse(words[1:]), Path("unused"))
        elif words and words[0] != "test":  # which passes its words on to pytest
            with monkeypatch.context() as patch, suppress(Parsed):
                patch.setattr(Parser, "split", split_only)
                code = main(words)
                # dppo --version
                assert (code, words[0][:2]) == (0, "--"), f"{command}: {capsys.readouterr().err}"


@pages
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    for target in targets:
        path, _, heading = target.partition("#")
        if "://" in path:
            continue
        linked = page.parent / path if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not heading or heading in anchors(linked), f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf8"), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pages
def test_files_and_names_that_are_mentioned_exist(page: Path) -> None:
    places = r"(?<![\w/.-])((?:src|tests|examples|benchmarks|docs)/[\w./-]*\.(?:py|md|yaml))(?:::([\w.]+))?"
    for path, names in set(re.findall(places, page.read_text(encoding="utf8"))):
        assert (ROOT / path).is_file(), f"{page.name} mentions {path}"
        text = (ROOT / path).read_text(encoding="utf8")
        for name in filter(None, names.split(".")):  # a class and its method
            assert re.search(rf"^ *(?:def|class) {name}\b", text, re.MULTILINE), (
                f"{page.name} mentions {path}::{names}"
            )


def test_every_example_is_listed() -> None:
    listed = set(
        re.findall(r"`(\w+\.py)`", (ROOT / "examples" / "README.md").read_text(encoding="utf8"))
    )
    assert listed == {file.name for file in (ROOT / "examples").glob("*.py")}


# how commands begin that have flags of their own
OF_OTHERS = ("ray ", "python ", "uv ", "tensorboard ", "scancel ")
FLAGS_OF_OTHERS = {"--shm-size", "--exclusive", "--requeue", "--nodes", "--cpus-per-task"}


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Return every flag that the help of a command shows."""
    printed = io.StringIO()
    for command in command_modules():
        with redirect_stdout(printed), suppress(SystemExit):
            main([command, "--help"])
    return {"--help", *re.findall(r"(?<![\w-])--[a-z][a-z-]*", printed.getvalue())}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_flags_that_are_mentioned_exist(page: Path, flags: set[str]) -> None:
    prose = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf8"), flags=re.MULTILINE | re.DOTALL
    )
    quoted = [text for text in re.findall(r"`([^`]+)`", prose) if not text.startswith(OF_OTHERS)]
    mentioned = {flag for text in quoted for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}
    unknown = mentioned - flags - FLAGS_OF_OTHERS
    assert not unknown, f"{page.name} mentions {sorted(unknown)}"


def test_quoted_messages_are_those_of_the_code() -> None:
    """In the table of messages of CLUSTER.md, `...` stands for parts that differ from case to case."""
    section = (
        (ROOT / "docs" / "CLUSTER.md")
        .read_text(encoding="utf8")
        .partition("## When it does not work")[2]
        .partition("\n## ")[0]
    )
    cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    quoted = [
        quote
        for cell in cells
        for quote in re.findall(r"`([^`]+)`", cell.partition(", with Ray's")[0])
    ]
    assert len(quoted) > 15

    constants = {
        node.value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
    }
    # an f-string as its constant pieces
    texts = [text for text in constants if isinstance(text, str)]
    for quote in quoted:
        for part in filter(None, map(str.strip, quote.split("..."))):
            assert any(part in text for text in texts), (
                f"{part!r} of {quote!r} is not a message of dppo"
            )
