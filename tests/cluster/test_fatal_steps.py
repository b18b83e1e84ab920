"""Steps in which every process is lost: the episode is given up, and the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import make_config
from driver import Driver
from left_out import check_that_it_is_left_out_in_one_process
from recorder import Notes

import dppo
from dppo.engine.actor_collector import ActorCollector
from dppo.engine.fatal import MOST_GIVEN_UP
from dppo.engine.messages import Ask, Died, Process
from dppo.envs.activity import Activity, Phase
from dppo.errors import ClusterError
from dppo.ppo.exchange.records import FatalStep

LOSSES = 4  # the losses after 3 replacements, which `driver.LIMITS` allows


class Fated(Driver):
    """One actor with two samplers, whose processes die in places that a test chooses."""

    def __init__(self, given_up: Any = ()) -> None:
        """Start the process; an earlier one has given up some steps."""
        super().__init__([[0, 1]])
        self.engine._ledger.load_given_up(given_up)
        self._number = 1
        self.request(0)

    def die_at(self, phase: Phase, episode: int, length: int, sampler: int = 1) -> None:
        """Let the process die, and start the next one."""
        activity = Activity(9, 0, phase, sampler, 0, 0, 0, 5, episode, length)
        self.on(Died(Process(0, self._number), "died", activity=activity))
        self.wait(10)
        self._number += 1
        self.start(0, self._number)

    def fatal(self) -> dict[int, tuple[FatalStep, ...]]:
        """Return the steps that the last question leaves out."""
        return dict(self.all(Ask)[-1].question.fatal)


def test_a_step_in_which_each_process_is_lost_is_left_out_until_its_segment_arrives() -> None:
    driver = Fated()
    for _ in range(LOSSES - 1):
        driver.die_at(Phase.STEP, 2, 7)
        assert driver.fatal() == {}
    driver.die_at(Phase.STEP, 2, 7)
    assert driver.fatal() == {1: (FatalStep(0, 2, 8),)}
    assert driver.asks[-1].question.requests[1].fatal == (FatalStep(0, 2, 8),)
    assert driver.asks[-1].question.requests[0].fatal == ()
    assert driver.incidents()[-1].text.endswith(
        "It was replaced 3 times in a row in step 8 of episode 2 of env 0 of sampler 1 (max_actor_restarts=3): "
        "that is a fault of the environment, which gives up this episode, or ends the run (on_env_fault), 30 s after "
        "the first loss; a smaller --step-timeout-s or --max-actor-restarts does so sooner"
    )
    driver.asks = driver.asks[-1:]
    driver.answer()
    driver.request(1)
    assert driver.fatal() == {}


def test_programs_that_a_lost_process_has_restarted_since_its_last_answer_are_counted() -> None:
    driver = Fated()
    activity = Activity(9, 0, Phase.STEP, 1, 0, 0, 0, restarts=2)
    driver.on(Died(Process(0, 1), "died", activity=activity))
    driver.wait(10)
    driver.start(0, 2)
    driver.answer()
    driver.on(Died(Process(0, 2), "died", activity=activity))
    kinds = [log.incident.kind for log in driver.incidents() if log.incident is not None]
    restarted = ["program_restarted"] * 2
    assert kinds == [*restarted, "actor_lost", *restarted, "actor_lost"]

    transport: Any = None
    collector = ActorCollector(driver.engine, transport)
    for number in range(3, 1 + LOSSES):
        driver.wait(10)
        driver.start(0, number)
        driver.die(0, number)
    driver.wait(10)
    driver.start(0, 1 + LOSSES)
    with pytest.raises(ClusterError, match="replaced 3 times in a row"):
        driver.on(Died(Process(0, 1 + LOSSES), "died", activity=activity))
    kinds = [incident.kind for incident in collector.take_incidents()]
    assert kinds == restarted, "also those of the loss that ends the run"


def test_a_reset_is_left_out_as_well() -> None:
    driver = Fated()
    for _ in range(LOSSES):
        driver.die_at(Phase.RESET, 3, 0)
    assert driver.fatal() == {1: (FatalStep(0, 3, 0),)}
    assert "a smaller --reset-timeout-s or" in driver.incidents()[-1].text


@pytest.mark.parametrize("phase", [Phase.MAKE, Phase.REPLAY, Phase.IDLE])
def test_losses_outside_of_steps_and_resets_end_the_run(phase: Phase) -> None:
    driver = Fated()
    for _ in range(LOSSES - 1):
        driver.die_at(phase, 2, 7)
    with pytest.raises(ClusterError, match="replaced 3 times in a row without making a segment"):
        driver.die_at(phase, 2, 7)


def test_losses_in_several_steps_end_the_run() -> None:
    driver = Fated()
    for step in range(LOSSES - 1):
        driver.die_at(Phase.STEP, 2, 7 + step // 2)
    with pytest.raises(ClusterError, match="replaced 3 times in a row without making a segment"):
        driver.die_at(Phase.STEP, 2, 7)


def test_a_step_that_is_fatal_although_it_is_left_out_ends_the_run() -> None:
    driver = Fated()
    for _ in range(2 * LOSSES - 1):
        driver.die_at(Phase.STEP, 2, 7)
    with pytest.raises(ClusterError, match="without making a segment"):
        driver.die_at(Phase.STEP, 2, 7)


def test_a_segment_gives_up_some_episodes_and_no_more() -> None:
    """If a simulator hangs in each episode, something else is wrong, and the run ends."""
    driver = Fated()
    for episode in range(MOST_GIVEN_UP):
        for _ in range(LOSSES):
            driver.die_at(Phase.STEP, episode, 7)
    assert len(driver.fatal()[1]) == MOST_GIVEN_UP
    for _ in range(LOSSES - 1):
        driver.die_at(Phase.STEP, MOST_GIVEN_UP, 7)
    with pytest.raises(ClusterError, match="without making a segment"):
        driver.die_at(Phase.STEP, MOST_GIVEN_UP, 7)


def settings(
    run_dir: Path, failure: str, where: str, num_samplers: int, **changes: Any
) -> dppo.Config:
    """Return the settings of a run of two iterations whose environments fail in their third episode."""
    env_kwargs = {"how": failure, "where": where, "at_step": 3, "at_episode": 2}
    values: dict[str, Any] = {
        "env_id": "worlds.faulty:crashing",
        "env_kwargs": env_kwargs,
        "run_dir": run_dir,
        "num_samplers": num_samplers,
        "num_steps": 64,
        "total_timesteps": num_samplers * 128,
        "update_epochs": 1,
        "on_env_fault": "rebuild",
        "env_faults": "unlimited",
    }
    return make_config(values | changes)


@pytest.mark.proves("kills its process, or hangs, in the same step each time")
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(
    ("failure", "where", "num_actors"),
    [
        ("kill", "step", 1),  # each loss starts a process
        pytest.param("kill", "reset", 2, marks=pytest.mark.slow),
        pytest.param("hang", "step", 2, marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_simulator_dies_in_the_same_step_each_time_equals_one_in_which_it_raises_there(
    failure: str, where: str, num_actors: int, tmp_path: Path
) -> None:
    """The fault follows from seed and actions, so a new process meets it again, also after a resume."""
    raising = dppo.train(settings(tmp_path / "raising", "raise", where, num_actors))
    on_actors: dict[str, Any] = {"num_actors": num_actors, "max_actor_restarts": 1}
    if failure == "hang":
        on_actors["step_timeout_s"] = 4.0
    with Notes() as notes:
        dying = dppo.train(settings(tmp_path / "dying", failure, where, num_actors, **on_actors))
    assert dying.weights_sha256 == raising.weights_sha256
    assert dying.incidents["env_raised"] == raising.incidents["env_raised"] > 0
    words = {kind.partition(": ")[2] for kind in dying.env_faults} - {""}
    assert words == {f"hung or died in {where}"}
    assert any("gives up this episode" in text for text in notes.texts)
    assert any("each time that it was tried" in text for text in notes.texts)
    # once is enough, as each command starts a process
    if failure == "kill" and where == "step":
        check_that_it_is_left_out_in_one_process(dying.run_dir)
