"""State of the whole process that a simulator changes: dppo computes, prints and writes as before."""

from __future__ import annotations

import gc
import locale
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from builders import tiny_run
from kinds import small
from worlds.disturbing import DISTURB

import dppo
from dppo.log import logger as dppo_logger
from dppo.numerics import arithmetic, torch_modes
from dppo.ppo.learning.trainer import PPOTrainer
from dppo.process_state import borders
from dppo.process_state.borders import forget_notes, note_changes, take_changes
from dppo.process_state.states import STATES

ENV = "worlds.disturbing:Disturbing"
WHEN = ("import", "make", "reset", "step")
# that no test can have beside others, or that other libraries depend on
ALONE = {"streams", "environ", "tempfile"}


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the process back as it was: to dppo some of the states are all the same."""
    monkeypatch.setattr(borders, "_users", borders._Users())
    monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)
    monkeypatch.setattr(sys, "argv", sys.argv.copy())
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.chdir(Path.cwd())
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            monkeypatch.setattr(logger, "disabled", logger.disabled)
    level = logging.root.level
    language = locale.setlocale(locale.LC_ALL)
    threads = torch.get_num_threads()
    recursion = sys.getrecursionlimit()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with (
        mock.patch.dict(os.environ),
        warnings.catch_warnings(),
        arithmetic.as_usual(),
        torch_modes.torch_as_usual(),
        torch.random.fork_rng(),
    ):
        yield
    sys.setrecursionlimit(recursion)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logging.disable(logging.NOTSET)
    logging.root.setLevel(level)
    locale.setlocale(locale.LC_ALL, language)
    socket.setdefaulttimeout(None)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    torch.set_flush_denormal(False)
    gc.enable()
    os.umask(0o022)


def trained(names: str, when: str, folder: Path, **changes: Any) -> dppo.Result:
    """Train on an environment that changes states."""
    if when == "import":
        os.environ["DISTURB_AT_IMPORT"] = names
        sys.modules.pop("worlds.disturbing", None)
    disturbing = {"env_id": ENV, "env_kwargs": {"names": names, "when": when}}
    try:
        return dppo.train(
            tiny_run(folder, samplers=2, **disturbing | {"update_epochs": 2} | changes)
        )
    finally:
        os.environ.pop("DISTURB_AT_IMPORT", None)


@cache
def undisturbed(folder: Path, *, image: bool, **settings: Any) -> str:
    kwargs = {"names": "", "when": "make", "image": image}
    return trained("", "make", folder, env_kwargs=kwargs, **settings).weights_sha256


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quiet")


OWN = {"model": "worlds.models:Residual", "norm_obs": False}


@pytest.mark.proves(
    "lets NumPy raise or the CPU round up, turns off gradients or logging, replaces `sys.stdout`, sets a umask, goes "
    "to another folder"
)
@pytest.mark.parametrize(
    ("when", "network"), [*((when, {}) for when in WHEN), ("make", OWN), ("step", OWN)], ids=str
)
def test_all_states_together_change_no_weight(
    when: str, network: dict[str, Any], quiet: Path, tmp_path: Path
) -> None:
    names = ",".join(name for name in DISTURB if name not in ALONE)
    result = trained(names, when, tmp_path / "run", **network)
    expected = undisturbed(quiet / f"numbers{len(network)}", image=False, **network)
    assert result.weights_sha256 == expected
    assert result.checkpoint.stat().st_mode & 0o777 == 0o644, (
        "the umask of a simulator is not that of dppo's files"
    )
    assert result.incidents.get("global_state", 0) >= 1


class Precise(gym.Wrapper[Any, Any, Any, Any]):
    """Sets the precision of torch's products, and needs it in its steps."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        torch.set_float32_matmul_precision("medium")

    def step(self, action: Any) -> Any:
        assert torch.get_float32_matmul_precision() == "medium"
        return self.env.step(action)


def test_a_simulator_keeps_its_own_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precisions = set()
    update = PPOTrainer.update

    def noted(*arguments: Any) -> Any:
        precisions.add(torch.get_float32_matmul_precision())
        return update(*arguments)

    monkeypatch.setattr(PPOTrainer, "update", noted)
    dppo.train(small(tmp_path / "run", env_id=Precise, on_env_fault="raise"))
    assert precisions == {"highest"}


@pytest.mark.slow
@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", DISTURB)
def test_no_state_changes_a_weight(
    name: str, when: str, image: bool, quiet: Path, tmp_path: Path
) -> None:
    kwargs = {"names": name, "when": when, "image": image}
    result = trained(name, when, tmp_path / "run", env_kwargs=kwargs)
    assert result.weights_sha256 == undisturbed(quiet / f"{image}", image=image)


@pytest.mark.proves("has numbers of tiny or huge units")
def test_rewards_in_tiny_units_are_learned_as_ordinary_ones(tmp_path: Path) -> None:
    def run(power: int) -> dppo.Result:
        kwargs = {"names": "", "when": "make", "unit": 2.0**power}
        return trained("", "make", tmp_path / f"{power}", env_kwargs=kwargs)

    tiny = run(-30)
    tinier = run(-40)
    ordinary = run(0)
    assert tiny.weights_sha256 == tinier.weights_sha256
    for name in ("losses/value_loss", "losses/policy_loss", "losses/approx_kl"):
        assert tiny.metrics[-1][name] == pytest.approx(
            ordinary.metrics[-1][name], rel=1e-2, abs=1e-6
        )


@pytest.mark.parametrize("when", ["make", "step"])
def test_notes_are_shown_and_results_printed_whatever_a_simulator_does(
    when: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = trained("logging,streams", when, tmp_path / "run", progress="plain")
    shown = capsys.readouterr().out
    assert "Network: an MLP" in shown
    assert "Mean return" in shown
    assert (
        "changed sys.stdout, sys.stderr, whether anything is logged, of the whole process" in shown
    )
    assert len(dppo.evaluate(result, episodes=1).returns) == 1
    print("to our stream")
    assert "to our stream" in capsys.readouterr().out


def test_a_simulator_that_logs_for_debugging_does_not_let_the_libraries_of_dppo_do_so() -> None:
    logging.root.setLevel(logging.WARNING)
    with borders.user_code("importing verbose"):
        logging.root.setLevel(logging.DEBUG)
    for _ in range(2):
        assert not logging.getLogger("matplotlib.font_manager").isEnabledFor(logging.INFO)
        with borders.guarded_steps("a step of Verbose"):
            assert logging.getLogger("verbose").isEnabledFor(logging.DEBUG)
    assert not take_changes()


def test_the_handlers_of_a_simulator_get_its_lines_and_not_those_of_dppo() -> None:
    lines = StringIO()
    handlers_before = [*logging.root.handlers]
    with borders.user_code("importing verbose"):
        logging.root.addHandler(logging.StreamHandler(lines))
    assert logging.root.handlers == handlers_before
    dppo_logger.warning("a note of dppo")
    with borders.guarded_steps("a step of Verbose"):
        logging.getLogger("verbose").warning("a step")
    assert lines.getvalue() == "a step\n"
    assert not take_changes()


def test_a_run_beside_the_program_leaves_it_the_root_logger() -> None:
    """The program configures its logging in the main thread while an environment steps in another one."""
    handler = logging.StreamHandler()

    def run() -> None:
        with borders.separate_run():
            barrier.wait(60)
            with borders.guarded_steps("a step of Slow"):
                logging.root.addHandler(handler)
                logging.root.setLevel(logging.INFO)

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not borders._users.runs_beside
    is_kept = handler in logging.root.handlers
    logging.root.removeHandler(handler)
    assert is_kept
    assert logging.root.level == logging.INFO


def test_weights_are_cast_to_bfloat16_anew_in_each_minibatch() -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    rows = torch.ones(1, 2)
    with torch_modes.torch_as_usual():
        results = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                results.append(torch.nn.functional.linear(rows, weight).float())
            weight.data.mul_(2)
    assert torch.equal(results[1], 2 * results[0])


def test_torch_is_not_asked_while_another_thread_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions are there before they work."""
    half_loaded = ModuleType("torch")
    half_loaded.__spec__ = ModuleSpec("torch", None)
    half_loaded.__spec__._initializing = True  # type: ignore[attr-defined]  # as importlib sets it
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", half_loaded)
        states = [state.get() for state in STATES if state.name.startswith("torch")]
    assert states == [None] * 5


def test_what_an_earlier_run_of_the_process_has_noted_is_noted_again() -> None:
    for _ in range(2):
        forget_notes()
        note_changes("a simulator", ["the umask"])
        note_changes("a simulator", ["the umask"])
        assert [change.names for change in take_changes()] == [("the umask",)]


class Wandering(gym.Wrapper[Any, Any, Any, Any]):
    """Goes to another folder and changes NumPy's error state, or expects the folder of its steps, and no change."""

    def __init__(self, folder: str = "", expected: str = "") -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.expected = expected or folder
        self.divide = "raise" if folder else np.geterr()["divide"]
        if folder:
            os.chdir(folder)
            np.seterr(divide="raise")
        else:
            assert self.divide == "warn"

    def step(self, action: Any) -> Any:
        assert os.getcwd() == self.expected
        assert np.geterr()["divide"] == self.divide
        return self.env.step(action)


class Within(dppo.Observer):
    """Trains another run within a run."""

    def __init__(self, config: dppo.Config) -> None:
        self.config = config

    def on_iteration(self, row: dict[str, float]) -> None:
        if row["iteration"] == 1:
            dppo.train(self.config)


def test_an_environment_begins_in_the_state_of_the_program_whatever_those_of_other_runs_did(
    tmp_path: Path,
) -> None:
    elsewhere = {"env_id": Wandering, "env_kwargs": {"folder": str(tmp_path)}}
    here = {"env_id": Wandering, "env_kwargs": {"expected": os.getcwd()}}
    within = small(tmp_path / "within", **here, on_env_fault="raise")
    first = small(tmp_path / "first", **elsewhere, on_env_fault="raise")
    assert dppo.train(first, observers=[Within(within)]).incidents["global_state"] == 2
    after = dppo.train(small(tmp_path / "after", **here, on_env_fault="raise"))
    assert "global_state" not in after.incidents


def test_what_an_import_has_set_is_found_by_all_runs_of_the_process() -> None:
    before = socket.getdefaulttimeout()
    with borders.separate_run(), borders.importing("timing"):
        socket.setdefaulttimeout(7)
    assert socket.getdefaulttimeout() == before
    for _ in range(2):
        with borders.separate_run(), borders.user_code("the constructor of Timing"):
            assert socket.getdefaulttimeout() == 7
