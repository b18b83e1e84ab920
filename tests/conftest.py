"""Shared by all tests: checked shapes, one Ray, one undisturbed run of each kind."""

from __future__ import annotations

import ast
import functools
import gc
import os
import re
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from extras import pytest_runtest_setup  # noqa: F401  a hook

from dppo.numerics.portable import VARIABLES, portable_numerics

# Objects of modules and of tests live until the end: collecting garbage would look at all of them again and again.
gc.disable()

# Commands under test compute as this process does: with portable numerics, unless variables simulate another CPU.
if any(os.environ.get(name, value) != value for name, value in VARIABLES.items()):
    os.environ["DPPO_NUMERICS"] = "native"
portable_numerics()

if TYPE_CHECKING:
    import dppo

# As in an activated environment: commands that are printed begin with `dppo`.
os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
os.environ.pop("DPPO_CALLED_AS", None)
# Ray lowers the priority of its workers, which would starve actors on a busy machine. Its processes inherit this.
os.environ |= {"RAY_worker_niceness": "0"}
# Several processes of tests share the cores, and torch's threads of all of them would wait for each other: the tests in
# process took four times as long. A run of dppo sets its own number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The files that use `sources`.
READ_SOURCE = (
    "test_architecture.py",
    "test_invocation.py",
    "test_readability.py",
    "test_readme.py",
    "test_remedies.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Import what tests need, such as torch, but for a process that only gives tests to others."""
    if config.getoption("dist", "no") != "no":
        return
    from hypothesis import settings
    from shapes import check_shapes

    check_shapes()  # imports torch, which reads the number of threads once
    # No example has a deadline: on a busy machine any of them may take long. Fast tests decide whether a change lands,
    # so they have the same examples each time; slow ones look for new examples.
    is_fast = config.getoption("markexpr") == "not slow"
    settings.register_profile("tests", deadline=None, derandomize=is_fast)
    settings.load_profile("tests")


def pytest_collection_finish() -> None:
    gc.freeze()
    # Small runs make many objects and little garbage: looking for it took 3 % of the time.
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture(autouse=True)
def signals_are_not_ignored() -> Iterator[None]:
    """Let commands under test receive SIGINT and SIGHUP; after `&` and nohup, processes ignore them."""
    handlers: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
    }
    ignored = [number for number in handlers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, handlers[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@functools.cache
def names_on_ray(file: Path) -> set[str]:
    """Return the functions of a file that use `ray_session`, also through others; `pytestmark` if all tests do."""
    text = file.read_text(encoding="utf8")
    if "ray_session" not in text:
        return set()
    used: dict[str, set[str]] = {}
    for node in ast.parse(text).body:
        name = (
            ast.unparse(node.targets[0])
            if isinstance(node, ast.Assign)
            else getattr(node, "name", "")
        )
        used[name] = set(re.findall(r"\w+", ast.unparse(node)))
    names = {"ray_session"}
    while new := {name for name, words in used.items() if words & names} - names:
        names |= new
    return names


def is_on_ray(nodeid: str, config: pytest.Config) -> bool:
    """Return whether a test uses `ray_session`. Where this is wrong, a second Ray is started, and no test fails."""
    file, _, test = nodeid.partition("::")
    return bool({"pytestmark", test.partition("[")[0]} & names_on_ray(config.rootpath / file))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one process run all tests that use `ray_session`, so that one Ray starts; the others run the rest.

    The others of a file stay together, because they share what they set up. Those of schedules are too many for one.
    Those of networks come last, one by one, so that no process has a long file left when the others are done. Files
    that read the source share its syntax trees.
    """
    from xdist.scheduler import LoadScopeScheduling

    def scope(nodeid: str) -> str:
        if is_on_ray(nodeid, config):
            return "ray"
        file = nodeid.partition("::")[0]
        if file.endswith(("test_engine.py", "test_networks.py")):
            return nodeid
        if file.endswith(READ_SOURCE):
            return "source"
        return file

    config.option.loadscopereorder = False
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = scope
    return scheduler


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of several processes, begin with the tests on Ray, which take the longest; end with files of many short tests."""
    if hasattr(config, "workerinput"):
        num_in_file = Counter(item.path for item in items)
        items.sort(key=lambda item: (not is_on_ray(item.nodeid, config), num_in_file[item.path]))


@pytest.fixture(autouse=True, scope="session")
def quick_files() -> Iterator[Callable[..., None]]:
    """Leave out what takes as long as small runs: learning curves, waits for the disk, a fingerprint of each run.

    Installed packages stay the same: they are looked up once.
    """
    from dppo.numerics.fingerprint import fingerprint
    from dppo.tools.pictures import learning_curve as plots

    draw = plots.learning_curve
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "learning_curve", lambda curve, path, title: None)
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr("dppo.run.building.fingerprint", functools.cache(fingerprint))
        patch.setattr("dppo.commands.versions.version", functools.cache(metadata.version))
        packages = functools.cache(metadata.packages_distributions)
        patch.setattr(metadata, "packages_distributions", packages)
        yield draw


@pytest.fixture
def pictures(quick_files: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the learning curve of runs after all."""
    monkeypatch.setattr("dppo.tools.pictures.learning_curve.learning_curve", quick_files)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def typed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command line in this process, and returns what it prints."""
    from dppo.__main__ import main

    def run(line: str, code: int = 0) -> str:
        exit_code = main(shlex.split(line))
        printed = capsys.readouterr()
        assert exit_code == code, printed.err
        return printed.err if code else printed.out

    return run


@pytest.fixture
def refused(typed: Callable[..., str]) -> Callable[[str], str]:
    """Return a function that runs a command line that is refused, and returns the reason."""
    return functools.partial(typed, code=2)


@pytest.fixture(scope="module")
def module_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for what the tests of a file share."""
    return tmp_path_factory.mktemp("module")


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Start one Ray for all tests that need actors, because starting it takes seconds. Runs leave it unchanged."""
    from dppo.config import Actors, Learners
    from dppo.transports.ray.session import RaySession, demand_of

    actors = Actors(num_actors=8)
    session = RaySession(
        actors, demand_of(actors, Learners()), store_bytes=256 * 2**20, notify=lambda text: None
    )
    yield
    session.close()


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dppo.Result]:
    """Return a function of a kind, one of `kinds.KINDS`: an undisturbed run in this process, trained once."""
    from kinds import settings

    import dppo

    folder = tmp_path_factory.mktemp("kinds")
    return functools.cache(lambda kind: dppo.train(settings(kind, folder / kind / "run")))
