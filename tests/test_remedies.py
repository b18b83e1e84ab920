"""Every remedy that a message prints is carried out: the situation, the text, what it says, and the fault is gone.

A new text that tells the user to do something needs a row in `tests/remedies`, or a reason in `not_executed.py`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from remedies import executes
from remedies.carrying_out import changed_as_told
from remedies.commands import COMMANDS
from remedies.networks import CONTRACT, settings_of
from remedies.not_executed import REASONS
from remedies.refused import STARTS, Remedy
from remedies.running import pattern_of, problem
from remedies.settings import BY_HAND, CHECKS, VALUES
from remedies.texts import Text, remedies

import dppo
from dppo.config.parts import settings_by_name
from dppo.errors import ConfigError

ENV = "CartPole-v1"
Row = tuple[str, str]
"""A file below src/dppo, and words of a text in it."""


TESTS = Path(__file__).parent


def rows() -> list[Row]:
    """Return what is executed: the rows of tables, and what tests are marked with `executes`."""
    settings = [(file_of_check(words), words) for words, _ in CHECKS]
    starts = [row_of(remedy) for remedy, *_ in STARTS]
    starts += [row_of(remedy) for remedy, _, _, _ in COMMANDS]
    contract = [("ppo/networks/user_module.py", words) for words, _, _ in CONTRACT]
    return [
        *settings,
        *contract,
        *((file, words) for file, words, _, _ in BY_HAND),
        *starts,
        *marked(),
    ]


def file_of_check(words: str) -> str:
    """Return the file of a check of settings."""
    for file in ("config/effects.py", "config/sac_checks.py", "config/process_checks.py"):
        if any(text.file == file and words in text.text for text in remedies()):
            return file
    return "config/checks.py"


def row_of(remedy: str) -> Row:
    """Return file and words of "file.py: words"."""
    file, _, words = remedy.partition(": ")
    return file, words


def marked() -> Iterator[Row]:
    """Yield what `executes` says above the tests of all files."""
    for path in TESTS.rglob("test_*.py"):
        source = path.read_text(encoding="utf8")
        if "@executes(" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "executes"
            ):
                for remedy in node.args:
                    yield row_of(ast.literal_eval(remedy))


def unexecuted() -> list[Row]:
    """Return what is not executed."""
    return [
        row_of(remedy) for remedies_of_reason in REASONS.values() for remedy in remedies_of_reason
    ]


def is_of(row: Row, text: Text) -> bool:
    return row[0] == text.file and row[1] in text.text


def refusal(settings: dict[str, Any]) -> str:
    """Return why settings are refused; "" if they are not."""
    try:
        dppo.Config(**{"env_id": ENV, **settings})
    except ConfigError as error:
        return str(error)
    return ""


def fact_of(message: str) -> str:
    """Return the fact of a message, without its numbers: the same fault has the same, another one another."""
    return re.sub(r"[\d.]*\d", "N", message.partition(". ")[0])


@pytest.mark.parametrize(("words", "settings"), CHECKS, ids=[words for words, _ in CHECKS])
def test_what_a_refusal_of_settings_says_makes_them_valid(
    words: str, settings: dict[str, Any]
) -> None:
    problems = refusal(settings).splitlines()
    problem = next(line for line in problems if re.search(pattern_of(words), line))
    further_facts = {fact_of(line) for line in problems} - {fact_of(problem)}
    alternatives = list(changed_as_told(problem, settings, VALUES))
    assert alternatives
    for tried in alternatives:
        answers = [refusal(changed).splitlines() for changed in tried]
        # the message has named all else that these settings need
        assert any({fact_of(line) for line in answer} <= further_facts for answer in answers), (
            problem,
            tried[0],
            answers[-1],
        )


@pytest.mark.parametrize(
    ("file", "words", "settings", "instead"), BY_HAND, ids=[words for _, words, _, _ in BY_HAND]
)
def test_what_a_refusal_of_a_value_names_is_valid(
    file: str, words: str, settings: dict[str, Any], instead: tuple[dict[str, Any], ...]
) -> None:
    assert re.search(pattern_of(words), refusal(settings)), file
    for settings_that_work in instead:
        assert refusal(settings_that_work) == ""


def starts() -> Iterator[ParameterSet]:
    """Yield the rows; further ways to carry out a remedy are slow tests."""
    remedies_so_far = set[str]()
    for remedy, settings, *changes in STARTS:
        for change in changes:
            marks = [pytest.mark.slow] if remedy in remedies_so_far else []
            remedies_so_far.add(remedy)
            yield pytest.param(remedy, settings, change, id=remedy, marks=marks)


@pytest.mark.parametrize(("remedy", "settings", "change"), list(starts()))
def test_what_a_run_that_does_not_start_says_makes_it_start(
    remedy: str,
    settings: dict[str, Any],
    change: Remedy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    message = problem(tmp_path, starts=True, **settings)
    assert re.search(pattern_of(row_of(remedy)[1]), message)
    assert problem(tmp_path, starts=True, **change(message, settings)) == ""


@pytest.mark.parametrize(
    ("words", "broken", "mended"), CONTRACT, ids=[words for words, _, _ in CONTRACT]
)
def test_a_network_that_follows_the_message_is_accepted(
    words: str, broken: Any, mended: Any, tmp_path: Path
) -> None:
    message = problem(tmp_path, starts=True, **settings_of(broken))
    assert re.search(pattern_of(words), message)
    assert problem(tmp_path, starts=True, **settings_of(mended)) == ""


@executes(
    "ppo/kernels/recurrence.py: Pass an nn.GRUCell or an nn.LSTMCell with biases",
    "ppo/kernels/recurrence.py: Call it step by step",
)
def test_cells_that_are_refused_are_replaced_or_called_step_by_step() -> None:
    inputs = torch.zeros(2, 1, 3)
    state = torch.zeros(1, 4)
    starts = torch.zeros(2, 1, dtype=torch.bool)

    def outputs_of(cell: Any) -> torch.Tensor:
        return dppo.over_time(cell, inputs, state, starts)[0]

    with pytest.raises(TypeError, match=r"Pass an nn\.GRUCell or an nn\.LSTMCell with biases"):
        outputs_of(torch.nn.RNNCell(3, 4))
    assert outputs_of(torch.nn.GRUCell(3, 4)).shape == (2, 1, 4)
    assert outputs_of(torch.nn.LSTMCell(3, 2)).shape == (2, 1, 2)

    hooked = torch.nn.GRUCell(3, 4)
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="Call it step by step"):
        outputs_of(hooked)
    assert hooked(inputs[0], state).shape == (1, 4)


def test_each_remedy_in_the_source_is_carried_out_by_a_test_or_has_a_reason() -> None:
    known_rows = [*rows(), *unexecuted()]
    missing = [text for text in remedies() if not any(is_of(row, text) for row in known_rows)]
    assert not missing, "write a row in tests/remedies for:\n" + "\n".join(
        f"{text.file}: {text.text}" for text in missing
    )


def test_flags_and_settings_that_texts_name_exist() -> None:
    """Also those of texts that no test carries out, such as advice on learning, or on a cluster."""
    known_names = set(settings_by_name()) | {
        "resume",
        "branch",
        "trust",
        "video",
        "render",
        "episode",
    }
    # of commands
    known_names |= {
        "episodes",
        "seeds",
        "seeds_at_once",
        "out",
        "equal",
        "seconds",
        "label",
        "actors",
        "policy",
        "config",
    }
    # of docker, ray and pip
    foreign = {"shm-size", "address", "ref-model", "user", "force-reinstall"}
    for remedy in remedies():
        flags = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", remedy.text)) - foreign
        names = {flag.removeprefix("no-").replace("-", "_") for flag in flags}
        names |= {match[1] for match in re.finditer(r"`([a-z_]+)=[^`]*`", remedy.text)}
        assert not {name for name in names if name and name not in known_names}, remedy


def test_each_row_is_about_a_text_of_the_source() -> None:
    gone = [
        row for row in (*rows(), *unexecuted()) if not any(is_of(row, text) for text in remedies())
    ]
    assert not gone, "no remedy of the source has these words:\n" + "\n".join(map(str, gone))
