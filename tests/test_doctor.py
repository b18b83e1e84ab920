"""`dppo doctor`: what it finds in sick environments, and what its model of an iteration predicts."""

from __future__ import annotations

import gc
import io
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from builders import SLOW_STEPS, make_config, tiny_run
from commandline import Typed, parse, run
from remedies import executes
from worlds.sick import Sick
from worlds.single import OnPort

import dppo
from dppo.__main__ import main
from dppo.config import Config, grouped, plain_settings
from dppo.hosts.plans import TrainerPlan
from dppo.learners import trainers
from dppo.learners.trainers import LocalTrainer
from dppo.machine import usable_cores
from dppo.records.bottleneck import TimeSplit
from dppo.slots import cores
from dppo.slots.slots import Slots
from dppo.tools.doctor import examination, updating, watching
from dppo.tools.doctor.command import _measured
from dppo.tools.doctor.controllers import RANDOM, ZERO
from dppo.tools.doctor.examination import Examination
from dppo.tools.doctor.findings import findings
from dppo.tools.doctor.needed import faults
from dppo.tools.doctor.playing import Played, spread
from dppo.tools.doctor.process import ProcessWatch, release_unused_memory
from dppo.tools.doctor.run_findings import PHASES, findings_of_run
from dppo.tools.doctor.speed import Facts, advice, iteration_s, plans, recommended

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "MAX_STEPS", 50)
    monkeypatch.setattr(updating, "MAX_ITERATIONS", 2)


def config_of(env_id: Any = "worlds.sick:Sick", **settings: Any) -> Config:
    sizes = {"num_samplers": 1, "num_steps": 16, "update_epochs": 1}
    return make_config({"env_id": env_id, **sizes, **settings})


def facts_of(config: Config) -> Facts:
    """Examine an environment in this process."""
    facts: Facts = {}
    Sick.instances = 0
    calls = Counter[str]()
    on_call = {name: partial(calls.update, [name]) for name in ("make", "done", "reset", "step")}
    Examination(config, 1e3, lambda **new: facts.update(new), on_call).run()
    assert calls["step"] >= facts.get("steps", 0), (
        "each call is reported, so that one that hangs can be named"
    )
    return facts


def examined(env_id: Any = "worlds.sick:Sick", **settings: Any) -> list[str]:
    """Examine an environment in this process, and return the findings."""
    config = config_of(env_id, **settings)
    return texts_of(facts_of(config), config)


def texts_of(facts: Facts, config: Config) -> list[str]:
    return [
        f"{kind}: {text}"
        for kind, text in findings(facts | {"available_mb": 1e6, "cpus": 2}, config)
    ]


OWNER = "error: sampler 0 (worlds.sick:Sick), env 0: "
AGAIN = "warning: the same seed and actions give another episode "
DISEASES: dict[str, tuple[str, ...]] = {  # what is found, besides Gymnasium's opinion
    "none": (
        "ok: the same seed and actions give the same 82 steps in a new instance, after other episodes, beside",
    ),
    "own randomness": (
        f"{AGAIN}in a new instance: it differs at step 0",
        "warning: it draws from the global generator of random",
    ),
    "seeds": (
        "ok: the same seed and actions give the same 82 steps in a new instance, after other episodes, beside",
        "note: it seeds NumPy's global generator, or draws from it. Environments of one process share it",
    ),
    "hidden state": (f"{AGAIN}after other episodes: it differs at step 0",),
    "raises": (
        f"{OWNER}step of episode 1 (seed ",
        "warning: faults do not follow from seed and actions: different ones happened after other episodes, beside",
        "ok: the same seed and actions give the same ",
    ),
    "no licence": (f"{OWNER}the environment's constructor raised RuntimeError: no licence left",),
    "one instance": (
        "note: a process can have one instance only: a second one raised RuntimeError: the port is in use, and another "
        "process could make one meanwhile. Use `samplers_per_actor=1`, `num_actors=1`",
        "ok: the same seed and actions give the same 82 steps after other episodes",
    ),
    "not finite": (
        f"{OWNER}step of episode 0",
        "ok: the same seed and actions give the same 82 steps in a new instance",
    ),
    "several": (
        "ok: the same seed",
        "warning: playing changes the current folder",
        "warning: sampler 0 (worlds.sick:Sick): the observation is from 1073741824 to",
        "warning: integers are not normalized: the observation reaches 1,073,741,8",
        "warning: memory grows by ",
        "note: all rewards of 82 steps were 0.",
        "note: it cannot be pickled, and need not be: TypeError: cannot pickle",
    ),
}


@pytest.mark.parametrize("disease", DISEASES)
def test_a_disease_is_found(disease: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # and back, wherever an environment goes
    # of a process of its own
    monkeypatch.setattr(Examination, "_elsewhere", lambda examination: True)
    texts = [
        text
        for text in examined(env_kwargs={"disease": disease})
        if "Gymnasium's checker" not in text
        and f"note: {ZERO} and {RANDOM} get the same" not in text
    ]
    assert len(texts) == len(DISEASES[disease]), texts
    for expected, text in zip(DISEASES[disease], texts, strict=True):
        assert re.sub(r" \(\S+, line \d+\)", "", text).startswith(expected)


MAPPED = (
    "note: Actions lie between 0.2 and 1: the range [-1, 1] of the policy is mapped to these bounds"
)
CLIPPED = (
    "warning: actions lie between 0.2 and 1, and the policy, which starts around 0, is clipped to them: it may "
    "stay at a bound. Use --action-bounds rescale"
)


@pytest.mark.parametrize(
    ("bounds", "expected"), [("auto", [MAPPED]), ("clip", [CLIPPED]), ("squash", [])]
)
def test_the_bounds_of_actions_are_reported(bounds: str, expected: list[str]) -> None:
    texts = examined("worlds.acting:Actuated", env_kwargs={"kind": "valve"}, action_bounds=bounds)
    reported = [text for text in texts if "ctions lie between" in text]
    assert len(reported) == len(expected)
    for text, start in zip(reported, expected, strict=True):
        assert text.startswith(start)


def test_an_element_beside_an_infinite_bound_is_a_warning() -> None:
    texts = examined("worlds.acting:Actuated", env_kwargs={"kind": "free"})
    assert any(
        text.startswith("warning: Element 1 of an action lies between 0 and inf") for text in texts
    )


@pytest.mark.parametrize(
    ("steps", "resets", "kinds"), [(0.1, 0.0, ["raise"]), (0.1, 0.3, ["nan", "reward", "exit"])]
)
def test_faults_are_counted_and_lead_to_settings_with_which_a_run_goes_on(
    steps: float, resets: float, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "MAX_STEPS", 150)
    env = partial(
        examined,
        "worlds.faulty:Unreliable",
        env_kwargs={"steps": steps, "resets": resets, "kinds": kinds},
    )
    fault, same, *_ = env()
    assert fault.startswith("error: sampler 0 (worlds.faulty:Unreliable), env 0: ")

    last = fault.splitlines()[-1]
    counts = re.match(r"It is the first of (\d+) faults in (\d+) steps", last)
    assert counts

    faults_per_step = int(counts[1]) / int(counts[2])
    assert 0.5 < faults_per_step / (steps + resets * steps) < 2
    assert "env_faults=10/h: 100% of runs end in their first 100 env steps" in last
    assert same.startswith(f"ok: the same seed and actions give the same {counts[2]} steps"), (
        "their faults, too"
    )

    advised = re.search(r"With --on-env-fault rebuild --env-faults (\d+)/h, a run goes on", last)
    assert advised
    fault, *_ = env(on_env_fault="rebuild", env_faults=f"{advised[1]}00/h")
    assert fault.startswith("warning: sampler 0")
    assert fault.endswith("A run goes on after each.")


def test_faults_that_follow_from_no_seed_end_a_comparison_and_not_the_examination() -> None:
    random.seed(1)
    faults, unlike, *further = examined(env_kwargs={"disease": "flaky"})
    assert "ConnectionError in step), about" in faults
    assert unlike.startswith(
        "warning: faults do not follow from seed and actions: different ones happened in a new instance"
    )
    assert not any(text.startswith(AGAIN) for text in further)


@pytest.mark.parametrize(
    ("env_id", "env_kwargs"),
    [
        ("agents", {}),
        ("agents", {"fails_at": 5}),
        ("vector", {}),
        ("Native", {"mode": "NextStep"}),  # it resets its sub-environments by itself
    ],
    ids=str,
)
def test_environments_with_sub_environments_are_examined(env_id: str, env_kwargs: Any) -> None:
    texts = examined(f"worlds.joint:{env_id}", env_kwargs=env_kwargs, envs_per_sampler=3)

    def says(words: str) -> bool:
        return any(words in text for text in texts)

    resets_by_itself = env_id == "Native"
    assert any(text.startswith("note: 3 sub-environments step at once") for text in texts), texts
    errors = [text for text in texts if text.startswith("error: ")]
    assert all("raised OSError" in error for error in errors), errors
    assert says("the same seed and actions give the same") != resets_by_itself
    assert says("note: it is declared nondeterministic") == resets_by_itself
    assert says("OSError in step") == ("fails_at" in env_kwargs)


@pytest.mark.parametrize(
    ("partial", "expected"),
    [
        (False, "ok: another instance goes on in the same way after set_state"),
        (True, "warning: after set_state in another instance: it differs at step 1. Return from"),
    ],
)
@pytest.mark.parametrize(
    ("env_id", "env_state"), [("Saved", "auto"), ("SavedInFile", "auto"), ("SavedInFile", "own")]
)
def test_a_state_that_is_not_whole_is_found(
    env_id: str, env_state: str, partial: bool, expected: str
) -> None:
    kwargs = {"disease": "hidden state", "partial": partial}
    texts = examined(f"worlds.sick:{env_id}", env_kwargs=kwargs, env_state=env_state)
    assert any(text.startswith(expected) for text in texts), texts
    assert not any("its state holds a path" in text for text in texts), texts


def test_the_update_that_is_timed_is_that_of_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plans: list[TrainerPlan] = []

    class Recorded(LocalTrainer):
        def __init__(self, plan: TrainerPlan, *args: Any) -> None:
            plans.append(plan)
            super().__init__(plan, *args)

    monkeypatch.setattr(trainers, "LocalTrainer", Recorded)
    settings: dict[str, Any] = {"update_epochs": 4, "total_timesteps": 16, "progress": "off"}
    settings["run_dir"] = tmp_path / "run"
    examined("Pendulum-v1", **settings)
    dppo.train(config_of("Pendulum-v1", **settings))
    timed, trained = (plan.ppo for plan in plans)
    assert timed == trained
    assert (trained.norm_adv, trained.target_kl) == (False, 0.04)


PLAYED: Facts = {
    "steps": 1000,
    "faults": {},
    "rewards": [0.0, 1.0],
    "returns": [1.0],
    "lengths": [9],
    "available_mb": 4000,
}
FACTS: list[tuple[Facts, dict[str, Any], str]] = [
    (
        {"rewards": [0.0, 1e6]},
        {"norm_reward": False},
        "rewards or returns reach 1e+06; values are learned best if",
    ),
    ({"rewards": [0.0, 1e6]}, {}, ""),
    ({"lengths": []}, {}, "no episode ended in 1,000 steps"),
    ({"lengths": []}, {"replay": False}, ""),
    (
        {
            "lengths": [],
            "rewards": [],
            "faults": {"invalid in step": 700},
            "first_fault": ["step returned nan as the reward."],
        },
        {},
        "step returned nan as the reward.\nIt is the first of 700 faults in 1,000 steps (700 x invalid in step): no "
        "run learns from so few valid steps. Correct the environment",
    ),
    (
        {"lengths": [], "state": ""},
        {"env_state": "own"},
        "another instance goes on in the same way after set_state",
    ),
    (
        {"late": "61 s"},
        {},
        "an update with these settings was not over after 61 s: no speed is predicted",
    ),
    (
        {"same": {"in a new instance": "it differs"}},
        {"replay": False},
        "the same seed and actions give another episode",
    ),
    (
        {"leak_mb": 50.0},
        {"total_timesteps": 1e6},
        "memory grows by 50.0 MB in 1,000 env steps, 50.0 GB in a whole run",
    ),
    ({"output": 2e6, "last_line": "tick"}, {}, "it printed 2.0 MB, at the end 'tick'"),
    (
        {"cpus": 9, "available_mb": 300.0, "env_mb": 100.0},
        {"ranks_per_env": 4, "num_samplers": 2},
        "this machine has room for 2 environments of ranks_per_env=4 x cores_per_rank=1: 2 by its cores, 3 by its",
    ),
    (
        {"cpus": 9, "available_mb": 300.0, "env_mb": 10.0},
        {"ranks_per_env": 5, "num_samplers": 2},
        "this machine has room for 1 environment of ranks_per_env=5 x cores_per_rank=1: 1 by its cores, 30 by its "
        "memory, 10 MB for all ranks of an environment. A run with 2 environments is refused here. Lower",
    ),
    (
        {"written": ["state.txt"]},
        {},
        "files of the current folder were written meanwhile: state.txt",
    ),
    ({"left": ["sleep"]}, {}, "close() leaves 1 of its processes: ['sleep']"),
    ({"close_s": 9.0}, {}, "close() took 9.0 s, and a run waits for 4 s"),
    ({"step": {"worst": 20.0, "median": 0.1}}, {}, "one step took 20.0 s, others 0.1 s"),
    (
        {"env_mb": 900.0},
        {"num_samplers": 8},
        "8 x 1 environments of 900 MB are more than the 4,000 MB available",
    ),
]


@pytest.mark.parametrize(("facts", "settings", "text"), FACTS)
def test_facts_lead_to_a_finding(facts: Facts, settings: dict[str, Any], text: str) -> None:
    severities_and_texts = [*findings(PLAYED | facts, config_of(**settings))]
    texts = [finding for _, finding in severities_and_texts]
    assert len(texts) == bool(text), texts
    assert "".join(texts).startswith(text)
    severities = {severity for severity, _ in severities_and_texts}
    assert ("error" in severities) == ("no run learns" in text)


def test_the_steps_of_all_sub_environments_count_where_many_fail() -> None:
    faulty: Facts = {"steps": 10, "faults": {"invalid in step": 7}, "first_fault": ["."], "lost": 9}
    times = {"mean": 0.02, "count": 9}
    facts = faulty | {"make": times, "reset": times, "step": times}
    assert "no run learns" in faults(facts, config_of())[1]
    assert "no run learns" not in faults(facts | {"rows": 2}, config_of())[1]


@executes("tools/doctor/findings.py: Use --env-state own, which sets its own state instead")
def test_endless_episodes_of_an_environment_with_a_state_need_no_replays() -> None:
    facts: Facts = PLAYED | {"lengths": [], "state": ""}
    texts = [text for _, text in findings(facts, config_of())]
    assert texts[1].endswith("Use --env-state own, which sets its own state instead")
    assert len([*findings(facts, config_of(env_state="own"))]) == 1


def test_steps_that_are_played_back_are_checked_as_in_a_run() -> None:
    texts = examined(env_kwargs={"disease": "overshoots"}, num_samplers=4)
    assert any("1.00999" in text for text in texts)
    assert not any(text.startswith("error") for text in texts), texts


def test_the_memory_of_the_network_and_of_the_examination_is_not_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examination, "MAX_STEPS", 150)
    facts = facts_of(config_of(env_kwargs={"disease": "camera"}, image_features=64))
    assert facts["env_mb"] < 20
    assert facts["leak_mb"] == 0


def test_memory_per_step_counts_the_steps_of_all_sub_environments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(examination, "MAX_STEPS", 20)
    examined_mb = []

    def leak_mb(played: Played, examination_mb: float) -> float:
        examined_mb.append(examination_mb)
        assert played.memory[-1][0] == num_envs * len(played.trace)
        return 0.0

    monkeypatch.setattr(Played, "leak_mb", leak_mb)
    for num_envs in (1, 3):
        facts_of(config_of("worlds.joint:vector", envs_per_sampler=num_envs))
    single_mb, joint_mb = examined_mb
    assert joint_mb == pytest.approx(3 * single_mb)


def test_memory_that_is_no_longer_in_use_is_not_measured() -> None:
    watch = ProcessWatch()
    before_mb = watch.usage().mb
    gc.disable()
    try:
        garbage: list[Any] = [bytearray(2**23)]
        garbage.append(garbage)
        del garbage
        release_unused_memory()
        assert watch.usage().mb < before_mb + 4
    finally:
        gc.enable()


def test_a_checker_whose_actions_ignore_the_mask_is_not_asked() -> None:
    facts = facts_of(config_of("worlds.acting:Masked", env_kwargs={"source": "method"}))
    assert not {"error", "gymnasium"} & facts.keys()


def test_without_memory_for_any_plan_there_is_still_one() -> None:
    facts = {**WAITS, "env_mb": 3000, "available_mb": 6400}
    config = config_of(num_samplers=4, num_actors=2, num_learners=2)
    assert recommended(facts, config) in [*plans(facts, config)]


def test_a_hang_in_close_does_not_call_for_actors() -> None:
    facts = {**WAITS, "stage": "closing", "hung": "closing has not returned for 60 s"}
    assert recommended(facts, config_of()).actors == 0
    _, text = next(iter(findings(facts, config_of())))
    assert text.endswith("Give it a timeout: a run does not wait for it")
    _, text = next(iter(findings(facts | {"stage": "playing"}, config_of())))
    assert "If it is slow, raise --seconds to some 20 times what it needs" in text


@pytest.mark.parametrize(
    "fact",
    [{"died": "exit code 3"}, {"hung": "in step", "stage": "playing"}, {"leak_mb": 50.0}],
    ids=str,
)
def test_what_ends_a_run_without_actors_leads_to_actors(fact: Facts) -> None:
    config = config_of(num_samplers=8)
    facts = {**WAITS, "busy": 0.1}
    assert recommended(facts, config).actors == 0
    assert recommended(facts | fact, config).actors >= 1
    texts = advice(facts | fact, config)
    assert not any(text.startswith("You do not need Ray") for text in texts)


class SharesMemory(Sick):
    """Starts Python's own process for shared memory, which stays until its parent ends; and one that is left behind."""

    children: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        resource_tracker._resource_tracker.ensure_running()
        self.children.append(subprocess.Popen(["sleep", "1000"]))


def test_pythons_own_process_is_not_left_by_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tracker = resource_tracker.ResourceTracker()
    monkeypatch.setattr(resource_tracker, "_resource_tracker", tracker)
    try:
        texts = examined(SharesMemory)
    finally:
        for child in SharesMemory.children:
            child.kill()
            child.wait()
        tracker._stop()  # type: ignore[attr-defined]
    [text_of_close] = [text for text in texts if "close() leaves" in text]
    assert "python" not in text_of_close
    assert f"leaves {len(SharesMemory.children)} of its processes" in text_of_close


class LeavesGrandchild(Sick):
    """Starts a solver that has a helper, and ends the solver alone."""

    helpers: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        solver = ["sh", "-c", "sleep 1000 >/dev/null & echo $!; wait"]
        self.solver = subprocess.Popen(solver, stdout=subprocess.PIPE)
        assert self.solver.stdout is not None
        self.helpers.append(int(self.solver.stdout.readline()))

    def close(self) -> None:
        self.solver.kill()
        self.solver.wait()
        self.solver.stdout.close()  # type: ignore[union-attr]


def test_a_process_is_left_also_if_its_parent_was_ended() -> None:
    try:
        texts = examined(LeavesGrandchild)
    finally:
        for helper in LeavesGrandchild.helpers:
            os.kill(helper, signal.SIGKILL)
    [text_of_close] = [text for text in texts if "close() leaves" in text]
    assert "'sleep'" in text_of_close
    assert "'sh'" not in text_of_close


class OnRanks(Sick):
    """Starts its simulator on the ranks of its slots."""

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        assert not slots.layout.is_plain


PLACES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (OnPort, {}),
    (OnRanks, {"ranks_per_env": 2, "cores_per_rank": 0}),
    (OnRanks, {"ranks_per_env": 1 + usable_cores() // 2}),
)


@pytest.mark.parametrize(("env_id", "settings"), PLACES)
def test_a_second_instance_may_need_another_place_or_ranks(
    env_id: Any, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "LOCK", f"dppo-{tmp_path}-{os.getpid()}")  # of no other test
    config = config_of(env_id, **settings)
    facts = facts_of(config)
    texts = texts_of(facts, config)
    start = next(line for line in _measured(facts) if line.startswith("start "))
    assert ("again" in start) == (2 * config.layout.cores <= usable_cores())
    assert any(text.startswith("ok: the same seed and actions give the same ") for text in texts)
    assert not any(text.startswith("error") or "one instance only" in text for text in texts), texts


ALONE = {"single": "PermissionError: only one", "elsewhere": True}
LEAKS: Facts = {"leak_mb": 50.0}
COMMANDS: list[tuple[str, Facts, str, str]] = [
    # flags, facts, words of the command, and words that it leaves out
    ("--num-actors 2 --backup-requests", {}, "--env-threads", "--backup-requests --num-actors"),
    ("--num-actors 2 --num-learners 2", {}, "--num-learners --num-actors", ""),
    ("--num-actors 2 --eval-every 5000 --eval-actors 2", {}, "--eval-every", "--eval-actors"),
    ("--total-timesteps 1e6", LEAKS, "--recycle-after --num-actors", ""),
    ("--num-samplers 4", LEAKS | {"env_mb": 3000}, "--recycle-after 24GB", "2GB"),
    ("--num-actors 2 --recycle-after 9GB", LEAKS, "--recycle-after 9GB --num-actors", "2GB"),
    ("--env-threads", ALONE, "--num-actors --samplers-per-actor 8 1", "--env-threads"),
    ("--standby-envs 1", ALONE, "--samplers-per-actor --num-actors 8", "--standby-envs"),
    ("--samplers-per-actor 4 --num-actors 2", {}, "--samplers-per-actor", "--env-threads"),
    ("--config own.yaml", {"busy": 1, "own_busy": 1, "cpus": 1}, "--config", "--env-threads"),
]


@pytest.mark.parametrize(
    ("flags", "facts", "named", "left_out"), COMMANDS, ids=[case[0] for case in COMMANDS]
)
def test_the_command_that_is_printed_is_accepted_and_is_what_is_recommended(
    flags: str,
    facts: Facts,
    named: str,
    left_out: str,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("num_actors: 4\nenv_threads: true\n")
    facts = {**WAITS, "stage": "over", "output": 0, **facts}
    monkeypatch.setattr("dppo.tools.doctor.watching.examine", lambda *_: facts)
    assert main(["doctor", "CartPole-v1", *flags.split(), "--json"]) == 0

    printed = json.loads(capsys.readouterr().out)
    words = shlex.split(printed["command"])[2:]
    assert {*named.split()} <= {*words}
    assert not {*left_out.split()} & {*words}

    own_settings = parse(["CartPole-v1", *flags.split()]).settings
    best = recommended(facts, make_config(own_settings))
    config = make_config(parse(words).settings)
    assert config.num_actors == best.actors
    assert config.env_threads == best.threads


@pytest.mark.parametrize("needed", [{}, {"elsewhere": True}])
def test_the_report_is_about_the_command_that_is_printed(
    needed: Facts, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Soft actor-critic steps at another speed, so that its faults in an hour are others."""
    faulty = {"steps": 500, "faults": {"RuntimeError in step": 9}, "first_fault": ["."], "lost": 9}
    network = "two critics"
    sac = {"collect_s": 0.1, "update_s": 1.2, "network": network}
    facts = {**SLOW_STEPS, **faulty, "stage": "over", "output": 0, "make": {"mean": 0.1}}
    facts["algorithms"] = {"sac": sac}
    monkeypatch.setattr("dppo.tools.doctor.watching.examine", lambda *_: facts | needed)
    configs = list[Config]()

    def noted(facts: Facts, config: Config) -> list[tuple[str, str]]:
        configs.append(config)
        return [*findings(facts, config)]

    monkeypatch.setattr("dppo.tools.doctor.findings.findings", noted)
    assert main(["doctor", "x:y", "--env-threads", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert "--algo sac" in printed["command"]
    assert configs[0].algo == "sac"
    assert configs[0].env_threads == (not needed)
    assert printed["facts"]["network"] == network
    rates = {
        re.findall(r"--env-faults (\d+)/h", text)[0]
        for text in (printed["command"], printed["findings"][0][1])
    }
    assert len(rates) == 1


@pytest.mark.parametrize(("encoding", "bar"), [("ascii", "@"), ("latin-1", "@"), ("utf8", "█")])
def test_a_report_is_printed_in_any_encoding(
    encoding: str, bar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"stage": "over", "output": 0, "step": spread([0.1, 0.2]), "error": "not a ∞"}
    monkeypatch.setattr("dppo.tools.doctor.watching.examine", lambda *_: facts)
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding=encoding))
    assert main(["doctor", "CartPole-v1"]) == 1
    assert f"|{bar} " in out.getvalue().decode(encoding)


@pytest.mark.parametrize(("max_entries", "named"), [(4, ["changed", "new"]), (3, []), (2, [])])
def test_files_that_were_written_into_the_current_folder_are_named_unless_it_is_large(
    max_entries: int, named: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dppo.tools.doctor.watching.MAX_ENTRIES", max_entries)
    monkeypatch.chdir(tmp_path)
    Path("old").write_text("")
    Path("changed").write_text("")

    def write(*_: Any, **__: Any) -> Facts:
        print("1", file=sys.__stdout__, flush=True)
        Path("changed").write_text("1")
        Path("new").write_text("")
        return {"stage": "over"}

    monkeypatch.setattr("dppo.tools.doctor.watching.examine_apart", write)
    with Path("output").open("w") as output:  # as of `dppo doctor ... > output`
        monkeypatch.setattr(sys, "__stdout__", output)
        assert watching.examine({}, 1.0)["written"] == named


@pytest.mark.parametrize("seconds", ["0", "nan"])
def test_the_time_is_more_than_nothing(seconds: str, capsys: Capture) -> None:
    assert main(["doctor", "CartPole-v1", "--seconds", seconds]) == 2
    assert f"seconds={seconds}: must be a finite number above 0." in capsys.readouterr().err


WAITS: Facts = {
    "step": {"mean": 0.01},
    "reset": {"mean": 0.0},
    "lengths": [],
    "busy": 0.0,
    "own_busy": 0.0,
    "collect_s": 0.0,
    "update_s": 0.0,
    "cpus": 2,
    "available_mb": 1e6,
    "env_mb": 0,
}
NO_ACTOR = (0, False)
THREADS = (0, True)
COMPUTES = {"busy": 1, "own_busy": 1}
HOLDS_PYTHONS_LOCK = {"busy": 0.4, "own_busy": 0.4}
WORLDS: list[tuple[str, Facts, dict[tuple[int, bool], float], tuple[int, bool]]] = [
    # with 8 samplers: facts, speed-ups by actors and threads, what is recommended
    (
        "a simulator that waits",
        {},
        {(1, False): 1, (4, False): 4, (8, False): 8, (64, False): 64},
        THREADS,
    ),
    ("one that computes", COMPUTES, {(1, False): 1, (8, False): 2}, (2, False)),
    (
        "one that costs nothing",
        {"step": {"mean": 1e-6}, "update_s": 0.1},
        {(8, False): 0.84},
        NO_ACTOR,
    ),
    ("SGD that takes as long", {"update_s": 5.12}, {(8, False): 10.24 / 5.76}, THREADS),
    ("threads of one Python lock", HOLDS_PYTHONS_LOCK, {THREADS: 2.5, (8, False): 5}, (2, True)),
    ("little memory", COMPUTES | {"available_mb": 100}, {(2, False): 2}, NO_ACTOR),
]


@pytest.mark.parametrize(
    ("name", "facts", "speed_ups", "best"), WORLDS, ids=[case[0] for case in WORLDS]
)
def test_the_model_predicts(
    name: str, facts: Facts, speed_ups: dict[tuple[int, bool], float], best: tuple[int, bool]
) -> None:
    facts = WAITS | facts
    config = make_config({"env_id": "x:y", "num_samplers": 8, "num_steps": 64})
    speeds = {(plan.actors, plan.threads): plan.speed for plan in plans(facts, config)}
    for plan, expected in speed_ups.items():
        speed_up = speeds[plan] / speeds[NO_ACTOR]
        assert speed_up == pytest.approx(expected, rel=0.15), plan

    chosen = recommended(facts, config)
    assert (chosen.actors, chosen.threads) == best
    texts = [text for text in advice(facts, config) if text.startswith("You do not need Ray")]
    assert len(texts) == (chosen.actors == 0)
    assert all("stops the run. Use --num-actors 8" in text for text in texts)
    bring_nothing = (
        "would not make this command faster, because threads step all environments at the same time"
    )
    assert any(bring_nothing in text for text in texts) == (best == THREADS)


def test_the_model_knows_what_a_lag_and_resets_in_the_background_gain() -> None:
    facts = WAITS | {
        "busy": 0.6,
        "own_busy": 0.6,
        "cpus": 64,
        "update_s": 0.6,
        "reset": {"mean": 0.5},
        "lengths": [25],
    }
    config = make_config({"env_id": "x:y", "num_samplers": 8, "num_steps": 64})
    in_turns = iteration_s(facts, config, 8, lag=False)
    lagging = iteration_s(facts, config, 8, lag=True)
    # the update takes no time beside collecting
    assert in_turns - lagging == pytest.approx(0.66, abs=0.03)

    lag, standby = advice(facts, config)
    assert "--policy-lag 1" in lag
    assert lag.endswith("It changes what is learned.")
    soft_actor_critic = make_config(
        {"env_id": "x:y", "num_samplers": 8, "num_steps": 64, "algo": "sac"}
    )
    lag_of_sac, _ = advice(facts, soft_actor_critic)
    assert lag_of_sac.startswith("--policy-lag 1 --num-steps 16 ")
    assert "hardly any env steps on four of five known tasks, with segments of 16." in lag_of_sac
    short, *_ = advice(facts, replace(soft_actor_critic, num_steps=16))
    assert short.startswith("--policy-lag 1 collects while learning")
    # an episode takes half the time of a reset
    assert standby.startswith("--standby-envs 2 ")
    [lag] = advice(facts, replace(config, licences=23))
    assert "--policy-lag 1" in lag
    assert max(plan.actors for plan in plans(facts, replace(config, licences=23))) == 16

    # beside the update of a run that learns meanwhile, resets take no time
    lagging_run = replace(config, policy_lag=1)
    busy_learner = facts | {"update_s": 4.0, "died": "now and then"}
    assert any("--standby-envs" in text for text in advice(busy_learner, config))
    assert list(advice(busy_learner, lagging_run)) == []


@executes("tools/doctor/speed.py: Fewer --eval-episodes, or a larger --eval-every")
@pytest.mark.parametrize(
    ("eval_every", "waits_here", "waits_for_actors"), [(2000, True, True), (10**6, False, False)]
)
def test_the_model_says_when_evaluations_take_long(
    eval_every: int, waits_here: bool, waits_for_actors: bool
) -> None:
    """An episode takes five seconds: on eight threads, sixteen of them take ten, and on one actor eighty."""
    facts = WAITS | {"step": {"mean": 0.05, "median": 0.05, "worst": 0.05}, "lengths": [100]}
    config = make_config(
        {
            "env_id": "x:y",
            "num_samplers": 8,
            "num_steps": 64,
            "eval_every": eval_every,
            "eval_episodes": 16,
        }
    )
    assert recommended(facts, config).actors == 0
    here = [text for text in advice(facts, config) if "evaluation" in text]
    assert bool(here) == waits_here

    leaks = facts | {"leak_mb": 99.0}
    on_actors = [text for text in advice(leaks, config) if "evaluation" in text]
    assert bool(on_actors) == waits_for_actors
    if waits_here:
        assert "An evaluation of 16 episodes takes 0:10, and" in here[0]
        assert "takes 1:20 on 1 actor" in on_actors[0]


def run_findings(
    folder: Path, rows: list[dict[str, Any]], **settings: Any
) -> Iterator[tuple[str, str]]:
    """Return what the doctor finds in a run with these metrics."""
    config = make_config({"env_id": "CartPole-v1", **settings})
    (folder / "config.yaml").write_text(yaml.safe_dump(grouped(plain_settings(config))))
    return findings_of_run(folder, rows)


def test_rows_that_a_copy_lacks_are_named(tmp_path: Path, typed: Typed) -> None:
    run = dppo.train(tiny_run(tmp_path / "run", iterations=3)).run_dir
    complete = typed(f"doctor {run}")
    assert "rows are missing" not in complete
    assert not complete.endswith("\n\n")
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    for count in (1, 0):
        metrics.write_text("".join(lines[:count]))
        words = f"ends with iteration {count}, but the newest checkpoint is of iteration 3: rows are missing"
        assert words in typed(f"doctor {run}")
    assert "metrics.jsonl has no rows yet" in typed(f"doctor {run}")


def test_the_incident_that_has_ended_a_run_is_named(tmp_path: Path) -> None:
    incident = tmp_path / "incidents" / "001" / "incident.json"
    incident.parent.mkdir(parents=True)
    ended = ("warning", f"the run ended with env_raised, see {incident.parent}: no licence")
    row = {"iteration": 1, "global_step": 512}
    for ended_after, rows in ((0, []), (1, [row])):
        facts = {"kind": "env_raised", "message": "no licence\nTraceback"}
        incident.write_text(json.dumps({**facts, "ended_after": ended_after}))
        assert ended in run_findings(tmp_path, rows)
        later = {**row, "iteration": ended_after + 1}
        assert ended not in run_findings(tmp_path, [later]), "it was resumed"
        # an actor was lost in the iteration that Ctrl-C has dropped
        incident.write_text(json.dumps({**facts, "ended_after": None}))
        assert ended not in run_findings(tmp_path, rows)
        incident.write_text(json.dumps(facts))
        assert ended not in run_findings(tmp_path, rows), "of an earlier version"


def findings_of_phase(
    phase: str, folder: Path, incidents: dict[str, float] | None = None, **settings: Any
) -> list[str]:
    """Return what the doctor finds in a run all of whose time went to one phase."""
    row: dict[str, float] = {"iteration": 2, "global_step": 512, **(incidents or {})}
    row |= {f"perf/{name}_frac": float(name == phase) for name in PHASES}
    row |= {f"perf/{name}": 1.0 for name in TimeSplit._fields}
    return [text for _, text in run_findings(folder, [row], **settings)]


@pytest.mark.parametrize(
    ("settings", "advised"),
    [({"num_actors": 2}, True), ({}, False), ({"num_actors": 2, "policy_lag": 1}, False)],
)
def test_a_lag_is_advised_where_actors_would_not_wait_for_the_slowest(
    settings: dict[str, Any], advised: bool, tmp_path: Path
) -> None:
    texts = findings_of_phase("wait", tmp_path, **settings)
    [text] = [text for text in texts if "went to waiting" in text]
    assert text.endswith(". This changes what is learned")
    assert (", or --policy-lag 1" in text) == advised
    hangs = {"incidents/actor_hung": 2.0, "incidents/actor_lost": 1.0}
    text_of_hangs = "".join(findings_of_phase("wait", tmp_path, hangs, **settings))
    assert "and for Ray, also because actors hung or died (3)" in text_of_hangs
    assert "This changes what is learned" not in text_of_hangs


def test_collecting_while_learning_is_advised_once_with_its_gain(tmp_path: Path) -> None:
    texts = findings_of_phase("update", tmp_path, num_actors=2)
    advice = [text for text in texts if "--policy-lag" in text or "--overlap" in text]
    assert len(advice) == 1
    assert " x as fast" in advice[0]


@pytest.mark.parametrize(
    ("env_share", "named"), [(0.04, ["SGD"]), (0.2, ["SGD", "the environments"])]
)
def test_a_phase_that_would_gain_nothing_is_not_to_be_shortened(
    env_share: float, named: list[str], tmp_path: Path
) -> None:
    row: dict[str, float] = {"iteration": 2, "global_step": 512}
    row |= {f"perf/{phase}_frac": 0.0 for phase in PHASES}
    row |= {"perf/env_frac": env_share, "perf/update_frac": 1 - env_share}
    row |= {f"perf/{name}": 1.0 for name in TimeSplit._fields}
    brief = row | {"perf/iteration_s": 1e-3, "perf/wait_frac": 1.0}  # as before an update
    stalled = row | {"perf/iteration_s": 1e3, "perf/transfer_frac": 1.0}
    rows = [row, brief, brief, row, stalled, row]
    texts = [text for _, text in run_findings(tmp_path, rows, num_actors=1)]
    assert (
        re.findall("of the time after the first iteration went to ([^.]*)", "\n".join(texts))
        == named
    )


@pytest.mark.parametrize(("num_actors", "has_advice"), [(0, False), (2, True), (8, False)])
def test_a_slow_start_is_named_in_place_of_what_the_other_iterations_took(
    num_actors: int, has_advice: bool, tmp_path: Path
) -> None:
    row: dict[str, float] = {"global_step": 512}
    row |= {f"perf/{phase}_frac": float(phase == "update") for phase in PHASES}
    row |= {f"perf/{name}": 1.0 for name in TimeSplit._fields}
    first = row | {"iteration": 1, "perf/iteration_s": 57.0}
    rows = [first, row | {"iteration": 4}]  # a sample of four
    texts = [text for _, text in run_findings(tmp_path, rows, num_actors=num_actors)]
    [text] = [text for text in texts if "of the time went to" in text]
    assert text.startswith("95% of the time went to the first iteration, which makes the environm")
    assert ("More --num-actors" in text) == has_advice
    first["incidents/actor_hung"] = 3
    texts = [text for _, text in run_findings(tmp_path, rows, num_actors=num_actors)]
    assert f"{text.partition('. ')[0]}, and in which actors hung or died (3)" in texts


@pytest.mark.parametrize(("training_s", "actors"), [(28.0, 10), (0.0, 20)])
def test_a_long_wait_for_evaluations_is_named_with_its_remedies(
    training_s: float, actors: int, tmp_path: Path
) -> None:
    row = {"iteration": 2, "global_step": 512, "time/training_s": training_s}
    row["time/eval_wait_s"] = 250.0
    row |= {f"perf/{phase}_frac": 0.0 for phase in PHASES}
    row |= {f"perf/{name}": 1.0 for name in TimeSplit._fields}
    findings = list(run_findings(tmp_path, [row], num_actors=2, eval_every=64))
    [text] = [text for severity, text in findings if severity == "warning"]
    assert text == (
        f"Waiting for evaluations took 4:10, training 0:{training_s:02.0f}. Use eval_actors={actors} "
        f"(--eval-actors {actors}) if there are CPUs for them, a larger eval_every (--eval-every), or fewer "
        f"eval_episodes (--eval-episodes)."
    )


def test_numbers_too_large_to_be_squared_leave_out_the_finding_that_needs_them(
    tmp_path: Path,
) -> None:
    rows = [
        {"iteration": number, "global_step": 10_000 * number, "charts/episodes": 50 * number}
        | {"charts/episodic_return": 1.0, "charts/episodic_return_std": 1e308}
        for number in range(1, 41)
    ]
    assert not list(run_findings(tmp_path, rows))
    rows = [row | {"charts/episodic_return_std": 1.0} for row in rows]
    [(_, text)] = run_findings(tmp_path, rows)
    assert text.startswith("the mean return has not risen in the last 140,000 env steps")


def times_of_files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_doctor_of_a_run_says_what_limited_it_and_writes_nothing(
    desk: Path, typed: Typed, refused: Typed
) -> None:
    folder = desk / "run"
    dppo.train(config_of("CartPole-v1", run_dir=folder, progress="off", total_timesteps=48))
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    times = {f"perf/{phase}_frac": 0.0 for phase in PHASES}
    times |= {"perf/env_frac": 0.5, "perf/update_frac": 0.4, "perf/iteration_s": 1.0}
    counts = {"incidents/actor_hung": 2, "incidents/\x1b[2J": 1}
    metrics.write_text("".join(f"{json.dumps(row | times | counts)}\n" for row in rows))
    written = times_of_files(folder)

    out = typed("doctor run")
    assert "50% of the time after the first iteration went to the environments" in out
    assert "40% of the time after the first iteration went to SGD" in out
    assert "2 x actor_hung" in out
    assert "\x1b" not in out, "a stranger's folder prints no escape sequences"

    report = json.loads(typed("doctor run --json"))
    assert report["can_train"]
    assert times_of_files(folder) == written
    for name in ("--num-steps", "--seconds"):
        assert f"{name} has no effect here" in refused(f"doctor run {name} 3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disease", "code", "text"),
    [
        ("none", 0, "in a fresh process"),
        ("child", 0, "close() leaves 2 of its processes: ['sleep', 'sleep']"),
        ("prints", 0, "MB, at the end 'xxx"),
        ("segfault", 1, "was ended by SIGSEGV while playing, in reset (call 2). It was in "),
        ("exits", 1, "ended with exit code 3 while playing, in step"),
        ("hangs in reset", 1, "playing, in reset (call 2) has not returned"),
        ("hangs while it is made", 1, "making, in a constructor (call 1) has not"),
        ("slow to close", 0, " s, and a run waits for 4 s"),
    ],
)
def test_the_command(disease: str, code: int, text: str, tmp_path: Path) -> None:
    # the others end by themselves, on a busy machine after more than five seconds
    seconds = "5" if disease.startswith("hangs") else "60"
    sick = ["worlds.sick:Sick", "--env-kwargs", json.dumps({"disease": disease})]
    sizes = ["--seconds", seconds, "--num-samplers", "2", "--num-steps", "16"]
    ended, out, err = run(["doctor", *sick, *sizes], tmp_path)
    assert ended == code, err
    assert "Traceback" not in err
    assert text in out
    assert not list(tmp_path.glob("runs*"))
    if code == 0:
        assert out.strip().splitlines()[-1].startswith("dppo train worlds.sick:Sick --env-kwargs ")


@pytest.mark.proves("replaces the first instance of its process in silence")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "finding"),
    [
        (
            ["worlds.single:Engine"],
            "note     a process can have one instance only: a second one raised Permission",
        ),
        (
            ["worlds.single:Replaced"],
            "warning  instances in one process disturb each other: the same seed and act",
        ),
        (
            ["worlds.single:Replaced", "--env-kwargs", '{"hangs_s": 1000}'],
            "warning  with a second instance in its process: comparing with a second instance, in step (call ",
        ),
    ],
    ids=["raises", "differs", "hangs"],
)
def test_a_simulator_of_which_a_process_may_have_one_gets_a_command_that_works(
    words: list[str], finding: str, tmp_path: Path
) -> None:
    sizes = ["--num-steps", "8", "--update-epochs", "1", "--seconds", "30"]
    code, out, _ = run(["doctor", *words, *sizes], tmp_path, timeout_s=200)
    assert code == 0
    assert finding in out
    assert "--samplers-per-actor 1, --num-actors 8" in out
    commands = [line for line in out.splitlines() if " train " in line]
    [command] = [line for line in commands if "--samplers-per-actor" in line]
    words = shlex.split(command.partition(" train ")[2])
    config = make_config(parse(words).settings)
    assert config.num_samplers == config.num_actors == 8
    assert config.samplers_per_actor == 1


@pytest.mark.parametrize(
    ("facts", "envs", "flags"),
    [
        ({}, 1, "`samplers_per_actor=1`, `num_actors=4`, `num_samplers=4`, `envs_per_sampler=1`"),
        ({}, 2, "`samplers_per_actor=1`, `num_actors=8`, `num_samplers=8`, `envs_per_sampler=1`"),
        (
            {"rows": 2},
            2,
            "`samplers_per_actor=1`, `num_actors=4`, `num_samplers=4`, `envs_per_sampler=2`",
        ),
    ],
)
def test_as_many_processes_as_instances_are_recommended(
    facts: Facts, envs: int, flags: str
) -> None:
    config = config_of(num_samplers=4, envs_per_sampler=envs)
    texts = [text for _, text in findings(ALONE | facts, config) if "one instance" in text]
    assert len(texts) == 1
    assert texts[0].partition("Use ")[2] == flags


def test_an_argument_that_the_environment_does_not_take_is_a_short_finding() -> None:
    facts = facts_of(config_of(env_kwargs={"diseas": "none"}))
    assert facts["error"].startswith(
        "env_kwargs: diseas is not a known argument of worlds.sick:Sick. Did you mean disease?"
    )
    assert "\n" not in facts["error"]
