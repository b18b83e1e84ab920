"""Ray's errors in one line."""

from __future__ import annotations

from dppo.cluster.faults import cause_of_death

UNEXPECTED = """The actor died unexpectedly before finishing this task.
\tclass_name: PPOActor
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) ... (2) ..."""


def test_the_paragraph_about_an_unexpected_exit_becomes_a_short_reason() -> None:
    assert cause_of_death(RuntimeError(UNEXPECTED)) == (
        "died: its process crashed, exited or was killed (out of memory?)"
    )


def test_other_reasons_are_those_of_ray() -> None:
    error = RuntimeError("The actor died.\nThe node is dead: 10.0.0.1\nsee the logs")
    assert cause_of_death(error) == "died: The node is dead: 10.0.0.1"
