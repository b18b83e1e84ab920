"""The time of `dppo doctor`: checks of the environment come first, and updates are timed in part and by the CPU."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import SLOW_STEPS, make_config
from worlds.faulty import Faulty
from worlds.sick import Saved, Sick

from dppo import machine
from dppo.config import Config
from dppo.learners.trainers import LocalTrainer
from dppo.ppo.learning.parallel import Parallel
from dppo.tools.doctor import examination, process, updating, watching
from dppo.tools.doctor.command import _measured
from dppo.tools.doctor.controllers import RANDOM, ZERO
from dppo.tools.doctor.examination import Examination
from dppo.tools.doctor.findings import findings
from dppo.tools.doctor.playing import WITH_SECOND
from dppo.tools.doctor.process import CoreClock
from dppo.tools.doctor.sgd_clock import FEWEST_SUMS, SGDClock
from dppo.tools.doctor.speed import Facts, best_way, env_step_s

Monkeypatch = pytest.MonkeyPatch


def examined(config: Config, seconds: float) -> tuple[list[str], Facts]:
    """Return the stages of an examination in this process, and its facts."""
    stages = list[str]()
    facts: Facts = {}

    def report(**new: Any) -> None:
        stages.extend(new[name] for name in ("stage",) if name in new)
        facts.update(new)

    on_call: dict[str, Callable[[], None]] = defaultdict(lambda: lambda: None)
    Examination(config, seconds, report, on_call).run()
    return stages, facts


def long_update(**settings: Any) -> Config:
    """Return settings of which an update takes half an hour."""
    sizes = {"num_samplers": 1, "num_steps": 16, "minibatch_size": 2, "update_epochs": 10**6}
    return make_config({"env_id": lambda: Faulty(length=1)} | sizes | settings)


def test_the_environment_is_examined_first_and_a_long_update_is_timed_in_part(
    monkeypatch: Monkeypatch,
) -> None:
    monkeypatch.setattr(examination, "MAX_STEPS", 50)
    monkeypatch.setattr(examination, "LEAST_S", 60.0)  # a busy machine does not stall for so long
    monkeypatch.setattr(updating, "facts_of_algorithms", lambda *_: {})
    stages, facts = examined(long_update(target_kl=0.0), 0.0)
    assert stages == [
        "making",
        "playing",
        "playing controllers",
        "comparing with other episodes",
        WITH_SECOND,
        "updating",
        "closing",
    ]
    assert [*facts["controllers"]] == [ZERO, RANDOM]
    assert facts["same"]
    assert facts["update_s"] > 100


@pytest.mark.parametrize(("world", "runs"), [(Sick, 5), (Saved, 8)], ids=["without", "with"])
def test_a_slow_environment_is_asked_for_few_steps_where_its_state_is_tested(
    world: type[Any], runs: int, monkeypatch: Monkeypatch
) -> None:
    """Steps that take the whole time leave two, which each comparison repeats; `--num-steps` is for runs."""
    monkeypatch.setattr(examination, "MAX_STEPS", 1)
    steps = []

    class Counted(world):  # type: ignore[misc]
        def step(self, action: Any) -> Any:
            steps.append(action)
            return super().step(action)

    _, facts = examined(make_config({"env_id": Counted, "num_steps": 128}), 0.0)
    assert facts["sizes"] == [2]
    assert facts["state"] == (None if world is Sick else "")
    assert len(steps) == 2 * runs


class Recorded(LocalTrainer):
    """Notes how often each of its updates sums gradients."""

    sums: list[int]

    def update(self, experience: Any) -> Any:
        clock = self._parallel
        assert isinstance(clock, SGDClock)
        update = super().update(experience)
        self.sums.append(len(clock._times))
        return update


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"minibatch_size": 5},
        {"reuse": 3},
        {"memory": "lstm", "sequence_length": 4},
        {"prior": "worlds.priors:balance", "prior_steps": 64},
        {"noise": "pink", "env_id": "Pendulum-v1"},
        {"algo": "sac", "env_id": "Pendulum-v1"},
        {"algo": "sac", "env_id": "Pendulum-v1", "gradient_steps": 0.5},
        {
            **{"algo": "sac", "env_id": "Pendulum-v1"},
            **{"prior": "worlds.priors:zeros", "prior_steps": 64},
        },
    ],
    ids=str,
)
def test_the_sums_of_an_update_are_known_before(
    settings: dict[str, Any], monkeypatch: Monkeypatch
) -> None:
    monkeypatch.setattr(Recorded, "sums", [], raising=False)
    monkeypatch.setattr("dppo.learners.trainers.LocalTrainer", Recorded)
    sizes: dict[str, Any] = {
        "num_samplers": 2,
        "num_steps": 8,
        "update_epochs": 2,
        "target_kl": 0.0,
    }
    if settings.get("algo") == "sac":
        sizes = {"num_samplers": 2, "num_steps": 8}
    config = make_config({"env_id": "CartPole-v1"} | sizes | settings)
    predicted = list[int]()
    measure = SGDClock.measure

    def noted(clock: SGDClock, update: Any, sums: int, until: float) -> float:
        predicted.append(sums)
        return measure(clock, update, sums, until)

    monkeypatch.setattr(SGDClock, "measure", noted)
    monkeypatch.setattr(updating, "MAX_ITERATIONS", 4)
    monkeypatch.setattr(examination, "MAX_STEPS", 20)
    monkeypatch.setattr(examination, "facts_of_algorithms", lambda *_: {})
    _, facts = examined(config, 1e4)
    assert len(predicted) == 4, facts.get("error")
    assert predicted == Recorded.sums


def test_the_time_of_an_update_follows_from_its_first_sums() -> None:
    seconds = iter(range(1000))
    clock = SGDClock()
    clock.seconds = lambda: float(next(seconds))
    tensor: Any = None

    def update() -> None:
        next(seconds)  # make_batch
        for _ in range(30):
            clock.sum_(tensor)

    in_part = clock.measure(update, 30, time.monotonic() - 1)
    assert len(clock._times) == FEWEST_SUMS
    assert in_part == 2 + 29
    whole = clock.measure(update, 30, time.monotonic() + 1e6)
    assert whole == 1 + 31
    assert isinstance(clock, Parallel)


# --------------------------------------------------------------- other work on the machine


def test_a_thread_that_waits_for_a_core_gets_a_share_of_it(monkeypatch: Monkeypatch) -> None:
    waited = iter([2.0, 5.0, 2.0, 5.0, 0.0, 0.05, 0.0, 0.0])
    cpu = iter([1.0, 2.0, 1.0, 1.0, 0.0, 0.04, 0.0, 9.0])
    monkeypatch.setattr(process, "waited_for_a_core_s", lambda: next(waited))
    monkeypatch.setattr("dppo.tools.doctor.process.time.thread_time", lambda: next(cpu))
    assert [CoreClock().share() for _ in range(4)] == [0.25, 1.0, 1.0, 1.0]


def test_the_system_counts_the_time_without_a_core(
    monkeypatch: Monkeypatch, tmp_path: Path
) -> None:
    counts = tmp_path / "schedstat"
    monkeypatch.setattr(machine, "SCHEDULING_OF_THIS_THREAD", counts)
    assert machine.waited_for_a_core_s() == 0.0
    counts.write_text("182131765 2022340628 67\n")
    assert machine.waited_for_a_core_s() == pytest.approx(2.022340628)
    monkeypatch.delattr("os.getloadavg")
    assert machine.load_average() == 0.0


@pytest.mark.parametrize(
    ("core_share", "busy", "step_s"),
    # 10 steps of 5 s, of which 1 s is CPU time: they wait for something, or for a core
    [(1.0, 0.2, 5.0), (0.5, 0.25, 4.0), (0.2, 1.0, 1.0), (0.01, 1.0, 1.0)],
)
def test_an_environment_that_computes_does_not_seem_to_wait_on_a_busy_machine(
    core_share: float, busy: float, step_s: float
) -> None:
    config = make_config({"env_id": "CartPole-v1", "num_samplers": 1, "num_steps": 16})
    facts: Facts = {"step": {"mean": 5.0}, "reset": {"mean": 0.0}, "lengths": []}
    examine = Examination(config, 1e4, lambda **new: facts.update(new), {})
    examine._instances.seconds["step"] = [5.0] * 10
    examine._instances.cpu_s = 10.0
    cpu_of_children_s = examine._process.usage().children_cpu_s
    examine._report_share_of_cpu(cpu_of_children_s, core_share)
    assert facts["busy"] == facts["own_busy"] == pytest.approx(busy)
    assert env_step_s(facts) == pytest.approx(step_s)


SLOW: Facts = SLOW_STEPS | {
    "step": {"mean": 0.027, "median": 0.027, "worst": 0.027},
    "algorithms": {"sac": {"collect_s": 0.02, "update_s": 1.3}},
}


def test_updates_are_timed_by_the_cpu_so_that_the_advice_is_that_of_a_quiet_machine(
    monkeypatch: Monkeypatch,
) -> None:
    """Steps of 27 ms lead to soft actor-critic, whose gradient steps would take too long at a sixth of a core."""
    config = make_config({"env_id": "Pendulum-v1", "num_samplers": 2, "num_steps": 8})
    chosen = best_way(SLOW, make_config({"env_id": "Pendulum-v1"}), ())
    assert chosen is not None
    assert chosen.way.flags == "--algo sac"

    began = time.monotonic()
    monkeypatch.setattr("dppo.tools.doctor.updating.time.thread_time", lambda: 0.0)
    monkeypatch.setattr("dppo.tools.doctor.updating.MAX_ITERATIONS", 2)
    monkeypatch.setattr(examination, "MAX_STEPS", 20)
    monkeypatch.setattr(SGDClock, "__init__", without_cpu_time)
    _, facts = examined(config, 1e4)
    assert time.monotonic() > began
    assert facts["update_s"] == facts["collect_s"] == 0.0
    assert facts["algorithms"]["sac"].items() >= {"collect_s": 0.0, "update_s": 0.0}.items()


def without_cpu_time(clock: SGDClock) -> None:
    clock.seconds = lambda: 0.0
    clock._times = []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {"core_share": 0.16},
            "the load average is 15.2 on 2 cores, and this process got 16% of the CPU",
        ),
        (
            {"core_share_of_updates": 0.3, "load": 0.0},
            "busy with other work: this process got 30% of the CPU",
        ),
        ({"core_share": 0.9, "core_share_of_updates": 0.85}, ""),
        ({}, ""),
    ],
    ids=str,
)
def test_a_busy_machine_is_reported_in_a_line_with_its_numbers(facts: Facts, words: str) -> None:
    lines = [line for line in _measured({"load": 15.2, "cpus": 2} | facts) if "machine" in line]
    assert len(lines) == bool(words)
    assert words in "".join(lines)


# --------------------------------------------------------------- processes


def test_the_time_of_starting_the_process_is_part_of_the_time(monkeypatch: Monkeypatch) -> None:
    granted_s = list[float]()

    class Noted(Examination):
        def __init__(self, config: Config, seconds: float, *further: Any) -> None:
            granted_s.append(seconds)
            super().__init__(config, seconds, *further)

        def run(self, *_: Any, **__: Any) -> None:
            self._instances.close()

    monkeypatch.setattr(examination, "Examination", Noted)
    monkeypatch.setattr("dppo.tools.doctor.examination.os.set_inheritable", lambda *_: None)
    monkeypatch.setattr("dppo.tools.doctor.examination.os.write", lambda _, line: len(line))
    for name in ("faulthandler.enable", "faulthandler.register", "atexit.register"):
        monkeypatch.setattr(f"dppo.tools.doctor.examination.{name}", lambda *_, **__: None)
    monkeypatch.setattr("dppo.tools.doctor.examination.time.time", lambda: 1000.0)
    request = {"settings": {"env_id": "CartPole-v1"}, "seconds": 40.0, "sizes": [], "updates": True}
    for asked_at in (990.0, 900.0, 1001.0):
        examination.main(1, request | {"asked_at": asked_at})
    assert granted_s == [30.0, 20.0, 40.0]


def test_a_process_that_hangs_in_a_check_has_its_updates_timed_by_another_one(
    tmp_path: Path, monkeypatch: Monkeypatch
) -> None:
    first = {"trace": [[1, 0]], "sizes": [1], "compared": 1, "same": {}, "unlike": []}
    second = {"trace": [[1, 0]], "collect_s": 0.5, "update_s": 0.25, "stage": "over"}
    code = (
        "import json, os, sys, time; to = int(sys.argv[1]); wanted = json.load(sys.stdin)\n"
        "say = lambda text: os.write(to, text.encode() + b'\\n')\n"
        "again = os.path.exists('made'); open('made', 'w')\n"
        f"say(json.dumps({second} if again else {first} | {{'stage': wanted['settings']['stage']}}))\n"
        "again or (say('s'), time.sleep(1000))"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watching, "EXAMINATION", ("-S", "-c", code))
    monkeypatch.setattr(watching, "PATIENCE_S", 0.5)
    for stage in (WITH_SECOND, "asking Gymnasium's checker"):
        facts = watching.examine({"stage": stage}, 0.5)
        assert facts["update_s"] == 0.25
        assert bool(facts.get("single")) == (stage == WITH_SECOND)
        assert bool(facts.get("hung")) != (stage == WITH_SECOND)
        Path("made").unlink()


def test_a_process_that_starts_slowly_does_not_hang(monkeypatch: Monkeypatch) -> None:
    monkeypatch.setattr(watching, "PATIENCE_S", 0.1)
    code = (
        'import os, sys, time; time.sleep(1); os.write(int(sys.argv[1]), b\'{"stage": "over"}\\n\')'
    )
    facts = watching.Watch(("-S", "-c", code), {}, print).wait(0.2)
    assert "hung" not in facts


def test_an_update_that_does_not_return_is_given_up_and_the_checks_stay(
    monkeypatch: Monkeypatch,
) -> None:
    monkeypatch.setattr(watching, "UPDATING_S", 0.2)
    code = (
        "import os, sys, time; to = int(sys.argv[1])\n"
        'os.write(to, b\'{"stage": "updating", "steps": 1, "lengths": [1]}\\n\'); time.sleep(1000)'
    )
    facts = watching.Watch(("-S", "-c", code), {}, print).wait(0.1)
    config = make_config({"env_id": "CartPole-v1"})
    [text] = [text for _, text in findings(facts, config)]
    assert re.match(r"an update with these settings was not over after \d+ s: no speed", text)
