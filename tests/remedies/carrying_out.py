"""Carry out the remedy of a message about settings: read from its text what to change, and change it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from dppo.config.parts import default_of, settings_by_name, types_by_name

Settings = dict[str, Any]
STEPS = 24
"""A number is doubled, or halved, so often until a message is gone."""


def remedy_of(message: str) -> str:
    """Return the part of a message that says what to do: from the first instruction on."""
    match = re.search(
        r"(?:^|[.:;)] )((?:Use|Raise|Lower|Leave|Set|To change that|On a node)\b.*)",
        message,
        re.DOTALL,
    )
    assert match, f"no instruction in: {message}"
    return match[1]


def changed_as_told(
    message: str, settings: Mapping[str, Any], values: Mapping[str, Any]
) -> Iterator[list[Settings]]:
    """Yield the settings after each alternative that a message offers: several to try, of which one has to help.

    `values` are for settings that a remedy names without a value, as in "Set `model`".
    """
    subject = re.match(r"([a-z_]+)(?:=|:| )", message)
    assert subject, message
    name = subject[1]
    text = remedy_of(message)
    for assignments in re.findall(r"`[a-z_]+=[^`]*`(?: (?:and|with) `[a-z_]+=[^`]*`)*", text):
        yield [
            {
                **settings,
                **dict(parsed(assignment) for assignment in re.findall("`([^`]*)`", assignments)),
            }
        ]
    for number in re.findall(r"`[a-z_]+=[^`]*` or (\d+)", text):
        yield [{**settings, name: int(number)}]
    if re.search(r"\b[Ll]eave it out", text):
        yield [_without(settings, name)]
    if re.search(r"\b[Ll]eave one of them out", text):
        alternatives = [
            setting
            for setting in settings
            if setting != name and re.search(rf"\b{setting}\b", message)
        ]
        assert alternatives, f"which others? {message}"
        for setting in (name, *alternatives):
            yield [_without(settings, setting)]
    for setting in re.findall(r"\b[Ll]eave `(\w+)` out", text):
        yield [_without(settings, setting)]
    for verb, setting in _directions(text):
        yield _raised_or_lowered(settings, name if setting == "it" else setting, verb)
    for assignments in re.findall(r"\bSet (`\w+`(?: and `\w+`)*)", text):
        names = re.findall(r"\w+", assignments.replace(" and ", " "))
        chosen = {name: values[name] if name in values else _usual(name) for name in names}
        yield [{**settings, **chosen}]
    if at_most := re.search(r"\bUse at most (\d+)", text):
        yield [{**settings, name: int(at_most[1])}]


def parsed(assignment: str) -> tuple[str, Any]:
    """Return name and value of `name=value`, as a message has it."""
    name, _, text = assignment.partition("=")
    try:
        return name, json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return name, text


def _without(settings: Mapping[str, Any], name: str) -> Settings:
    return {key: value for key, value in settings.items() if key != name}


def _directions(text: str) -> Iterator[tuple[str, str]]:
    """Yield `raise` or `lower`, and the setting: "Lower `a` or `b`" are two."""
    for verb, names in re.findall(r"\b([Rr]aise|[Ll]ower) ((?:it|`\w+`)(?: or `\w+`)*)", text):
        for name in re.findall(r"\w+", names):
            if name != "or":
                yield verb.lower(), name


def _raised_or_lowered(settings: Mapping[str, Any], name: str, verb: str) -> list[Settings]:
    number = settings.get(name, default_of(name))
    tried = []
    for _ in range(STEPS):
        if verb == "raise":
            number = 2 * number if number else 1
        else:
            number = number // 2 if isinstance(number, int) else number / 2
        tried.append({**settings, name: number})
    return tried


def _usual(name: str) -> Any:
    """Return a value for a setting that is off: the last of its choices, or a number."""
    assert name in settings_by_name()
    choices = [arg for arg in get_args(types_by_name()[name]) if isinstance(arg, str)]
    return choices[-1] if choices else 2
