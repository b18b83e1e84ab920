"""The process of the doctor that watches another one, in which an environment is examined."""

from __future__ import annotations

import inspect
import re
import time
from pathlib import Path
from typing import Any

import pytest
from builders import make_config

from dppo.envs.checks.faults import PACKAGE
from dppo.tools.doctor import examination, watching
from dppo.tools.doctor.findings import findings
from dppo.tools.doctor.playing import WITH_SECOND
from dppo.tools.doctor.watching import Watch

CONFIG = make_config({"env_id": "CartPole-v1"})
WATCHED = "import os, sys, time; to = int(sys.argv[1]); say = lambda text: os.write(to, text.encode() + b'\\n')\n"
PROGRAMS: dict[str, tuple[str, str, str]] = {  # what a process does, the fact, and its text
    "exits": (
        "say('{\"stage\": \"playing\"}'); say('s'); os._exit(3)",
        "died",
        "exit code 3 while playing, in step (c",
    ),
    "is killed": (
        "say('{\"stage\": \"playing\"}'); say('r'); os.kill(os.getpid(), 9)",
        "died",
        "SIGKILL while playing",
    ),
    "hangs": (
        "say('{\"stage\": \"playing\"}'); say('r'); time.sleep(99)",
        "hung",
        "playing, in reset (call 1) has not",
    ),
}


def watched(code: str, seconds: float = 5.0, **arguments: Any) -> dict[str, Any]:
    """Return the facts about a process that is watched for so long."""
    return Watch(("-S", "-c", WATCHED + code), arguments, print).wait(seconds)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_process_that_dies_or_hangs_gives_a_finding(name: str) -> None:
    code, fact, text = PROGRAMS[name]
    facts = watched(code, 1.0)
    assert text in facts[fact]
    assert [kind for kind, _ in findings(facts, CONFIG)] == ["error"]


def test_what_is_wanted_may_be_longer_than_an_argument_of_a_command() -> None:
    code = (
        "import json; wanted = json.load(sys.stdin); say(json.dumps({'size': len(wanted['map'])}))"
    )
    assert watched(code, map="x" * 300_000)["size"] == 300_000


def test_the_place_of_a_hang_is_in_the_code_of_the_user_also_in_a_folder_called_dppo() -> None:
    places = [
        f"{PACKAGE}/envs/episode.py",
        "/home/me/dppo/sim.py",
        f"{PACKAGE}/hosts/environments.py",
    ]
    stack = "".join(
        f'  File "{place}", line 7 in step\n'
        for place in ["/usr/lib/python3.11/socket.py", *places]
    )
    printed = f"Current thread 0x1 (most recent call first):\n{stack}".rstrip()
    facts = watched(f"say({printed!r}); os.kill(os.getpid(), 9)")
    assert facts["died"].endswith("in /home/me/dppo/sim.py, line 7, in step")


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ("'threads_left': ['pump']", "after close(), a thread (pump) keeps running, so"),
        ("'threads_ended': True", "after close(), the process does not end, although its threads"),
    ],
)
def test_a_process_that_does_not_end_after_close_has_a_finding_of_its_own(
    reported: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not take all of the time: the process, which would end by itself, is ended before."""
    monkeypatch.setattr("dppo.tools.doctor.watching.PATIENCE_S", 0.1)
    monkeypatch.setattr("dppo.tools.doctor.watching.SLOW_S", 0.2)
    code = f"import json; say(json.dumps({{'stage': 'over', {reported}}})); time.sleep(20)"
    facts = watched(code, 1000.0)
    ((kind, text),) = findings(facts, CONFIG)
    assert kind == "error"
    assert text.startswith(expected)


def test_a_process_whose_threads_have_ended_may_take_its_time_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine, Python unloads its packages for longer than a thread of the environment may go on."""
    monkeypatch.setattr("dppo.tools.doctor.watching.PATIENCE_S", 0.1)
    facts = watched('say(\'{"stage": "over", "threads_ended": true}\'); time.sleep(1)', 0.5)
    assert list(findings(facts, CONFIG)) == []


HOLDING = """
import os, threading
from pathlib import Path
import gymnasium as gym

class Holds(gym.Wrapper):
    def close(self):
        threading.Thread(target=threading.Event().wait, name="pump").start()

def make():
    return Holds(gym.make("CartPole-v1"))
"""


@pytest.mark.parametrize("env_id", ["CartPole-v1", "holding:make"])
def test_an_examination_reports_whether_threads_hold_its_process(
    env_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "holding.py").write_text(HOLDING)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("dppo.tools.doctor.watching.PATIENCE_S", 0.5)
    arguments = {
        "settings": {"env_id": env_id},
        "seconds": 1.0,
        "sizes": [1],
        "asked_at": time.time(),
    }
    facts = Watch(watching.EXAMINATION, arguments | {"updates": False}, print).wait(60.0)
    is_holding = env_id == "holding:make"
    assert facts["threads_left"] == (["pump"] if is_holding else [])
    assert facts["threads_ended"] is not is_holding


NOT_PLAYED = "episodes were not played again in a fresh process: "
SAME = "the same seed and actions give "
REPORTED: dict[str, tuple[str, str]] = {  # what a second process reports, and what is found
    "{'error': 'no licence left'}": ("warning", f"{NOT_PLAYED}no licence left"),
    "{'trace': []}": ("warning", f"{NOT_PLAYED}for lack of time"),
    "{'trace': [[1, 0]]}": (
        "ok",
        f"{SAME}the same 2 steps in a new instance, in a fresh process (the first 1)",
    ),
    "{'trace': [[1, 0], [3, 0]]}": (
        "warning",
        f"{SAME}another episode in a fresh process: it differs at step 1",
    ),
}


@pytest.mark.parametrize("reported", REPORTED)
def test_episodes_are_played_again_in_a_fresh_process_as_far_as_it_comes(
    reported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {
        "trace": [[1, 0], [2, 0]],
        "sizes": [2],
        "compared": 2,
        "same": {"in a new instance": ""},
        "unlike": [],
    }
    chosen = f"made = {reported} if os.path.exists('made') else {first}; open('made', 'w')"
    code = f"{WATCHED}import json; {chosen}; say(json.dumps(made | {{'stage': 'over'}}))"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watching, "EXAMINATION", ("-S", "-c", code))
    diagnosis = findings({"steps": 2} | watching.examine({}, 5.0), CONFIG)
    assert [
        (kind, text.partition(". ")[0]) for kind, text in diagnosis if "fresh process" in text
    ] == [REPORTED[reported]]


def test_stages_say_what_is_done_and_which_process_plays_the_same_episodes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = "".join(
        f'say(\'{{"stage": "{stage}"}}\'); ' for stage in ("making", "playing", "closing", "over")
    )
    facts = {
        "trace": [[1, 0]],
        "sizes": [1],
        "compared": 1,
        "same": {"in a new instance": ""},
        "unlike": [],
    }
    code = f"{WATCHED}import json; say(json.dumps({facts})); {stages}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watching, "EXAMINATION", ("-S", "-c", code))
    shown = list[str]()
    watching.examine({}, 5.0, shown.append)
    assert shown == [
        "making the environment",
        "playing episodes",
        "closing the environment",
        "in a second process: making the environment",
        "in a second process: playing the same episodes again",
        "in a second process: closing the environment",
    ]


def test_every_stage_of_an_examination_has_words_for_the_user() -> None:
    source = inspect.getsource(examination)
    assert set(re.findall(r'report\(stage="(.+?)"\)', source)) - watching.STAGES.keys() == {
        "making a second instance in another process",
        "asking Gymnasium's checker",
    }
    assert WITH_SECOND in watching.STAGES


def test_an_update_or_a_network_that_takes_long_is_not_a_hung_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "SLOW_S", 0.5)
    monkeypatch.setattr(watching, "UPDATING_S", 0.5)
    updates = watched('say(\'{"stage": "updating"}\'); time.sleep(99)', 1.0)
    assert re.fullmatch(r"\d+ s", updates["late"])
    assert not updates.keys() & {"hung", "died"}
    code = "say('{\"stage\": \"making\"}'); say('m'); say('d'); time.sleep(99)"
    built = watched(code, 1.0)
    assert built["hung"].startswith("making has not returned for ")
