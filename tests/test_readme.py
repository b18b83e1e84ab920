"""What README and docs say is so: commands and snippets run, names exist, figures are those that are written."""

from __future__ import annotations

import ast
import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from commandline import run

import dppo
from dppo.__main__ import COMMANDS
from dppo.commands import arguments, compare_plan
from dppo.commands import eval as eval_command
from dppo.config import make_config
from dppo.ppo.segment import IncidentKind

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page that are in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """Every command line in the shell blocks of a page."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip() and not line.strip().startswith("#")]


# ------------------------------------------------------------------------- the README's commands


def forget_the_last_checkpoint(folder: Path) -> None:
    """As if the run had been stopped before its last iteration."""
    max((folder / "runs" / "first" / "checkpoints").glob("iter_*")).unlink()


@dataclass(frozen=True)
class Small:
    """How a command of the README is run here: as written, then with words that make it short."""

    words: str
    says: str
    """What its output must match."""
    own_ray: bool = False
    """Whether it starts a Ray of its own, as for a newcomer; the others join that of the tests."""
    before: Callable[[Path], None] | None = None


SMALL = {
    "./dppo train CartPole-v1 --num-actors 8": Small("--total-timesteps 512", r"Done after 512 steps", own_ray=True),
    "./dppo test": Small("--collect-only -q tests/test_streams.py", r"\d+ tests collected"),
    "./dppo compare dppo/SlowCartPole-v0 --actors 1 8 --seeds 3 --target 350": Small(
        "--actors 1 2 --seeds 1 --total-timesteps 512 --env-kwargs '{\"step_s\": 0.001}' --out compared",
        r"The same weights, bit for bit",
    ),
    "./dppo train mysim:make --num-actors 4 --env-kwargs '{\"gravity\": 9.81}'": Small(
        "--num-actors 2 --total-timesteps 1024", r"Done after 1,024 steps"
    ),
    "./dppo train CartPole-v1 --run-dir runs/first": Small(
        "--total-timesteps 1024 --checkpoint-interval-s 0", r"Done after 1,024 steps"
    ),
    "./dppo train --resume runs/first --num-actors 4": Small(
        "--num-actors 2",
        r"(?s)Resuming from iter_000003 at step 768.*Done after 1,024 steps",
        before=forget_the_last_checkpoint,
    ),
    "./dppo train --resume runs/first --branch runs/second --learning-rate 1e-4": Small(
        "--num-actors 0 --total-timesteps 512", r"(?s)Branching off .* at step 1,024.*Done after 512 steps"
    ),
    "./dppo eval runs/first --episodes 20": Small("--episodes 3", r"return \d+\.\d \+- "),
    "./dppo train mysim:make --num-actors 64 --num-samplers 64 --address auto": Small(
        "--num-actors 2 --num-samplers 2 --total-timesteps 256", r"Done after 256 steps"
    ),
}
SNIPPET = {"num_actors=8": "num_actors=2", "total_timesteps=100_000": "total_timesteps=1024"}


@pytest.fixture(scope="module")
def shared_ray(ray_session: None) -> dict[str, str]:
    """Variables with which another process finds the Ray of the tests."""
    import ray

    auth = {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH") if name in os.environ}
    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, **auth}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the README asks for."""
    folder = tmp_path_factory.mktemp("newcomer")
    for snippet in blocks(README, "python"):
        if name := re.match(r"# (\w+\.py)\n", snippet):
            (folder / name[1]).write_text(snippet, encoding="utf8")
    return folder


def test_every_command_of_the_readme_is_run_here() -> None:
    assert sorted(commands(README)) == sorted(SMALL)


def test_the_commands_of_the_readme_work_one_after_the_other(shared_ray: dict[str, str], folder: Path) -> None:
    weights = {}
    for command in commands(README):
        small = SMALL[command]
        if small.before is not None:
            small.before(folder)
        words = shlex.split(f"{command} {small.words}")[1:]
        code, out, err = run(words, folder, **({} if small.own_ray else shared_ray))
        assert code == 0, f"{command}\n{out}\n{err}"
        assert re.search(small.says, out), f"{command}\n{out}"
        weights[command] = re.findall(r"Weights: sha256 (\w+)", out)
    assert (folder / "compared" / "compare.png").stat().st_size > 0
    first, resumed = (
        weights[command]
        for command in weights
        if "runs/first" in command and "train" in command and "branch" not in command
    )
    assert first == resumed != []


def test_the_snippets_of_the_readme_work(shared_ray: dict[str, str], folder: Path) -> None:
    ran = 0
    for snippet in blocks(README, "python"):
        if snippet.startswith("# "):  # a file, which a command needs
            continue
        for written, small in SNIPPET.items():
            assert written in snippet
            snippet = snippet.replace(written, small)
        code, _, err = run([], folder, program=("-c", snippet + "\nassert action in (0, 1)"), **shared_ray)
        assert code == 0, err
        ran += 1
    assert ran > 0


def test_the_caption_of_the_picture_is_that_of_its_command() -> None:
    command = next(command for command in commands(README) if "compare" in command)
    options, settings = compare_plan.parse(shlex.split(command)[2:])
    plan = compare_plan.make_plan(options, settings, Path("unused"))
    assert README.read_text(encoding="utf8").count(compare_plan.caption(options, plan)) == 2


def words_for_dppo(command: str) -> list[str]:
    """What `dppo` is given in a line of the shell; nothing where it is not called."""
    words = shlex.split(re.sub(r"\$\w+", "1", command), comments=True)
    called = [index for index, word in enumerate(words) if word in ("dppo", "./dppo")]
    return words[called[0] + 1 :] if called else []


@pages
def test_commands_of_the_documents_are_understood(page: Path) -> None:
    for command in commands(page):
        words = words_for_dppo(command)
        if words[:1] == ["train"] and "--resume" not in words:
            make_config(arguments.parse(words[1:], "dppo train").settings)
        elif words[:1] == ["compare"]:
            compare_plan.make_plan(*compare_plan.parse(words[1:]), Path("unused"))
        elif words:
            assert words[0] in COMMANDS


# ------------------------------------------------------------------------------ names and places


@pages
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing, f"{page.name} links to {missing}"


@pages
def test_files_and_names_that_are_mentioned_exist(page: Path) -> None:
    mentioned = re.findall(
        r"(?<![\w/.-])((?:src|tests|examples|benchmarks|docs)/[\w./-]*\.(?:py|md|yaml))(?:::([\w.]+))?",
        page.read_text(encoding="utf8"),
    )
    assert mentioned
    for path, name in set(mentioned):
        assert (ROOT / path).is_file(), f"{page.name} mentions {path}"
        assert not name or name in defined_in(ROOT / path), f"{page.name} mentions {path}::{name}"


def defined_in(path: Path) -> set[str]:
    """Functions, classes and methods of a module, as `name` and `Class.name`."""

    def names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from names(node.body, f"{node.name}.")

    return set(names(ast.parse(path.read_text(encoding="utf8")).body, ""))


def test_the_tree_of_the_readme_is_the_one_that_is_there() -> None:
    [tree] = blocks(README, "text")
    named, path = set(), ROOT
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        first = line.split()[0]
        if first.endswith("/"):
            parents = path.relative_to(ROOT).parts
            path = ROOT / first if depth == 0 else (ROOT / "src" / "dppo" / first)
            assert depth == 0 or parents[:2] == ("src", "dppo")
        else:
            path = {0: ROOT, 1: ROOT / "src" / "dppo"}.get(depth, path)
        files = re.findall(r"(?<![\w.])\w+\.(?:py|md|txt|yaml)(?!\w)", line)
        named |= {path / file for file in files}
        assert path.is_dir()
    missing = [str(file.relative_to(ROOT)) for file in named if not file.is_file()]
    assert not missing, f"not there: {missing}"
    modules = {file for file in (ROOT / "src" / "dppo").rglob("*.py") if file.name != "__init__.py"}
    left_out = [str(file.relative_to(ROOT)) for file in modules - named]
    assert not left_out, f"not in the tree: {left_out}"


OF_OTHERS = ("ray ", "python ")  # how commands begin whose flags are not ours to know
FLAGS_OF_OTHERS = {"--shm-size", "--exclusive"}


@pages
def test_flags_that_are_mentioned_exist(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf8"), flags=re.MULTILINE | re.DOTALL)
    quoted = [text for text in re.findall(r"`([^`]+)`", prose) if not text.startswith(OF_OTHERS)]
    mentioned = {flag for text in quoted for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}
    flags = {"--slow", "--help"}
    for parser in (compare_plan.make_parser({}), eval_command.make_parser()):
        flags |= set(parser._option_string_actions)
    unknown = mentioned - flags - FLAGS_OF_OTHERS
    assert not unknown, f"{page.name} mentions {sorted(unknown)}"


# --------------------------------------------------------------------------------------- metrics


def table_keys(page: Path, heading: str) -> set[str]:
    """The first column of the tables under a heading whose title begins so."""
    sections = re.split(r"^## ", page.read_text(encoding="utf8"), flags=re.MULTILINE)[1:]
    chosen = "".join(section for section in sections if section.startswith(heading))
    return set(re.findall(r"^\| `([^`]+)` \|", chosen, re.MULTILINE))


def test_metrics_are_those_of_a_run(tmp_path: Path) -> None:
    config = dppo.Config(
        env_id="testbeds:point_mass",
        num_samplers=1,
        num_steps=60,
        total_timesteps=120,
        progress="off",
        run_dir=tmp_path / "run",
    )
    written = set(dppo.train(config).metrics[-1])
    documented = table_keys(ROOT / "docs" / "METRICS.md", "") - incident_kinds()
    assert documented == written


def incident_kinds() -> set[str]:
    return table_keys(ROOT / "docs" / "METRICS.md", "Incidents")


def test_kinds_of_incidents_are_those_of_the_code() -> None:
    assert {kind.value for kind in IncidentKind} == incident_kinds()
